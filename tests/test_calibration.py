"""What steps cost: found again from steps of known costs, kept and merged, and damaged files."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from batchgen.calibration import (
    LEAST_SPREAD,
    LEAST_STEPS,
    REMEMBERED,
    Answers,
    Calibration,
    Machine,
    learn,
    measured_run,
    read_calibration,
    relative_costs,
    step_costs,
)
from batchgen.kernels.base import ModelShape

SHAPE = ModelShape(576, 1536, 30, 9, 3, 64, 49152, 8192)
RELATIVE = relative_costs(SHAPE)
MACHINE = Machine("abc", "portable", "fp32", "fp32", 2, "2 x x86_64 cpu", "1")
# A step, a prompt token, a decoded token, and of each the context, in seconds.
COSTS = np.array([8e-3, 1.2e-4, 2e-4, 6e-8, 1.2e-6])


def run_of(steps: int, seed: int = 0, noise: float = 0.0, costs: NDArray[np.float64] = COSTS) -> Calibration:
    """Steps of a job: prompts of all lengths come in while others decode."""
    rng = np.random.default_rng(seed)
    prefill, decode = rng.integers(0, 2048, steps), rng.integers(0, 256, steps)
    context = rng.integers(50, 3000, (2, steps))
    terms = np.stack([np.ones(steps), prefill, decode, prefill * context[0], decode * context[1]], axis=1)
    return Calibration.of_steps(terms, terms @ costs * np.exp(noise * rng.standard_normal(steps)))


def test_costs_are_found_again() -> None:
    costs = step_costs(run_of(300), RELATIVE)
    np.testing.assert_allclose(costs.seconds, COSTS, rtol=0.05)
    assert costs.spread == LEAST_SPREAD


def test_the_spread_is_that_of_the_steps() -> None:
    costs = step_costs(run_of(2000, noise=0.3), RELATIVE)
    np.testing.assert_allclose(costs.seconds, COSTS, rtol=0.3)
    assert costs.spread == pytest.approx(0.3, rel=0.3)
    known = run_of(2000, noise=0.3)
    assert known.terms @ costs.seconds == pytest.approx(known.seconds)


def test_no_cost_is_negative() -> None:
    """Steps that take the less the more they decode."""
    known = run_of(100, costs=np.array([0.2, 1e-4, -2e-4, 0, 0]))
    assert np.linalg.solve(known.products, known.terms).min() < -1e-4
    assert step_costs(known, RELATIVE).seconds.min() == 0


def test_what_was_never_measured_is_supposed_and_uncertain() -> None:
    """A job of one prompt length that decodes nothing tells nothing of decoding."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, 16, 200)
    terms = np.stack([np.ones(200), prompts * 128, 0 * prompts, prompts * 128 * 64, 0 * prompts], axis=1)
    terms = terms.astype(np.float64)
    known = Calibration.of_steps(terms, terms @ COSTS * np.exp(0.05 * rng.standard_normal(200)))
    costs = step_costs(known, RELATIVE)
    assert costs.of(terms.sum(axis=0))[0] == pytest.approx(known.seconds, rel=0.05)
    decoding = np.array([1000, 0, 128_000, 0, 128_000 * 500.0])
    seconds, error = costs.of(decoding)
    assert 0.2 < seconds / (decoding @ COSTS) < 5
    assert error > 2 * costs.of(terms.sum(axis=0))[1]
    long = np.array([100, 200_000, 0, 200_000 * 1000.0, 0])  # not measured either, but of the same kind
    assert 0.5 < costs.of(long)[0] / (long @ COSTS) < 2


def test_a_short_run_does_not_outweigh_what_is_known(own_calibration: Path) -> None:
    learn(MACHINE, run_of(2000))
    learn(MACHINE, run_of(LEAST_STEPS - 1, seed=1, costs=100 * COSTS))  # too short to count at all
    learn(MACHINE, run_of(LEAST_STEPS, seed=2, costs=2 * COSTS))
    known = read_calibration(MACHINE)
    assert known is not None and known.steps == REMEMBERED + LEAST_STEPS
    np.testing.assert_allclose(step_costs(known, RELATIVE).seconds[1:3], COSTS[1:3], rtol=0.1)


def test_the_machine_of_long_ago_is_forgotten(own_calibration: Path) -> None:
    for seed in range(6):
        learn(MACHINE, run_of(1500, seed, costs=COSTS * (5 if seed == 0 else 1)))
    known = read_calibration(MACHINE)
    assert known is not None and known.steps == 2 * REMEMBERED
    total = run_of(100, seed=9)
    assert step_costs(known, RELATIVE).of(total.terms)[0] == pytest.approx(total.seconds, rel=0.15)


def test_other_machines_and_models_have_their_own(own_calibration: Path) -> None:
    learn(MACHINE, run_of(100))
    for change in ({"model": "b"}, {"kernel": "b"}, {"weights": "b"}, {"kv_dtype": "b"}, {"threads": 1}, {"cpu": "b"}):
        values: dict[str, Any] = {name: getattr(MACHINE, name) for name in Machine.__dataclass_fields__}
        assert read_calibration(Machine(**(values | change))) is None
    assert os.listdir(own_calibration) == [MACHINE.path.name]


def test_what_is_read_is_what_was_learned(own_calibration: Path) -> None:
    assert read_calibration(MACHINE) is None
    run = run_of(50)
    learn(MACHINE, Calibration(run.steps, run.seconds, run.terms, run.products, Answers(3, 40), 1.5))
    known = read_calibration(MACHINE)
    assert known is not None and (known.answers, known.load_seconds) == (Answers(3, 40), 1.5)
    assert (known.products == run.products).all() and (known.terms == run.terms).all()
    learn(MACHINE, run)  # as bench does, which loads but has no answers
    again = read_calibration(MACHINE)
    assert again is not None and (again.answers, again.load_seconds) == (Answers(3, 40), 1.5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: "",
        lambda value: json.dumps(value)[:-20],
        lambda value: "[1, 2]",
        lambda value: json.dumps({**value, "terms": value["terms"][:-1]}),
        lambda value: json.dumps({**value, "terms": "abc"}),
        lambda value: json.dumps({**value, "products": value["terms"]}),
        lambda value: json.dumps({**value, "steps": 0}),
        lambda value: json.dumps({**value, "seconds": float("nan")}),
        lambda value: json.dumps({**value, "answers": None}),
        lambda value: json.dumps({**value, "machine": {**value["machine"], "threads": 99}}),
        lambda value: json.dumps({name: part for name, part in value.items() if name != "load_seconds"}),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(own_calibration: Path, damage: Any) -> None:
    learn(MACHINE, run_of(50))
    MACHINE.path.write_text(damage(json.loads(MACHINE.path.read_text())))
    assert read_calibration(MACHINE) is None
    learn(MACHINE, run_of(60))
    known = read_calibration(MACHINE)
    assert known is not None and known.steps == 60


def test_a_finished_run_is_measured_without_its_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]*"  # no pattern
    steps = {
        "step": [2, 0, 1],
        "duration_ns": [2_000_000_000, 90_000_000_000, 1_000_000_000],
        "num_prefill_tokens": [0, 100, 7],
        "num_decode_tokens": [3, 0, 1],
        "num_prefill_context": [0, 5050, 70],
        "num_decode_context": [30, 0, 11],
    }
    results = {"a_finish_reason": ["stop", "length", "error", "stop"], "a_num_generated_tokens": [5, 8, 0, 1]}
    for name, columns in (("steps", steps), ("results", results)):
        (folder / name).mkdir(parents=True)
        pl.DataFrame(columns).write_parquet(folder / name / "part-00000.parquet")
    run = measured_run(folder, 0, "a_", may_end=True, load_seconds=0.5)
    assert (run.steps, run.seconds, run.answers, run.load_seconds) == (2, 3.0, Answers(2, 14), 0.5)
    assert run.terms.tolist() == [2, 7, 4, 70, 41]
    assert measured_run(folder, 0, "a_", may_end=False, load_seconds=0.5).answers == Answers()
    resumed = measured_run(folder, 1, "a_", may_end=True, load_seconds=0.5)  # the steps before ran with other threads
    assert (resumed.steps, resumed.seconds) == (1, 2.0)
