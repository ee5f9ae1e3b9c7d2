"""The whole-table plan: an order in which every shared prefix is computed once, and what that will cost.

Sorting the prompts lexicographically by token puts the prefix trie into depth-first order, and the lengths of the
common prefixes of neighbours *are* the trie. A row then needs nothing but its predecessor: whatever it shares with any
earlier row, it shares with that one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.engine.types import Request, RowFailure, Sample, SamplingParams

COMPARE_ROWS, COMPARE_TOKENS = 1 << 14, 64
"""Neighbours, and tokens of each, compared at a time: bounds memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """Tokenised prompts back to back: prompt i is `tokens[offsets[i]:offsets[i + 1]]`, of row `row_index[i]`."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    row_index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_index)

    def prompt(self, i: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @classmethod
    def from_prompts(cls, prompts: list[NDArray[np.int32]], row_index: NDArray[np.int64]) -> "PromptTable":
        lengths = np.fromiter((len(p) for p in prompts), np.int64, len(prompts))
        tokens = np.concatenate([*prompts, np.zeros(0, np.int32)]).astype(np.int32, copy=False)
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), row_index)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """`order[i]` is the i-th prompt to run; it has `shared[i]` leading tokens in common with `order[i - 1]`.

    A prompt equal to its predecessor has `shared == length` and is not computed at all.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int64]
    lengths: NDArray[np.int64]  # in plan order

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def distinct_tokens(self) -> int:
        """The fewest prompt tokens that can be computed: the trie's size."""
        return int((self.lengths - self.shared).sum())

    @property
    def repeats(self) -> NDArray[np.bool_]:
        """Prompts equal to their predecessor in the order."""
        equal = self.shared == self.lengths
        return equal & (np.concatenate([[-1], self.lengths[:-1]]) == self.lengths)


def plan_prefixes(table: PromptTable) -> PrefixPlan:
    """Sort the prompts and measure what neighbours have in common."""
    order = _sorted_order(table)
    return PrefixPlan(order, _common_prefixes(table, order), table.lengths[order])


def _sorted_order(table: PromptTable) -> NDArray[np.int64]:
    """Stable lexicographic order. Big-endian bytes compare as the (non-negative) tokens do."""
    if not len(table):
        return np.zeros(0, np.int64)
    data = pa.py_buffer(table.tokens.astype(">i4").tobytes())
    offsets = pa.py_buffer((table.offsets * 4).astype(np.int64))
    keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(table), [None, offsets, data])
    columns = pa.table({"key": keys, "position": np.arange(len(table))})
    sort = pc.sort_indices(columns, sort_keys=[("key", "ascending"), ("position", "ascending")])
    return sort.to_numpy().astype(np.int64)


def _common_prefixes(table: PromptTable, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Length of the common prefix of each prompt in `order` and the one before it; 0 for the first."""
    shared = np.zeros(len(order), np.int64)
    for first in range(1, len(order), COMPARE_ROWS):
        pair = order[first - 1 : first + COMPARE_ROWS]
        shared[first : first + COMPARE_ROWS] = _shared_by_neighbours(table, pair)
    return shared


def _shared_by_neighbours(table: PromptTable, order: NDArray[np.int64]) -> NDArray[np.int64]:
    starts, lengths = table.offsets[:-1][order], table.lengths[order]
    shared = np.zeros(len(order), np.int64)
    undecided = np.arange(1, len(order) if len(table.tokens) else 0)
    window = np.arange(COMPARE_TOKENS)
    while len(undecided):
        at = shared[undecided]
        limit = np.minimum(lengths[undecided], lengths[undecided - 1]) - at
        last = len(table.tokens) - 1
        mine = table.tokens[np.minimum((starts[undecided] + at)[:, None] + window, last)]
        theirs = table.tokens[np.minimum((starts[undecided - 1] + at)[:, None] + window, last)]
        inside = window < limit[:, None]
        equal = np.logical_and.accumulate((mine == theirs) & inside, axis=1).sum(axis=1)
        shared[undecided] += equal
        undecided = undecided[equal == COMPARE_TOKENS]
    return shared[1:]


@dataclass(frozen=True, slots=True)
class Admission:
    """What can be answered at all: the model's context and vocabulary, and the tokens that the KV cache holds."""

    context_length: int
    vocab_size: int
    kv_tokens: int

    def room(self, prompt_length: int, params: SamplingParams) -> int:
        """Tokens that may be generated; the last one needs no place in the context."""
        return min(params.max_tokens, self.context_length - prompt_length + 1)

    def refusal(self, prompt: NDArray[np.int32], params: SamplingParams) -> RowFailure | None:
        """Why a prompt cannot be answered, if it cannot."""
        length = len(prompt)
        if not length:
            return RowFailure("prompt_missing", "the prompt has no tokens")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            return RowFailure("encode_error", f"the prompt has a token id outside 0..{self.vocab_size - 1}")
        if length > self.context_length:
            text = f"the prompt has {length} tokens; the model's context holds {self.context_length}"
            return RowFailure("prompt_too_long", text)
        needed = length + max(self.room(length, params) - 1, 0)
        if needed > self.kv_tokens:
            text = f"{needed} tokens of KV memory are needed; engine.kv_memory holds {self.kv_tokens}"
            return RowFailure("resource_error", text)
        return None


def own_pages(plan: PrefixPlan, answer_pages: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """KV pages that each row adds to its predecessor's, in plan order; `answer_pages` those of what it generates."""
    return -(-plan.lengths // page_size) - plan.shared // page_size + answer_pages


def pages_at_once(plan: PrefixPlan, own: NDArray[np.int64], page_size: int, max_num_seqs: int) -> int:
    """About how many KV pages keep `max_num_seqs` requests going.

    The own pages of as many neighbours in the plan, and those of the longest prefix that they can share with what ran
    before. Rows that answer much longer than their neighbours can make it more.
    """
    if not len(plan.order):
        return 0
    total = np.concatenate([[0], np.cumsum(own)])[[*np.flatnonzero(~plan.repeats), len(own)]]
    width = min(max_num_seqs, len(total) - 1)
    return int((total[width:] - total[:-width]).max() + -(-plan.lengths.max() // page_size))


@dataclass(frozen=True, slots=True)
class RowWish:
    """What a row asks for: `n` answers under `params`; `own_seed` when the seed is a value of the row itself."""

    params: SamplingParams
    n: int
    own_seed: bool


def make_requests(
    table: PromptTable, plan: PrefixPlan, wish: Callable[[int], RowWish], *, sharing: bool = True
) -> Iterator[Request]:
    """Requests in plan order; `wish` is asked once per position of the table.

    Equal prompts become one request. Without `sharing` every answer is a request of its own, with the same random
    numbers as it has with sharing.
    """
    for begin, end in pairwise([*np.flatnonzero(~plan.repeats).tolist(), len(plan.order)]):
        members = np.sort(plan.order[begin:end]).tolist()
        prompt, samples = table.prompt(members[0]), _join_samples(table, members, wish)
        if sharing:
            yield Request(prompt, samples)
        else:
            for sample in samples:
                yield from (Request(prompt, (replace(sample, targets=(target,)),)) for target in sample.targets)


def _join_samples(table: PromptTable, members: list[int], wish: Callable[[int], RowWish]) -> tuple[Sample, ...]:
    """The k-th of several equal rows draws from the k-th streams; rows that must agree share one sample."""
    numbers: dict[SamplingParams, int] = {}
    targets: dict[tuple[SamplingParams, int], list[tuple[int, int]]] = {}
    for position in members:
        row, asked = int(table.row_index[position]), wish(position)
        params = asked.params.without_unused()
        first = 0 if asked.own_seed else numbers.get(params, 0)
        numbers[params] = first + asked.n
        for k in range(asked.n):
            number = 0 if params.greedy else first + k
            targets.setdefault((params, number), []).append((row, k))
    return tuple(Sample(params, tuple(rows), number) for (params, number), rows in targets.items())
