"""Where prompts come from: texts that are rendered and encoded, or a column of token ids.

A source is used in two steps, so that the next rows can be rendered while a text is being encoded: `render` looks at
the rows and is Python, `encode` leaves the interpreter to others and uses all cores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.engine.planner import rows_with
from batchgen.engine.types import RowFailure
from batchgen.errors import InputError, RowError, SpecError
from batchgen.io import openai_batch
from batchgen.io.table import InputTable, check_column
from batchgen.spec import JobSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.tokenizer import Tokenizer

PythonRow = Mapping[str, Any] | RowFailure
Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]
Messages = list[dict[str, Any]]

ENCODE_CHARACTERS = 1 << 22
"""Characters encoded at a time: an encoded text takes some 100 bytes a token until it is an array."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What is scored of some prompts, an entry for each; see `types.Score`.

    `rows`: whose they are, by place in the batch; of these it is result number `sample_index`. `lost` tokens were cut
    off its context.
    """

    rows: NDArray[np.int64]
    sample_index: NDArray[np.int32]
    counts: NDArray[np.int32]
    last_tokens: NDArray[np.int32]
    lost: NDArray[np.int32]

    def __getitem__(self, kept: NDArray[np.bool_]) -> "Scored":
        return Scored(*(getattr(self, name)[kept] for name in self.__slots__))

    @classmethod
    def joined(cls, parts: Sequence["Scored"]) -> "Scored":
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The prompts of some rows back to back; those of `failures` (by place of the row) have length 0.

    One prompt for each row, or, where given tokens are to be scored, as many as `scored` says.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    failures: dict[int, RowFailure] = field(default_factory=dict)
    scored: Scored | None = None


class Source(Protocol):
    """`columns` are those that it needs, `row_columns` those of them that it needs as Python values.

    `render` is given a batch and the values of `row_columns` (or why a row has none). `bos_in_text` counts the texts
    that bring the BOS token which they would have been given anyway.
    """

    @property
    def bos_in_text(self) -> int: ...
    @property
    def columns(self) -> frozenset[str]: ...
    @property
    def row_columns(self) -> frozenset[str]: ...
    def check(self, table: InputTable) -> None: ...
    def render(self, batch: pa.RecordBatch, rows: Sequence[PythonRow]) -> Any: ...
    def encode(self, rendered: Any) -> Encoded: ...


def make_source(spec: JobSpec, tokenizer: Tokenizer, chat: ChatTemplate | None) -> Source:
    """What `input` of the spec says. Raises InputError where a chat template is needed and the model has none."""
    given = spec.input
    if given.token_ids is not None:
        return TokenColumn(given.token_ids)
    has_messages = given.messages is not None or given.is_batch
    auto = given.chat == "auto" and not given.parse_special and spec.task.kind not in ("perplexity", "embed")
    wants_chat = given.chat is True or has_messages or auto
    if chat is None and (given.chat is True or has_messages):
        raise InputError("the model has no chat template; give input.prompt with chat: false")
    bos = tokenizer.bos_token if tokenizer.add_bos else None
    if not wants_chat or chat is None:
        assert given.prompt is not None
        template = PromptTemplate(given.prompt, "input.prompt")
        return TextSource(
            template.columns,
            template.render,
            lambda texts: tokenizer.encode_batch(texts, parse_special=given.parse_special),
            bos if given.parse_special else None,
        )
    columns, messages = _messages_of(spec)
    protect = (lambda value: value) if given.parse_special else tokenizer.protect
    column = given.messages if isinstance(given.messages, str) else None
    return TextSource(
        columns,
        lambda row: chat.render(protect(messages(row))),
        tokenizer.encode_rendered_batch,
        bos,
        column,
        guard=protect,
    )


# --- token ids --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """A column of token ids, used as they are: a list of integers of any width."""

    column: str
    bos_in_text = 0
    row_columns = frozenset[str]()

    @property
    def columns(self) -> frozenset[str]:
        return frozenset([self.column])

    def check(self, table: InputTable) -> None:
        _check_type(table, self.column, "input.token_ids", "list of whole numbers", _holds_token_ids)

    def render(self, batch: pa.RecordBatch, rows: Sequence[PythonRow]) -> Encoded:
        lists = batch.column(self.column)
        if pa.types.is_null(lists.type):
            lists = lists.cast(pa.list_(pa.int32()))
        ids, lengths = lists.flatten(), pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int32)
        missing = lists.is_null().to_numpy(zero_copy_only=False)
        holes = rows_with(ids.is_null().to_numpy(zero_copy_only=False), lengths)
        values = ids.fill_null(0).to_numpy()
        outside = rows_with((values < 0) | (values > np.iinfo(np.int32).max), lengths)
        failures: dict[int, RowFailure] = {}
        for bad, why in ((outside, self._outside), (holes, self._holes), (missing, self._missing)):
            failures.update(dict.fromkeys(np.flatnonzero(bad).tolist(), why))
        good = ~(missing | holes | outside)
        tokens = values.astype(np.int32) if good.all() else values[np.repeat(good, lengths)].astype(np.int32)
        return Encoded(tokens, np.where(good, lengths, 0).astype(np.int32), failures)

    def encode(self, rendered: Encoded) -> Encoded:
        return rendered

    @property
    def _missing(self) -> RowFailure:
        return RowFailure("prompt_missing", f"column '{self.column}' is null")

    @property
    def _holes(self) -> RowFailure:
        return RowFailure("encode_error", f"column '{self.column}' does not hold a list of whole numbers")

    @property
    def _outside(self) -> RowFailure:
        return RowFailure("encode_error", f"column '{self.column}' has a token id outside 0..2147483647")


def _check_type(table: InputTable, column: str, key: str, wanted: str, fits: Callable[[pa.DataType], bool]) -> None:
    check_column(column, table.schema.names)
    found = table.schema.field(column).type
    if not fits(found):
        raise SpecError(f"{key}: column '{column}' has type {found}; a {wanted} is needed")


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds_token_ids(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (_is_list(kind) and pa.types.is_integer(kind.value_type))


# --- texts ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TextSource:
    """Texts, made by `render_row` and encoded by `encode_texts`.

    `bos` is the text of a token that encoding would add, `messages` the column that holds chats, if one does. What
    follows a rendered text is passed through `guard` before.
    """

    columns: frozenset[str]
    render_row: Callable[[Mapping[str, Any]], str]
    encode_texts: Encode
    bos: str | None
    messages: str | None = None
    bos_in_text: int = 0
    guard: Callable[[str], str] = lambda text: text

    @property
    def row_columns(self) -> frozenset[str]:
        return self.columns

    def check(self, table: InputTable) -> None:
        if self.messages is not None:
            _check_type(table, self.messages, "input.messages", "list of (role, content) structs", _holds_messages)

    def render(self, batch: pa.RecordBatch, rows: Sequence[PythonRow]) -> list[str | RowFailure]:
        texts = [row if isinstance(row, RowFailure) else _or_failure(self.render_row, row) for row in rows]
        if self.bos:
            self.bos_in_text += sum(isinstance(text, str) and text.startswith(self.bos) for text in texts)
        return texts

    def encode(self, rendered: Sequence[str | RowFailure]) -> Encoded:
        return encode_all(self.encode_texts, rendered)


_NOTHING = np.zeros(0, np.int32)


def encode_all(encode: Encode, given: Sequence[str | RowFailure]) -> Encoded:
    """The texts' tokens. A text that cannot be encoded becomes a failure."""
    texts = [text for text in given if isinstance(text, str)]
    made = iter([prompt for part in _parts(texts) for prompt in _encode_part(encode, part)])
    prompts = [next(made) if isinstance(text, str) else text for text in given]
    failures = {place: prompt for place, prompt in enumerate(prompts) if isinstance(prompt, RowFailure)}
    arrays = [_NOTHING if isinstance(prompt, RowFailure) else prompt for prompt in prompts]
    lengths = np.fromiter(map(len, arrays), np.int32, len(arrays))
    return Encoded(np.concatenate([_NOTHING, *arrays]), lengths, failures)


def _encode_part(encode: Encode, texts: list[str]) -> Sequence[NDArray[np.int32] | RowFailure]:
    try:
        return encode(texts)
    except RowError:  # one of them; find out which
        return [_or_failure(lambda text: encode([text])[0], text) for text in texts]


def _parts(texts: list[str]) -> Iterator[list[str]]:
    """The texts in portions of some `ENCODE_CHARACTERS`, a text at least."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > ENCODE_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _or_failure(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except RowError as error:
        return RowFailure(error.code, error.message)


def _messages_of(spec: JobSpec) -> tuple[frozenset[str], Callable[[Mapping[str, Any]], Messages]]:
    """The columns that a row's messages come from, and the function that makes them."""
    given = spec.input
    if given.is_batch:
        columns = frozenset(openai_batch.COLUMNS)
        return columns, lambda row: _column_messages("body.messages", openai_batch.messages_of(row))
    if given.prompt is not None:
        prompt = PromptTemplate(given.prompt, "input.prompt")
        return prompt.columns, lambda row: [{"role": "user", "content": prompt.render(row)}]
    if isinstance(given.messages, str):
        column = given.messages
        return frozenset([column]), lambda row: _column_messages(column, row[column])
    assert given.messages is not None
    templates = [
        (compile_value(m.role, "input.messages.role"), PromptTemplate(m.content, "input.messages.content"))
        for m in given.messages
    ]
    columns = frozenset().union(*(role.columns | content.columns for role, content in templates))
    return columns, lambda row: [{"role": str(r.evaluate(row)), "content": c.render(row)} for r, c in templates]


def _holds_messages(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return {"role", "content"} <= {field.name for field in kind.value_type}


def _column_messages(column: str, value: Any) -> Messages:
    """A list of messages from a column; fields that are null are left out, as templates expect."""
    if value is None:
        raise RowError("prompt_missing", f"column '{column}' is null")
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise RowError("schema_error", f"column '{column}' does not hold a list of messages (structs)")
    if not value:
        raise RowError("prompt_missing", f"column '{column}' has no messages")
    for number, message in enumerate(value):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise RowError("schema_error", f"column '{column}': message {number} has no text in '{name}'")
    return [{name: item for name, item in message.items() if item is not None} for message in value]


# --- rows --------------------------------------------------------------------------------------------------------


def python_rows(batch: pa.RecordBatch) -> list[PythonRow]:
    """The rows as dictionaries; a row with a value that Python cannot hold (a year 10000, say) becomes a failure."""
    try:
        return batch.to_pylist()
    except Exception:  # pyarrow raises what it likes here
        return [_python_row(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _python_row(row: pa.RecordBatch) -> PythonRow:
    values: dict[str, Any] = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except Exception as error:
            reason = " ".join(str(error).split())
            return RowFailure("schema_error", f"column '{name}': its value cannot be put into a prompt: {reason}")
    return values
