"""Any table, any limits: every row is answered once, and as if it were alone."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.engine.cache_tiers import HostMemory, TierPolicy
from batchgen.engine.planner import plan_prefixes
from batchgen.engine.prompt_table import PromptTable
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import Policy, run_order
from batchgen.engine.sampler import random_key
from batchgen.engine.scheduler import RISK
from batchgen.engine.types import Request, RequestOutput, SamplingParams
from tests.engine.mock import ByteDetokenizer, Draw, HashModel, Rig, letters, prompt_table, trie_size

POLICIES: list[Policy] = ["planned", "planned", "fifo", "prefill_first"]
VOCAB = 30
CONTEXT = 300
AMPLE = 1_000_000
MOST_STEPS = 150
MODEL, DETOKENIZER = HashModel(VOCAB), letters(VOCAB)
REPEATABLE = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Job:
    """A table, what its rows want, and the limits to run it under."""

    prompts: list[tuple[int, ...]]
    wishes: list[RowWish]
    page_size: int
    spare_pages: int
    max_batch_tokens: int
    max_num_seqs: int
    sharing: bool
    policy: Policy = "planned"
    rash: bool = False

    @property
    def num_pages(self) -> int:
        """What the longest row needs alone, and the spare ones, up to what all answers need at once."""
        room = [len(p) + max(w.params.max_tokens - 1, 0) for p, w in zip(self.prompts, self.wishes, strict=True)]
        pages = [-(-tokens // self.page_size) for tokens in room]
        copies = 2  # a page in place of one shared inside it, which is kept until the step's end
        all_at_once = sum(w.n * (count + copies) for w, count in zip(self.wishes, pages, strict=True))
        return min(max(pages) + self.spare_pages, max(pages) + all_at_once)

    @property
    def runs(self) -> list[tuple[int, ...]]:
        """Prompts of the rows for which anything has to be computed."""
        return [p for p, w in zip(self.prompts, self.wishes, strict=True) if w.params.max_tokens]

    @property
    def most_steps(self) -> int:
        """In every step at least the oldest sequence advances."""
        return sum(w.n * (len(p) + w.params.max_tokens) for p, w in zip(self.prompts, self.wishes, strict=True)) + 1


# Runs of equal tokens with lengths around the page sizes: prefixes of prefixes, many of them equal.
SEGMENT = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 7, 31, 32, 33, 64]))
PROMPT = st.lists(SEGMENT, min_size=1, max_size=3).map(lambda runs: tuple(t for t, count in runs for _ in range(count)))
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([0, 1, 1, 2, 3, 8, 40]),
    temperature=st.sampled_from([0.0, 0.0, 0.7]),
    seed=st.integers(0, 1),
    stop=st.sampled_from([(), (), ("q",), ("ab", "b", "z")]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25]),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    pool = draw(st.lists(PROMPT, min_size=1, max_size=8, unique=True))
    prompts = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=14))
    params = draw(st.lists(PARAMS, min_size=1, max_size=3))
    own_seed = draw(st.booleans())
    wish = st.builds(RowWish, st.sampled_from(params), st.sampled_from([1, 1, 1, 2, 5]), st.just(own_seed))
    wishes = draw(st.lists(wish, min_size=len(prompts), max_size=len(prompts)))
    tokens = sum(w.n * (len(p) + w.params.max_tokens) for p, w in zip(prompts, wishes, strict=True))
    batch_tokens = draw(st.sampled_from([1, 2, 7, 31, 32, 33, 64, 100, 500]))
    return Job(
        prompts,
        wishes,
        page_size=draw(st.sampled_from([4, 32, 32, 64])),
        spare_pages=draw(st.sampled_from([0, 1, 2, 3, 5, 9, 20, AMPLE])),
        max_batch_tokens=max(batch_tokens, tokens // MOST_STEPS),  # one token a step takes a small table
        max_num_seqs=draw(st.integers(1, 20)),
        sharing=draw(st.booleans()),
        policy=draw(st.sampled_from(POLICIES)),
    )


@st.composite
def tight_jobs(draw: st.DrawFn) -> Job:
    """Long answers, small pages, and few more of them than the longest row needs."""
    pool = draw(st.lists(PROMPT, min_size=3, max_size=8, unique=True))
    prompts = draw(st.lists(st.sampled_from(pool), min_size=3, max_size=10))
    stops, lengths = st.sampled_from([(), (), ("ab", "b", "z")]), st.sampled_from([5, 40, 60])
    params = st.builds(
        SamplingParams, max_tokens=lengths, temperature=st.just(0.5), stop=stops, ignore_eos=st.just(True)
    )
    wish = st.builds(RowWish, params, st.sampled_from([1, 1, 4]), st.just(False))
    wishes = draw(st.lists(wish, min_size=len(prompts), max_size=len(prompts)))
    return Job(
        prompts,
        wishes,
        page_size=draw(st.sampled_from([4, 4, 32])),
        spare_pages=draw(st.integers(0, 12)),
        max_batch_tokens=draw(st.sampled_from([20, 33, 100, 500])),
        max_num_seqs=draw(st.integers(2, 20)),
        sharing=draw(st.sampled_from([True, True, False])),
        policy=draw(st.sampled_from(POLICIES)),
        rash=draw(st.booleans()),
    )


def sample_numbers(job: Job) -> dict[tuple[int, int], int]:
    """The k-th of several equal rows draws from the k-th streams; a row with a seed of its own from the first."""
    return {
        (row, k): k + sum(
            earlier.n
            for other, earlier in zip(job.prompts[:row], job.wishes[:row], strict=True)
            if not wish.own_seed and other == job.prompts[row] and earlier.params == wish.params
        )
        for row, wish in enumerate(job.wishes)
        for k in range(wish.n)
    }  # fmt: skip


def draw_alone(context: tuple[int, ...], prompt: tuple[int, ...], params: SamplingParams, number: int) -> Draw:
    """What a draw must look like, by the parameters."""
    p, index = params, len(context) - len(prompt)
    key = random_key(np.array(prompt, np.int32), p)
    random = None if p.greedy else (key, number, index, p.temperature, p.top_k, p.top_p, p.min_p)
    penalties = (len(prompt), p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    return Draw(context, random, penalties if p.has_penalties else None, (0,) if index < p.min_tokens else ())


def new_stop(before: str, text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The first stop string, the longest one there, that ends after `before`; with its place."""
    found = [(at, s) for s in stops for at in range(len(text)) if text.startswith(s, at) and at + len(s) > len(before)]
    return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)


def answer_alone(prompt: tuple[int, ...], params: SamplingParams, number: int) -> RequestOutput:
    """The answer to a row by the definition, without an engine."""
    ids: list[int] = []
    logprobs: list[float] = []
    text, reason, stop = "", "length", None
    while len(ids) < params.max_tokens and reason == "length":
        token, logprob = MODEL(draw_alone(prompt + tuple(ids), prompt, params, number))
        ids.append(token)
        logprobs.append(logprob)
        before, text = text, DETOKENIZER.decode(np.array(ids, np.int32))
        hit = new_stop(before, text, params.stop) if len(ids) >= params.min_tokens else None
        if token == 0 and not params.ignore_eos:
            reason = "stop"
        elif hit is not None:
            reason, text, stop = "stop", text[: hit[0]], hit[1]
    tokens, logs = np.array(ids, np.int32), np.array(logprobs, np.float32)
    return RequestOutput(0, 0, reason, text, stop, len(prompt), token_ids=tokens, logprobs=logs)  # type: ignore[arg-type]


def content(output: RequestOutput) -> tuple[object, ...]:
    """What must not depend on anything but the row."""
    bits = output.logprobs.view(np.uint32).tolist()
    return (
        output.finish_reason,
        output.text,
        output.stop_reason,
        output.num_prompt_tokens,
        output.token_ids.tolist(),
        bits,
    )


def rig_for(job: Job, detokenizer: ByteDetokenizer = DETOKENIZER, **tiers: Any) -> Rig:
    return Rig(
        MODEL,
        detokenizer,
        job.max_batch_tokens,
        job.max_num_seqs,
        job.num_pages,
        job.page_size,
        CONTEXT,
        VOCAB,
        job.sharing,
        job.policy == "prefill_first",
        job.rash,
        **tiers,
    )


def job_requests(job: Job, table: PromptTable | None = None) -> Iterator[Request]:
    table = table or prompt_table(job.prompts)
    plan = plan_prefixes(table)
    wishes = [job.wishes[row] for row in table.row_index]
    new_tokens = np.array([wishes[i].n * wishes[i].params.max_tokens for i in plan.order], np.int64)
    longest = max(len(p) + w.params.max_tokens for p, w in zip(job.prompts, job.wishes, strict=True))
    order = run_order(plan, new_tokens, job.policy, num_pages=job.num_pages, longest_pages=-(-longest // job.page_size))
    return make_requests(table, plan, order, wishes.__getitem__, sharing=job.sharing)


def run_job(job: Job, **tiers: Any) -> Rig:
    rig = rig_for(job, **tiers)
    rig.run(job_requests(job), job.most_steps)
    if rig.tiers is not None:
        rig.tiers.close()
    return rig


def check_times(output: RequestOutput) -> None:
    stamps = [output.arrived_ns, output.scheduled_ns, output.first_token_ns, output.finished_ns]
    assert stamps == sorted(stamps)
    assert len(output.token_ids) == len(output.logprobs) == len(output.token_steps) == len(output.token_times)
    assert (np.diff(output.token_steps) > 0).all() and (np.diff(output.token_times) > 0).all()
    if len(output.token_ids):
        assert (output.first_token_ns, output.finished_ns) == (output.token_times[0], output.token_times[-1])


def check_answers(job: Job, rig: Rig) -> None:
    numbers = sample_numbers(job)
    assert rig.outputs.keys() == numbers.keys()
    for (row, k), output in rig.outputs.items():
        wish = job.wishes[row]
        assert content(output) == content(answer_alone(job.prompts[row], wish.params, numbers[row, k]))
        assert not len(output.token_ids) or output.num_cached_tokens <= output.num_prompt_tokens
        check_times(output)


@settings(REPEATABLE, max_examples=150)
@given(jobs())
def test_every_row_is_answered_once_as_if_it_were_alone(job: Job) -> None:
    check_answers(job, run_job(job))


@settings(REPEATABLE, max_examples=80)
@given(tight_jobs(), st.integers(1, 6), st.sampled_from([1, 1, -1]))
def test_answers_are_the_same_when_memory_is_tight_and_requests_come_late(job: Job, waiting: int, order: int) -> None:
    """Requests in the order of their plan, or from its end: the order decides only how much is shared."""
    rig, requests = rig_for(job), iter(list(job_requests(job))[::order])
    rig.submit(itertools.islice(requests, waiting))
    while rig.engine.has_work:
        assert len(rig.records) <= job.most_steps
        rig.step()
        rig.submit(itertools.islice(requests, max(waiting - rig.engine.scheduler.num_waiting, 0)))
    check_answers(job, rig)


@settings(REPEATABLE, max_examples=80)
@given(jobs(), st.sampled_from(["planned", "prefill_first"]))
def test_nothing_is_computed_twice(job: Job, policy: Policy) -> None:
    """With memory enough, as many prompt tokens are computed as the trie of prompts has nodes."""
    job = replace(job, spare_pages=AMPLE, sharing=True, policy=policy)
    rig = run_job(job)
    assert rig.engine.scheduler.preemptions == 0
    assert rig.prefill_tokens == trie_size(job.runs)
    answered = [output for output in rig.outputs.values() if len(output.token_ids)]
    assert rig.prefill_tokens == sum(output.num_prompt_tokens - output.num_cached_tokens for output in answered)


@settings(REPEATABLE, max_examples=40)
@given(jobs())
def test_without_sharing_every_answer_computes_its_prompt(job: Job) -> None:
    job = replace(job, spare_pages=AMPLE, sharing=False)
    rig = run_job(job)
    computed = [w.n * len(p) for p, w in zip(job.prompts, job.wishes, strict=True) if w.params.max_tokens]
    assert rig.prefill_tokens == sum(computed)
    assert all(output.num_cached_tokens == 0 for output in rig.outputs.values())
    assert all(len(batch.shared_runs) == 0 for batch in rig.backend.batches)


def shuffled_but_for_equal_rows(job: Job, order: list[int]) -> list[int]:
    """Rows in another order; equal ones keep theirs, since the k-th of them is to be the k-th."""
    kind = [(prompt, wish.params) for prompt, wish in zip(job.prompts, job.wishes, strict=True)]
    places = [[place for place in order if kind[place] == k] for k in kind]
    turn = {place: sorted(mine)[mine.index(place)] for mine in places for place in mine}
    return [turn[place] for place in order]


@settings(REPEATABLE, max_examples=40)
@given(jobs(), st.data())
def test_row_order_changes_nothing(job: Job, data: st.DataObject) -> None:
    order = shuffled_but_for_equal_rows(job, data.draw(st.permutations(range(len(job.prompts)))))
    table = PromptTable.from_prompts([np.array(job.prompts[row], np.int32) for row in order], np.array(order))
    rig = rig_for(job)
    rig.run(job_requests(job, table))
    check_answers(job, rig)


@settings(REPEATABLE, max_examples=150)
@given(jobs())
def test_tight_memory_costs_no_token(job: Job) -> None:
    """Who does not fit beside the kept pages takes them over: any memory that holds the longest row is enough."""
    policy: Policy = "prefill_first" if job.policy == "prefill_first" else "planned"
    rig = run_job(replace(job, spare_pages=min(job.spare_pages, 3), sharing=True, policy=policy))
    answered = [output for output in rig.outputs.values() if len(output.token_ids)]
    assert rig.engine.scheduler.preemptions == 0
    assert rig.prefill_tokens == trie_size(job.runs)
    assert rig.prefill_tokens == sum(output.num_prompt_tokens - output.num_cached_tokens for output in answered)


def test_hope_for_short_answers_costs_little_and_saves_time() -> None:
    """Answers may have 200 tokens and end after some 30: more run at once than could if all were long.

    The bound is the trie's size and what was generated, but for every last token, which is not computed: nothing less
    can be computed without another model of the answers.
    """
    prompts = [(1,) * 40 + (2 + i % 5,) * 20 + (7 + i % 19,) * (i // 95 + 1) for i in range(475)]
    wishes = [RowWish(SamplingParams(max_tokens=200, temperature=0.7), 1, False)] * len(prompts)
    job = Job(prompts, wishes, 32, 24, max_batch_tokens=500, max_num_seqs=64, sharing=True)
    hopeful, careful = rig_for(job), rig_for(job)
    careful.engine.scheduler._may_risk = lambda sequence: False  # type: ignore[method-assign]
    for rig in (hopeful, careful):
        rig.run(job_requests(job), 10**5)
        check_answers(job, rig)
    least = trie_size(job.prompts) + sum(len(output.token_ids) - 1 for output in hopeful.outputs.values())
    computed = sum(batch.num_tokens for batch in hopeful.backend.batches)
    assert hopeful.engine.scheduler.preemptions > 0
    assert least < computed <= (1 + RISK) * least
    assert careful.engine.scheduler.preemptions == 0
    assert len(hopeful.records) < len(careful.records)


TIERS = st.builds(
    TierPolicy,
    write=st.sampled_from(["back", "through", "off"]),
    prefetch=st.booleans(),
    async_backup=st.just(False),
    restore_wait_s=st.just(10.0),
)


@settings(REPEATABLE, max_examples=50)
@given(st.one_of(jobs(), tight_jobs()), TIERS, st.integers(1, 40))
def test_tiers_below_the_device_change_no_answer(job: Job, policy: TierPolicy, pages: int) -> None:
    """Also when they forget most of what they are given; the mock looks at everything that is restored."""
    store = HostMemory(pages * 16 * job.page_size)
    for _ in range(2):
        check_answers(job, run_job(job, store=store, policy=policy))


@pytest.mark.parametrize("write", ["back", "through"])
def test_a_page_that_another_prompt_takes_over_is_saved_as_it_was(write: Any) -> None:
    """The third prompt writes into the second page of the first two, which nobody runs any more."""
    prompts = [(1,) * 6 + (2, 2, 2), (1,) * 6 + (2, 2, 3), (1,) * 6 + (3, 3, 3)]
    wishes = [RowWish(SamplingParams(max_tokens=1), 1, False)] * 3
    job = Job(prompts, wishes, 4, AMPLE, max_batch_tokens=100, max_num_seqs=1, sharing=True)
    store = HostMemory(1 << 30)
    first, second = (run_job(job, store=store, policy=TierPolicy(write, False, False, 0.0)) for _ in range(2))
    for rig in (first, second):
        check_answers(job, rig)
    assert second.tiers is not None and second.tiers.counts["restored_pages"] == 2
    assert second.prefill_tokens == 1 + 1 + 3


def restorable_tokens(job: Job) -> set[tuple[int, ...]]:
    """Prefixes of whole pages that a run of the job leaves in its tiers: those that several prompts have."""
    runs = set(job.runs)
    requests = (r for r in job_requests(job) if tuple(r.prompt_token_ids.tolist()) in runs)
    size = job.page_size
    return {
        tuple(r.prompt_token_ids[: pages * size].tolist())
        for r in requests
        for pages in range(1, r.shared_tokens // size + 1)
    }


def least_after_restoring(job: Job, kept: set[tuple[int, ...]]) -> int:
    """Prompt tokens that are neither shared with the prompt before nor restored; the last one is always computed."""
    total, before = 0, ()
    for prompt in sorted(set(job.runs)):
        shared = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
        ends = range(0, len(prompt), job.page_size)
        restored = max(end for end in ends if all(prompt[:e] in kept for e in ends if 0 < e <= end))
        total, before = total + len(prompt) - max(shared, restored), prompt
    return total


@settings(REPEATABLE, max_examples=60)
@given(jobs(), TIERS)
def test_a_second_job_computes_no_shared_page_again(job: Job, policy: TierPolicy) -> None:
    """In the order of the sorted prompts, for which that can be told beforehand."""
    job = replace(job, spare_pages=AMPLE, sharing=True, policy="prefill_first")
    store = HostMemory(1 << 30)
    first, second = (run_job(job, store=store, policy=policy) for _ in range(2))
    kept = restorable_tokens(job) if policy.write != "off" else set()
    assert first.prefill_tokens == trie_size(job.runs)
    assert second.prefill_tokens == least_after_restoring(job, kept)
    for rig in (first, second):
        answered = [output for output in rig.outputs.values() if len(output.token_ids)]
        assert rig.prefill_tokens == sum(output.num_prompt_tokens - output.num_cached_tokens for output in answered)
        assert rig.tiers is not None and rig.tiers.counts["damaged_pages"] == 0
        whole_pages = rig.tiers.counts["restored_pages"] * job.page_size
        assert sum(output.num_restored_tokens for output in answered) <= whole_pages


def test_a_step_is_never_empty_when_all_have_been_set_back() -> None:
    """Pages that are kept for others make way for one of them, in that very step."""
    wishes = [RowWish(SamplingParams(max_tokens=5, temperature=0.5, ignore_eos=True), 1, False)] * 3
    job = Job([(1,)] * 3, wishes, 4, 0, max_batch_tokens=20, max_num_seqs=2, sharing=True, rash=True)
    for policy in get_args(Policy):
        rig = run_job(replace(job, policy=policy))
        assert rig.engine.scheduler.preemptions > 0
        check_answers(job, rig)
