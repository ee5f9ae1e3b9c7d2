"""Float32 weights into the layouts of gemm.py, once, at load."""

import numpy as np
from numba import njit

from batchgen.kernels.cpu.compiling import compiled


@njit(nogil=True, inline="always")
def round_to_bf16(bits):
    """Bits of a float32 to the bits of the nearest bfloat16, ties to even."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def _convert_rows(bits, out):
    for r in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            out[r, i] = round_to_bf16(bits[r, i])


@compiled
def _fill_bf16(bits, panels, k, column, alternate):
    for r in range(bits.shape[0]):
        c = column + r
        if alternate:
            c = column + r // 16 * 32 + r % 16
        panel = c // 16 * (k * 16)
        for i in range(bits.shape[1]):
            panels[panel + i // 2 * 32 + c % 16 * 2 + i % 2] = round_to_bf16(bits[r, i])


@compiled
def _fill_fp32(rows, panels, k, column, alternate):
    for r in range(rows.shape[0]):
        c = column + r
        if alternate:
            c = column + r // 16 * 32 + r % 16
        panel = c // 16 * (k * 16)
        for i in range(rows.shape[1]):
            panels[panel + i * 16 + c % 16] = rows[r, i]


def rows_to_bf16(rows: np.ndarray, out: np.ndarray) -> None:
    """(rows, k) float32 into (rows, at least k) uint16."""
    _convert_rows(np.ascontiguousarray(rows, np.float32).view(np.uint32), out)


def fill_panels(rows: np.ndarray, panels: np.ndarray, k: int, column: int, alternate: bool) -> None:
    """Lay (outputs, inputs) float32 rows into flat panels of `k` padded inputs, from output column `column` on.

    `alternate` leaves every second panel to another matrix. uint16 panels hold bfloat16 pairs, float32 ones floats.
    """
    rows = np.ascontiguousarray(rows, np.float32)
    if panels.dtype == np.uint16:
        _fill_bf16(rows.view(np.uint32), panels, k, column, alternate)
    else:
        _fill_fp32(rows, panels, k, column, alternate)
