"""The whole-table plan against sorted Python lists, and requests against what each row asked for."""

from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchgen.engine import planner, requests
from batchgen.engine.planner import (
    Admission,
    own_pages,
    plan_prefixes,
)
from batchgen.engine.prompt_table import PromptTable
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import pages_at_once, plan_order
from batchgen.engine.types import Request, RowFailure, SamplingParams
from tests.engine.mock import HashModel, Rig, letters, prompt_table, requests_for, trie_size

REPEATABLE = settings(derandomize=True, deadline=None)
# Long runs of equal tokens make common prefixes longer than what is compared at a time.
RUN = st.tuples(st.sampled_from([0, 1, 2, 255, 256, 70_000]), st.sampled_from([1, 1, 2, 63, 64, 65, 130]))
PROMPT = st.lists(RUN, max_size=3).map(lambda runs: [t for t, count in runs for _ in range(count)])
SAMPLED = SamplingParams(max_tokens=4, temperature=0.8)
GREEDY = SamplingParams(max_tokens=4)


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def targets(request: Request) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    return [(sample.targets, sample.sample_number) for sample in request.samples]


@settings(REPEATABLE, max_examples=150)
@given(st.lists(PROMPT, max_size=12).filter(lambda prompts: any(prompts) or len(prompts) < 2))
def test_plan_equals_sorted_lists(prompts: list[list[int]]) -> None:
    plan = plan_prefixes(prompt_table(prompts))
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i], i))
    ordered = [prompts[i] for i in order]
    common = [sum(1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(*ab, strict=False))) for ab in pairwise(ordered)]
    assert plan.order.tolist() == order
    assert plan.shared.tolist() == [0, *common][: len(prompts)]
    assert plan.lengths.tolist() == [len(p) for p in ordered]
    assert plan.repeats.tolist() == [i > 0 and ordered[i] == ordered[i - 1] for i in range(len(ordered))]
    assert plan.prompt_tokens == sum(map(len, prompts))
    assert plan.trie_tokens == trie_size(prompts)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("at_a_time", [1, 8, 16, 1000])
def test_common_prefixes_however_many_tokens_are_compared_at_a_time(
    monkeypatch: pytest.MonkeyPatch, length: int, at_a_time: int
) -> None:
    monkeypatch.setattr(planner, "COMPARE_TOKENS", at_a_time)
    common = [7] * length
    plan = plan_prefixes(prompt_table([[*common, 9], common, [6], [*common, 8, 8], common, [6]]))
    assert plan.order.tolist() == [2, 5, 1, 4, 3, 0]
    assert plan.shared.tolist() == [0, 1, 0, length, length, length]
    assert plan.trie_tokens == length + 4


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_groups_of_equal_prompts_however_many_rows_are_looked_at_at_a_time(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(requests, "CHUNK_REQUESTS", chunk)
    made = requests_for([[2], [1], [2], [2], [3], [1]], RowWish(GREEDY, 1, False))
    assert [[target for target, _ in sample.targets] for r in made for sample in r.samples] == [
        [1, 5],
        [0, 2, 3],
        [4],
    ]


def test_empty_table() -> None:
    plan = plan_prefixes(prompt_table([]))
    assert (plan.prompt_tokens, plan.trie_tokens, len(plan.order)) == (0, 0, 0)
    assert pages_at_once(plan, plan_order(plan), np.zeros(0, np.int64), 32, 4) == 0
    assert requests_for([], []) == []


def test_only_empty_prompts() -> None:
    plan = plan_prefixes(prompt_table([[], []]))
    assert (plan.shared.tolist(), plan.trie_tokens, plan.repeats.tolist()) == ([0, 0], 0, [False, True])


def test_repeated_empty_prompts_are_repeats() -> None:
    plan = plan_prefixes(prompt_table([[], [1], []]))
    assert plan.order.tolist() == [0, 2, 1]
    assert plan.repeats.tolist() == [False, True, False]


def test_table_keeps_prompts_and_row_numbers() -> None:
    table = PromptTable.from_prompts([ids(1, 2), ids(), ids(3)], np.array([10, 20, 30]))
    assert [table.prompt(i).tolist() for i in range(3)] == [[1, 2], [], [3]]
    assert table.lengths.tolist() == [2, 0, 1]
    plan = plan_prefixes(table)
    assert [targets(r) for r in make_requests(table, plan, plan_order(plan), lambda i: RowWish(GREEDY, 1, False))] == [
        [(((20, 0),), 0)],
        [(((10, 0),), 0)],
        [(((30, 0),), 0)],
    ]


def test_equal_greedy_rows_run_once_and_fan_out() -> None:
    requests = requests_for([[1, 2], [1], [1, 2]], RowWish(GREEDY, 2, False))
    assert [r.prompt_token_ids.tolist() for r in requests] == [[1], [1, 2]]
    assert [targets(r) for r in requests] == [
        [(((1, 0), (1, 1)), 0)],
        [(((0, 0), (0, 1), (2, 0), (2, 1)), 0)],
    ]


def test_top_k_of_one_is_greedy_too() -> None:
    (request,) = requests_for([[1], [1]], RowWish(SamplingParams(temperature=0.8, top_k=1), 1, False))
    assert targets(request) == [(((0, 0), (1, 0)), 0)]


def test_kth_of_equal_rows_takes_kth_sample_numbers() -> None:
    wishes = [RowWish(SAMPLED, n, False) for n in (2, 1, 1, 3)]
    other, request = requests_for([[5], [5], [1], [5]], wishes)
    assert targets(other) == [(((2, 0),), 0)]
    assert targets(request) == [
        (((0, 0),), 0),
        (((0, 1),), 1),
        (((1, 0),), 2),
        (((3, 0),), 3),
        (((3, 1),), 4),
        (((3, 2),), 5),
    ]


def test_sample_numbers_count_per_parameters() -> None:
    hot = SamplingParams(max_tokens=4, temperature=1.5)
    (request,) = requests_for([[5]] * 4, [RowWish(p, 1, False) for p in (SAMPLED, hot, SAMPLED, hot)])
    assert {(s.params, s.sample_number): s.targets for s in request.samples} == {
        (SAMPLED, 0): ((0, 0),),
        (hot, 0): ((1, 0),),
        (SAMPLED, 1): ((2, 0),),
        (hot, 1): ((3, 0),),
    }


def test_rows_with_equal_seeds_of_their_own_agree() -> None:
    seven, eight = (SamplingParams(temperature=0.8, seed=seed) for seed in (7, 8))
    (request,) = requests_for([[5]] * 3, [RowWish(p, n, True) for p, n in ((seven, 1), (eight, 1), (seven, 2))])
    assert {(s.params, s.sample_number): s.targets for s in request.samples} == {
        (seven, 0): ((0, 0), (2, 0)),
        (seven, 1): ((2, 1),),
        (eight, 0): ((1, 0),),
    }


@pytest.mark.parametrize("own_seed", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_without_sharing_each_answer_is_a_request_with_the_same_sample_number(
    params: SamplingParams, own_seed: bool
) -> None:
    prompts, wish = [[5], [1], [5], [5]], RowWish(params, 2, own_seed)
    shared, split = (requests_for(prompts, wish, sharing=sharing) for sharing in (True, False))
    assert all(len(r.samples) == len(r.samples[0].targets) == 1 for r in split)
    assert len(split) == 8
    by_target = [
        {(r.prompt_token_ids.tolist()[0], t): s.sample_number for r in requests for s in r.samples for t in s.targets}
        for requests in (shared, split)
    ]
    assert by_target[0] == by_target[1]


def test_a_wish_is_asked_once_per_row() -> None:
    asked: list[int] = []
    table = prompt_table([[1], [2], [1]])
    plan = plan_prefixes(table)
    list(make_requests(table, plan, plan_order(plan), lambda i: asked.append(i) or RowWish(SAMPLED, 2, False)))  # type: ignore[func-returns-value]
    assert sorted(asked) == [0, 1, 2]


# Admission

ADMISSION = Admission(context_length=100, vocab_size=50, kv_tokens=64)


def refusal(length: int, max_tokens: int, admission: Admission = ADMISSION) -> tuple[str, str] | None:
    failure = admission.refusal(np.ones(length, np.int32), SamplingParams(max_tokens=max_tokens))
    return None if failure is None else (failure.code, failure.message)


def test_empty_prompt_is_missing() -> None:
    assert refusal(0, 1) == ("prompt_missing", "the prompt has no tokens")


@pytest.mark.parametrize("token", [-1, 50, 2**31 - 1])
def test_token_outside_the_vocabulary(token: int) -> None:
    expected = RowFailure("encode_error", "the prompt has a token id outside 0..49")
    assert ADMISSION.refusal(ids(1, token), GREEDY) == expected
    assert ADMISSION.refusal(ids(0, 49), GREEDY) is None


def test_prompt_as_long_as_the_context_may_generate_one_token() -> None:
    roomy = Admission(context_length=100, vocab_size=50, kv_tokens=1000)
    assert refusal(100, 5, roomy) is None
    assert roomy.room(100, SamplingParams(max_tokens=5)) == 1
    assert roomy.room(99, SamplingParams(max_tokens=5)) == 2
    assert roomy.room(50, SamplingParams(max_tokens=5)) == 5
    assert refusal(101, 0, roomy) == ("prompt_too_long", "the prompt has 101 tokens; the model's context holds 100")


@pytest.mark.parametrize(("length", "max_tokens"), [(64, 1), (64, 0), (60, 5), (1, 64)])
def test_kv_memory_that_just_suffices(length: int, max_tokens: int) -> None:
    """The last token that is generated needs no place."""
    assert refusal(length, max_tokens) is None


@pytest.mark.parametrize(("length", "max_tokens", "needed"), [(65, 1, 65), (64, 2, 65), (60, 6, 65), (90, 500, 100)])
def test_kv_memory_that_does_not_suffice(length: int, max_tokens: int, needed: int) -> None:
    text = f"the prompt's {length} tokens and its answer need {needed} tokens of KV memory"
    assert refusal(length, max_tokens) == ("resource_error", f"{text}; engine.kv_memory holds 64")


@settings(REPEATABLE, max_examples=300)
@given(st.lists(st.tuples(st.lists(st.sampled_from([-1, 0, 7, 49, 50]), max_size=12), st.integers(0, 12)), max_size=8))
def test_many_prompts_are_accepted_as_each_is(rows: list[tuple[list[int], int]]) -> None:
    admission = Admission(context_length=10, vocab_size=50, kv_tokens=9)
    tokens = np.array([token for prompt, _ in rows for token in prompt], np.int32)
    lengths, most = np.array([len(p) for p, _ in rows], np.int32), np.array([count for _, count in rows], np.int64)
    each = [admission.refusal(ids(*p), SamplingParams(max_tokens=count)) is None for p, count in rows]
    assert admission.accepts(tokens, lengths, most).tolist() == each
    rooms = [admission.room(len(p), SamplingParams(max_tokens=count)) for p, count in rows]
    assert admission.rooms(lengths, most).tolist() == rooms


# How much memory a plan wants

SEGMENT = st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 8, 9, 31, 33, 64]))
DISTINCT = st.lists(
    st.lists(SEGMENT, min_size=1, max_size=3).map(lambda runs: tuple(t for t, count in runs for _ in range(count))),
    min_size=1,
    max_size=16,
    unique=True,
)


Row = tuple[tuple[int, ...], int]
"""A prompt and its max_tokens."""


def most_pages(
    rows: list[tuple[tuple[int, ...], int]], page_size: int, seqs: int, batch_tokens: int
) -> tuple[int, int]:
    """(pages that a run with plenty used at most, what the plan said) for these rows."""
    wishes = [
        RowWish(SamplingParams(max_tokens=count, temperature=0.5, ignore_eos=True), 1, False) for _, count in rows
    ]
    table = prompt_table([prompt for prompt, _ in rows])
    plan = plan_prefixes(table)
    rig = Rig(
        HashModel(30),
        letters(30),
        batch_tokens,
        seqs,
        num_pages=600,
        page_size=page_size,
        context_length=400,
        vocab_size=30,
    )
    rig.run(make_requests(table, plan, plan_order(plan), wishes.__getitem__))
    answer_pages = np.array([-(-count // page_size) + 1 for _, count in rows])[plan.order]
    own = own_pages(plan.lengths, plan.shared, answer_pages, page_size)
    return rig.most_pages, pages_at_once(plan, plan_order(plan), own, page_size, seqs)


@settings(REPEATABLE, max_examples=60)
@given(
    DISTINCT,
    st.sampled_from([1, 2, 9, 40]),
    st.sampled_from([8, 32]),
    st.integers(1, 8),
    st.sampled_from([20, 64, 500]),
)
def test_rows_of_equal_answers_use_no_more_pages_than_planned(
    prompts: list[tuple[int, ...]], max_tokens: int, page_size: int, seqs: int, batch_tokens: int
) -> None:
    used, planned = most_pages([(prompt, max_tokens) for prompt in prompts], page_size, seqs, batch_tokens)
    assert 0 < used <= planned


def test_repeated_rows_use_no_more_pages_than_planned() -> None:
    rows: list[Row] = [((i,) * 64, 2) for i in range(1, 5) for _ in range(6)]
    used, planned = most_pages(rows, page_size=8, seqs=4, batch_tokens=500)
    assert used <= planned
