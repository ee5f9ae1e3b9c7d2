"""Tokenised prompts as sorted runs in a store, so that memory does not grow with the table's tokens.

Prompts come in the order of the table. A window of them at a time is sorted and set down in the store, which is memory
or a file. Merging the runs block by block gives the whole table's order, exactly; and whoever reads the prompts in that
order reads every run from its beginning to its end.

Tokens are stored as big-endian int32, since the bytes of two prompts then compare as their (non-negative) tokens do.
Arrays of tokens "as stored" have these bytes under the type int32: equal where the tokens are, and to be compared only.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

WINDOW_TOKENS, BLOCK_TOKENS = 1 << 24, 1 << 23
"""Tokens sorted at a time, and merged at a time: 64 and 32 MiB, of which some three copies are needed for the while."""

_BIG_ENDIAN = np.dtype(">i4")
_TOKEN_BYTES = 4

Positions = NDArray[np.int64]
_Run = tuple[Positions, NDArray[np.int32]]


class TokenStore(Protocol):
    """Bytes that are appended first and then read; `read` gives what a `memoryview` can be made of."""

    def append(self, data: memoryview) -> None: ...
    def read(self, start: int, size: int) -> Any: ...


class MemoryStore:
    """A store in memory."""

    def __init__(self) -> None:
        self._data = bytearray()

    def append(self, data: memoryview) -> None:
        self._data += data

    def read(self, start: int, size: int) -> memoryview:
        return memoryview(self._data)[start : start + size]


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """Prompts by position: prompt i, of row `row_index[i]`, is `lengths[i]` tokens of the store from `starts[i]` on.

    `runs` are the positions of each window's prompts, sorted by (prompt, position) and stored in that order.
    """

    store: TokenStore
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    row_index: NDArray[np.int64]
    runs: tuple[Positions, ...]

    def __len__(self) -> int:
        return len(self.row_index)

    def prompt(self, i: int) -> NDArray[np.int32]:
        """Its token ids, int32."""
        return self._read(int(self.starts[i]), int(self.lengths[i])).view(_BIG_ENDIAN).astype(np.int32)

    @classmethod
    def from_prompts(cls, prompts: list[NDArray[np.int32]], row_index: NDArray[np.int64]) -> "PromptTable":
        """All of them in memory."""
        builder = PromptTableBuilder(MemoryStore())
        lengths = np.fromiter((len(p) for p in prompts), np.int32, len(prompts))
        builder.append(np.concatenate([np.zeros(0, np.int32), *prompts]), lengths, row_index)
        return builder.finish()

    def in_order(self, block_tokens: int = BLOCK_TOKENS) -> Iterator[tuple[Positions, NDArray[np.int32]]]:
        """All prompts in lexicographic order, equal ones by position: (positions, tokens as stored, back to back).

        A block has about `block_tokens` tokens, at most twice as many (prompts longer than that apart).
        """
        for parts in self._cut_runs(block_tokens):
            positions = np.concatenate(parts)
            tokens = np.concatenate([self._read_part(part) for part in parts])
            if len(parts) > 1:
                order, tokens = _sort_rows(tokens, self.lengths[positions])
                positions = positions[order]
            yield positions, tokens

    def _cut_runs(self, block_tokens: int) -> Iterator[list[Positions]]:
        """The parts of the runs that make up each block: nothing in a block comes after anything in the next one."""
        splitters = self._splitters(block_tokens)
        cuts = [
            np.split(run, [bisect_left(run, splitter, key=self._sort_key) for splitter in splitters])
            for run in self.runs
        ]
        for parts in zip(*cuts, strict=True):
            if kept := [part for part in parts if len(part)]:
                yield kept

    def _splitters(self, block_tokens: int) -> list[tuple[bytes, int]]:
        """Sort keys between blocks: of every run's prompts, one each time `step` tokens have gone by, and of these, in
        order, each n-th, n being the number of runs. Between two splitters lie n to 2n steps."""
        step = max(1, block_tokens // max(1, len(self.runs)))
        samples = sorted(self._sort_key(position) for run in self.runs for position in self._sampled(run, step))
        return samples[len(self.runs) :: max(1, len(self.runs))]

    def _sampled(self, run: Positions, step: int) -> Positions:
        ends = np.cumsum(self.lengths[run], dtype=np.int64)
        return run[np.unique(np.searchsorted(ends, np.arange(step, ends[-1], step)))]

    def _sort_key(self, position: int) -> tuple[bytes, int]:
        return self._read(int(self.starts[position]), int(self.lengths[position])).tobytes(), int(position)

    def _read_part(self, part: Positions) -> NDArray[np.int32]:
        """The tokens of prompts that are neighbours in a run."""
        return self._read(int(self.starts[part[0]]), int(self.lengths[part].sum()))

    def _read(self, start: int, count: int) -> NDArray[np.int32]:
        return _as_tokens(self.store.read(start * _TOKEN_BYTES, count * _TOKEN_BYTES), count)


class PromptTableBuilder:
    """Prompts in, in the table's order; a table out. Tokens must not be negative."""

    def __init__(self, store: TokenStore, window_tokens: int = WINDOW_TOKENS):
        self._store, self._window_tokens = store, window_tokens
        self._tokens: list[NDArray[np.int32]] = []  # of the window
        self._lengths: list[NDArray[np.int32]] = []
        self._row_index: list[NDArray[np.int64]] = []  # of all prompts
        self._waiting = self._count = 0  # tokens in the window, prompts in the runs
        self._runs: list[_Run] = []

    def append(self, tokens: NDArray[np.int32], lengths: NDArray[np.int32], row_index: NDArray[np.int64]) -> None:
        """Prompts back to back, the length of each and its row."""
        if not len(lengths):
            return
        if self._waiting + len(tokens) > self._window_tokens:
            self._set_down()
        self._tokens.append(tokens.astype(_BIG_ENDIAN).view(np.int32))
        self._lengths.append(lengths)
        self._row_index.append(row_index)
        self._waiting += len(tokens)

    def finish(self) -> PromptTable:
        self._set_down()
        row_index = np.concatenate([np.zeros(0, np.int64), *self._row_index])
        starts, lengths, base = np.zeros(len(row_index), np.int64), np.zeros(len(row_index), np.int32), 0
        for positions, run_lengths in self._runs:
            ends = base + np.cumsum(run_lengths, dtype=np.int64)
            starts[positions], lengths[positions], base = ends - run_lengths, run_lengths, int(ends[-1])
        return PromptTable(self._store, starts, lengths, row_index, tuple(positions for positions, _ in self._runs))

    def _set_down(self) -> None:
        """Sort the window and append it to the store."""
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        if not len(lengths):
            return
        tokens, self._tokens, self._lengths, self._waiting = np.concatenate(self._tokens), [], [], 0
        order, tokens = _sort_rows(tokens, lengths)
        self._store.append(tokens.view(np.uint8).data)
        self._runs.append((order + self._count, lengths[order]))
        self._count += len(lengths)


def _sort_rows(tokens: NDArray[np.int32], lengths: NDArray[np.int32]) -> tuple[Positions, NDArray[np.int32]]:
    """The stable order of rows that lie back to back, and the rows back to back in that order."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * _TOKEN_BYTES
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(tokens)]
    rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)
    order = pc.array_sort_indices(rows)
    return order.to_numpy().astype(np.int64), _as_tokens(rows.take(order).buffers()[2], len(tokens))


def _as_tokens(data: Any, count: int) -> NDArray[np.int32]:
    return np.frombuffer(data, np.int32, count) if count else np.zeros(0, np.int32)
