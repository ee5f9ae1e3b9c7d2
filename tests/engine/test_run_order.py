"""Every policy's order: each request once, whole subtrees together, prompts and answers mixed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchgen.engine.planner import PrefixPlan, plan_prefixes
from batchgen.engine.run_order import Policy, RunOrder, run_order, shared_in_turn
from tests.engine.mock import prompt_table, trie_size

RUN = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 5, 40]))
PROMPT = st.lists(RUN, min_size=1, max_size=4).map(lambda runs: tuple(t for t, count in runs for _ in range(count)))


def ordered(prompts: list[tuple[int, ...]], new_tokens: list[int], policy: Policy = "planned") -> tuple[list, RunOrder]:
    """(prompt, lane) of each request in turn."""
    plan = plan_prefixes(prompt_table(prompts))
    wanted = np.array(new_tokens, np.int64)[plan.order]
    order = run_order(plan, wanted, policy, num_pages=1000, longest_pages=1)
    firsts = plan.order[order.begins]
    return [(prompts[i], lane) for i, lane in zip(firsts.tolist(), order.lanes.tolist(), strict=True)], order


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def computed(turns: list[tuple[tuple[int, ...], int]]) -> int:
    """Tokens that are computed when each shares with the one before it in its lane and the last of the other."""
    last: dict[int, tuple[int, ...]] = {}
    total = 0
    for prompt, lane in turns:
        total += len(prompt) - min(max((common(prompt, other) for other in last.values()), default=0), len(prompt) - 1)
        last[lane] = prompt
    return total


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(PROMPT, min_size=1, max_size=25), st.data(), st.sampled_from(["planned", "prefill_first"]))
def test_in_a_planned_order_nothing_is_computed_twice(prompts: list, data: st.DataObject, policy: Policy) -> None:
    new = data.draw(st.lists(st.sampled_from([1, 1, 50, 400]), min_size=len(prompts), max_size=len(prompts)))
    turns, _ = ordered(prompts, new, policy)
    assert sorted(prompt for prompt, _ in turns) == sorted(set(prompts))
    assert computed(turns) == trie_size(prompts)


def two_tasks() -> tuple[list[tuple[int, ...]], list[int]]:
    """Long prompts with one new token each, then short ones with long answers, in two subtrees."""
    long = [(1,) * 100 + (3, i) + (4,) * 40 for i in range(120)]
    short = [(9, i) for i in range(40)]
    return long + short, [1] * 120 + [100] * 40


def test_heavy_prompts_and_heavy_answers_are_used_up_at_one_pace() -> None:
    turns, order = ordered(*two_tasks())
    assert set(order.lanes.tolist()) == {0, 1}
    kinds = [prompt[0] == 9 for prompt, _ in turns]
    thirds = [sum(kinds[first : first + 53]) for first in (0, 53, 106)]
    assert min(thirds) >= 12
    plain, _ = ordered(*two_tasks(), policy="prefill_first")
    assert [prompt[0] == 9 for prompt, _ in plain] == [False] * 120 + [True] * 40


def test_rows_that_are_all_alike_keep_the_plans_order() -> None:
    prompts = [(1,) * 30 + (i,) for i in range(50)]
    turns, order = ordered(prompts, [20] * 50)
    assert [prompt for prompt, _ in turns] == sorted(prompts) and not order.lanes.any()


def test_little_memory_is_for_one_end_only() -> None:
    prompts, new = two_tasks()
    plan = plan_prefixes(prompt_table(prompts))
    order = run_order(plan, np.array(new)[plan.order], "planned", num_pages=30, longest_pages=10)
    assert not order.lanes.any() and (np.diff(order.begins) > 0).all()


def test_fifo_takes_rows_as_the_table_has_them() -> None:
    prompts = [(5,), (1, 2), (5,), (0,), (1, 2)]
    turns, _ = ordered(prompts, [1] * 5, "fifo")
    assert [prompt for prompt, _ in turns] == [(5,), (1, 2), (0,)]


def test_a_prompt_that_others_begin_with_comes_before_them() -> None:
    prompts = [(1,) * 50, *[(1,) * 50 + (i,) * 30 for i in range(2, 8)], *[(9, i) for i in range(6)]]
    turns, order = ordered(prompts, [90] + [1] * 6 + [30] * 6)
    order_of = [prompt for prompt, lane in turns if lane == 0]
    assert order.lanes.any() and order_of[0] == (1,) * 50


@pytest.mark.parametrize("policy", ["planned", "fifo", "prefill_first"])
def test_an_empty_plan(policy: Policy) -> None:
    none: NDArray[np.int64] = np.zeros(0, np.int64)
    plan = PrefixPlan(none, none.astype(np.int32), none.astype(np.int32))
    assert len(run_order(plan, none, policy, num_pages=10, longest_pages=0)) == 0


def test_groups_are_the_plans() -> None:
    plan = plan_prefixes(prompt_table([(1,), (2,), (1,), (2,), (2,)]))
    order = run_order(plan, np.ones(5, np.int64), "planned", num_pages=0, longest_pages=1)
    assert list(pairwise([*order.begins.tolist(), 5])) == list(zip(order.begins, order.ends, strict=True))
    assert order.sums(np.ones(5, np.int64)).tolist() == [2, 3]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(PROMPT, min_size=1, max_size=25))
def test_what_neighbours_in_the_table_have_in_common(prompts: list) -> None:
    plan = plan_prefixes(prompt_table(prompts))
    order = run_order(plan, np.ones(len(prompts), np.int64), "fifo", num_pages=1, longest_pages=1)
    turns = list(dict.fromkeys(prompts))
    assert shared_in_turn(plan, order).tolist() == [0, *(common(a, b) for a, b in pairwise(turns))]
