"""What batchgen should reach. Figures that need no peer are measured here; one JSON line.

    python -m benchmarks.targets NAME [--model SOURCE]

`compare.py` runs each in a process of its own and shows them all beside the targets.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.run_tokens import write_spec
from benchmarks.workloads import MODEL, load

ROOT = Path(__file__).parent.parent
SIZE = 2048
"""Rows, inputs and outputs of the matrix product."""
TRIES = 8


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """A workload should be `factor` times as fast as the best peer; `any_setting`: with whatever setting is best."""

    workload: str
    factor: float
    any_setting: bool = False


@dataclass(frozen=True, slots=True)
class OwnTarget:
    """A figure, a share or seconds, that should be at most, or at least, `wanted`; measured up to `repeats` times."""

    name: str
    what: str
    unit: Literal["s", "share"]
    wanted: float
    at_most: bool
    repeats: int = 100

    def show(self, value: float) -> str:
        return f"{value:.2f} s" if self.unit == "s" else f"{value:.1%}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A target beside today's figure. `ratio`: of the figure to the target, above 1 is better; see `Run` for others."""

    what: str
    wanted: str
    figure: str
    ratio: float
    others: float
    load: float

    @property
    def met(self) -> bool:
        return self.ratio >= 1


PEER_TARGETS = (
    PeerTarget("decode", 4.0),
    PeerTarget("fewshot", 3.0),
    PeerTarget("annotate", 3.5),
    PeerTarget("prefill", 2.5),
    PeerTarget("single", 5.0, any_setting=True),
)
OUTSIDE = OwnTarget("outside", "decode: time outside the kernels", "share", 0.05, at_most=True)
OWN_TARGETS = (
    OwnTarget("fewshot-job", "fewshot: whole job, process start to exit", "s", 5.0, at_most=True),
    OwnTarget("first-token", "single: process start to first token", "s", 2.5, at_most=True),
    OwnTarget("compile", "kernels compiled from nothing", "s", 45.0, at_most=True, repeats=1),
    OwnTarget("gemm", "GEMM 2048^3, two threads, of two cores' peak", "share", 0.5, at_most=False),
    OwnTarget("portable-gemm", "portable GEMM 2048^3, of numpy's sgemm", "share", 0.6, at_most=False),
)


def outcome(target: OwnTarget, value: float, others: float, load: float) -> Outcome:
    sign = "<=" if target.at_most else ">="
    ratio = target.wanted / value if target.at_most and value > 0 else value / target.wanted
    if target.at_most and value <= 0:
        ratio = float("inf")
    return Outcome(target.what, f"{sign} {target.show(target.wanted)}", target.show(value), ratio, others, load)


def measure(name: str, model: str) -> float:
    """Seconds, or a share, of one of `OWN_TARGETS`."""
    measures: dict[str, Callable[[str], float]] = {
        "fewshot-job": fewshot_job,
        "first-token": first_token,
        "compile": compile_from_nothing,
        "gemm": gemm_share,
        "portable-gemm": portable_gemm_share,
    }
    return measures[name](model)


def fewshot_job(model: str) -> float:
    """Seconds of the process, its kernels compiled before."""
    run(["batchgen", "warmup"])
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "fewshot.parquet"
        load("fewshot").write_parquet(table)
        spec = write_spec(Path(folder), table, model)
        start = time.perf_counter()
        run(["batchgen", "run", str(spec), "--quiet"])
        return time.perf_counter() - start


def first_token(model: str) -> float:
    """Seconds from the start of the process to the end of the first step of one sequence, its kernels compiled."""
    run(["batchgen", "warmup"])
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "single.parquet"
        load("single").write_parquet(table)
        since = str(time.monotonic())
        output = run(["benchmarks.run_tokens", str(table), "--model", model, "--since", since])
    return float(json.loads(output.splitlines()[-1])["first_step_seconds"])


def compile_from_nothing(model: str) -> float:
    """Seconds of `batchgen warmup` with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(["batchgen", "warmup"], BATCHGEN_CACHE_DIR=folder)
        return time.perf_counter() - start


def run(module: list[str], **environment: str) -> str:
    """What `python -m MODULE ARGUMENTS` prints; SystemExit with its errors when it fails."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def gemm_share(model: str) -> float:
    """The product's rate on the best kernel with bf16 weights and two threads, of twice one core's limit."""
    from batchgen.kernels.cpu.features import available_kernels
    from batchgen.machine import multiply_rate, units

    kernel = available_kernels()[0]
    peak = 2 * multiply_rate(units(kernel, "bf16")[0])
    return 2 * SIZE**3 / gemm_seconds(kernel, "bf16", 2) / peak


def portable_gemm_share(model: str) -> float:
    """The rate of the portable kernel on float32, of that of numpy's product, both with all threads."""
    from batchgen.loading import thread_count
    from batchgen.spec import EngineSpec

    rng = np.random.default_rng(0)
    a, b = rng.random((SIZE, SIZE), np.float32), rng.random((SIZE, SIZE), np.float32)
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return min(seconds) / gemm_seconds("portable", "fp32", thread_count(EngineSpec()))


def gemm_seconds(kernel: str, weights: str, threads: int) -> float:
    """Seconds of a product of SIZE rows, inputs and outputs in a program of its own; the best of a few."""
    from batchgen.bench import StepShape, step_batch
    from batchgen.kernels.base import ModelShape, Ops, StepLimits
    from batchgen.kernels.cpu import records
    from batchgen.kernels.cpu.backend import CpuBackend

    backend, rng, vocab = CpuBackend(kernel, weights, "fp32", threads), np.random.default_rng(0), 64
    rows, norm = rng.standard_normal((vocab, SIZE)).astype(np.float32), backend.vector(np.ones(SIZE, np.float32))
    table, head = backend.table(rows), backend.linear([rows])
    weight = backend.linear([rng.standard_normal((SIZE, SIZE)).astype(np.float32)])

    def forward(ops: Ops) -> None:
        x = ops.embed(table)
        ops.linear(ops.rms_norm(x, norm, 1e-5), weight)
        ops.sample_head(ops.final_norm(x, norm, 1e-5), head)

    sequences = SIZE // 32
    rope = np.zeros((1, 32, 8), np.float32)
    shape, limits = ModelShape(SIZE, 32, 1, 1, 1, 16, vocab, 32), StepLimits(SIZE, sequences, sequences, 32)
    backend.build(forward, shape, limits, (rope, rope))
    batch = step_batch(StepShape("gemm", sequences, 32, 0), 32, vocab)
    ops, times = backend.operations, backend.times
    seconds = []
    for _ in range(TRIES + 1):  # the first one is not counted
        times[:] = 0
        backend.run(batch)
        seconds.append(int(times[:, ops["code"] == records.LINEAR, 0].max()) / 1e9)
    backend.close()
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[target.name for target in OWN_TARGETS])
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    print(json.dumps({"value": measure(args.name, args.model)}))


if __name__ == "__main__":
    main()
