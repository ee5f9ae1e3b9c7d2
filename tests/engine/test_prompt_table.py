"""Runs sorted window by window and merged block by block give what sorting everything at once gives."""

from collections.abc import Sequence
from itertools import chain, pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.planner import PrefixPlan, plan_prefixes
from batchgen.engine.prompt_table import MemoryStore, PromptTable, PromptTableBuilder

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=200)
# Few different tokens, so that prompts are equal and share prefixes; and some that differ in any of their four bytes.
TOKEN = st.sampled_from([0, 1, 1, 255, 256, 65_536, 2**31 - 1])
PROMPTS = st.lists(st.lists(TOKEN, max_size=6), max_size=40)


def build(prompts: Sequence[Sequence[int]], window: int, batch: int) -> PromptTable:
    """The table of these prompts, of rows 100, 101, …, given `batch` at a time."""
    builder = PromptTableBuilder(MemoryStore(), window)
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        tokens = np.array([token for prompt in part for token in prompt], np.int32)
        rows = np.arange(100 + first, 100 + first + len(part))
        builder.append(tokens, np.array([len(prompt) for prompt in part], np.int32), rows)
    return builder.finish()


def expected(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Order and common prefixes, by sorting lists."""
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i], i))
    pairs = pairwise([prompts[i] for i in order])
    common = [sum(1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(*pair, strict=False))) for pair in pairs]
    return order, [0, *common][: len(prompts)]


def as_lists(plan: PrefixPlan) -> tuple[list[int], list[int]]:
    return plan.order.tolist(), plan.shared.tolist()


@REPEATABLE
@given(PROMPTS, st.integers(1, 30), st.integers(1, 40), st.integers(1, 60))
def test_windows_and_blocks_of_any_size_give_the_order_of_the_whole(
    prompts: list[list[int]], window: int, batch: int, block: int
) -> None:
    table = build(prompts, window, batch)
    assert as_lists(plan_prefixes(table, block)) == expected(prompts)
    assert [table.prompt(i).tolist() for i in range(len(table))] == prompts
    assert table.row_index.tolist() == list(range(100, 100 + len(prompts)))
    assert table.lengths.tolist() == [len(prompt) for prompt in prompts]


@REPEATABLE
@given(st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=60), st.integers(4, 40))
def test_blocks_are_bounded(prompts: list[list[int]], block: int) -> None:
    table = build(prompts, window=10, batch=3)
    longest = max(map(len, prompts))
    sizes = [len(tokens) for _, tokens in table.in_order(block)]
    assert sum(sizes) == sum(map(len, prompts))
    assert max(sizes) <= 2 * max(block, len(table.runs)) + longest * len(table.runs)


def test_equal_prompts_are_cut_into_blocks_too_and_keep_their_order() -> None:
    table = build([[7, 7]] * 1000, window=100, batch=10)
    blocks = [positions.tolist() for positions, _ in table.in_order(200)]
    assert len(table.runs) == 20 and len(blocks) >= 5
    assert list(chain(*blocks)) == list(range(1000))
    assert as_lists(plan_prefixes(table, 200)) == (list(range(1000)), [0, *[2] * 999])


def test_a_prompt_longer_than_the_window_is_a_run_of_its_own() -> None:
    prompts = [[3], [2] * 50, [1], [2] * 49]
    table = build(prompts, window=8, batch=1)
    assert [run.tolist() for run in table.runs] == [[0], [1], [2], [3]]
    assert as_lists(plan_prefixes(table, 4)) == expected(prompts) == ([2, 3, 1, 0], [0, 0, 49, 0])


@pytest.mark.parametrize("prompts", [[], [[]], [[], []], [[], [5], []]])
def test_tables_with_nothing_in_them(prompts: list[list[int]]) -> None:
    for window in (1, 100):
        assert as_lists(plan_prefixes(build(prompts, window, 1), 1)) == expected(prompts)


def test_prompts_are_native_and_their_own() -> None:
    table = build([[1, 2]], window=8, batch=1)
    prompt = table.prompt(0)
    prompt[0] = 9
    assert prompt.dtype == np.int32 and prompt.dtype.isnative
    assert table.prompt(0).tolist() == [1, 2]
