"""Rows of the input table into prompts, and what is asked of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import PromptTable, RowWish
from batchgen.engine.types import RowFailure, SamplingParams
from batchgen.errors import InputError, RowError
from batchgen.io.table import InputTable
from batchgen.spec import JobSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.tokenizer import Tokenizer

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
            self._read_batch(row_index.tolist(), batch.to_pylist(), found, refuse)
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

    def _read_batch(self, rows: list[int], values: list[dict[str, Any]], found: _Collected, refuse: Refuse) -> None:
        wishes = [self._wish(row) for row in values]
        prompts = self._source.prompts(values)
        for row, value, wish, prompt in zip(rows, values, wishes, prompts, strict=True):
            number = wish.n if isinstance(wish, RowWish) else 1
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

    def _name(self, row: Mapping[str, Any]) -> str | None:
        column = self._spec.input.id
        return None if column is None or row[column] is None else str(row[column])

    def _wish(self, row: Mapping[str, Any]) -> RowWish | RowFailure:
        sampling = self._spec.sampling
        try:
            params, n = sampling.row_params(row), sampling.n_for(row)
            if self._last is None or self._last.params is not params or self._last.n != n:
                self._last = RowWish(params, n, sampling.seed_is_per_row)  # one for all rows, mostly
            return self._last
        except RowError as error:
            return RowFailure(error.code, error.message)


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
