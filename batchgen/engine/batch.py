"""A step plan into the flat arrays that kernels read."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.sampler import SamplerInputs
from batchgen.engine.scheduler import StepPlan
from batchgen.kernels.base import StepBatch

LEAST_SHARED_TOKENS = 128
"""Below, a barrier and the state carried over cost more than reading the keys once saves (benchmarks/LOG.md)."""
MAX_LEVELS = 32
"""Of nested prefixes that are looked into when neighbours are grouped."""


def build_batch(plan: StepPlan, sampling: SamplerInputs, page_size: int, prefix_sharing: bool) -> StepBatch:
    """Arrays of one step; see `StepBatch`."""
    scheduled = plan.scheduled
    starts = np.array([s.start for s in scheduled], np.int32)
    counts = np.array([s.count for s in scheduled], np.int32)
    cu_seqlens = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    owner = np.repeat(np.arange(len(scheduled)), counts)
    positions = (starts[owner] + np.arange(plan.num_tokens, dtype=np.int32) - cu_seqlens[owner]).astype(np.int32)
    tables = _block_tables(plan)
    pages = tables[owner, positions // page_size].astype(np.int64)
    logits = np.array([s.num_logits for s in scheduled], np.int32)
    runs = _shared_runs(tables, starts, counts, page_size) if prefix_sharing else np.zeros((0, 3), np.int32)
    return StepBatch(
        input_ids=np.concatenate([s.sequence.token_ids[s.start : s.start + s.count] for s in scheduled]),
        positions=positions,
        slot_mapping=pages * page_size + positions % page_size,
        block_tables=tables,
        cu_seqlens_q=cu_seqlens,
        seq_lens=starts + counts,
        logits_rows=np.flatnonzero(starts[owner] + counts[owner] - positions <= logits[owner]).astype(np.int32),
        needs_logits=sampling.needs_logits,
        samples=sampling.samples,
        history=sampling.history,
        suppress=sampling.suppress,
        copies=np.array([(s, d) for d, s in plan.copies.items()], np.int64).reshape(-1, 2),
        cleared_pages=np.array(plan.new_pages, np.int32),
        shared_runs=runs,
    )


def _block_tables(plan: StepPlan) -> NDArray[np.int32]:
    width = max(len(s.sequence.block_table) for s in plan.scheduled)
    tables = np.full((len(plan.scheduled), width), -1, np.int32)
    for row, s in zip(tables, plan.scheduled, strict=True):
        row[: len(s.sequence.block_table)] = s.sequence.block_table
    return tables


def _shared_runs(
    tables: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32], page_size: int
) -> NDArray[np.int32]:
    """Groups of neighbouring sequences, one token each, that read the same leading pages: (first, end, pages)."""
    full = np.where(counts == 1, starts // page_size, 0)  # pages that end before the first query
    equal = np.logical_and.accumulate(tables[1:] == tables[:-1], axis=1).sum(axis=1)
    common = np.minimum(equal, np.minimum(full[1:], full[:-1]))
    common[common * page_size < LEAST_SHARED_TOKENS] = 0
    runs: list[tuple[int, int, int]] = []
    _best_runs(common, 0, len(starts), runs)
    return np.array(runs, np.int32).reshape(-1, 3)


def _best_runs(
    common: NDArray[np.int64], first: int, end: int, runs: list[tuple[int, int, int]], levels: int = MAX_LEVELS
) -> int:
    """Append groups of [first, end) that save many page reads; returns how many.

    Either the whole is a group, or it is cut where its members have least in common, whichever saves more.
    """
    if end - first < 2:
        return 0
    inside = common[first : end - 1]
    pages = int(inside.min())
    whole = pages * (end - first - 1)
    if pages == inside.max() or not levels:
        if pages:
            runs.append((first, end, pages))
        return whole
    parts: list[tuple[int, int, int]] = []
    cuts = [first, *(first + 1 + np.flatnonzero(inside == pages)).tolist(), end]
    saved = sum(_best_runs(common, a, b, parts, levels - 1) for a, b in pairwise(cuts))
    if saved > whole:
        runs.extend(parts)
        return saved
    runs.append((first, end, pages))
    return whole
