"""Continuations that are given: each token's log-probability as if the row were alone, whatever runs beside it."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.cache_tiers import HostMemory
from batchgen.engine.planner import plan_prefixes, shared_before_logits
from batchgen.engine.requests import RowWish
from batchgen.engine.types import SCORING, RequestOutput, Score
from tests.engine.mock import HashModel, Rig, prompt_table, requests_for, scored
from tests.engine.test_engine_property import REPEATABLE

VOCAB = 30
MODEL = HashModel(VOCAB)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """A context and what follows it."""

    context: Tokens
    continuation: Tokens

    @property
    def prompt(self) -> Tokens:
        return (self.context + self.continuation)[:-1]

    @property
    def wish(self) -> RowWish:
        return RowWish(SCORING, 1, False, Score(len(self.continuation), self.continuation[-1]))

    def expected(self) -> tuple[list[float], bool]:
        """By the definition."""
        whole = self.context + self.continuation
        asked = [scored(MODEL, whole[:at], whole[at]) for at in range(len(self.context), len(whole))]
        greedy = all(token == wanted for (token, _), wanted in zip(asked, self.continuation, strict=True))
        return [np.float32(logprob) for _, logprob in asked], greedy


def run(rows: list[Scored], sharing: bool = True, **limits: int) -> Rig:
    rig = Rig(MODEL, vocab_size=VOCAB, prefix_sharing=sharing, **limits)
    rig.run(requests_for([row.prompt for row in rows], [row.wish for row in rows], sharing=sharing))
    return rig


def check(output: RequestOutput, row: Scored) -> None:
    logprobs, greedy = row.expected()
    assert output.logprobs.tolist() == logprobs
    assert output.is_greedy is greedy
    assert output.token_ids.tolist() == list(row.continuation)
    assert output.num_prompt_tokens == len(row.prompt)
    assert (output.finish_reason, output.text, output.error) == ("stop", None, None)
    assert len(output.token_steps) == len(output.token_times) == len(row.continuation)


RUNS = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 31, 32, 33]))
TOKENS = st.lists(RUNS, min_size=1, max_size=3).map(lambda runs: tuple(t for t, count in runs for _ in range(count)))
ROWS = st.lists(st.builds(Scored, TOKENS, TOKENS), min_size=1, max_size=10)


@settings(REPEATABLE, max_examples=120)
@given(
    ROWS,
    st.booleans(),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 7, 32, 100, 500]),
    st.sampled_from([4, 32]),
    st.sampled_from([0, 1, 5, 1000]),
    st.booleans(),
)
def test_scores_are_those_of_a_row_alone_and_the_plan_holds(rows, sharing, seqs, tokens, page, spare, first) -> None:
    longest = -(-max(len(row.prompt) for row in rows) // page)
    rig = run(
        rows, sharing, max_batch_tokens=tokens, max_num_seqs=seqs, num_pages=longest + spare, page_size=page,
        prefill_first=first,
    )  # fmt: skip
    for i, row in enumerate(rows):
        check(rig.outputs[i, 0], row)
    assert rig.engine.scheduler.generated_tokens == rig.engine.scheduler.preemptions == 0
    plan = plan_prefixes(prompt_table(row.prompt for row in rows))
    logits = np.array([len(row.continuation) for row in rows])[plan.order]
    found = shared_before_logits(plan.lengths, plan.shared, logits) if sharing else np.zeros(1)
    planned = plan.lengths.sum() - found.sum()
    assert rig.prefill_tokens == planned


def test_a_context_is_computed_once_for_all_its_continuations() -> None:
    """Its last token, from whose logits each begins, once for each prompt that differs."""
    context = tuple(range(1, 11))
    rows = [Scored(context, (20, 21)), Scored(context, (20, 22)), Scored(context, (23,)), Scored(context, (24,))]
    rig = run(rows)
    assert rig.prefill_tokens == 10 + 2  # (23,) and (24,) need nothing but the context; 20 comes after it
    assert len(rig.backend.batches) == 1
    assert [len(rig.outputs[i, 0].logprobs) for i in range(4)] == [2, 2, 1, 1]


def test_equal_rows_are_scored_once_and_the_same_tokens_with_another_border_too() -> None:
    rows = [Scored((1, 2), (3, 4)), Scored((1, 2), (3, 4)), Scored((1,), (2, 3, 4)), Scored((1, 2, 3), (4,))]
    rig = run(rows)
    assert rig.prefill_tokens == 3
    for i, row in enumerate(rows):
        check(rig.outputs[i, 0], row)


def test_a_chunk_ends_where_no_more_logits_fit() -> None:
    rig = run([Scored((1,) * 5, (2,) * 10)], max_num_seqs=3)
    assert [len(batch.logits_rows) for batch in rig.backend.batches] == [3, 3, 3, 1]
    assert [batch.num_tokens for batch in rig.backend.batches] == [7, 3, 3, 1]
    steps = rig.outputs[0, 0].token_steps
    assert steps.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3] and all(a <= b for a, b in pairwise(steps))


def test_the_likeliest_continuation_is_greedy() -> None:
    context: Tokens = (1, 2, 3)
    first = scored(MODEL, context, 0)[0]
    second = scored(MODEL, (*context, first), 0)[0]
    rig = run([Scored(context, (first, second)), Scored(context, (first, second + 1)), Scored(context, (first,))])
    assert [rig.outputs[i, 0].is_greedy for i in range(3)] == [True, False, True]


def test_prefixes_from_a_tier_below_end_where_scores_begin() -> None:
    """A second engine finds the context's full pages on disk, so to speak, and computes what it scores."""
    store = HostMemory(1 << 20)
    context = tuple(1 + i % 7 for i in range(70))
    rows = [Scored(context, (20, 21)), Scored(context, (22, 23)), Scored(context[:60], context[60:])]
    requests = requests_for([row.prompt for row in rows], [row.wish for row in rows])
    prefills = []
    for _ in range(2):
        rig = Rig(MODEL, vocab_size=VOCAB, store=store)
        rig.run(requests)
        assert rig.tiers is not None
        rig.tiers.close()
        prefills.append(rig.prefill_tokens)
        for i, row in enumerate(rows):
            check(rig.outputs[i, 0], row)
    assert prefills[1] == prefills[0] - 32  # one full page before token 59, from which on all is computed


def test_the_end_token_is_scored_like_any_other() -> None:
    rows = [Scored((1, 2), (0, 5, 0))]
    check(run(rows).outputs[0, 0], rows[0])


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_a_token_that_the_model_does_not_have_fails_its_row(bad: int) -> None:
    rig = run([Scored((1, 2), (3, bad)), Scored((1, 2), (3, 4))])
    failure = rig.outputs[0, 0].error
    assert failure is not None
    assert (failure.code, failure.message) == (
        "encode_error",
        f"the continuation has a token id outside 0..{VOCAB - 1}",
    )
    assert rig.outputs[1, 0].error is None


def test_scores_that_are_not_finite_fail_their_row() -> None:
    def model(draw):
        token, logprob = MODEL(draw)
        return token, float("nan") if draw.context[-2:] == (7, 8) else logprob

    rig = Rig(model, vocab_size=VOCAB)
    rows = [Scored((1, 7), (8, 9)), Scored((1, 6), (8, 9))]
    rig.run(requests_for([row.prompt for row in rows], [row.wish for row in rows]))
    assert rig.outputs[0, 0].error is not None and rig.outputs[0, 0].error.code == "internal_error"
    check(rig.outputs[1, 0], rows[1])
