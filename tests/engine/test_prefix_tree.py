"""The tree of shared prefixes against a trie made of dictionaries."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.planner import PrefixPlan, plan_prefixes
from batchgen.engine.prefix_tree import SharedPrefix, largest_prefixes, shared_among
from tests.engine.mock import prompt_table, trie_size

REPEATABLE = settings(derandomize=True, deadline=None)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), max_size=14)
Prompt = tuple[int, ...]


def branching_prefixes(prompts: list[Prompt]) -> dict[Prompt, int]:
    """Rows of every prefix that two rows share and after which they go apart, or end together."""
    prefixes = {prompt[:end] for prompt in prompts for end in range(len(prompt) + 1)}
    beneath = {prefix: [p for p in prompts if p[: len(prefix)] == prefix] for prefix in prefixes}
    longest = {prefix: rows for prefix, rows in beneath.items() if not is_longer_possible(prefix, rows)}
    return {prefix: len(rows) for prefix, rows in longest.items() if len(rows) > 1}


def is_longer_possible(prefix: Prompt, rows: list[Prompt]) -> bool:
    return len({row[: len(prefix) + 1] for row in rows}) == 1 and len(rows[0]) > len(prefix)


def plan_of(prompts: list[Prompt]) -> tuple[PrefixPlan, list[Prompt]]:
    plan = plan_prefixes(prompt_table(prompts))
    return plan, [prompts[i] for i in plan.order]


def prefixes_of(tree: SharedPrefix, ordered: list[Prompt]) -> dict[Prompt, int]:
    return {ordered[node.begin][: node.depth]: node.rows for node in tree.walk() if node.rows > 1}


@settings(REPEATABLE, max_examples=200)
@given(PROMPTS)
def test_the_whole_tree_is_the_trie(prompts: list[Prompt]) -> None:
    plan, ordered = plan_of(prompts)
    tree = largest_prefixes(plan, most=1000)
    assert prefixes_of(tree, ordered) == branching_prefixes(prompts)
    assert sum(node.saved_tokens for node in tree.walk()) == plan.prompt_tokens - plan.trie_tokens
    for node in tree.walk():
        ends = [(child.begin, child.end) for child in sorted(node.children, key=lambda child: child.begin)]
        assert all(node.begin <= begin < end <= node.end for begin, end in ends)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        assert all(child.depth == node.depth + child.own and child.own > 0 for child in node.children)


@settings(REPEATABLE, max_examples=100)
@given(PROMPTS, st.integers(0, 4))
def test_a_small_tree_has_true_nodes_only_and_never_says_more_than_is_saved(prompts: list[Prompt], most: int) -> None:
    plan, ordered = plan_of(prompts)
    tree = largest_prefixes(plan, most)
    nodes = list(tree.walk())
    assert len(nodes) <= most + 1
    assert prefixes_of(tree, ordered).items() <= (branching_prefixes(prompts) | {(): len(prompts)}).items()
    assert sum(node.saved_tokens for node in nodes) <= plan.prompt_tokens - plan.trie_tokens


def test_a_large_prefix_below_small_ones_is_shown_in_their_place() -> None:
    pairs = [(1, i, *([7] * 5), k) for i in range(8) for k in range(3)]
    deep = [(2, 2, *([9] * length), i) for i, length in enumerate([40] * 20)]
    plan, ordered = plan_of(pairs + deep)
    tree = largest_prefixes(plan, most=1)
    (shown,) = tree.children
    assert (shown.rows, shown.depth, shown.own) == (20, 42, 42)
    assert ordered[shown.begin][:2] == (2, 2)
    assert largest_prefixes(plan, most=20, least_saved=100).children == (shown,)


def test_of_prompts_that_continue_each_other_a_few_nodes_tell_nearly_all() -> None:
    """A conversation after each of its turns: no node has more than a token of its own beyond the next smaller one."""
    plan, _ = plan_of([(0,) * length for length in range(1, 301)])
    tree = largest_prefixes(plan, 12, least_saved=plan.prompt_tokens // 200)
    assert sum(node.saved_tokens for node in tree.walk()) > 0.9 * (plan.prompt_tokens - plan.trie_tokens)
    (first,) = largest_prefixes(plan, 1).children
    assert abs(first.rows - 150) < 10


def test_a_large_prefix_is_found_among_many_depths() -> None:
    """Tasks of so many rows, which share 300 tokens and some more, and with the task before less."""
    rng = np.random.default_rng(0)
    tasks = {0: 3000, 9: 200, 60: 5000, 50: 10, 20: 700}
    shared = np.concatenate([[depth, *rng.integers(300, 400, rows - 1)] for depth, rows in tasks.items()])
    tree = largest_prefixes(PrefixPlan(np.arange(len(shared)), shared, shared + 50), 2)
    found = [(node.begin, node.end, node.depth) for node in tree.children]
    assert (tree.depth, found) == (9, [(3200, 8200, 300), (0, 3000, 300)])


@pytest.mark.parametrize("prompts", [[], [(1, 2)], [(1,), (2,)]])
def test_nothing_shared_is_a_root_alone(prompts: list[Prompt]) -> None:
    tree = largest_prefixes(plan_of(prompts)[0], 10)
    assert (tree.rows, tree.depth, tree.saved_tokens, tree.children) == (len(prompts), 0, 0, ())


def test_a_million_rows_take_little_time() -> None:
    """Twelve tasks, each row's own part random: as long as sorting would take at the very most."""
    rng = np.random.default_rng(0)
    shared = rng.integers(300, 330, 1_000_000)
    shared[rng.integers(0, len(shared), 1000)] = rng.integers(10, 300, 1000)
    shared[0] = 0
    plan = PrefixPlan(np.arange(len(shared)), shared, shared + 50)
    start = time.perf_counter()
    tree = largest_prefixes(plan, 12)
    assert time.perf_counter() - start < 5
    assert len(list(tree.walk())) == 13


@settings(REPEATABLE, max_examples=100)
@given(PROMPTS, st.data())
def test_what_a_part_of_the_rows_shares(prompts: list[Prompt], data: st.DataObject) -> None:
    plan, ordered = plan_of(prompts)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts))), bool)
    chosen = [prompt for prompt, want in zip(ordered, wanted, strict=True) if want]
    assert plan.lengths[wanted].sum() - shared_among(plan, wanted).sum() == trie_size(chosen)
