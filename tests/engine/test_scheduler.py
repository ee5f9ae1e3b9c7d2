"""Who runs when, what is shared, what is copied, who is set back."""

import itertools
from typing import Any

import numpy as np
import pytest

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.cache_tiers import HostMemory
from batchgen.engine.requests import RowWish
from batchgen.engine.scheduler import Scheduler, Sequence, StepPlan, common_prefix
from batchgen.engine.types import Request, Sample, SamplingParams
from tests.engine.mock import HashModel, Rig, requests_for

PAGE = 32


def wish(max_tokens: int = 1, n: int = 1, temperature: float = 0.7) -> RowWish:
    return RowWish(SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True), n, False)


def rig(**limits: Any) -> Rig:
    return Rig(HashModel(64), **limits)


def plans(rig: Rig) -> list[list[tuple[int, int]]]:
    """(first position, tokens) of the sequences of every step."""
    counts = [np.diff(batch.cu_seqlens_q) for batch in rig.backend.batches]
    return [
        list(zip((batch.seq_lens - count).tolist(), count.tolist(), strict=True))
        for batch, count in zip(rig.backend.batches, counts, strict=True)
    ]


# Sharing within a step


def test_rows_share_a_prefix_that_is_computed_in_the_same_step() -> None:
    r = rig()
    r.run(requests_for([[1] * 64 + [5] * 3, [1] * 64 + [6] * 4, [1] * 64 + [7]], wish()))
    assert plans(r) == [[(0, 67), (64, 4), (64, 1)]]
    assert r.copies == [[]]
    assert r.most_pages == 2 + 3


def test_divergence_inside_a_page_copies_the_slots_before_it() -> None:
    r = rig()
    r.run(requests_for([[1] * 75 + [5] * 3, [1] * 75 + [6] * 4], wish()))
    assert plans(r) == [[(0, 78), (75, 4)]]
    (copies,) = r.copies
    tables = r.backend.batches[0].block_tables
    offset = 75 % PAGE
    assert copies == [(tables[0, 2] * PAGE + i, tables[1, 2] * PAGE + i) for i in range(offset)]
    assert tables[0, :2].tolist() == tables[1, :2].tolist() and tables[0, 2] != tables[1, 2]


def test_copies_of_copies_are_taken_from_where_the_keys_are_written() -> None:
    """The third row shares 12 tokens with the second, which in this very step copies 10 of them from the first."""
    r = rig()
    r.run(requests_for([[1] * 10 + [2] * 3, [1] * 10 + [3] * 3, [1] * 5 + [4], [1] * 10 + [3, 3, 5]], wish()))
    (copies,) = r.copies
    written = set(r.backend.batches[0].slot_mapping.tolist())
    assert len(copies) == 10 + 12 + 5
    assert {source for source, _ in copies} <= written


def test_a_prompt_that_is_a_prefix_is_computed_once_and_its_last_token_for_each() -> None:
    r = rig()
    outputs = r.run(requests_for([[1] * 40, [1] * 41, [1] * 64, [1] * 65], wish()))
    assert plans(r) == [[(0, 40), (40, 1), (41, 23), (64, 1)]]
    assert [outputs[row, 0].num_cached_tokens for row in range(4)] == [0, 40, 41, 64]


def test_who_comes_later_finds_the_pages_of_who_has_finished() -> None:
    r = rig(max_num_seqs=1)
    r.run(requests_for([[1] * 64 + [i] for i in range(2, 6)], wish(max_tokens=3)))
    assert r.prefill_tokens == 64 + 4
    assert r.most_pages == 3


def test_pages_are_kept_only_as_far_as_the_next_row_shares_them() -> None:
    r = rig(max_num_seqs=1)
    r.submit(requests_for([[1] * 32 + [2] * 96, [1] * 32 + [3] * 5], wish()))
    r.step()
    assert [len(pages) for pages in r.engine.scheduler.page_holders() if pages] == [1]
    r.run()


def test_no_pages_are_kept_for_a_row_that_shares_nothing() -> None:
    r = rig(max_num_seqs=1)
    r.submit(requests_for([[1] * 64, [2] * 5], wish()))
    r.step()
    assert r.engine.blocks.num_used == 0
    r.run()


def test_requests_submitted_between_steps_find_the_prefix() -> None:
    """A caller that keeps as many requests waiting as may run at once, as a job does."""
    r, seqs = rig(max_num_seqs=2), 2
    requests = iter(requests_for([[1] * 64 + [i] for i in range(2, 8)], wish()))
    r.submit(itertools.islice(requests, seqs))
    while r.engine.has_work:
        r.step()
        r.submit(itertools.islice(requests, seqs - r.engine.scheduler.num_waiting))
    assert len(r.outputs) == 6
    assert r.prefill_tokens == 64 + 6


def test_requests_in_another_order_than_the_plan_share_what_they_can() -> None:
    """The second is a prefix of the first: all but its last token, whose logits are wanted, is there."""
    r = rig()
    outputs = r.run(reversed(requests_for([[1] * 40, [1] * 50], wish())))
    assert plans(r) == [[(0, 50), (39, 1)]]
    assert outputs[0, 0].num_cached_tokens == 39


# Chunked prefill


def test_who_shares_a_prefix_that_takes_several_steps_waits_for_it() -> None:
    r = rig(max_batch_tokens=40)
    r.run(requests_for([[1] * 100 + [5] * 2, [1] * 100 + [6] * 2, [1] * 100 + [7] * 30], wish()))
    assert plans(r) == [[(0, 40)], [(40, 40)], [(80, 22), (100, 2), (100, 16)], [(116, 14)]]


def test_who_shares_only_what_is_already_computed_does_not_wait() -> None:
    """The second row shares 64 tokens, of which all are computed when the first stops for the step's limit."""
    r = rig(max_batch_tokens=100)
    r.submit(requests_for([[1] * 64 + [5] * 50, [1] * 64 + [6] * 50], wish()))
    r.step()
    r.step()
    assert plans(r) == [[(0, 100)], [(100, 14), (64, 50)]]
    r.run()


def test_decoding_comes_before_new_prompts() -> None:
    r = rig(max_batch_tokens=20)
    r.run(requests_for([[1] * 10, [2] * 30], wish(max_tokens=3)))
    assert plans(r) == [[(0, 10), (0, 10)], [(10, 1), (10, 19)], [(11, 1), (29, 1)], [(30, 1)], [(31, 1)]]


def test_no_more_sequences_run_than_allowed() -> None:
    r = rig(max_num_seqs=3)
    r.run(requests_for([[i] for i in range(1, 8)], wish(max_tokens=2)))
    assert [record.num_seqs for record in r.records] == [3, 3, 3, 3, 1, 1]


# Samples of one prompt


def test_samples_share_the_prompt_and_draw_in_the_step_that_computes_it() -> None:
    r = rig()
    r.run(requests_for([[1] * 70], wish(max_tokens=3, n=4)))
    assert plans(r) == [[(0, 70)], [(70, 1)] * 4, [(71, 1)] * 4]
    assert len(r.backend.batches[0].samples) == 4
    tables = r.backend.batches[1].block_tables
    assert len(set(tables[:, 0])) == len(set(tables[:, 1])) == 1 and len(set(tables[:, 2])) == 4


def test_samples_of_a_prompt_that_fills_its_pages_copy_nothing() -> None:
    r = rig()
    r.run(requests_for([[1] * 64], wish(max_tokens=3, n=4)))
    assert r.copies == [[], [], []]


def test_samples_copy_the_page_that_they_continue() -> None:
    r = rig()
    r.run(requests_for([[1] * 70], wish(max_tokens=3, n=4)))
    assert [len(copies) for copies in r.copies] == [0, 3 * 6, 0]  # the last to write keeps the page
    assert r.most_pages == 2 + 4


def test_more_samples_than_sequences_take_turns() -> None:
    r = rig(max_num_seqs=2)
    outputs = r.run(requests_for([[1] * 5], wish(max_tokens=3, n=5)))
    assert len(outputs) == 5
    assert [record.num_seqs for record in r.records] == [1, 2, 2, 2, 2, 1, 1]


# Memory that does not suffice


def test_a_row_is_admitted_only_when_its_longest_answer_fits() -> None:
    r = rig(num_pages=6)
    r.run(requests_for([[1] * 60, [2] * 60, [3] * 60], wish(max_tokens=6)))
    assert [record.num_seqs for record in r.records] == [2] * 6 + [1] * 6
    assert r.engine.scheduler.preemptions == 0


def test_the_youngest_is_set_back_and_answers_the_same() -> None:
    requests = lambda: requests_for([[i] * 20 for i in range(1, 5)], wish(max_tokens=70))  # noqa: E731
    r = rig(num_pages=7, rash=True)
    outputs = r.run(requests())
    assert r.engine.scheduler.preemptions > 0
    finished = sorted(outputs, key=lambda key: outputs[key].finished_ns)
    assert finished == [(0, 0), (1, 0), (2, 0), (3, 0)]
    plenty = rig().run(requests())
    for key, output in outputs.items():
        assert output.token_ids.tolist() == plenty[key].token_ids.tolist()
        assert output.logprobs.tolist() == plenty[key].logprobs.tolist()


def test_who_is_set_back_does_not_return_in_the_same_step() -> None:
    r = rig(num_pages=4, rash=True)
    r.submit(requests_for([[1] * 30, [2] * 30], wish(max_tokens=64)))
    before = 0
    while r.engine.has_work:
        r.step()
        if r.engine.scheduler.preemptions > before:
            before = r.engine.scheduler.preemptions
            assert (r.records[-1].num_seqs, r.engine.scheduler.num_waiting) == (1, 1)
    assert before == 1


def test_who_is_set_back_comes_before_those_that_wait() -> None:
    """Row 1 is set back when it outgrows its page; when row 0 has finished, it starts again ahead of row 2."""
    r = rig(num_pages=4, max_num_seqs=2, rash=True)
    r.run(requests_for([[1] * 30, [2] * 30, [3]], [wish(64), wish(64), wish(1)]))
    assert r.engine.scheduler.preemptions == 1
    starts = [count for step in plans(r)[1:] for start, count in step if start == 0]
    assert starts == [30 + 3, 1]


def test_cached_tokens_are_those_that_another_row_computed() -> None:
    """Nobody shares a token with anybody here but the second row's own second try."""
    r = rig(num_pages=4, rash=True)
    r.submit(requests_for([[1] * 30, [2] * 30], wish(max_tokens=64)))
    outputs = r.run()
    assert r.engine.scheduler.preemptions == 1
    assert [outputs[row, 0].num_cached_tokens for row in range(2)] == [0, 0]


# Tiers below the device


def with_tiers(**limits: Any) -> Rig:
    return rig(store=HostMemory(1 << 20), **limits)


def test_what_was_let_go_is_restored_when_it_is_wanted_again() -> None:
    """Sequences set back find the pages that they had in common, though nobody has kept them on the device."""
    r = with_tiers()
    r.submit(requests_for([[1] * 64 + [5] * 3, [1] * 64 + [6] * 4], wish(4)))
    r.step()
    for running in list(r.engine.scheduler._running)[::-1]:
        r.engine.scheduler._preempt(running)
    r.engine.scheduler.drop_frontiers()
    assert r.engine.blocks.num_used == 0
    outputs = r.run()
    assert plans(r)[:2] == [[(0, 67), (64, 4)], [(64, 4), (64, 5)]]
    assert r.tiers is not None and r.tiers.counts["restored_pages"] == 2
    assert [outputs[row, 0].num_restored_tokens for row in range(2)] == [0, 0]  # it was computed before


def test_a_page_that_is_shared_in_part_is_restored_as_a_whole() -> None:
    """The first job keeps [1] * 64 and [1] * 40 + [2] * 24; then a row shares 40 tokens with the one before."""
    first = with_tiers()
    first.run(
        requests_for([[1] * 64 + [5], [1] * 64 + [6], [1] * 40 + [2] * 24 + [7], [1] * 40 + [2] * 24 + [8]], wish())
    )
    assert first.tiers is not None
    first.tiers.close()
    second = rig(store=first.store)
    outputs = second.run(requests_for([[1] * 64 + [7], [1] * 40 + [2] * 30], wish()))
    assert plans(second) == [[(64, 1), (64, 6)]]
    assert second.copies == [[]]
    assert [outputs[row, 0].num_restored_tokens for row in range(2)] == [64, 24]
    assert [outputs[row, 0].num_cached_tokens for row in range(2)] == [64, 64]


def test_the_last_prompt_token_is_always_computed() -> None:
    """Its logits are wanted: of a prompt of whole pages the last one is not restored."""
    first = with_tiers()
    first.run(requests_for([[1] * 96 + [5], [1] * 96 + [6]], wish()))
    second = rig(store=first.store)
    second.run(requests_for([[1] * 96], wish()))
    assert plans(second) == [[(64, 32)]]


def test_only_what_several_rows_share_is_saved() -> None:
    """Whether they share it on the device or not."""
    for sharing in (True, False):
        r = with_tiers(prefix_sharing=sharing)
        r.run(requests_for([[1] * 90 + [2] * 9, [1] * 90 + [3] * 9, [4] * 99], wish(), sharing=sharing))
        assert r.tiers is not None
        r.tiers.close()
        assert r.tiers.counts["saved_pages"] == 2


def test_answers_of_a_restored_prompt_share_it() -> None:
    first = with_tiers()
    first.run(requests_for([[1] * 64 + [5], [1] * 64 + [6]], wish()))
    second = rig(store=first.store)
    outputs = second.run(requests_for([[1] * 70], wish(3, n=3)))
    assert plans(second)[0] == [(64, 6)]
    assert [outputs[0, k].num_restored_tokens for k in range(3)] == [64, 0, 0]
    assert [outputs[0, k].num_cached_tokens for k in range(3)] == [64, 70, 70]


# The scheduler alone


def scheduler(num_pages: int = 16, sharing: bool = True) -> Scheduler:
    return Scheduler(
        BlockManager(num_pages), page_size=PAGE, max_batch_tokens=64, max_num_seqs=8, prefix_sharing=sharing
    )


def sequence(prompt: list[int], room: int = 50, samples: int = 1) -> Sequence:
    tokens = np.array(prompt + [0] * room, np.int32)
    wanted = tuple(Sample(SamplingParams(max_tokens=room), ((0, k),), k) for k in range(samples))
    return Sequence(Request(tokens[: len(prompt)], wanted), tokens, len(prompt), arrived_ns=1)


def finish_step(s: Scheduler, plan: StepPlan) -> None:
    """Append a token to everyone who has reached the last one."""
    for scheduled in plan.scheduled:
        if scheduled.num_logits:
            s.append_token(scheduled.sequence, 9, -0.5, step=0, now_ns=5)
    s.end_step()


def test_schedule_reserves_pages_and_says_who_wants_logits() -> None:
    s = scheduler()
    a, b = sequence([1] * 40), sequence([2] * 40)
    s.add(a)
    s.add(b)
    plan = s.schedule(now_ns=3)
    assert [(x.sequence, x.start, x.count, x.num_logits) for x in plan.scheduled] == [
        (a, 0, 40, True),
        (b, 0, 24, False),
    ]
    assert plan.num_tokens == 64
    assert plan.new_pages == [*a.block_table, *b.block_table] and len(plan.new_pages) == 3
    assert (s.num_waiting, a.scheduled_ns) == (0, 3)


def test_a_token_is_appended_and_computed_next() -> None:
    s, a = scheduler(), sequence([1] * 3)
    s.add(a)
    finish_step(s, s.schedule(1))
    assert (a.num_tokens, a.num_generated, a.generated.tolist(), a.logprobs) == (4, 1, [9], [-0.5])
    plan = s.schedule(2)
    assert [(x.start, x.count, x.num_prompt_tokens, x.num_logits) for x in plan.scheduled] == [(3, 1, 0, True)]


def test_a_recomputed_sequence_counts_prompt_and_generated_tokens_apart() -> None:
    s, a = scheduler(), sequence([1] * 3)
    s.add(a)
    finish_step(s, s.schedule(1))
    s._preempt(a)
    s.drop_frontiers()
    plan = s.schedule(2)
    assert [(x.start, x.count, x.num_prompt_tokens) for x in plan.scheduled] == [(0, 4, 3)]


def test_fork_shares_the_pages_and_keeps_the_children_behind_their_parent() -> None:
    s, a, b = scheduler(), sequence([1] * 3, samples=3), sequence([2] * 3)
    s.add(a)
    s.add(b)
    s.schedule(1)
    family = s.fork(a, a.request.samples)
    assert [x.sample.sample_number for x in family if x.sample] == [0, 1, 2]
    assert [x.block_table for x in family] == [a.block_table] * 3
    assert len(s._running) == 4
    for child in family:
        s.append_token(child, child.sample.sample_number if child.sample else -1, 0.0, 0, 0)
    assert [x.generated.tolist() for x in family] == [[0], [1], [2]]
    s.append_token(b, 9, 0.0, 0, 0)
    s.end_step()
    assert [x.sequence for x in s.schedule(2).scheduled] == [*family, b]


@pytest.mark.parametrize(
    ("a", "b", "common"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1], [2], 0)]
)
def test_common_prefix(a: list[int], b: list[int], common: int) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == common
