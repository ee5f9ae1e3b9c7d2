"""A model's own roofline: how long a step of each shape takes, kernel by kernel, beside what the machine can do."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.calibration import Calibration, learn, this_machine
from batchgen.engine.scheduler import attended
from batchgen.errors import SpecError
from batchgen.kernels.base import SAMPLE_DTYPE, ModelShape, StepBatch, StepLimits
from batchgen.kernels.cpu import records
from batchgen.kernels.cpu.backend import CpuBackend
from batchgen.loading import (
    ModelFile,
    load_model,
    locate_model,
    make_backend,
    open_model,
    resolve_numerics,
    thread_count,
)
from batchgen.machine import Limits, measure_limits
from batchgen.progress import ProgressListener
from batchgen.spec import EngineSpec, ModelSpec

LENGTH, LONG = 128, 2048
"""Tokens of a prompt, or before the one that is decoded; and of the longer shapes."""
MOST_DECODING, LONG_DECODING = 128, 16
SECONDS, LEAST_STEPS = 1.0, 5
"""Of steps of each shape."""
CALIBRATED_AS = 10
"""How many steps of a run the figure of a shape counts as."""

KINDS = {
    records.EMBED: "embed",
    records.NORM: "norm",
    records.LINEAR: "linear",
    records.LINEAR_ADD: "linear_add",
    records.LINEAR_SWIGLU: "linear_swiglu",
    records.ROPE: "rope",
    records.CLEAR: "clear",
    records.ATTENTION: "attention",
    records.HEAD: "head",
    records.PICK: "pick",
    records.SAMPLE: "sample",
    records.ROWS: "rows",
    records.WHOLE: "experts",
}


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `sequences`, each of `tokens` new ones after `context` that are in the KV cache."""

    name: str
    sequences: int
    tokens: int
    context: int

    @property
    def length(self) -> int:
        return self.context + self.tokens

    def pages(self, page_size: int) -> int:
        """Of each sequence."""
        return -(-self.length // page_size)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What decides the least a step can do. `kv_bytes`: a token's keys and values in one layer, as they are kept."""

    tokens: int
    rows: int  # of logits
    keys: int  # keys of all sequences
    pairs: int  # of a query and a key that it attends to, in one head
    kv_bytes: int
    query_size: int  # heads * head_dim
    table_bytes: int  # of a value of the embedding


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One kind of kernel in a step: seconds at work (mean of the threads), the least bytes and operations.

    `limit` is what would take longer at the machine's rates, `memory` or `multiply`, and `of_limit` how much of that
    rate is reached. It can exceed 1 where data stay in a cache.
    """

    kernel: str
    seconds: float
    bytes: int
    operations: int
    bytes_per_s: float
    operations_per_s: float
    limit: str
    of_limit: float
    of_step: float


@dataclass(frozen=True, slots=True)
class StepFigure:
    """A step of median duration. `waiting`: share of the threads' time spent at barriers; `outside`: not in kernels."""

    shape: StepShape
    seconds: float
    tokens_per_s: float
    waiting: float
    outside: float
    kernels: list[KernelFigure]


@dataclass(frozen=True, slots=True)
class Bench:
    """All that was measured of a model."""

    model: str
    kernel: str
    weights: str
    kv_dtype: str
    limits: Limits
    steps: list[StepFigure]


def run_bench(model: ModelSpec, engine: EngineSpec, progress: ProgressListener) -> Bench:
    """Load the model as a job would and measure; SpecError for the reference kernel, which keeps no times."""
    numerics = resolve_numerics(model, engine)
    if numerics.kernel == "reference":
        raise SpecError("engine.kernel: 'reference' keeps no times; bench measures the compiled kernels")
    path, sha256 = locate_model(model, progress.message)
    file, threads = open_model(path, model.pre_tokenizer), thread_count(engine)
    progress.message("measuring memory and multiplications")
    limits = measure_limits(numerics.kernel, numerics.weights, threads)
    backend = make_backend(numerics, threads)
    assert isinstance(backend, CpuBackend)
    shapes = step_shapes(engine, file.config.shape.context_length)
    load_model(file, backend, _step_limits(engine, shapes), progress.message)
    try:
        steps = [_measure(shape, backend, file, engine, limits, progress) for shape in shapes]
    finally:
        backend.close()
    try:
        learn(this_machine(sha256, numerics, threads), measured_steps(steps))
    except OSError as error:
        progress.message(f"what was measured is not kept for later plans: {error}")
    return Bench(path.name, numerics.kernel, numerics.weights, numerics.kv_dtype, limits, steps)


def step_shapes(engine: EngineSpec, context_length: int) -> list[StepShape]:
    """Prefill, decode, a single sequence, and long ones, within the engine's limits and the model's context."""
    length, long = (max(1, min(most, context_length // 2, engine.max_batch_tokens)) for most in (LENGTH, LONG))
    prompts = min(engine.max_num_seqs, engine.max_batch_tokens // length)
    decoding = min(engine.max_num_seqs, engine.max_batch_tokens, MOST_DECODING)
    return [
        StepShape("prefill", prompts, length, 0),
        StepShape("decode", decoding, 1, length),
        StepShape("single", 1, 1, length),
        StepShape("long prompt", 1, long, 0),
        StepShape("long context", min(decoding, LONG_DECODING), 1, long // 2),
    ]


def measured_steps(figures: list[StepFigure]) -> Calibration:
    """What the shapes tell of the machine's speed."""
    terms = np.array([_terms(figure.shape) for figure in figures], np.float64).repeat(CALIBRATED_AS, axis=0)
    return Calibration.of_steps(terms, np.array([figure.seconds for figure in figures]).repeat(CALIBRATED_AS))


def _terms(shape: StepShape) -> tuple[int, ...]:
    """See `calibration.TERMS`."""
    tokens = shape.sequences * shape.tokens
    context = shape.sequences * attended(shape.context, shape.length)
    return (1, 0, tokens, 0, context) if shape.context else (1, tokens, 0, context, 0)


def _step_limits(engine: EngineSpec, shapes: list[StepShape]) -> StepLimits:
    pages = max(shape.sequences * shape.pages(engine.page_size) for shape in shapes)
    return StepLimits(engine.max_batch_tokens, engine.max_num_seqs, pages, engine.page_size)


def step_batch(
    shape: StepShape, page_size: int, vocab_size: int, first: int = 0, pages: int | None = None
) -> StepBatch:
    """Random tokens, a greedy answer for each sequence, all pages newly allocated.

    The sequences are those from `first` on of many that have `pages` each, which is as many as they need by default.
    """
    sequences, count = shape.sequences, shape.sequences * shape.tokens
    each = pages or shape.pages(page_size)
    tables = np.arange(first * each, (first + sequences) * each, dtype=np.int32).reshape(sequences, each)
    positions = np.tile(np.arange(shape.context, shape.length, dtype=np.int32), sequences)
    held = tables[np.repeat(np.arange(sequences), shape.tokens), positions // page_size].astype(np.int64)
    samples = np.zeros(sequences, SAMPLE_DTYPE)
    samples["row"], samples["greedy"], samples["temperature"] = np.arange(sequences), 1, 1
    ends = np.arange(sequences + 1, dtype=np.int32) * np.int32(shape.tokens)
    none = np.zeros(0, np.int32)
    return StepBatch(
        input_ids=np.random.default_rng(0).integers(0, vocab_size, count, np.int32),
        positions=positions,
        slot_mapping=held * page_size + positions % page_size,
        block_tables=tables,
        cu_seqlens_q=ends,
        seq_lens=np.full(sequences, shape.length, np.int32),
        logits_rows=ends[1:] - np.int32(1),
        needs_logits=np.zeros(sequences, np.bool_),
        samples=samples,
        history=none,
        suppress=none,
        copies=np.zeros((0, 2), np.int64),
        cleared_pages=tables.reshape(-1),
        shared_runs=np.zeros((0, 3), np.int32),
    )


def _measure(
    shape: StepShape,
    backend: CpuBackend,
    file: ModelFile,
    engine: EngineSpec,
    limits: Limits,
    progress: ProgressListener,
) -> StepFigure:
    progress.message(f"measuring {shape.name}")
    model = file.config.shape
    batch = step_batch(shape, engine.page_size, model.vocab_size)
    for context in _contexts(shape, engine, model.vocab_size):
        backend.run(context)
    backend.run(batch)
    batch.cleared_pages = np.zeros(0, np.int32)
    seconds, times = _median_step(backend, batch)
    kv_bytes = backend.page_bytes(model, engine.page_size) // (engine.page_size * model.num_layers)
    work = step_work(shape, model, kv_bytes, 4 if backend.weights_dtype == "fp32" else 2)
    return step_figure(shape, seconds, backend.operations, times, work, limits)


def _contexts(shape: StepShape, engine: EngineSpec, vocab_size: int) -> Iterator[StepBatch]:
    """Steps that write what `shape` finds in the cache: memory that was never written is not read either."""
    most = max(1, engine.max_batch_tokens // max(1, shape.context))
    for first in range(0, shape.sequences if shape.context else 0, most):
        part = replace(shape, sequences=min(most, shape.sequences - first), tokens=shape.context, context=0)
        yield step_batch(part, engine.page_size, vocab_size, first, shape.pages(engine.page_size))


def _median_step(backend: CpuBackend, batch: StepBatch) -> tuple[float, NDArray[np.int64]]:
    """Seconds of a step, and its times (see `CpuBackend.times`)."""
    times = backend.times
    steps: list[tuple[float, NDArray[np.int64]]] = []
    begin = time.perf_counter()
    while len(steps) < LEAST_STEPS or time.perf_counter() - begin < SECONDS:
        times[:] = 0
        start = time.perf_counter()
        backend.run(batch)
        steps.append((time.perf_counter() - start, times.copy()))
    middle = median_low(seconds for seconds, _ in steps)
    return next(step for step in steps if step[0] == middle)


def step_work(shape: StepShape, model: ModelShape, kv_bytes: int, table_bytes: int) -> StepWork:
    """Counts of a step in which every query attends to all tokens up to its own."""
    of_one = shape.tokens * shape.context + shape.tokens * (shape.tokens + 1) // 2
    return StepWork(
        tokens=shape.sequences * shape.tokens,
        rows=shape.sequences,
        keys=shape.sequences * shape.length,
        pairs=shape.sequences * of_one,
        kv_bytes=kv_bytes,
        query_size=model.num_heads * model.head_dim,
        table_bytes=table_bytes,
    )


def least_work(op: np.void, work: StepWork) -> tuple[int, int]:
    """Bytes that an operation must move and operations it must do, activations left out: they can stay in caches.

    Weights count once, as they are held; a linear is 2 * rows * inputs * outputs operations (sizes padded to 32).
    """
    code, k, n = int(op["code"]), int(op["k"]), int(op["n"])
    if code == records.EMBED:
        return work.tokens * k * work.table_bytes, 0
    if code == records.NORM:
        return 4 * n, 0
    if code == records.ROPE:
        return work.tokens * work.kv_bytes, 0
    if code == records.ATTENTION:
        return work.keys * work.kv_bytes, 4 * work.pairs * work.query_size
    if code in (records.LINEAR, records.LINEAR_ADD, records.LINEAR_SWIGLU, records.HEAD):
        columns = 2 * n if code == records.LINEAR_SWIGLU else n
        scales = 4 * columns if op["scales"] else 0
        rows = work.rows if op["logits_rows"] else work.tokens
        return columns // 32 * int(op["pair_bytes"]) + scales, 2 * rows * k * columns
    return 0, 0


def step_figure(
    shape: StepShape,
    seconds: float,
    ops: NDArray[np.void],
    times: NDArray[np.int64],
    work: StepWork,
    limits: Limits,
) -> StepFigure:
    """Figures of one step of `seconds`, whose `times` (threads, operations, 2) are nanoseconds."""
    working, waiting = times.mean(axis=0).T / 1e9
    codes = [code for code in KINDS if working[ops["code"] == code].sum() > 0 and code != records.CLEAR]
    return StepFigure(
        shape=shape,
        seconds=seconds,
        tokens_per_s=work.tokens / seconds,
        waiting=float(waiting.sum()) / seconds,
        outside=max(0.0, 1 - float(working.sum() + waiting.sum()) / seconds),
        kernels=[_kernel_figure(code, ops, working, work, limits, seconds) for code in codes],
    )


def _kernel_figure(
    code: int,
    ops: NDArray[np.void],
    working: NDArray[np.float64],
    work: StepWork,
    limits: Limits,
    step_seconds: float,
) -> KernelFigure:
    chosen = ops["code"] == code
    each = [(*least_work(op, work), multiply_limit(op, limits)) for op in ops[chosen]]
    seconds = float(working[chosen].sum())
    size, count = sum(e[0] for e in each), sum(e[1] for e in each)
    moving = size / limits.bytes_per_s
    multiplying = sum(operations / rate for _, operations, rate in each)
    return KernelFigure(
        kernel=KINDS[code],
        seconds=seconds,
        bytes=size,
        operations=count,
        bytes_per_s=size / seconds,
        operations_per_s=count / seconds,
        limit="memory" if moving >= multiplying else "multiply",
        of_limit=max(moving, multiplying) / seconds,
        of_step=seconds / step_seconds,
    )


def multiply_limit(op: np.void, limits: Limits) -> float:
    """Operations per second of the unit that an operation multiplies on: int8 weights have their own."""
    rates: dict[str, Any] = limits.operations_per_s
    if op["format"] == records.FORMAT_INT8 and "tdpbssd" in rates:
        return rates["tdpbssd"]
    return next(iter(rates.values()))
