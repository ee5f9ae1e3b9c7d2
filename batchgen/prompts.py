"""Rows of the input table into prompts, and what is asked of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.engine.planner import PromptTable, RowWish
from batchgen.engine.types import RowFailure, SamplingParams
from batchgen.errors import InputError, RowError, SpecError
from batchgen.io.table import InputTable, check_column
from batchgen.spec import JobSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.tokenizer import Tokenizer

PythonRow = dict[str, Any] | RowFailure
Refuse = Callable[[NDArray[np.int32], SamplingParams], RowFailure | None]


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that cannot be answered; `name` is the value of the id column, `samples` the results it still gets."""

    row_index: int
    name: str | None
    samples: int
    failure: RowFailure


@dataclass(slots=True, eq=False)
class JobPrompts:
    """Every row of the input: either a prompt of `table` with its wish, or a failure.

    `row_index` and `samples` (results per row) cover all rows, in input order. `bos_in_text` counts the prompts whose
    text brings the BOS token that the model would have been given anyway.
    """

    table: PromptTable
    wishes: list[RowWish]
    failures: list[FailedRow]
    row_index: NDArray[np.int64]
    samples: NDArray[np.int32]
    bos_in_text: int


@dataclass(slots=True, eq=False)
class _Collected:
    rows: list[int] = field(default_factory=list)
    prompts: list[NDArray[np.int32]] = field(default_factory=list)
    wishes: list[RowWish] = field(default_factory=list)
    failures: list[FailedRow] = field(default_factory=list)
    row_index: list[NDArray[np.int64]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


class PromptReader:
    """Renders and encodes rows as the spec says."""

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, chat: ChatTemplate | None):
        self._spec, self._tokenizer = spec, tokenizer
        self._source = _text_source(spec, tokenizer, chat)
        self._last: RowWish | None = None

    @property
    def columns(self) -> list[str]:
        """The input columns that prompts and parameters need, and the id column so that its absence is told."""
        names = {*self._source.columns, *self._spec.sampling.columns}
        return sorted(names | ({self._spec.input.id} if self._spec.input.id else set()))

    def read(self, table: InputTable, refuse: Refuse) -> JobPrompts:
        """All rows of the table; those that `refuse` names a reason for become failures."""
        found = _Collected()
        for row_index, batch in table.batches(self.columns):
            self._read_batch(row_index.tolist(), _python_rows(batch), found, refuse)
            found.row_index.append(row_index)
        rows = np.array(found.rows, np.int64)
        return JobPrompts(
            PromptTable.from_prompts(found.prompts, rows),
            found.wishes,
            found.failures,
            np.concatenate([np.zeros(0, np.int64), *found.row_index]),
            np.array(found.samples, np.int32),
            self._source.bos_in_text,
        )

    def _read_batch(self, rows: list[int], values: list[PythonRow], found: _Collected, refuse: Refuse) -> None:
        wishes = [row if isinstance(row, RowFailure) else self._wish(row) for row in values]
        made = iter(self._source.prompts([row for row in values if not isinstance(row, RowFailure)]))
        prompts = [row if isinstance(row, RowFailure) else next(made) for row in values]
        for row, value, wish, prompt in zip(rows, values, wishes, prompts, strict=True):
            number = wish.n if isinstance(wish, RowWish) else self._samples(value)
            failure = next((x for x in (wish, prompt) if isinstance(x, RowFailure)), None)
            if failure is None and isinstance(wish, RowWish) and not isinstance(prompt, RowFailure):
                failure = refuse(prompt, wish.params)
            found.samples.append(number)
            if failure is not None:
                found.failures.append(FailedRow(row, self._name(value), number, failure))
            else:
                found.rows.append(row)
                found.prompts.append(prompt)  # type: ignore[arg-type]
                found.wishes.append(wish)  # type: ignore[arg-type]

    def check(self, table: InputTable) -> None:
        """Raise for a column that is not there, or that cannot hold what the spec says of it (once, not row by row)."""
        for name in self.columns:
            check_column(name, table.schema.names)
        given = self._spec.input
        if given.token_ids is not None:
            _check_type(table, given.token_ids, "input.token_ids", "list of whole numbers", _holds_token_ids)
        if isinstance(given.messages, str):
            _check_type(table, given.messages, "input.messages", "list of (role, content) structs", _holds_messages)

    def _samples(self, row: PythonRow) -> int:
        """Results of a row whose parameters are wrong: as many as it asks for, if that much can be read."""
        try:
            return self._spec.sampling.n_for({} if isinstance(row, RowFailure) else row)
        except RowError:
            return 1

    def _name(self, row: PythonRow) -> str | None:
        column = self._spec.input.id
        return None if column is None or isinstance(row, RowFailure) or row[column] is None else str(row[column])

    def _wish(self, row: Mapping[str, Any]) -> RowWish | RowFailure:
        sampling = self._spec.sampling
        try:
            params, n = sampling.row_params(row), sampling.n_for(row)
            if self._last is None or self._last.params is not params or self._last.n != n:
                self._last = RowWish(params, n, sampling.seed_is_per_row)  # one for all rows, mostly
            return self._last
        except RowError as error:
            return RowFailure(error.code, error.message)


def _python_rows(batch: pa.RecordBatch) -> list[PythonRow]:
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


def _check_type(table: InputTable, column: str, key: str, wanted: str, fits: Callable[[pa.DataType], bool]) -> None:
    check_column(column, table.schema.names)
    found = table.schema.field(column).type
    if not fits(found):
        raise SpecError(f"{key}: column '{column}' has type {found}; a {wanted} is needed")


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds_token_ids(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (_is_list(kind) and pa.types.is_integer(kind.value_type))


def _holds_messages(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return {"role", "content"} <= {field.name for field in kind.value_type}


Prompt = NDArray[np.int32] | RowFailure


@dataclass(frozen=True, slots=True)
class _TokenSource:
    """A column of token ids, used as they are."""

    column: str
    bos_in_text = 0

    @property
    def columns(self) -> frozenset[str]:
        return frozenset([self.column])

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        return [self._prompt(row[self.column]) for row in rows]

    def _prompt(self, ids: Any) -> Prompt:
        if ids is None:
            return RowFailure("prompt_missing", f"column '{self.column}' is null")
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return RowFailure("encode_error", f"column '{self.column}' does not hold a list of whole numbers")
        if any(not 0 <= i < 2**31 for i in ids):
            return RowFailure("encode_error", f"column '{self.column}' has a token id outside 0..2147483647")
        return np.array(ids, np.int32)


@dataclass(slots=True)
class _TextSource:
    """Texts, made by `render` and encoded by `encode`; `bos` is the text of a token that encoding would add."""

    columns: frozenset[str]
    render: Callable[[Mapping[str, Any]], str]
    encode: Callable[[Sequence[str]], list[NDArray[np.int32]]]
    bos: str | None
    bos_in_text: int = 0

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        texts = [_or_failure(self.render, row) for row in rows]
        good = [text for text in texts if isinstance(text, str)]
        if self.bos:
            self.bos_in_text += sum(text.startswith(self.bos) for text in good)
        encoded = iter(self._encode_all(good))
        return [next(encoded) if isinstance(text, str) else text for text in texts]

    def _encode_all(self, texts: list[str]) -> Iterable[Prompt]:
        try:
            return self.encode(texts)
        except RowError:  # one of them; find out which
            return [_or_failure(lambda text: self.encode([text])[0], text) for text in texts]


def _or_failure(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except RowError as error:
        return RowFailure(error.code, error.message)


def _text_source(spec: JobSpec, tokenizer: Tokenizer, chat: ChatTemplate | None) -> _TokenSource | _TextSource:
    given = spec.input
    if given.token_ids is not None:
        return _TokenSource(given.token_ids)
    wants_chat = given.chat is True or given.messages is not None or (given.chat == "auto" and not given.parse_special)
    if chat is None and (given.chat is True or given.messages is not None):
        raise InputError("the model has no chat template; give input.prompt with chat: false")
    bos = tokenizer.bos_token if tokenizer.add_bos else None
    if not wants_chat or chat is None:
        assert given.prompt is not None
        template = PromptTemplate(given.prompt, "input.prompt")
        return _TextSource(
            template.columns,
            template.render,
            lambda texts: tokenizer.encode_batch(texts, parse_special=given.parse_special),
            bos if given.parse_special else None,
        )
    columns, messages = _messages_of(spec)
    protect = (lambda value: value) if given.parse_special else tokenizer.protect
    return _TextSource(columns, lambda row: chat.render(protect(messages(row))), tokenizer.encode_rendered_batch, bos)


Messages = list[dict[str, Any]]


def _messages_of(spec: JobSpec) -> tuple[frozenset[str], Callable[[Mapping[str, Any]], Messages]]:
    """The columns that a row's messages come from, and the function that makes them."""
    given = spec.input
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
