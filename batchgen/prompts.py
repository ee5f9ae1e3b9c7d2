"""Rows of the input table into prompts, and what is asked of each."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.engine.planner import Admission, PrefixPlan
from batchgen.engine.prompt_table import PromptTable, PromptTableBuilder, TokenStore
from batchgen.engine.requests import RowWish
from batchgen.engine.types import SCORING, RowFailure, SamplingParams, Score
from batchgen.errors import RowError
from batchgen.io import openai_batch
from batchgen.io.table import InputTable, check_column
from batchgen.overflow import Overflow, truncate
from batchgen.prompt_sources import Encoded, PythonRow, Scored, python_rows
from batchgen.scored_sources import make_task_source
from batchgen.shown import counted
from batchgen.spec import JobSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_R = TypeVar("_R")

BATCH_ROWS = 1024
"""Rows read, rendered and encoded at a time; three such batches are under way at most."""

OnRows = Callable[[int, int], None]
"""Told the rows read and the tokens made so far."""


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that cannot be answered; `name` is the value of the id column, `samples` the results it still gets."""

    row_index: int
    name: str | None
    samples: int
    failure: RowFailure


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """What each row or prompt asks for: one of some distinct wishes, by number, and a seed where it brings its own.

    And what of each prompt is `scored`, if that is the task.
    """

    distinct: Sequence[RowWish]
    numbers: NDArray[np.int32]
    seeds: NDArray[np.int64]
    scored: Scored | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: int) -> RowWish:
        wish = self.distinct[self.numbers[position]]
        if (scored := self.scored) is not None:
            score = Score(int(scored.counts[position]), int(scored.last_tokens[position]))
            return replace(wish, score=score, sample_index=int(scored.sample_index[position]))
        if not wish.own_seed:
            return wish
        return replace(wish, params=replace(wish.params, seed=int(self.seeds[position])))

    @property
    def n(self) -> NDArray[np.int64]:
        """The answers that each wants."""
        return self._each(lambda wish: wish.n)

    @property
    def max_tokens(self) -> NDArray[np.int64]:
        return self._each(lambda wish: wish.params.max_tokens)

    @property
    def greedy(self) -> NDArray[np.bool_]:
        return self._each(lambda wish: wish.params.greedy).astype(np.bool_)

    @property
    def answers(self) -> bool:
        """Whether answers are generated, rather than prompts or what follows them looked at."""
        return self.scored is None and all(wish.pooling is None for wish in self.distinct)

    def num_logits(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Of how many of its last tokens each, having so many, needs the logits, or the hidden states."""
        if self.scored is not None:
            return self.scored.counts.astype(np.int64)
        means = self._each(lambda wish: wish.pooling is not None and wish.pooling.kind == "mean")
        return np.where(means, lengths, 1).astype(np.int64)

    def computed(self, plan: PrefixPlan) -> NDArray[np.int64]:
        """The answers that are computed for each, in the table's order: of those that must agree, one.

        These are greedy answers and those of one seed, of equal prompts under equal parameters (see `make_requests`).
        """
        if self.scored is not None:
            return self.n
        greedy = self.greedy
        computed = np.where(greedy, 1, self.n)
        equal = plan.repeats
        equal[:-1] |= equal[1:]
        agreeing = greedy | self._each(lambda wish: wish.own_seed).astype(np.bool_)
        which = np.flatnonzero(equal & agreeing[plan.order])  # by place in the plan, where equal prompts are neighbours
        at = plan.order[which]
        asked = np.stack([np.cumsum(~plan.repeats)[which], self._kinds()[at], np.where(greedy, 0, self.seeds)[at]])
        turn = np.lexsort(asked)
        again = np.append(False, (np.diff(asked[:, turn]) == 0).all(axis=0))[: len(turn)]
        computed[at[turn[again]]] = 0
        return computed

    def _kinds(self) -> NDArray[np.int64]:
        """Equal where the parameters are, as far as they matter."""
        numbers: dict[Hashable, int] = {}
        return self._each(lambda wish: numbers.setdefault(_kind(wish), len(numbers)))

    @property
    def may_end(self) -> NDArray[np.bool_]:
        """Whether the model may end the answers before they are as long as they can be."""
        return self._each(lambda wish: not wish.params.ignore_eos).astype(np.bool_)

    def _each(self, value: Callable[[RowWish], int]) -> NDArray[np.int64]:
        used, places = np.unique(self.numbers, return_inverse=True)
        return np.array([value(self.distinct[number]) for number in used], np.int64)[places]


def _kind(wish: RowWish) -> Hashable:
    params = wish.params.without_unused()
    return params, 1 if params.greedy else wish.n


@dataclass(frozen=True, slots=True, eq=False)
class JobPrompts:
    """Every row of the input: either a prompt of `table` with its wish, or a failure.

    `row_index`, `samples` (results per row) and `truncated` (tokens cut off) cover all rows, in input order.
    `bos_in_text` counts the prompts whose text brings the BOS token that the model would have been given anyway.
    `encoded_tokens` were made in `tokenize_seconds`, reading and rendering included; they are those of the table and of
    prompts that were refused or cut. `kv_tokens_wanting`: what the longest of the rows needs that the KV cache cannot
    hold, 0 if it holds all.
    """

    table: PromptTable
    wishes: Wishes
    failures: list[FailedRow]
    row_index: NDArray[np.int64]
    samples: NDArray[np.int32]
    bos_in_text: int
    encoded_tokens: int
    tokenize_seconds: float
    truncated: NDArray[np.int32]
    kv_tokens_wanting: int

    def kv_shortage(self, page_size: int, page_bytes: int) -> str | None:
        """What KV memory would hold the rows that now find too little, if there are any."""
        if not self.kv_tokens_wanting:
            return None
        size = -(-self.kv_tokens_wanting // page_size) * page_bytes
        rows = counted(sum(row.failure.code == "resource_error" for row in self.failures), "row")
        needed = f"the longest needs {self.kv_tokens_wanting:,} tokens of keys and values"
        return f"engine.kv_memory is too small for {rows}: {needed}; {size} (bytes) or more would suffice"

    @property
    def tokens_per_second(self) -> float:
        return self.encoded_tokens / self.tokenize_seconds if self.tokenize_seconds else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Rendered:
    """A batch of rows before encoding. `failures` are those that are known by now, by place in the batch."""

    row_index: NDArray[np.int64]
    names: pa.Array | None  # values of the id column
    asked: Wishes
    failures: dict[int, RowFailure]
    texts: Any  # what the source encodes

    def failed_row(self, place: int, failure: RowFailure) -> FailedRow:
        name = None if self.names is None else _text_of(self.names[place])
        return FailedRow(int(self.row_index[place]), name, self.asked[place].n, failure)


class PromptReader:
    """Renders and encodes rows as the spec says."""

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, chat: ChatTemplate | None, context_length: int):
        self._spec = spec
        self._source = make_task_source(spec, tokenizer, chat, context_length)
        self._row_columns = sorted(self._source.row_columns | spec.sampling.columns)
        self._differ = bool(spec.sampling.columns) or spec.input.is_batch  # rows in what they ask for
        self._wishes: list[RowWish] = []  # the distinct ones
        self._numbers: dict[RowWish, int] = {}

    @property
    def columns(self) -> list[str]:
        """The input columns that prompts and parameters need, and the id column so that its absence is told."""
        names = {*self._source.columns, *self._row_columns}
        return sorted(names | ({self._spec.input.id} if self._spec.input.id else set()))

    def check(self, table: InputTable) -> None:
        """Raise for a column that is not there, or that cannot hold what the spec says of it (once, not row by row)."""
        for name in self.columns:
            check_column(name, table.schema.names)
        self._source.check(table)

    def read(
        self,
        table: InputTable,
        admission: Admission,
        store: TokenStore,
        on_rows: OnRows = lambda rows, tokens: None,
        rows: tuple[int, int] | None = None,
    ) -> JobPrompts:
        """The rows of the table (all, or a range of indices), their tokens in `store`.

        Those that `admission` refuses become failures.

        While a batch is encoded, on all cores, the next one is read and rendered and the one before is taken in.
        """
        started = time.perf_counter()
        taken = _Taken(admission, PromptTableBuilder(store), self._spec.input.overflow)
        batches = table.batches(self.columns, rows, BATCH_ROWS)
        with ThreadPoolExecutor(1, "encode") as pool:
            rendered = (self._render(row_index, batch) for row_index, batch in batches)
            for batch in _ahead(pool, self._encode, rendered):
                taken.add(*batch)
                on_rows(taken.rows, taken.tokens)
        seconds = time.perf_counter() - started
        return taken.finish(self._wishes, self._source.bos_in_text, seconds)

    def _render(self, row_index: NDArray[np.int64], batch: pa.RecordBatch) -> _Rendered:
        rows = python_rows(batch.select(self._row_columns)) if self._row_columns else [{}] * batch.num_rows
        names = batch.column(self._spec.input.id) if self._spec.input.id else None
        return _Rendered(row_index, names, *self._asked(rows), self._source.render(batch, rows))

    def _encode(self, rendered: _Rendered) -> tuple[_Rendered, Encoded]:
        return rendered, self._source.encode(rendered.texts)

    def _asked(self, rows: Sequence[PythonRow]) -> tuple[Wishes, dict[int, RowFailure]]:
        """What the rows ask for, and why some cannot be answered; found once if it does not depend on the row."""
        asked = [self._ask(row) for row in (rows if self._differ else [{}])]
        each = len(rows) // len(asked)
        numbers = np.array([self._number(wish) for wish, _ in asked], np.int32)
        seeds = np.array([wish.params.seed for wish, _ in asked], np.int64)
        failures = {place: failure for place, (_, failure) in enumerate(asked * each) if failure is not None}
        return Wishes(self._wishes, np.repeat(numbers, each), np.repeat(seeds, each)), failures

    def _ask(self, row: PythonRow) -> tuple[RowWish, RowFailure | None]:
        """What a row asks for and, if that cannot be answered, why; of such a wish only `n` means something."""
        if not self._spec.task.generates:
            return RowWish(SCORING, 1, False, pooling=self._spec.task.pooled), None
        if isinstance(row, RowFailure):
            return self._results_of({}), row
        sampling = self._spec.sampling
        try:
            own = openai_batch.sampling_of(row, sampling.names) if self._spec.input.is_batch else {}
            return RowWish(*sampling.with_values(row, own), sampling.seed_is_per_row or "seed" in own), None
        except RowError as error:
            return self._results_of(row), RowFailure(error.code, error.message)

    def _results_of(self, row: Mapping[str, Any]) -> RowWish:
        """A row whose parameters are wrong gets as many results as it asks for, if that much can be read."""
        try:
            return RowWish(SamplingParams(), self._spec.sampling.n_for(row), False)
        except RowError:
            return RowWish(SamplingParams(), 1, False)

    def _number(self, wish: RowWish) -> int:
        """The number of a wish among the distinct ones; seeds are kept apart."""
        if wish.own_seed:
            wish = replace(wish, params=replace(wish.params, seed=0))
        number = self._numbers.setdefault(wish, len(self._wishes))
        if number == len(self._wishes):
            self._wishes.append(wish)
        return number


class _Taken:
    """What has been read so far."""

    def __init__(self, admission: Admission, builder: PromptTableBuilder, overflow: Overflow):
        self._admission, self._builder, self._overflow = admission, builder, overflow
        self._truncated = [np.zeros(0, np.int32)]
        self.rows = self.tokens = self.kv_tokens_wanting = 0
        self._failures: list[FailedRow] = []
        self._row_index = [np.zeros(0, np.int64)]
        self._samples = [np.zeros(0, np.int32)]
        self._numbers, self._seeds = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        self._scored: list[Scored] = []

    def add(self, rendered: _Rendered, encoded: Encoded) -> None:
        """One batch: its prompts go to the table, cut if need be, or are refused."""
        asked, count = rendered.asked, len(rendered.row_index)
        self.tokens += len(encoded.tokens)
        encoded, lost = self._cut(encoded, asked, count)
        self._truncated.append(lost)
        rows = np.arange(count) if encoded.scored is None else encoded.scored.rows
        wishes = Wishes(asked.distinct, asked.numbers[rows], asked.seeds[rows], encoded.scored)
        failures = self._refused(encoded, wishes, rows) | encoded.failures | rendered.failures
        good = np.ones(count, bool)
        good[list(failures)] = False
        self._keep(encoded, wishes, good[rows], rendered.row_index[rows])
        self._failures += [rendered.failed_row(place, failures[place]) for place in sorted(failures)]
        self.rows += count
        self._row_index.append(rendered.row_index)
        results = asked.n if encoded.scored is None else np.where(good, np.bincount(rows, minlength=count), 1)
        self._samples.append(results.astype(np.int32))

    def _cut(self, encoded: Encoded, asked: Wishes, count: int) -> tuple[Encoded, NDArray[np.int32]]:
        """The prompts as long as they may be, and how many tokens each row has lost."""
        if encoded.scored is None:
            return truncate(encoded, asked.max_tokens, self._admission.context_length, self._overflow)
        lost = np.zeros(count, np.int32)
        np.maximum.at(lost, encoded.scored.rows, encoded.scored.lost)
        return encoded, lost

    def _keep(self, encoded: Encoded, wishes: Wishes, kept: NDArray[np.bool_], row_index: NDArray[np.int64]) -> None:
        tokens, lengths = encoded.tokens, encoded.lengths
        self._builder.append(tokens if kept.all() else tokens[np.repeat(kept, lengths)], lengths[kept], row_index[kept])
        self._numbers.append(wishes.numbers[kept])
        self._seeds.append(wishes.seeds[kept])
        self._scored += [] if wishes.scored is None else [wishes.scored[kept]]

    def _refused(self, encoded: Encoded, wishes: Wishes, rows: NDArray[np.int64]) -> dict[int, RowFailure]:
        """Why some prompts cannot be answered, by their rows' place in the batch."""
        accepted = self._admission.accepts(encoded.tokens, encoded.lengths, wishes.max_tokens)
        if encoded.scored is not None:
            accepted &= encoded.scored.last_tokens < self._admission.vocab_size
        begins = np.cumsum(encoded.lengths, dtype=np.int64) - encoded.lengths
        found: dict[int, RowFailure] = {}
        short: list[int] = []  # of KV memory
        for place in np.flatnonzero(~accepted).tolist():
            prompt = encoded.tokens[begins[place] : begins[place] + encoded.lengths[place]]
            failure = self._admission.refusal(prompt, wishes[place].params, wishes[place].score)
            assert failure is not None
            if failure.code == "resource_error":
                short.append(place)
            found.setdefault(int(rows[place]), failure)
        if short:
            needed = self._admission.needed(encoded.lengths[short], wishes.max_tokens[short])
            self.kv_tokens_wanting = max(self.kv_tokens_wanting, int(needed.max()))
        return found

    def finish(self, distinct: list[RowWish], bos_in_text: int, seconds: float) -> JobPrompts:
        return JobPrompts(
            self._builder.finish(),
            Wishes(
                distinct,
                np.concatenate(self._numbers),
                np.concatenate(self._seeds),
                Scored.joined(self._scored) if self._scored else None,
            ),
            self._failures,
            np.concatenate(self._row_index),
            np.concatenate(self._samples),
            bos_in_text,
            self.tokens,
            seconds,
            np.concatenate(self._truncated),
            self.kv_tokens_wanting,
        )


def _ahead(pool: ThreadPoolExecutor, function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """The function's results, in order: it works on an item in the pool while the next one is made."""
    working: Future[_R] | None = None
    for item in items:
        following = pool.submit(function, item)
        if working is not None:
            yield working.result()
        working = following
    if working is not None:
        yield working.result()


def _text_of(value: pa.Scalar) -> str | None:
    """A name to show; None for null and for what Python cannot hold."""
    try:
        return None if value.as_py() is None else str(value.as_py())
    except Exception:  # pyarrow raises what it likes here
        return None
