"""What this machine can do at most: bytes read from memory, and operations done, in a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numba
import numpy as np
import psutil

from batchgen.kernels.cpu import simd, tiles
from batchgen.kernels.cpu.backend import Crew, aligned_zeros
from batchgen.kernels.cpu.features import HAS_AVX512

Unit = Literal["tdpbf16ps", "tdpbssd", "fma"]
"""What multiplies: tiles of bfloat16, tiles of int8, or vectors of float32 (fused multiply-adds)."""

READ_BYTES = 1 << 30
"""Much more than caches hold; at most a quarter of the free memory."""
ROUNDS = 1 << 20
TRIES = 4
VECTORS = 10 if HAS_AVX512 else 6
"""Sums under way at a time: enough to hide the latency, few enough to stay in registers."""
ROUND_OPERATIONS = {"tdpbf16ps": 4 * 16 * 16 * 32 * 2, "tdpbssd": 4 * 16 * 16 * 64 * 2, "fma": VECTORS * 16 * 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all threads together: bytes per second from memory, and operations per second by unit.

    A multiplication and an addition are two operations. Theirs is one core's limit times the threads.
    """

    threads: int
    bytes_per_s: float
    operations_per_s: dict[str, float]


def units(kernel: str, weights: str) -> tuple[Unit, ...]:
    """The units that a kernel's products run on, that of all but int8 weights first.

    `avx512_bf16` is measured by float32 fused multiply-adds, than which its own instruction is at most twice as fast.
    """
    if kernel != "amx_bf16":
        return ("fma",)
    return ("tdpbf16ps", "tdpbssd") if weights == "int8" else ("tdpbf16ps",)


def measure_limits(kernel: str, weights: str, threads: int) -> Limits:
    """About a second. The kernel must be one of `features.available_kernels()`."""
    rates = {str(unit): threads * multiply_rate(unit) for unit in units(kernel, weights)}
    return Limits(threads, read_rate(threads), rates)


def read_rate(threads: int) -> float:
    """Bytes per second that the threads together read from memory, each a part of its own from front to back."""
    part = min(READ_BYTES, psutil.virtual_memory().available // 4) // threads // 4096 * 4096
    parts = [aligned_zeros(part // 4, np.float32) for _ in range(threads)]

    def fill(thread: int) -> None:  # pages that were never written are all the same one
        parts[thread][:] = 1

    def read(thread: int) -> None:
        _read(parts[thread].ctypes.data, part)

    return part * threads / _fastest(threads, read, fill)


def multiply_rate(unit: Unit) -> float:
    """Operations per second of one core, the operands in registers; a multiplication and an addition are two."""
    operands, config = np.full(4096, 1, np.uint8), tiles.tile_config()
    kernels = {"tdpbf16ps": _multiply_bf16, "tdpbssd": _multiply_int8, "fma": _multiply_vectors}

    def multiply(thread: int) -> None:
        kernels[unit](operands.ctypes.data, config.ctypes.data, ROUNDS)

    return ROUND_OPERATIONS[unit] * ROUNDS / _fastest(1, multiply, multiply)


def _fastest(threads: int, work: Callable[[int], None], prepare: Callable[[int], None]) -> float:
    """Seconds of the fastest try; `prepare` runs once before, on the same threads."""
    crew, seconds = Crew(threads), []
    try:
        crew.run(prepare)
        for _ in range(TRIES + 1):  # the first one compiles
            start = time.perf_counter()
            crew.run(work)
            seconds.append(time.perf_counter() - start)
    finally:
        crew.close()
    return min(seconds[1:])


@numba.njit(nogil=True)
def _read(address: int, size: int) -> Any:
    a = b = c = d = simd.broadcast(np.float32(0))
    for i in range(address, address + size, 256):
        a, b = a + simd.load(i), b + simd.load(i + 64)
        c, d = c + simd.load(i + 128), d + simd.load(i + 192)
    return simd.reduce_add(a + b + c + d)


@numba.njit(nogil=True)
def _multiply_vectors(operands: int, config: int, rounds: int) -> Any:
    x = simd.broadcast(np.float32(0.5))
    a = b = c = d = e = f = g = h = i = j = x
    for _ in range(rounds):
        a, b, c = simd.fma(a, x, x), simd.fma(b, x, x), simd.fma(c, x, x)
        d, e, f = simd.fma(d, x, x), simd.fma(e, x, x), simd.fma(f, x, x)
        if HAS_AVX512:
            g, h, i, j = simd.fma(g, x, x), simd.fma(h, x, x), simd.fma(i, x, x), simd.fma(j, x, x)
    return simd.reduce_add(a + b + c + d + e + f + g + h + i + j)


def _on_tiles(dot_046: Any, dot_147: Any, dot_256: Any, dot_357: Any) -> Any:
    @numba.njit(nogil=True)
    def multiply(operands: int, config: int, rounds: int) -> Any:
        tiles.load_config(config)
        tiles.load4(operands, 64), tiles.load5(operands, 64), tiles.load6(operands, 64), tiles.load7(operands, 64)
        tiles.zero0(), tiles.zero1(), tiles.zero2(), tiles.zero3()
        for _ in range(rounds):
            dot_046(), dot_147(), dot_256(), dot_357()
        tiles.release()

    return multiply


_multiply_bf16 = _on_tiles(tiles.dot_046, tiles.dot_147, tiles.dot_256, tiles.dot_357)
_multiply_int8 = _on_tiles(tiles.idot_046, tiles.idot_147, tiles.idot_256, tiles.idot_357)
