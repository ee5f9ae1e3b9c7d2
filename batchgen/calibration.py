"""What engine steps cost on this machine with one model, learned from the steps of finished runs and of `bench`.

A step is modelled to take

    a + b * prompt tokens + c * decoded tokens + d * prompt context + e * decode context   seconds

where the context of a token is how many tokens it attends to, and none of a..e is negative. Not modelled: reading
a shared run of pages once for several sequences, rows that fail, and other programs on the machine.

Kept are sums over the steps from which a..e follow by least squares: the normal equations. Errors are weighed by 1 /
duration, as they grow with it. Of what was known before and of a new run, each counts as `REMEMBERED` steps at most:
a short run changes little, and the machine of long ago is forgotten. Where the steps do not tell two terms apart,
`relative_costs` decides.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from batchgen import __version__
from batchgen.io.files import cache_root, write_json
from batchgen.kernels.base import ModelShape
from batchgen.loading import Numerics

TERMS = ("steps", "prefill_tokens", "decode_tokens", "prefill_context", "decode_context")
"""What a step's time is made of, in the order of all vectors here; the first is 1 for every step."""
COLUMNS = ("num_prefill_tokens", "num_decode_tokens", "num_prefill_context", "num_decode_context")
"""The columns of `steps/` that hold the other terms."""

REMEMBERED = 1000.0
LEAST_STEPS = 8
"""A run of fewer steps says more about warming up than about the machine."""
LEAST_SPREAD = 0.1
"""By what share steps differ from what they should take on a quiet machine; no calibration claims to know better."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a calibration holds for: model (SHA-256), kernel, number types, threads, processor, batchgen's version."""

    model: str
    kernel: str
    weights: str
    kv_dtype: str
    threads: int
    cpu: str
    version: str = __version__

    @property
    def path(self) -> Path:
        """Its file in the user's cache (BATCHGEN_CACHE_DIR names another)."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return calibration_directory() / f"{digest[:16]}.json"


def this_machine(model_sha256: str, numerics: Numerics, threads: int) -> Machine:
    """Processors are the same when they are of one kind and number, as far as LLVM tells."""
    from llvmlite.binding import get_host_cpu_name

    from batchgen.kernels.cpu.features import HOST

    features = hashlib.sha256(" ".join(sorted(HOST)).encode()).hexdigest()[:12]
    cpu = f"{os.cpu_count()} x {platform.machine()} {get_host_cpu_name()} {features}"
    return Machine(model_sha256, numerics.kernel, numerics.weights, numerics.kv_dtype, threads, cpu)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers that ended by themselves, and the tokens of all answers that might have, the cut ones too."""

    ended: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Sums over steps of x seconds y and terms t (5 values, see `TERMS`): their number, Σ y, Σ t and Σ t tᵀ / y."""

    steps: float
    seconds: float
    terms: NDArray[np.float64]
    products: NDArray[np.float64]
    answers: Answers
    load_seconds: float | None  # of the newest run that told

    @classmethod
    def of_steps(
        cls,
        terms: NDArray[np.float64],
        seconds: NDArray[np.float64],
        answers: Answers | None = None,
        load_seconds: float | None = None,
    ) -> "Calibration":
        """From a row of `terms` and the seconds of each step. Steps of no duration are left out."""
        terms, seconds = terms[seconds > 0], seconds[seconds > 0]
        products = (terms / seconds[:, None]).T @ terms
        return cls(len(seconds), float(seconds.sum()), terms.sum(axis=0), products, answers or Answers(), load_seconds)

    def merged(self, newer: "Calibration") -> "Calibration":
        """With what a newer run says; see the module for how much each counts."""
        old, new = self._at_most(REMEMBERED), newer._at_most(REMEMBERED)
        return Calibration(
            old.steps + new.steps,
            old.seconds + new.seconds,
            old.terms + new.terms,
            old.products + new.products,
            Answers(old.answers.ended + new.answers.ended, old.answers.tokens + new.answers.tokens),
            old.load_seconds if new.load_seconds is None else new.load_seconds,
        )

    def _at_most(self, steps: float) -> "Calibration":
        share = min(1.0, steps / self.steps)
        answers = Answers(self.answers.ended * share, self.answers.tokens * share)
        scaled = (self.steps * share, self.seconds * share, self.terms * share, self.products * share)
        return Calibration(*scaled, answers, self.load_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """Seconds per unit of each term (5 values); `spread`: by what share steps differ from it; their covariance."""

    seconds: NDArray[np.float64]
    spread: float
    covariance: NDArray[np.float64]

    def of(self, terms: NDArray[np.float64]) -> tuple[float, float]:
        """(seconds, relative error) of work with these total terms.

        The error is twice what the spread of steps, which is not taken to average out, and what is not known of the
        costs themselves make together; it grows where the work is unlike all that was measured.
        """
        seconds = float(terms @ self.seconds)
        unknown = math.sqrt(max(0.0, float(terms @ self.covariance @ terms)))
        return seconds, 2 * math.hypot(self.spread, unknown / seconds if seconds > 0 else 0.0)


def relative_costs(shape: ModelShape) -> NDArray[np.float64]:
    """What is supposed of each term, relative to a prompt token, where nothing was measured.

    Operations of a pair of query and key beside those of a token in the linear layers, twice as dear as these; a pair
    in decoding ten times as dear, as its key is read from memory for one query; a step 64 tokens: it reads the weights.
    """
    heads = shape.num_heads * shape.head_dim
    linear = shape.hidden_size * (2 * heads + 2 * shape.num_kv_heads * shape.head_dim + 3 * shape.intermediate_size)
    pair = 2 * (2 * heads) / linear
    return np.array([64, 1, 1, pair, 10 * pair])


def step_costs(known: Calibration, relative: NDArray[np.float64]) -> StepCosts:
    """Least squares without negative costs: of all choices of terms that cost nothing, the best."""
    wishes, mean = _wishes(known, relative), known.seconds / known.steps
    matrix = known.products + LEAST_SPREAD**2 * mean * wishes
    best = min([_solve(matrix, known.terms, free) for free in _choices()], key=lambda found: found[0])[1]
    misfit = max(0.0, known.seconds - float(2 * best @ known.terms - best @ known.products @ best))
    spread = max(LEAST_SPREAD, math.sqrt(misfit / known.seconds))
    covariance = np.linalg.inv(known.products / (spread**2 * mean) + wishes).astype(np.float64)
    together = known.seconds / float(known.terms @ best)  # weighing by 1 / duration slights slow steps
    return StepCosts(best * together, spread, covariance)


def _wishes(known: Calibration, relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Equations `cost of the term = its relative cost x cost of a prompt token`, as information added to the steps'.

    For an amount that costs as much as a mean step, each may be wrong by as much as that costs.
    """
    rows = np.eye(len(TERMS))
    rows[:, TERMS.index("prefill_tokens")] -= relative
    rows *= (_usual_tokens(known, relative) * known.steps / known.seconds / relative)[:, None]
    return rows.T @ rows


def _usual_tokens(known: Calibration, relative: NDArray[np.float64]) -> float:
    """A mean step in prompt tokens that would cost as much."""
    return float(known.terms @ relative) / known.steps


def _choices() -> list[list[int]]:
    indices = range(len(TERMS))
    return [list(chosen) for size in range(1, len(TERMS) + 1) for chosen in combinations(indices, size)]


def _solve(
    matrix: NDArray[np.float64], terms: NDArray[np.float64], free: list[int]
) -> tuple[float, NDArray[np.float64]]:
    """(misfit but for a constant, costs) with only the `free` terms; infinite where one comes out negative."""
    scale = 1 / np.sqrt(np.diag(matrix)[free])
    part = matrix[np.ix_(free, free)] * np.outer(scale, scale)
    costs = np.zeros(len(terms))
    costs[free] = scale * np.linalg.lstsq(part, scale * terms[free], rcond=None)[0]
    if costs.min() < 0:
        return np.inf, costs
    return float(costs @ matrix @ costs - 2 * costs @ terms), costs


def measured_run(directory: Path, first_step: int, prefix: str, may_end: bool, load_seconds: float) -> Calibration:
    """What a finished job's folder tells of the run that began with `first_step`, which warmed up and does not count.

    `prefix` of the result columns; `may_end`: the model may end answers, so that their lengths say something.
    """
    steps = (
        _parts(directory, "steps").filter(pl.col("step") > first_step).select("step", "duration_ns", *COLUMNS).collect()
    )
    terms = steps.select(pl.lit(1), *COLUMNS).to_numpy().astype(np.float64)
    answers = _answers(directory, prefix) if may_end else Answers()
    return Calibration.of_steps(terms, steps["duration_ns"].to_numpy() / 1e9, answers, load_seconds)


def _answers(directory: Path, prefix: str) -> Answers:
    results = _parts(directory, "results")
    ended = (pl.col(f"{prefix}finish_reason") == "stop").sum()
    tokens = pl.col(f"{prefix}num_generated_tokens").sum()
    return Answers(*results.select(ended=ended, tokens=tokens).collect().row(0))


def _parts(directory: Path, kind: str) -> pl.LazyFrame:
    """A table of the job; its path is no pattern, whatever characters are in it."""
    return pl.scan_parquet(sorted((directory / kind).glob("*.parquet")), glob=False)


# --- on disk ----------------------------------------------------------------------------------------------------------


def calibration_directory() -> Path:
    return cache_root() / "calibration"


def read_calibration(machine: Machine) -> Calibration | None:
    """What is known of the machine; None when nothing is, or its file is damaged."""
    try:
        return _parsed(json.loads(machine.path.read_text("utf-8")), asdict(machine))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def learn(machine: Machine, run: Calibration) -> None:
    """Add a run to what is known. OSError when it cannot be written."""
    if run.steps < LEAST_STEPS:
        return
    known = read_calibration(machine)
    merged = run if known is None else known.merged(run)
    path = machine.path
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {**asdict(merged), "terms": merged.terms.tolist(), "products": merged.products.tolist()}
    write_json(path, {"machine": asdict(machine), **values}, path.with_name(f"{path.name}.{os.getpid()}"))


def _parsed(value: Mapping[str, Any], machine: dict[str, Any]) -> Calibration:
    """ValueError, TypeError or KeyError for what `learn` would not have written."""
    size = len(TERMS)
    terms, products = np.array(value["terms"], np.float64), np.array(value["products"], np.float64)
    answers = Answers(float(value["answers"]["ended"]), float(value["answers"]["tokens"]))
    load = None if value["load_seconds"] is None else float(value["load_seconds"])
    numbers = [float(value["steps"]), float(value["seconds"]), answers.ended, answers.tokens, load or 0.0]
    if terms.shape != (size,) or products.shape != (size, size) or value["machine"] != machine:
        raise ValueError("not a calibration of this machine")
    every = np.concatenate([terms, products.ravel(), numbers])
    if not np.isfinite(every).all() or every.min() < 0 or min(numbers[:2]) <= 0:
        raise ValueError("not sums over steps")
    return Calibration(numbers[0], numbers[1], terms, products, answers, load)
