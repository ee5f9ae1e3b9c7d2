"""The CPU backend: packs weights, owns memory and threads, records the program and runs it."""

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import KEY_BLOCK, ModelShape, Ops, StepBatch, StepLimits, StepResult, single_token_batch
from batchgen.kernels.cpu import attention, gemm, kv_cache, pack, program, tiles
from batchgen.kernels.cpu.features import available_kernels

ALIGNMENT, HUGE_PAGE = 4096, 2 << 20


KV_TYPES = {
    "fp32": kv_cache.KV_F32,
    "bf16": kv_cache.KV_BF16,
    "int8": kv_cache.KV_INT8,
    "q8_0": kv_cache.KV_INT8,
}
KV_SIZES = {"fp32": 4, "bf16": 2, "int8": 1, "q8_0": 1}


def aligned_zeros(count: int, dtype: Any) -> NDArray[Any]:
    """Zeros on a page boundary, on huge pages where the system has them; memory is taken only as it is touched."""
    dtype = np.dtype(dtype)
    size = count * dtype.itemsize
    alignment = HUGE_PAGE if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") else ALIGNMENT
    memory = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if alignment == HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype)


def pad(value: int, multiple: int = 32) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in kernel layout: `k` rows (inputs) and `n` columns (outputs), padded; `array` owns the memory."""

    array: NDArray[Any]
    k: int
    n: int

    @property
    def address(self) -> int:
        return self.array.ctypes.data


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation of the program: `ld` columns, padded."""

    array: NDArray[Any]
    ld: int

    @property
    def address(self) -> int:
        return self.array.ctypes.data


class StepArrays(NamedTuple):
    """What the threads read and write in a step, beside the program's own buffers."""

    input_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    logits_rows: NDArray[np.int32]
    needs_logits: NDArray[np.bool_]
    samples: NDArray[np.void]
    history: NDArray[np.int32]
    suppress: NDArray[np.int32]
    copies: NDArray[np.int64]
    cleared_pages: NDArray[np.int32]
    items: NDArray[np.int32]
    best: NDArray[np.int32]
    best_logit: NDArray[np.float32]
    log_sum: NDArray[np.float64]
    logits: NDArray[np.float32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Crew:
    """Threads that wait to run the same function together.

    The calling thread only waits for them, so that it can attend to signals meanwhile.
    """

    def __init__(self, threads: int):
        self._starts = [threading.Semaphore(0) for _ in range(threads)]
        self._ends = threading.Semaphore(0)
        self._work: Callable[[int], None] | None = None
        self._failure: BaseException | None = None
        for number, start in enumerate(self._starts):
            threading.Thread(target=self._serve, args=(number, start), daemon=True, name=f"kernel-{number}").start()

    def _serve(self, number: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            if self._work is None:
                return
            try:
                self._work(number)
            except BaseException as error:
                self._failure = error
            self._ends.release()

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work(number)` once on every thread and wait for all."""
        self._work = work
        for start in self._starts:
            start.release()
        for _ in self._starts:
            self._ends.acquire()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._work = None
        for start in self._starts:
            start.release()


class CpuBackend:
    """See `kernels.base.Backend`.

    kernel: one of `features.KERNELS`; weights_dtype: "fp32" or "bf16"; kv_dtype: one of `KV_TYPES`.
    """

    name = "cpu"

    def __init__(self, kernel: str, weights_dtype: str, kv_dtype: str, threads: int):
        if kernel not in available_kernels():
            raise ValueError(f"kernel {kernel} does not run on this processor, which has {available_kernels()}")
        if kernel != "portable" and weights_dtype != "bf16":
            raise ValueError(f"kernel {kernel} needs bf16 weights, not {weights_dtype}")
        self.kernel, self.weights_dtype, self.kv_dtype = kernel, weights_dtype, kv_dtype
        self._code = {
            "amx_bf16": gemm.KERNEL_AMX,
            "avx512_bf16": gemm.KERNEL_AVX512_BF16,
            "portable": gemm.KERNEL_F32 if weights_dtype == "fp32" else gemm.KERNEL_BF16_WEIGHTS,
        }[kernel]
        self._act_dtype = np.float32 if kernel == "portable" else np.uint16
        self._kv_amx = kernel == "amx_bf16" and kv_dtype != "fp32"
        self._threads = threads
        self._crew: Crew | None = None
        self._kept: list[NDArray[Any]] = []

    # Weights

    def vector(self, values: NDArray[np.float32]) -> Packed:
        array = aligned_zeros(pad(len(values)), np.float32)
        array[: len(values)] = values
        return Packed(array, len(array), 1)

    def table(self, rows: NDArray[np.float32]) -> Packed:
        count, k = rows.shape
        if self.weights_dtype == "fp32":
            array = aligned_zeros(count * pad(k), np.float32)
            array.reshape(count, pad(k))[:, :k] = rows
        else:
            array = aligned_zeros(count * pad(k), np.uint16)
            pack.rows_to_bf16(rows, array.reshape(count, pad(k)))
        return Packed(array, pad(k), count)

    def linear(self, parts: Sequence[NDArray[np.float32]]) -> Packed:
        k, n = parts[0].shape[1], sum(len(p) for p in parts)
        array = self._panels(k, n)
        column = 0
        for part in parts:
            pack.fill_panels(part, array, pad(k), column, False)
            column += len(part)
        return Packed(array, pad(k), pad(n))

    def gated_pair(self, gate: NDArray[np.float32], up: NDArray[np.float32]) -> Packed:
        """Panels of gate and up in turn, so that one block holds both halves of sixteen outputs."""
        n, k = gate.shape
        array = self._panels(k, 2 * pad(n))
        pack.fill_panels(gate, array, pad(k), 0, True)
        pack.fill_panels(up, array, pad(k), 16, True)
        return Packed(array, pad(k), pad(n))

    def _panels(self, k: int, n: int) -> NDArray[Any]:
        return aligned_zeros(pad(k) * pad(n), np.float32 if self.weights_dtype == "fp32" else np.uint16)

    # Memory

    def page_bytes(self, shape: ModelShape, page_size: int) -> int:
        scales = self._kv_groups(shape) * 4 if KV_TYPES[self.kv_dtype] == kv_cache.KV_INT8 else 0
        size = pad(shape.head_dim) * KV_SIZES[self.kv_dtype] + scales
        return shape.num_layers * shape.num_kv_heads * 2 * page_size * size

    def _kv_groups(self, shape: ModelShape) -> int:
        """Scales of a token's keys, or values, in one head: one for `int8`, one in 32 dimensions for `q8_0`."""
        return pad(shape.head_dim) // 32 if self.kv_dtype == "q8_0" else 1

    def build(
        self,
        forward: Callable[[Ops], None],
        shape: ModelShape,
        limits: StepLimits,
        rope: tuple[NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        """Record `forward` and allocate all that a step needs. `rope`: cos and sin (positions, head_dim / 2)."""
        if shape.head_dim % 16:
            raise ValueError(f"head_dim {shape.head_dim} is not a multiple of 16")
        if limits.page_size % KEY_BLOCK:
            raise ValueError(f"page_size {limits.page_size} is not a multiple of {KEY_BLOCK}")
        self._shape, self._limits = shape, limits
        self._crew = Crew(self._threads)
        self._tokens = pad(limits.max_tokens)
        self._rows = pad(limits.max_seqs)
        self._models = np.zeros(1, program.MODEL_DTYPE)
        self._steps = np.zeros(1, program.STEP_DTYPE)
        self._fill_model(rope)
        recorder = Recorder(self, shape, self._tokens, self._rows)
        forward(recorder)
        self._ops = np.concatenate(recorder.ops)
        self._ops["fused_end"] = program.fused_ends(self._ops)
        self._counters = self._keep("counters", len(self._ops) * program.COUNTERS_PER_OP, np.int64)
        self.times = np.zeros((self._threads, len(self._ops), 2), np.int64)
        self._outputs()

    def _keep(self, name: str, count: int, dtype: Any) -> NDArray[Any]:
        array = aligned_zeros(count, dtype)
        self._models[name] = array.ctypes.data
        self._kept.append(array)
        return array

    def _fill_model(self, rope: tuple[NDArray[np.float32], NDArray[np.float32]]) -> None:
        shape, limits, dim = self._shape, self._limits, pad(self._shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        values = {
            "threads": self._threads,
            "kernel": self._code,
            "act_bf16": self._act_dtype == np.uint16,
            "table_bf16": self.weights_dtype == "bf16",
            "kv_type": KV_TYPES[self.kv_dtype],
            "kv_groups": self._kv_groups(shape),
            "kv_amx": self._kv_amx,
            "layers": shape.num_layers,
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "group": group,
            "head_dim": shape.head_dim,
            "dim": dim,
            "vocab": shape.vocab_size,
            "page_size": limits.page_size,
            "pages": limits.num_pages,
            "max_tokens": self._tokens,
            "q_scale": shape.head_dim**-0.5 * 1.4426950408889634,
        }
        for name, value in values.items():
            self._models[name] = value
        self._keep("kv", limits.num_pages * self.page_bytes(shape, limits.page_size) // 4, np.float32)
        self._keep("q", (shape.num_heads * self._tokens + 16) * dim, np.uint16 if self._kv_amx else np.float32)
        self._models["state_items"] = items = self._rows * group // 16 + self._rows
        self._keep("state", shape.num_kv_heads * items * 16 * (dim + 2), np.float32)
        for name, table in zip(("cos", "sin"), rope, strict=True):
            self._keep(name, table.size, np.float32)[:] = table.reshape(-1)
        groups = -(-pad(shape.vocab_size) // (32 * program.HEAD_PAIRS))
        self._keep("partial", self._rows * groups * program.PARTIAL_FIELDS, np.float32)
        self._barrier = self._keep("barrier", 8, np.int64)
        self._kept.append(config := tiles.tile_config())
        self._models["tile_config"] = config.ctypes.data
        scratch = pad(max(dim * 320 + 8192 + 512, 4096 * program.HEAD_PAIRS), ALIGNMENT)
        self._models["scratch_bytes"] = scratch
        self._keep("scratch", scratch * self._threads, np.uint8)

    def _outputs(self) -> None:
        rows, vocab = self._rows, pad(self._shape.vocab_size)
        self._best = np.zeros(rows, np.int32)
        self._best_logit = np.zeros(rows, np.float32)
        self._log_sum = np.zeros(rows, np.float64)
        self._logits = self._keep("logits", rows * vocab, np.float32).reshape(rows, vocab)
        self._vocab_scratch = [(np.zeros(vocab, np.float32), np.zeros(vocab, np.int32)) for _ in range(self._threads)]
        items = 2 * (self._tokens * self._shape.num_heads // self._shape.num_kv_heads // 16 + self._rows + 16)
        self._items = np.zeros((items, attention.ITEM_FIELDS), np.int32)

    # Execution

    def warm_up(self) -> None:
        self.run(single_token_batch())

    def run(self, batch: StepBatch) -> StepResult:
        """Execute one step; see `StepBatch` for shapes."""
        shape, samples = self._shape, len(batch.samples)
        group = shape.num_heads // shape.num_kv_heads
        shared, items = attention.plan_items(
            batch.cu_seqlens_q, batch.seq_lens, batch.shared_runs, group, KEY_BLOCK, self._limits.page_size, self._items
        )
        self._steps[0] = (
            batch.num_tokens, len(batch.logits_rows), samples, len(batch.copies), len(batch.cleared_pages), shared,
            items, program.chunk_rows(batch.num_tokens, self._threads),
        )  # fmt: skip
        tokens, logprobs = np.zeros(samples, np.int32), np.zeros(samples, np.float32)
        self._counters[:] = 0
        self._barrier[:] = 0
        arrays = StepArrays(
            batch.input_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.logits_rows,
            batch.needs_logits, batch.samples, batch.history, batch.suppress, batch.copies, batch.cleared_pages,
            self._items, self._best, self._best_logit, self._log_sum, self._logits, tokens, logprobs,
        )  # fmt: skip

        def work(thread: int) -> None:
            program.run(
                self._ops, self._models, self._steps, arrays, thread, self._vocab_scratch[thread], self.times[thread]
            )

        assert self._crew is not None, "run comes after build"
        self._crew.run(work)
        return StepResult(
            tokens,
            logprobs,
            self._logits[:, : shape.vocab_size],
        )

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()


class Recorder:
    """`Ops` that writes the program instead of computing."""

    def __init__(self, backend: CpuBackend, shape: ModelShape, tokens: int, rows: int):
        self._backend, self._shape, self._tokens, self._rows = backend, shape, tokens, rows
        self._buffers: dict[Any, Buffer] = {}
        self.ops: list[NDArray[np.void]] = []

    def _buffer(self, role: str, columns: int, dtype: Any, rows: int | None = None) -> Buffer:
        """One buffer per role and width: layers take turns with them."""
        key = (role, columns)
        if key not in self._buffers:
            array = aligned_zeros((self._tokens if rows is None else rows) * columns, dtype)
            self._backend._kept.append(array)
            self._buffers[key] = Buffer(array, columns)
        return self._buffers[key]

    def _record(self, code: int, **fields: Any) -> None:
        op = np.zeros(1, program.OP_DTYPE)
        op["code"] = code
        for name, value in fields.items():
            op[name] = value
        self.ops.append(op)

    def embed(self, table: Packed) -> Buffer:
        out = self._buffer("residual", table.k, np.float32)
        self._record(program.CLEAR)
        self._record(program.EMBED, w=table.address, out=out.address, k=table.k, ld=out.ld)
        self._backend._kept.append(table.array)
        return out

    def _norm(self, x: Buffer, weight: Packed, eps: float, out: Buffer, final: bool) -> Buffer:
        self._record(
            program.NORM, logits_rows=final, x=x.address, w=weight.address, out=out.address, k=x.ld,
            n=self._shape.hidden_size, ld=x.ld, eps=eps,
        )  # fmt: skip
        self._backend._kept.append(weight.array)
        return out

    def rms_norm(self, x: Buffer, weight: Packed, eps: float) -> Buffer:
        return self._norm(x, weight, eps, self._buffer("normed", x.ld, self._backend._act_dtype), False)

    def final_norm(self, x: Buffer, weight: Packed, eps: float) -> Buffer:
        return self._norm(x, weight, eps, self._buffer("final", x.ld, self._backend._act_dtype, self._rows), True)

    def _linear(self, code: int, x: Buffer, weight: Packed, out: Buffer, logits_rows: bool = False) -> Buffer:
        self._record(
            code, logits_rows=logits_rows, x=x.address, w=weight.address, out=out.address, k=weight.k, n=weight.n,
            ld=out.ld,
        )  # fmt: skip
        self._backend._kept.append(weight.array)
        return out

    def linear(self, x: Buffer, weight: Packed) -> Buffer:
        return self._linear(program.LINEAR, x, weight, self._buffer("linear", weight.n, np.float32, self._tokens + 16))

    def linear_add(self, x: Buffer, weight: Packed, residual: Buffer) -> Buffer:
        return self._linear(program.LINEAR_ADD, x, weight, residual)

    def linear_swiglu(self, x: Buffer, weight: Packed) -> Buffer:
        return self._linear(program.LINEAR_SWIGLU, x, weight, self._buffer("gated", weight.n, self._backend._act_dtype))

    def rope_and_cache(self, qkv: Buffer, layer: int) -> Buffer:
        self._record(program.ROPE, x=qkv.address, ld=qkv.ld, layer=layer)
        return qkv

    def attention(self, q: Buffer, layer: int) -> Buffer:
        out = self._buffer("attended", pad(self._shape.num_heads * self._shape.head_dim), self._backend._act_dtype)
        self._record(program.ATTENTION, out=out.address, n=out.ld, layer=layer)
        return out

    def sample_head(self, x: Buffer, weight: Packed) -> None:
        none = Buffer(x.array, 0)
        self._linear(program.HEAD, x, weight, none, True)
        self._record(program.PICK, logits_rows=True, n=weight.n)
        self._record(program.SAMPLE)
