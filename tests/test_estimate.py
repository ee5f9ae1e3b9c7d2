"""The work that is estimated beside what the engine does with the same rows."""

import numpy as np
import pytest

from batchgen.calibration import Answers, Calibration
from batchgen.engine.planner import PrefixPlan, plan_prefixes
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import plan_order
from batchgen.engine.types import SamplingParams
from batchgen.estimate import UNKNOWN_SHARE, Sequences, estimate_seconds, expected_tokens, work
from tests.engine.mock import HashModel, Rig, letters, prompt_table
from tests.test_calibration import COSTS, SHAPE, run_of


def sequences_of(plan: PrefixPlan, room: int, batch_tokens: int = 64, at_once: int = 4) -> Sequences:
    count = len(plan.order)
    return Sequences(
        lengths=plan.lengths,
        shared=plan.shared,
        prefills=np.ones(count, np.int64),
        answers=np.ones(count, np.int64),
        rooms=np.full(count, room),
        ends=np.ones(count, bool),
        max_batch_tokens=batch_tokens,
        at_once=at_once,
    )


@pytest.mark.parametrize("room", [1, 2, 30])
@pytest.mark.parametrize("batch_tokens", [20, 64, 500])
@pytest.mark.parametrize("at_once", [1, 4, 40])
def test_tokens_and_contexts_are_those_of_the_engine(room: int, batch_tokens: int, at_once: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [[1] * int(rng.integers(1, 30)) + [int(t) for t in rng.integers(2, 20, 20)] for _ in range(20)]
    table = prompt_table(prompts)
    plan = plan_prefixes(table)
    rig = Rig(HashModel(30), letters(30), batch_tokens, at_once, num_pages=600, page_size=8, context_length=400)
    wish = RowWish(SamplingParams(max_tokens=room, ignore_eos=True), 1, False)
    rig.run(make_requests(table, plan, plan_order(plan), lambda i: wish))
    sequences = sequences_of(plan, room, batch_tokens, at_once)
    steps, *counts = work(sequences, sequences.rooms.astype(np.float64)).tolist()
    assert counts == [
        sum(r.num_prefill_tokens for r in rig.records),
        sum(r.num_decode_tokens for r in rig.records),
        sum(r.num_prefill_context for r in rig.records),
        sum(r.num_decode_context for r in rig.records),
    ]
    assert 0.6 < steps / len(rig.records) < 1.2


def test_nothing_to_run_takes_no_time() -> None:
    sequences = sequences_of(plan_prefixes(prompt_table([])), 5)
    assert work(sequences, sequences.rooms.astype(np.float64)).tolist() == [0] * 5
    assert estimate_seconds(sequences, run_of(100), SHAPE) == (0, 0)


def test_answers_end_as_often_as_they_did() -> None:
    sequences = sequences_of(plan_prefixes(prompt_table([[1], [2], [3]])), 20)
    sequences.ends[1] = False
    lengths = expected_tokens(sequences, Answers(ended=100, tokens=1000))
    assert lengths[1] == 20
    assert lengths[0] == pytest.approx(sum(0.9**i for i in range(20)))
    assert expected_tokens(sequences, Answers()).tolist() == [20 * UNKNOWN_SHARE, 20, 20 * UNKNOWN_SHARE]
    assert expected_tokens(sequences, Answers(0, 500)).tolist() == [20, 20, 20]
    assert expected_tokens(sequences, Answers(500, 500)).tolist() == [1, 20, 1]


def test_the_range_holds_what_such_steps_take() -> None:
    known = run_of(500, noise=0.1)
    sequences = sequences_of(plan_prefixes(prompt_table([[i] * 900 for i in range(200)])), 100, 2048, 128)
    low, high = estimate_seconds(sequences, known, SHAPE)
    true = work(sequences, sequences.rooms.astype(np.float64)) @ COSTS
    assert low < 0.5 * true  # answers may end after a tenth of their tokens
    assert true < high < 2 * true
    told = Calibration(known.steps, known.seconds, known.terms, known.products, Answers(0, 1000), None)
    low, high = estimate_seconds(sequences, told, SHAPE)
    assert 0.6 * true < low < true < high
