"""The CPU backend: packs weights, owns memory and threads, records the program and runs it."""

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import (
    KEY_BLOCK,
    Codes,
    Matrix,
    ModelShape,
    Ops,
    StepBatch,
    StepLimits,
    StepResult,
    single_token_batch,
)
from batchgen.kernels.cpu import (
    attention,
    experts,
    gemm,
    kv_cache,
    pack,
    program,
    records,
    row_kernels,
    sampling,
    tiles,
)
from batchgen.kernels.cpu.attend import scratch_bytes, shaped_attention
from batchgen.kernels.cpu.codes import block_bytes
from batchgen.kernels.cpu.features import available_kernels
from batchgen.kernels.cpu.head import HEAD_ROWS
from batchgen.kernels.cpu.linear import BLOCK_BYTES, INTEGERS_HEADER, PART_TILES, rows_at_once
from batchgen.kernels.cpu.on_demand import Kernel, kernel_address
from batchgen.kernels.cpu.records import FORMAT_CODES, FORMAT_INT8, FORMAT_PANELS, HEAD_PAIRS, PARTIAL_FIELDS
from batchgen.kernels.reference import final_norm

ALIGNMENT, HUGE_PAGE = 4096, 2 << 20


WEIGHT_TYPES = ("fp32", "bf16", "native", "int8")
KV_TYPES = {
    "fp32": kv_cache.KV_F32,
    "bf16": kv_cache.KV_BF16,
    "int8": kv_cache.KV_INT8,
    "q8_0": kv_cache.KV_INT8,
}
KV_SIZES = {"fp32": 4, "bf16": 2, "int8": 1, "q8_0": 1}


def aligned_zeros(count: int, dtype: Any) -> NDArray[Any]:
    """Zeros on a page boundary, on huge pages where the system has them; memory is taken only as it is touched.

    MemoryError when there is no room for them.
    """
    dtype = np.dtype(dtype)
    size = count * dtype.itemsize
    alignment = HUGE_PAGE if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE") else ALIGNMENT
    try:
        memory = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size} bytes") from error
    if alignment == HUGE_PAGE:
        with contextlib.suppress(OSError):  # a system may know the request and not grant it
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype)


def pad(value: int, multiple: int = 32) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in kernel layout: `k` rows (inputs) and `n` columns (outputs), padded; the arrays own the memory.

    `layout`: what an operation must know of it, the fields of `records.OP_DTYPE` from `format` on.
    """

    array: NDArray[Any]
    k: int
    n: int
    layout: dict[str, int] = field(default_factory=dict)
    scales: NDArray[np.float32] | None = None  # of the columns, of int8
    columns: int = 0  # of a vector, without padding

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


def format_of(matrix: Matrix) -> tuple[int, int, bool] | None:
    """How a matrix is quantised; None when it is not."""
    return matrix.format if isinstance(matrix, Codes) else None


def most_rows(op: np.void, act_dtype: Any) -> int:
    """The most rows that `linear.row_chunk`, `program.chunk_rows` and the head take at a time."""
    return max(rows_at_once(int(op["k"]), np.dtype(act_dtype).itemsize), program.MOST_ROWS, HEAD_ROWS)


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

    kernel: one of `features.KERNELS`; weights_dtype: one of `WEIGHT_TYPES`; kv_dtype: one of `KV_TYPES`.
    """

    name = "cpu"
    host_memory = True

    def __init__(self, kernel: str, weights_dtype: str, kv_dtype: str, threads: int):
        if kernel not in available_kernels():
            raise ValueError(f"kernel {kernel} does not run on this processor, which has {available_kernels()}")
        if kernel != "portable" and weights_dtype == "fp32":
            raise ValueError(f"kernel {kernel} works on bf16 or narrower weights, not {weights_dtype}")
        self.kernel, self.weights_dtype, self.kv_dtype = kernel, weights_dtype, kv_dtype
        self._code = {
            "amx_bf16": gemm.KERNEL_AMX,
            "avx512_bf16": gemm.KERNEL_AVX512_BF16,
            "portable": gemm.KERNEL_F32 if weights_dtype == "fp32" else gemm.KERNEL_BF16_WEIGHTS,
        }[kernel]
        self.wants_codes = True  # for weights in full, too: expanding them here is faster
        self._act_dtype = np.float32 if kernel == "portable" else np.uint16
        self._kv_amx = kernel == "amx_bf16" and kv_dtype != "fp32"
        self.kv_layout = "tiles" if self._kv_amx else "vectors"
        self._threads = threads
        self._crew: Crew | None = None
        self._kept: list[NDArray[Any]] = []

    # Weights

    def vector(self, values: NDArray[np.float32]) -> Packed:
        array = aligned_zeros(pad(len(values)), np.float32)
        array[: len(values)] = values
        return Packed(array, len(array), 1, columns=len(values))

    def table(self, rows: NDArray[np.float32]) -> Packed:
        count, k = rows.shape
        if self.weights_dtype == "fp32":
            array = aligned_zeros(count * pad(k), np.float32)
            array.reshape(count, pad(k))[:, :k] = rows
        else:
            array = aligned_zeros(count * pad(k), np.uint16)
            pack.rows_to_bf16(rows, array.reshape(count, pad(k)))
        return Packed(array, pad(k), count)

    def linear(self, parts: Sequence[Matrix]) -> tuple[Packed, ...]:
        """One weight, or one for each part when they are quantised in different ways."""
        columns = np.cumsum([0, *(p.shape[0] for p in parts)])
        if self.weights_dtype == "native" and len({format_of(p) for p in parts}) > 1 and not (columns % 32).any():
            return tuple(self._pack([p], [0], pad(p.shape[0]), False) for p in parts)
        return (self._pack(parts, columns[:-1].tolist(), pad(int(columns[-1])), False),)

    def gated_pair(self, gate: Matrix, up: Matrix) -> tuple[Packed, ...]:
        """Panels of gate and up in turn, so that one block holds both halves of sixteen outputs."""
        packed = self._pack([gate, up], [0, 16], 2 * pad(gate.shape[0]), True)
        return (replace(packed, n=packed.n // 2),)

    def _pack(self, parts: Sequence[Matrix], columns: list[int], n: int, alternate: bool) -> Packed:
        """Matrices that start at the given output columns, in one weight of `n` columns."""
        codes = [p for p in parts if isinstance(p, Codes)]
        if self.weights_dtype == "native" and codes and len({format_of(p) for p in parts}) == 1:
            return self._pack_codes(codes, columns, n, alternate)
        arrays = [pack.expand_codes(p) if isinstance(p, Codes) else p for p in parts]
        if self.weights_dtype == "int8":
            return self._pack_int8(arrays, columns, n, alternate)
        k = pad(arrays[0].shape[1])
        panels = aligned_zeros(k * n, np.float32 if self.weights_dtype == "fp32" else np.uint16)
        for part, column in zip(arrays, columns, strict=True):
            pack.fill_panels(part, panels, k, column, alternate)
        return Packed(panels, k, n, {"format": FORMAT_PANELS, "pair_bytes": k * 32 * panels.itemsize})

    def _pack_codes(self, parts: Sequence[Codes], columns: list[int], n: int, alternate: bool) -> Packed:
        bits, group, minima = parts[0].format
        k = parts[0].shape[1]
        size = k // 32 * block_bytes(bits, group, minima)
        panels = aligned_zeros(n // 16 * size, np.uint8)
        for part, column in zip(parts, columns, strict=True):
            pack.fill_codes(part, panels, column, alternate)
        layout = {"format": FORMAT_CODES, "pair_bytes": 2 * size, "bits": bits, "group": group, "minima": int(minima)}
        return Packed(panels, k, n, layout)

    def _pack_int8(self, parts: Sequence[NDArray[np.float32]], columns: list[int], n: int, alternate: bool) -> Packed:
        k = pad(parts[0].shape[1], 64)
        panels, scales = aligned_zeros(k * n, np.int8), aligned_zeros(n, np.float32)
        for part, column in zip(parts, columns, strict=True):
            codes, of_rows = pack.quantise_rows(part)
            pack.fill_panels(codes, panels, k, column, alternate)
            at = np.arange(len(part))
            scales[column + (at // 16 * 32 + at % 16 if alternate else at)] = of_rows
        layout = {"format": FORMAT_INT8, "pair_bytes": k * 32}
        return Packed(panels, pad(parts[0].shape[1]), n, layout, scales)

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
        """Record `forward` and allocate all that a step needs. `rope`: cos, sin (tables, positions, head_dim / 2)."""
        if shape.head_dim % 16:
            raise ValueError(f"head_dim {shape.head_dim} is not a multiple of 16")
        if limits.page_size % KEY_BLOCK:
            raise ValueError(f"page_size {limits.page_size} is not a multiple of {KEY_BLOCK}")
        self._shape, self._limits = shape, limits
        self._crew = Crew(self._threads)
        self._tokens = pad(limits.max_tokens)
        self._rows = pad(limits.max_seqs)
        self._models = np.zeros(1, records.MODEL_DTYPE)
        self._steps = np.zeros(1, records.STEP_DTYPE)
        self._fill_model(rope)
        recorder = Recorder(self, shape, self._tokens, self._rows, rope[0][0].nbytes)
        forward(recorder)
        self._final = recorder.final
        self.operations = np.concatenate(recorder.ops)
        self._unlinked = recorder.kernels
        windows = {int(window) for window in self.operations["window"]} - {0}
        if len(windows) > 1:
            raise ValueError(f"attention has windows of {sorted(windows)} keys; one size is supported")
        self._window = max(windows, default=0)
        self._reserve_scratch()
        self.operations["fused_end"] = program.fused_ends(self.operations)
        self._counters = self._keep("counters", len(self.operations) * program.COUNTERS_PER_OP, np.int64)
        # Nanoseconds of work and of waiting for other threads, summed since loading; may be set to zero.
        self.times = np.zeros((self._threads, len(self.operations), 2), np.int64)
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
            "table_bf16": self.weights_dtype != "fp32",
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
            "q_scale": shape.head_dim**-0.5 * sampling.LOG2_E,
        }
        for name, value in values.items():
            self._models[name] = value
        kv = self._keep("kv", limits.num_pages * self.page_bytes(shape, limits.page_size) // 4, np.float32)
        self._pages = kv.view(np.uint8).reshape(shape.num_layers, limits.num_pages, -1)  # see kv_cache.block_address
        self._keep("q", (shape.num_heads * self._tokens + 16) * dim, np.uint16 if self._kv_amx else np.float32)
        self._models["state_items"] = items = self._rows * group // 16 + self._rows
        self._keep("state", shape.num_kv_heads * items * 16 * (dim + 2), np.float32)
        for name, table in zip(("cos", "sin"), rope, strict=True):
            self._keep(name, table.size, np.float32)[:] = table.reshape(-1)
        groups = -(-pad(shape.vocab_size) // (32 * HEAD_PAIRS))
        self._keep("partial", self._rows * groups * PARTIAL_FIELDS, np.float32)
        self._barrier = self._keep("barrier", 8, np.int64)
        self._kept.append(config := tiles.tile_config())
        self._models["tile_config"] = config.ctypes.data

    def _reserve_scratch(self) -> None:
        """For each thread: blocks of results, or what attention needs; expanded panels; rows in int8; the head's."""
        linears = [op for op in self.operations if op["w"]]
        most = max(most_rows(op, self._act_dtype) for op in linears)
        in_parts = max([64, *(most_rows(op, self._act_dtype) for op in linears if op["k"] > 32 * PART_TILES)])
        widest = int(self.operations["k"].max())
        integers = max(pad(int(op["k"]), 64) * most_rows(op, self._act_dtype) for op in linears)
        has_integers = (self.operations["format"] == FORMAT_INT8).any()
        pieces = {
            "blocks": max(scratch_bytes(pad(self._shape.head_dim)), in_parts // 32 * BLOCK_BYTES),
            "panels": widest * 64,
            "integers": INTEGERS_HEADER + pad(most * 4, ALIGNMENT) + integers if has_integers else 0,
            "head": HEAD_ROWS // 32 * HEAD_PAIRS * BLOCK_BYTES,
        }
        end = 0
        for name, size in pieces.items():
            if name != "blocks":
                self._models[f"{name}_offset"] = end
            end += pad(size, ALIGNMENT)
        self._models["scratch_bytes"] = end
        self._keep("scratch", end * self._threads, np.uint8)

    def _outputs(self) -> None:
        rows, vocab = self._rows, pad(self._shape.vocab_size)
        self._best = np.zeros(rows, np.int32)
        self._best_logit = np.zeros(rows, np.float32)
        self._log_sum = np.zeros(rows, np.float64)
        self._logits = self._keep("logits", rows * vocab, np.float32).reshape(rows, vocab)
        self._vocab_scratch = [(np.zeros(vocab, np.float32), np.zeros(vocab, np.int32)) for _ in range(self._threads)]
        items = 2 * (self._tokens * self._shape.num_heads // self._shape.num_kv_heads // 16 + self._rows + 16)
        items *= 2 if self._window else 1
        self._items = np.zeros((items, attention.ITEM_FIELDS), np.int32)

    # Execution

    def warm_up(self) -> None:
        self.run(single_token_batch())

    def run(self, batch: StepBatch) -> StepResult:
        """Execute one step; see `StepBatch` for shapes."""
        shape, samples = self._shape, len(batch.samples)
        self._link()
        shared, items = self._plan(batch, 0, 0)
        window_shared, window_items = self._plan(batch, self._window, items) if self._window else (items, items)
        self._steps[0] = (
            batch.num_tokens, len(batch.logits_rows), samples, len(batch.copies), len(batch.cleared_pages), shared,
            items, program.chunk_rows(batch.num_tokens, self._threads), len(batch.seq_lens), window_shared,
            window_items, batch.positions.ctypes.data, batch.logits_rows.ctypes.data, batch.block_tables.ctypes.data,
            batch.block_tables.shape[1], self._items.ctypes.data,
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
                self.operations,
                self._models,
                self._steps,
                arrays,
                thread,
                self._vocab_scratch[thread],
                self.times[thread],
            )

        assert self._crew is not None, "run comes after build"
        self._crew.run(work)
        return StepResult(
            tokens,
            logprobs,
            self._logits[:, : shape.vocab_size],
            self._hidden_states(batch),
        )

    def _plan(self, batch: StepBatch, window: int, begin: int) -> tuple[int, int]:
        """Attention's work list from item `begin` on: ends of its items over shared runs, and of all."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        shared, items = attention.plan_items(
            batch.cu_seqlens_q, batch.seq_lens, batch.shared_runs, group, KEY_BLOCK, self._limits.page_size, window,
            self._items[begin:],
        )  # fmt: skip
        return begin + shared, begin + items

    def _link(self) -> None:
        """Compile, or load, the kernels that are not part of the program, where that has not been done."""
        for number, kernel in self._unlinked:
            self.operations[number]["function"] = kernel_address(kernel)
        self._unlinked = []

    def _hidden_states(self, batch: StepBatch) -> NDArray[np.float32]:
        """The final norm of what the layers left of the rows that want it, in float32 whatever activations are."""
        if self._final is None:
            return np.zeros((0, 0), np.float32)
        x, weight, bias, eps, centred = self._final
        size = self._shape.hidden_size
        rows = x.array.reshape(-1, x.ld)[batch.logits_rows, :size]
        shift = None if bias is None else bias.array[:size]
        return final_norm(rows, weight.array[:size], shift, eps, centred)

    def read_page(self, page: int) -> NDArray[np.uint8]:
        return self._pages[:, page].flatten()

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        place = self._pages[:, page]
        place[:] = data.reshape(place.shape)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()


def operation(code: int, **fields: Any) -> NDArray[np.void]:
    """A record of a program, (1,)."""
    op = np.zeros(1, records.OP_DTYPE)
    op["code"] = code
    for name, value in fields.items():
        op[name] = value
    return op


def weight_fields(weight: Packed, x: Buffer, out: Buffer, column: int = 0) -> dict[str, int]:
    """What an operation says of a product whose results begin at a column."""
    return {
        "x": x.address, "w": weight.address, "out": out.address + column * 4, "k": weight.k, "n": weight.n,
        "ld": out.ld, "scales": 0 if weight.scales is None else weight.scales.ctypes.data, **weight.layout,
    }  # fmt: skip


class Recorder:
    """`Ops` that writes the program instead of computing."""

    def __init__(self, backend: CpuBackend, shape: ModelShape, tokens: int, rows: int, rope_bytes: int):
        self._backend, self._shape, self._tokens, self._rows = backend, shape, tokens, rows
        self._rope_bytes = rope_bytes  # of a table of cosines
        self._buffers: dict[Any, Buffer] = {}
        self.ops: list[NDArray[np.void]] = []
        self.kernels: list[tuple[int, Kernel]] = []  # those that operations, by number, carry the address of
        self.final: tuple[Buffer, Packed, Packed | None, float, bool] | None = None

    def _buffer(self, role: str, columns: int, dtype: Any, rows: int | None = None) -> Buffer:
        """One buffer per role and width: layers take turns with them."""
        key = (role, columns)
        if key not in self._buffers:
            array = aligned_zeros((self._tokens if rows is None else rows) * columns, dtype)
            self._backend._kept.append(array)
            self._buffers[key] = Buffer(array, columns)
        return self._buffers[key]

    def _keep(self, *weights: Packed | None) -> None:
        self._backend._kept += [weight.array for weight in weights if weight is not None]

    def _record(self, code: int, kernel: Kernel | None = None, **fields: Any) -> None:
        if kernel is not None:
            self.kernels.append((len(self.ops), kernel))
        self.ops.append(operation(code, **fields))

    def embed(self, table: Packed) -> Buffer:
        out = self._buffer("residual", table.k, np.float32)
        self._record(records.CLEAR)
        self._record(records.EMBED, w=table.address, out=out.address, k=table.k, ld=out.ld)
        self._backend._kept.append(table.array)
        return out

    def _norm(self, x: Buffer, weight: Packed, eps: float, out: Buffer, final: bool) -> Buffer:
        self._record(
            records.NORM, logits_rows=final, x=x.address, w=weight.address, out=out.address, k=x.ld,
            n=self._shape.hidden_size, ld=x.ld, eps=eps,
        )  # fmt: skip
        self._backend._kept.append(weight.array)
        return out

    def rms_norm(self, x: Buffer, weight: Packed, eps: float, kept: bool = False) -> Buffer:
        out = self._buffer("kept" if kept else "normed", x.ld, self._backend._act_dtype)
        return self._norm(x, weight, eps, out, False)

    def final_norm(self, x: Buffer, weight: Packed, eps: float) -> Buffer:
        return self._norm(x, weight, eps, self._buffer("final", x.ld, self._backend._act_dtype, self._rows), True)

    def _linear(
        self, code: int, x: Buffer, weights: tuple[Packed, ...], out: Buffer, logits_rows: bool = False,
        kernel: Kernel | None = None, **fields: Any,
    ) -> Buffer:  # fmt: skip
        column = 0
        for weight in weights:
            self._record(code, kernel, logits_rows=logits_rows, **weight_fields(weight, x, out, column), **fields)
            column += weight.n
            self._backend._kept += [weight.array] if weight.scales is None else [weight.array, weight.scales]
        return out

    def linear(self, x: Buffer, weights: tuple[Packed, ...]) -> Buffer:
        n = sum(weight.n for weight in weights)
        return self._linear(records.LINEAR, x, weights, self._buffer("linear", n, np.float32, self._tokens + 16))

    def linear_add(self, x: Buffer, weights: tuple[Packed, ...], residual: Buffer) -> Buffer:
        return self._linear(records.LINEAR_ADD, x, weights, residual)

    def linear_swiglu(self, x: Buffer, weights: tuple[Packed, ...]) -> Buffer:
        out = self._buffer("gated", weights[0].n, self._backend._act_dtype)
        return self._linear(records.LINEAR_SWIGLU, x, weights, out)

    def rope_and_cache(self, qkv: Buffer, layer: int, table: int = 0) -> Buffer:
        self._record(records.ROPE, x=qkv.address, ld=qkv.ld, layer=layer, rope=table * self._rope_bytes)
        return qkv

    def attention(self, q: Buffer, layer: int, window: int = 0, soft_cap: float = 0.0) -> Buffer:
        out = self._buffer("attended", pad(self._shape.num_heads * self._shape.head_dim), self._backend._act_dtype)
        self._record(
            records.ATTENTION, shaped_attention if window or soft_cap else None, out=out.address, n=out.ld, layer=layer,
            window=window, soft_cap=soft_cap,
        )  # fmt: skip
        return out

    def layer_norm(
        self, x: Buffer, weight: Packed, bias: Packed | None, eps: float, kept: bool = False, final: bool = False
    ) -> Buffer:
        role = "final" if final else "kept" if kept else "normed"
        out = self._buffer(role, x.ld, self._backend._act_dtype, self._rows if final else None)
        self._record(
            records.ROWS, row_kernels.layer_norm_rows, logits_rows=final, x=x.address, w=weight.address,
            out=out.address, bias=0 if bias is None else bias.address, k=x.ld, n=self._shape.hidden_size, ld=x.ld,
            eps=eps,
        )  # fmt: skip
        self._keep(weight, bias)
        return out

    def operand(self, x: Buffer) -> Buffer:
        out = self._buffer("normed", x.ld, self._backend._act_dtype)
        self._record(records.ROWS, row_kernels.operand_rows, x=x.address, out=out.address, k=x.ld, ld=x.ld)
        return out

    def add_bias(self, x: Buffer, bias: Packed) -> Buffer:
        self._record(records.ROWS, row_kernels.bias_rows, bias=bias.address, out=x.address, k=bias.k, ld=x.ld)
        self._keep(bias)
        return x

    def norm_columns(self, x: Buffer, first: int, groups: int, weight: Packed, eps: float, centred: bool) -> Buffer:
        columns = weight.columns
        self._record(
            records.ROWS, row_kernels.norm_columns_rows, w=weight.address, out=x.address + first * 4, k=weight.k,
            n=columns, width=columns // groups, ld=x.ld, eps=eps, kind=centred,
        )  # fmt: skip
        self._keep(weight)
        return x

    def add_normed(self, x: Buffer, weight: Packed, eps: float, residual: Buffer) -> Buffer:
        self._record(
            records.ROWS, row_kernels.add_normed_rows, x=x.address, w=weight.address, out=residual.address,
            k=residual.ld, n=self._shape.hidden_size, ld=x.ld, eps=eps,
        )  # fmt: skip
        self._keep(weight)
        return residual

    def add_positions(self, x: Buffer, table: Packed) -> Buffer:
        self._record(records.ROWS, row_kernels.add_position_rows, w=table.address, out=x.address, k=x.ld, ld=x.ld)
        self._keep(table)
        return x

    def activate(self, x: Buffer, columns: int, kind: str, gated: bool) -> Buffer:
        out = self._buffer("gated", pad(columns), self._backend._act_dtype)
        self._record(
            records.ROWS, row_kernels.activate_rows, x=x.address, out=out.address, k=out.ld, n=columns, ld=x.ld,
            kind=records.ACTIVATIONS.index(kind), width=columns if gated else 0,
        )  # fmt: skip
        return out

    def add_experts(
        self, x: Buffer, routing: Buffer, gate_up: Sequence[tuple[Packed, ...]], down: Sequence[tuple[Packed, ...]],
        chosen: int, normalised: bool, residual: Buffer,
    ) -> Buffer:  # fmt: skip
        sizes = self._tokens, chosen, len(down)
        routes = self._buffer("routes", experts.routes_size(*sizes), np.int32, 1)
        common: dict[str, Any] = {"routes": routes.address, "chosen": chosen, "expert_count": len(down)}
        places = experts.most_places(*sizes)
        grouped = self._buffer("grouped", x.ld, self._backend._act_dtype, places)
        gated = self._buffer("grouped gated", gate_up[0][0].n, self._backend._act_dtype, places)
        results = self._buffer("grouped results", down[0][0].n, np.float32, places)
        self._record(records.ROWS, experts.route_rows, x=routing.address, ld=routing.ld, kind=normalised, **common)
        self._record(records.WHOLE, experts.group_rows, **common)
        self._record(records.WHOLE, experts.gather_rows, x=x.address, out=grouped.address, k=x.ld, **common)
        self._multiply_experts(records.LINEAR_SWIGLU, grouped, gate_up, gated, common)
        self._multiply_experts(records.LINEAR, gated, down, results, common)
        self._record(
            records.ROWS, experts.combine_rows, x=results.address, out=residual.address, k=residual.ld, ld=results.ld,
            **common,
        )  # fmt: skip
        return residual

    def _multiply_experts(
        self, code: int, x: Buffer, weights: Sequence[tuple[Packed, ...]], out: Buffer, common: dict[str, Any]
    ) -> None:
        """An operation for all, which knows what scratch it needs, and in a table one for each expert."""
        fields = [weight_fields(weight, x, out) for (weight,) in weights]
        own = np.concatenate([operation(code, **each) for each in fields])
        self._backend._kept.append(own)
        self._record(records.WHOLE, experts.multiply_experts, experts=own.ctypes.data, **fields[0], **common)
        for (weight,) in weights:
            self._backend._kept += [weight.array] if weight.scales is None else [weight.array, weight.scales]

    def hidden_states(self, x: Buffer, weight: Packed, bias: Packed | None, eps: float, centred: bool) -> None:
        self.final = (x, weight, bias, eps, centred)
        self._record(records.SAMPLE)  # nothing, but what looks at rows needs an end

    def sample_head(self, x: Buffer, weights: tuple[Packed, ...], soft_cap: float = 0.0) -> None:
        none = Buffer(x.array, 0)
        kernel = row_kernels.cap_logits if soft_cap else None
        self._linear(records.HEAD, x, weights[:1], none, True, kernel, soft_cap=soft_cap)
        self._record(records.PICK, logits_rows=True, n=weights[0].n)
        self._record(records.SAMPLE)
