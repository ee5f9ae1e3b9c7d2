"""Prompts whose continuations are given: a context and what follows it, or a text that is predicted token by token.

Texts become tokens, and long ones are cut, as lm-evaluation-harness does it (0.4.13: `TemplateLM._encode_pair` and
`loglikelihood`, `utils.get_rolling_token_windows`), so that scores can be compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.engine.types import RowFailure
from batchgen.errors import RowError
from batchgen.io.table import InputTable, check_column
from batchgen.prompt_sources import Encoded, PythonRow, Scored, Source, TextSource, make_source
from batchgen.spec import JobSpec, TaskSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.tokenizer import Tokenizer

Tokens = NDArray[np.int32]
Texts = Sequence[str | Tokens]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The tokens that a prediction may see, and of how many of the last ones, and of `last`, it is wanted.

    `lost` tokens were before it and cannot be seen.
    """

    prompt: Tokens
    count: int
    last: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is seen at a time: `max_length` tokens, and what stands before a text without context (None: nothing
    can); `strips_prefix`: encoding puts that there already."""

    max_length: int
    prefix: int | None
    strips_prefix: bool = False

    def prefix_token(self) -> int:
        if self.prefix is None:
            raise RowError("prompt_missing", "there is no context, and the model names neither BOS nor EOS token")
        return self.prefix


def bounds_of(tokenizer: Tokenizer, max_length: int) -> Bounds:
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Bounds(max_length, prefix, tokenizer.add_bos)


# --- what is scored ----------------------------------------------------------------------------------------------


class Continuations(Protocol):
    """What may follow a row's prompt: `of(row)`, texts or arrays of token ids."""

    @property
    def columns(self) -> frozenset[str]: ...
    def of(self, row: Mapping[str, Any]) -> Texts: ...


class OneContinuation:
    """That of `task.continuation`: a text, or token ids where its one value is a list."""

    def __init__(self, template: str):
        self._text = PromptTemplate(template, "task.continuation")
        self._value = compile_value(template, "task.continuation")
        self.columns = self._text.columns

    def of(self, row: Mapping[str, Any]) -> Texts:
        value = self._value.evaluate(row)
        if isinstance(value, list):
            return [_token_ids(value)]
        return [_not_empty(self._text.render(row), "task.continuation is empty: there is nothing to score")]


class Choices:
    """Those of `task.choices`: a column of lists of texts, or templates."""

    def __init__(self, given: str | Sequence[str]):
        self._column = given if isinstance(given, str) else None
        self._templates = [] if isinstance(given, str) else [PromptTemplate(text, "task.choices") for text in given]
        named = frozenset([given]) if isinstance(given, str) else frozenset[str]()
        self.columns = named.union(*(template.columns for template in self._templates))

    def of(self, row: Mapping[str, Any]) -> list[str]:
        texts = [t.render(row) for t in self._templates] if self._column is None else self._of_column(row[self._column])
        return [_not_empty(text, f"choice {number} is empty") for number, text in enumerate(texts)]

    def _of_column(self, value: Any) -> list[str]:
        if value is None:
            raise RowError("prompt_missing", f"column '{self._column}' is null")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise RowError("schema_error", f"column '{self._column}' does not hold a list of texts")
        if not value:
            raise RowError("prompt_missing", f"column '{self._column}' has no choices")
        return value


def right_choice(column: str, value: Any, choices: Texts) -> int:
    """The number of the right one. Raises RowError for what is neither a choice's number nor its text."""
    if isinstance(value, str) and value in (texts := list(map(str, choices))):
        return texts.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    raise RowError("schema_error", f"column '{column}': {value!r} is none of the {len(choices)} choices")


def continuations_of(task: TaskSpec) -> Continuations:
    """Of a task that has some."""
    if task.kind == "score":
        assert task.continuation is not None
        return OneContinuation(task.continuation)
    assert task.choices is not None
    return Choices(task.choices)


def _token_ids(value: list[Any]) -> Tokens:
    limit = np.iinfo(np.int32).max
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= limit for i in value):
        raise RowError("encode_error", "task.continuation: a list of token ids, whole numbers from 0 on, is needed")
    if not value:
        raise RowError("prompt_missing", "task.continuation is empty: there is nothing to score")
    return np.array(value, np.int32)


def _not_empty(text: str, why: str) -> str:
    if not text:
        raise RowError("prompt_missing", why)
    return text


# --- tokens ------------------------------------------------------------------------------------------------------


def split_spaces(context: str, continuation: str) -> tuple[str, str]:
    """White space at the context's end moves to the continuation, for words are encoded with the space before them."""
    kept = len(context.rstrip())
    return context[:kept], context[kept:] + continuation


def join(context: Tokens, continuation: Tokens, bounds: Bounds) -> Window:
    """A context's and its continuation's tokens, cut on the left so that `max_length` are seen."""
    if not len(continuation):
        raise RowError("encode_error", "the continuation adds no token to those of the context")
    if not len(context):
        context = np.array([bounds.prefix_token()], np.int32)
        if continuation[0] == context[0]:  # it is there already
            continuation = continuation[1:]
        if not len(continuation):
            raise RowError("prompt_missing", "there is nothing to score but the token that texts begin with")
    if len(continuation) > bounds.max_length:
        text = f"the continuation has {len(continuation)} tokens; {bounds.max_length} can be seen at a time"
        raise RowError("prompt_too_long", text)
    whole = np.concatenate([context, continuation])
    lost = max(0, len(whole) - bounds.max_length - 1)
    return Window(whole[lost:-1], len(continuation), int(whole[-1]), lost)


def rolling_windows(tokens: Tokens, stride: int, bounds: Bounds) -> Iterator[Window]:
    """Windows that predict every token once: the first as many as it may see, each further one `stride` of them."""
    if bounds.strips_prefix and len(tokens) and tokens[0] == bounds.prefix:
        tokens = tokens[1:]
    if not len(tokens):
        raise RowError("prompt_missing", "the text has no tokens")
    whole = np.append(np.int32(bounds.prefix_token()), tokens)
    done = 0
    while done < len(tokens):
        end = min(len(tokens), done + (stride if done else bounds.max_length))
        yield Window(whole[max(0, end - bounds.max_length) : end], end - done, int(whole[end]))
        done = end


# --- sources -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ScoredSource:
    """A source of contexts with what follows each; see `Source`."""

    contexts: Source
    continuations: Continuations
    task: TaskSpec
    bounds: Bounds

    @property
    def bos_in_text(self) -> int:
        return self.contexts.bos_in_text

    @property
    def columns(self) -> frozenset[str]:
        return self.contexts.columns | self.row_columns

    @property
    def row_columns(self) -> frozenset[str]:
        answer = frozenset([self.task.answer]) if self.task.answer is not None else frozenset[str]()
        return self.contexts.row_columns | self.continuations.columns | answer

    def check(self, table: InputTable) -> None:
        self.contexts.check(table)
        for name in self.row_columns:
            check_column(name, table.schema.names)

    def render(self, batch: pa.RecordBatch, rows: Sequence[PythonRow]) -> tuple[Any, list[Texts | RowFailure]]:
        return self.contexts.render(batch, rows), [or_failure(self._of, row) for row in rows]

    def _of(self, given: PythonRow) -> Texts:
        row = or_raise(given)
        found = self.continuations.of(row)
        if self.task.answer is not None:
            right_choice(self.task.answer, row[self.task.answer], found)
        return found

    def encode(self, rendered: tuple[Any, list[Texts | RowFailure]]) -> Encoded:
        contexts, continuations = rendered
        if isinstance(self.contexts, TextSource):
            return windows_of(self._of_texts(self.contexts, contexts, continuations))
        return windows_of(self._of_ids(self.contexts.encode(contexts), continuations))

    def _of_texts(
        self, source: TextSource, contexts: list[str | RowFailure], continuations: list[Texts | RowFailure]
    ) -> list[list[Window] | RowFailure]:
        """All texts of the batch, each row's context and then its wholes, are encoded at once."""
        texts = [self._texts(source, *given) for given in zip(contexts, continuations, strict=True)]
        encoded = source.encode([text for row in texts for text in row])
        parts = iter(parts_of(encoded))
        return [
            or_failure(self._joined, (context, found, [next(parts) for _ in row]))
            for row, context, found in zip(texts, contexts, continuations, strict=True)
        ]

    def _texts(self, source: TextSource, context: str | RowFailure, continuations: Texts | RowFailure) -> list[str]:
        """The context and, for each continuation that is a text, the whole; nothing for a row that has failed."""
        if isinstance(context, RowFailure) or isinstance(continuations, RowFailure):
            return []
        texts = [text for text in continuations if isinstance(text, str)]
        wholes = [split_spaces(context, source.guard(self.task.delimiter + text)) for text in texts]
        return [wholes[0][0] if wholes else context, *("".join(whole) for whole in wholes)]

    def _joined(self, given: tuple[str | RowFailure, Texts | RowFailure, list[Tokens | RowFailure]]) -> list[Window]:
        rendered, continuations, parts = given
        or_raise(rendered)
        tails = [tail for tail in or_raise(continuations) if isinstance(tail, np.ndarray)]
        context, *wholes = map(or_raise, parts)
        return [join(context, tail, self.bounds) for tail in [*(whole[len(context) :] for whole in wholes), *tails]]

    def _of_ids(self, contexts: Encoded, continuations: list[Texts | RowFailure]) -> list[list[Window] | RowFailure]:
        return [or_failure(self._joined_ids, given) for given in zip(parts_of(contexts), continuations, strict=True)]

    def _joined_ids(self, given: tuple[Tokens | RowFailure, Texts | RowFailure]) -> list[Window]:
        context, continuations = or_raise(given[0]), or_raise(given[1])
        tails = [tail for tail in continuations if isinstance(tail, np.ndarray)]
        if not tails:
            raise RowError("schema_error", "after input.token_ids, task.continuation must be a column of token ids")
        return [join(context, tail, self.bounds) for tail in tails]


@dataclass(slots=True)
class RollingSource:
    """A source of texts that are themselves predicted, in windows; see `Source`."""

    texts: Source
    stride: int
    bounds: Bounds

    @property
    def bos_in_text(self) -> int:
        return self.texts.bos_in_text

    @property
    def columns(self) -> frozenset[str]:
        return self.texts.columns

    @property
    def row_columns(self) -> frozenset[str]:
        return self.texts.row_columns

    def check(self, table: InputTable) -> None:
        self.texts.check(table)

    def render(self, batch: pa.RecordBatch, rows: Sequence[PythonRow]) -> Any:
        return self.texts.render(batch, rows)

    def encode(self, rendered: Any) -> Encoded:
        return windows_of([or_failure(self._windows, part) for part in parts_of(self.texts.encode(rendered))])

    def _windows(self, tokens: Tokens | RowFailure) -> list[Window]:
        return list(rolling_windows(or_raise(tokens), self.stride, self.bounds))


def make_task_source(spec: JobSpec, tokenizer: Tokenizer, chat: ChatTemplate | None, context_length: int) -> Source:
    """What `input` and `task` of the spec say."""
    source, task = make_source(spec, tokenizer, chat), spec.task
    if not task.scores:
        return source
    bounds = bounds_of(tokenizer, min(task.max_length or context_length, context_length))
    if task.kind == "perplexity":
        return RollingSource(source, min(task.stride or bounds.max_length, bounds.max_length), bounds)
    return ScoredSource(source, continuations_of(task), task, bounds)


def or_failure(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except RowError as error:
        return RowFailure(error.code, error.message)


def or_raise(value: T | RowFailure) -> T:
    if isinstance(value, RowFailure):
        raise RowError(value.code, value.message)
    return value


def parts_of(encoded: Encoded) -> list[Tokens | RowFailure]:
    """Each row's tokens."""
    tokens = np.split(encoded.tokens, np.cumsum(encoded.lengths[:-1]))
    return [encoded.failures.get(place, part) for place, part in enumerate(tokens[: len(encoded.lengths)])]


def windows_of(rows: Sequence[list[Window] | RowFailure]) -> Encoded:
    """The windows of all rows, one after the other."""
    places = [place for place, row in enumerate(rows) if isinstance(row, list) for _ in row]
    numbers = [number for row in rows if isinstance(row, list) for number in range(len(row))]
    windows = [window for row in rows if isinstance(row, list) for window in row]
    lengths = np.array([len(window.prompt) for window in windows], np.int32)
    scored = Scored(
        np.array(places, np.int64),
        np.array(numbers, np.int32),
        np.array([window.count for window in windows], np.int32),
        np.array([window.last for window in windows], np.int32),
        np.array([window.lost for window in windows], np.int32),
    )
    failures = {place: row for place, row in enumerate(rows) if isinstance(row, RowFailure)}
    tokens = np.concatenate([np.zeros(0, np.int32), *(window.prompt for window in windows)])
    return Encoded(tokens, lengths, failures, scored)
