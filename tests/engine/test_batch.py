"""The arrays of a step, and the groups of sequences that read the same pages."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchgen.engine.batch import _best_runs, _shared_runs, build_batch
from batchgen.engine.sampler import SamplerInputs
from batchgen.engine.scheduler import ScheduledSequence, Sequence, StepPlan
from batchgen.engine.types import Request, Sample, SamplingParams
from batchgen.kernels.base import SAMPLE_DTYPE, StepBatch

PAGE = 4
REPEATABLE = settings(derandomize=True, deadline=None)
COMMON = st.lists(st.integers(0, 4), max_size=7)


def scheduled(
    tokens: list[int], start: int, count: int, table: list[int], known: int | None = None
) -> ScheduledSequence:
    """`count` of `tokens` from `start`; the sequence knows the first `known` of them, by default all."""
    array = np.array(tokens, np.int32)
    known = len(tokens) if known is None else known
    request = Request(array[:known], (Sample(SamplingParams(), ((0, 0),)),))
    sequence = Sequence(request, array, known, 0, block_table=table, num_computed_tokens=start + count)
    return ScheduledSequence(sequence, start, count, start + count == known)


def inputs(logits_rows: int) -> SamplerInputs:
    none = np.zeros(0, np.int32)
    return SamplerInputs([], [], np.zeros(logits_rows, bool), np.zeros(logits_rows, SAMPLE_DTYPE), none, none)


def a_batch(prefix_sharing: bool = True) -> StepBatch:
    """A prompt's chunk that ends before its last token, two sequences that share a page, a prompt over two pages."""
    parts = [
        scheduled([10, 11, 12, 13, 14, 15, 16], 1, 4, [5, 2]),
        scheduled([20, 21, 22, 23, 24, 0, 0], 4, 1, [7, 3], known=5),
        scheduled([20, 21, 22, 23, 26, 27, 0], 5, 1, [7, 4], known=6),
        scheduled([30, 31, 32, 33, 34], 0, 5, [0, 1]),
    ]
    plan = StepPlan(parts, new_pages=[0, 1], copies={16: 12, 17: 13}, num_tokens=11)
    return build_batch(plan, inputs(3), PAGE, prefix_sharing)


def test_arrays_of_a_step() -> None:
    batch = a_batch()
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 24, 27, 30, 31, 32, 33, 34]
    assert batch.positions.tolist() == [1, 2, 3, 4, 4, 5, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [21, 22, 23, 8, 12, 17, 0, 1, 2, 3, 4]
    assert batch.block_tables.tolist() == [[5, 2], [7, 3], [7, 4], [0, 1]]
    assert batch.cu_seqlens_q.tolist() == [0, 4, 5, 6, 11]
    assert batch.seq_lens.tolist() == [5, 5, 6, 5]
    assert batch.logits_rows.tolist() == [4, 5, 10]
    assert batch.copies.tolist() == [[12, 16], [13, 17]]
    assert batch.cleared_pages.tolist() == [0, 1]
    assert batch.shared_runs.tolist() == [[1, 3, 1]]
    assert batch.num_tokens == 11


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.int32) for name in ("input_ids", "positions", "block_tables", "cu_seqlens_q", "seq_lens")),
        *((name, np.int32) for name in ("logits_rows", "cleared_pages", "shared_runs", "history", "suppress")),
        ("slot_mapping", np.int64),
        ("copies", np.int64),
        ("needs_logits", np.bool_),
        ("samples", SAMPLE_DTYPE),
    ],
)
def test_types_of_arrays(name: str, dtype: type) -> None:
    array = getattr(a_batch(), name)
    assert array.dtype == dtype and array.flags.c_contiguous


def test_logits_of_the_last_tokens_of_a_chunk() -> None:
    parts = [scheduled([1, 2, 3, 4], 0, 4, [0, 1]), scheduled([5, 6, 7], 1, 2, [2])]
    parts[0].num_logits, parts[1].num_logits = 3, 2
    batch = build_batch(StepPlan(parts, num_tokens=6), inputs(5), PAGE, True)
    assert batch.logits_rows.tolist() == [1, 2, 3, 4, 5]


def test_without_sharing_there_are_no_shared_runs() -> None:
    assert a_batch(prefix_sharing=False).shared_runs.shape == (0, 3)


def test_shorter_tables_are_filled_with_minus_one() -> None:
    plan = StepPlan([scheduled([1] * 9, 8, 1, [3, 4, 5]), scheduled([1], 0, 1, [6])], num_tokens=2)
    batch = build_batch(plan, inputs(2), PAGE, True)
    assert batch.block_tables.tolist() == [[3, 4, 5], [6, -1, -1]]
    assert batch.copies.shape == (0, 2) and batch.shared_runs.shape == (0, 3)


# Shared runs


def shared(tables: list[list[int]], starts: list[int], counts: list[int] | None = None) -> list[list[int]]:
    counts = counts or [1] * len(starts)
    arrays = (np.array(values, np.int32) for values in (tables, starts, counts))
    return _shared_runs(*arrays, PAGE).tolist()  # type: ignore[call-arg, arg-type]


def test_a_run_has_only_pages_that_end_before_every_query() -> None:
    tables = [[1, 2, 3], [1, 2, 3]]
    assert shared(tables, [8, 8]) == [[0, 2, 2]]
    assert shared(tables, [7, 8]) == [[0, 2, 1]]
    assert shared(tables, [3, 8]) == []


def test_short_runs_are_left_to_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.engine.batch.LEAST_SHARED_TOKENS", 2 * PAGE)
    tables = [[1, 2, 3], [1, 2, 3], [1, 4, 5]]
    assert shared(tables, [8, 8, 8]) == [[0, 2, 2]]
    assert shared(tables[1:], [8, 8]) == []


def test_prefill_takes_no_part_in_a_run() -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert shared(tables, [8, 8, 8], [1, 2, 1]) == []
    assert shared(tables, [8, 8, 8], [1, 1, 2]) == [[0, 2, 2]]


def test_pages_are_common_only_from_the_first_on() -> None:
    assert shared([[1, 2, 3], [9, 2, 3]], [12, 12]) == []


def test_missing_pages_are_not_common() -> None:
    assert shared([[1, -1, -1], [1, -1, -1]], [4, 4]) == [[0, 2, 1]]


def test_a_single_sequence_has_no_run() -> None:
    assert shared([[1, 2]], [8]) == []


def groups(common: list[int]) -> tuple[list[tuple[int, int, int]], int]:
    runs: list[tuple[int, int, int]] = []
    saved = _best_runs(np.array(common, np.int64), 0, len(common) + 1, runs)
    return runs, saved


def saved_by(common: list[int], cuts: tuple[int, ...]) -> int:
    """Page reads that these contiguous groups save: all but one reader of every common page."""
    edges = [0, *cuts, len(common) + 1]
    return sum(min(common[a : b - 1]) * (b - a - 1) for a, b in pairwise(edges) if b - a > 1)


def most_saved(common: list[int]) -> int:
    places = range(1, len(common) + 1)
    return max(saved_by(common, cuts) for size in range(len(places) + 1) for cuts in combinations(places, size))


@pytest.mark.parametrize(
    ("common", "runs"),
    [
        ([], []),
        ([0, 0], []),
        ([3], [(0, 2, 3)]),
        ([3, 3, 3], [(0, 4, 3)]),
        ([2, 0, 3], [(0, 2, 2), (2, 4, 3)]),
        ([5, 1, 1, 5], [(0, 2, 5), (3, 5, 5)]),
        ([3, 2, 3], [(0, 4, 2)]),
        ([4, 2, 4], [(0, 2, 4), (2, 4, 4)]),
    ],
)
def test_groups_that_save_most(common: list[int], runs: list[tuple[int, int, int]]) -> None:
    found, saved = groups(common)
    assert (found, saved) == (runs, most_saved(common))


@settings(REPEATABLE, max_examples=200)
@given(COMMON)
def test_groups_are_disjoint_and_common(common: list[int]) -> None:
    runs, saved = groups(common)
    assert saved == sum(pages * (end - first - 1) for first, end, pages in runs)
    assert all(a[1] <= b[0] for a, b in pairwise(runs))
    assert all(end - first >= 2 and pages == min(common[first : end - 1]) > 0 for first, end, pages in runs)
    single = [min(common[a : b - 1]) * (b - a - 1) for a, b in combinations(range(len(common) + 2), 2) if b - a > 1]
    assert saved >= max(single, default=0)
    assert 2 * saved >= most_saved(common)


def test_groups_of_many_levels() -> None:
    """Every sequence shares a page more with its successor."""
    common: NDArray[np.int64] = np.arange(1, 600)
    runs: list[tuple[int, int, int]] = []
    assert _best_runs(common, 0, 600, runs) > 0
