"""The whole-table plan: an order in which every shared prefix is computed once, and what that will cost.

Sorting the prompts lexicographically by token puts the prefix trie into depth-first order, and the lengths of the
common prefixes of neighbours *are* the trie. A row then needs nothing but its predecessor: whatever it shares with any
earlier row, it shares with that one.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.prompt_table import BLOCK_TOKENS, PromptTable
from batchgen.engine.types import RowFailure, SamplingParams, Score

COMPARE_TOKENS = 1 << 17
"""Tokens compared with their neighbours' at a time: bounds memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """`order[i]` is the i-th prompt to run; it has `shared[i]` leading tokens in common with `order[i - 1]`.

    A prompt equal to its predecessor has `shared == length` and is not computed at all.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int32]
    lengths: NDArray[np.int32]  # in plan order

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def trie_tokens(self) -> int:
        """The prompts' tokens, each prefix that several have counted once."""
        return int((self.lengths - self.shared).sum())

    @property
    def repeats(self) -> NDArray[np.bool_]:
        """Prompts equal to their predecessor in the order."""
        equal = self.shared == self.lengths
        return equal & (np.concatenate([[-1], self.lengths[:-1]]) == self.lengths)


def plan_prefixes(table: PromptTable, block_tokens: int = BLOCK_TOKENS) -> PrefixPlan:
    """Put the prompts in order and measure what neighbours have in common, some `block_tokens` at a time."""
    order, shared = np.zeros(len(table), np.int64), np.zeros(len(table), np.int32)
    done = 0
    for positions, tokens in table.in_order(block_tokens):
        block = slice(done, done + len(positions))
        order[block] = positions
        shared[block] = _common_prefixes(tokens, table.lengths[positions])
        if done:
            pair = [table.prompt(position) for position in order[done - 1 : done + 1]]
            shared[done] = _common_prefixes(np.concatenate(pair), np.array([len(p) for p in pair]))[1]
        done = block.stop
    return PrefixPlan(order, shared, table.lengths[order])


def _common_prefixes(tokens: NDArray[np.int32], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """What each of some prompts, back to back, has in common with the one before it; 0 for the first."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    limits = np.zeros(len(lengths), np.int64)
    limits[1:] = np.minimum(lengths[1:], lengths[:-1])
    compared = np.cumsum(limits)
    cuts = np.searchsorted(compared, np.arange(0, compared[-1], COMPARE_TOKENS), side="right")
    shared = [
        _shared_at(tokens, starts[first:end], starts[first - 1 : end - 1], limits[first:end])
        for first, end in pairwise([1, *cuts[1:].tolist(), len(lengths)])
    ]
    return np.concatenate([np.zeros(1, np.int64), *shared])


def _shared_at(
    tokens: NDArray[np.int32], mine: NDArray[np.int64], theirs: NDArray[np.int64], limits: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Length of the common prefix, `limits` at most, of what is at `mine` and at `theirs`."""
    ends = np.cumsum(limits)
    begins = ends - limits
    place = np.arange(ends[-1] if len(ends) else 0)
    at_mine, at_theirs = (place + np.repeat(at - begins, limits) for at in (mine, theirs))
    differing = np.append(np.flatnonzero(tokens[at_mine] != tokens[at_theirs]), len(place))
    return np.minimum(differing[np.searchsorted(differing, begins)] - begins, limits)


def rows_with(marked: NDArray[np.bool_], lengths: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which of some rows, back to back, have a marked item."""
    if not marked.any():
        return np.zeros(len(lengths), bool)
    before = np.concatenate([[0], np.cumsum(marked)])
    ends = np.cumsum(lengths, dtype=np.int64)
    return before[ends] > before[ends - lengths]


@dataclass(frozen=True, slots=True)
class Admission:
    """What can be answered at all: the model's context and vocabulary, and the tokens that the KV cache holds."""

    context_length: int
    vocab_size: int
    kv_tokens: int

    def room(self, prompt_length: int, params: SamplingParams) -> int:
        """Tokens that may be generated; the last one needs no place in the context."""
        return min(params.max_tokens, self.context_length - prompt_length + 1)

    def rooms(self, lengths: NDArray[np.integer], max_tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """`room` of many prompts at once."""
        return np.minimum(max_tokens, self.context_length + 1 - lengths.astype(np.int64))

    def accepts(
        self, tokens: NDArray[np.int32], lengths: NDArray[np.int32], max_tokens: NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Whether `refusal` is None, for prompts that lie back to back in `tokens`."""
        unknown = rows_with((tokens < 0) | (tokens >= self.vocab_size), lengths)
        fits = self.needed(lengths, max_tokens) <= self.kv_tokens
        return (lengths > 0) & (lengths <= self.context_length) & fits & ~unknown

    def needed(self, lengths: NDArray[np.integer], max_tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Tokens of KV memory for prompts of these lengths and one answer each."""
        return lengths.astype(np.int64) + np.maximum(self.rooms(lengths, max_tokens) - 1, 0)

    def refusal(
        self, prompt: NDArray[np.int32], params: SamplingParams, score: Score | None = None
    ) -> RowFailure | None:
        """Why a prompt cannot be answered, or a continuation scored, if it cannot."""
        length = len(prompt)
        if score is not None and not 0 <= score.last_token < self.vocab_size:
            return RowFailure("encode_error", f"the continuation has a token id outside 0..{self.vocab_size - 1}")
        if not length:
            return RowFailure("prompt_missing", "the prompt has no tokens")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            return RowFailure("encode_error", f"the prompt has a token id outside 0..{self.vocab_size - 1}")
        if length > self.context_length:
            text = f"the prompt has {length} tokens; the model's context holds {self.context_length}"
            return RowFailure("prompt_too_long", text)
        needed = length + max(self.room(length, params) - 1, 0)
        if needed > self.kv_tokens:
            text = f"the prompt's {length} tokens and its answer need {needed} tokens of KV memory"
            return RowFailure("resource_error", f"{text}; engine.kv_memory holds {self.kv_tokens}")
        return None


def shared_before_logits(
    lengths: NDArray[np.integer], shared: NDArray[np.integer], logits: NDArray[np.int64]
) -> NDArray[np.int64]:
    """What prompts find computed, that have `shared` tokens in common with those before: a prompt computes its last
    tokens, of so many of which it wants `logits`, itself.

    Equal prompts, which stand side by side, are one request. It wants the most that one of them does, and all but the
    first find it computed.
    """
    found = shared.astype(np.int64)
    begins = np.flatnonzero(found < lengths)
    if len(begins):
        most = np.maximum.reduceat(logits, begins)
        found[begins] = np.minimum(found[begins], lengths[begins] - most)
    return found


def own_pages(
    lengths: NDArray[np.integer], shared: NDArray[np.integer], answer_pages: NDArray[np.int64], page_size: int
) -> NDArray[np.int64]:
    """KV pages that each row adds to its predecessor's, in plan order; `answer_pages` those of what it generates."""
    return np.where(shared < lengths, -(-lengths // page_size) - shared // page_size, 0) + answer_pages
