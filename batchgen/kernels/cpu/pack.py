"""Weights into the layouts of gemm.py and codes.py, once, at load."""

import numpy as np

from batchgen.kernels.base import Codes
from batchgen.kernels.cpu.codes import block_bytes
from batchgen.kernels.cpu.compiling import compiled, inlined


@inlined
def round_to_bf16(bits):
    """Bits of a float32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined
def column_of(row, first, alternate):
    """Output column of a matrix' row; `alternate` leaves every second panel to another matrix."""
    return first + (row // 16 * 32 + row % 16 if alternate else row)


@compiled
def _convert_rows(bits, out):
    for r in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            out[r, i] = round_to_bf16(bits[r, i])


@compiled
def _fill_bf16(bits, panels, k, column, alternate):
    for r in range(bits.shape[0]):
        c = column_of(r, column, alternate)
        panel = c // 16 * (k * 16)
        for i in range(bits.shape[1]):
            panels[panel + i // 2 * 32 + c % 16 * 2 + i % 2] = round_to_bf16(bits[r, i])


@compiled
def _fill_fp32(rows, panels, k, column, alternate):
    for r in range(rows.shape[0]):
        c = column_of(r, column, alternate)
        panel = c // 16 * (k * 16)
        for i in range(rows.shape[1]):
            panels[panel + i * 16 + c % 16] = rows[r, i]


@compiled
def _expand(values, scales, minima, out):
    group = values.shape[1] // scales.shape[1]
    for r in range(values.shape[0]):
        for g in range(scales.shape[1]):
            scale, minimum = scales[r, g], minima[r, g] if minima.shape[1] else np.float32(0)
            for i in range(g * group, g * group + group):
                out[r, i] = np.float32(values[r, i]) * scale + minimum


@compiled
def _quantise(rows, codes, scales):
    for r in range(rows.shape[0]):
        largest, poison = np.float32(0), np.float32(0)
        for i in range(rows.shape[1]):
            largest = max(largest, abs(rows[r, i]))
            poison += rows[r, i] * np.float32(0)  # not zero when something is not finite
        inverse = np.float32(127) / largest if largest > np.float32(1e-35) else np.float32(0)
        for i in range(rows.shape[1]):
            codes[r, i] = np.int8(np.rint(rows[r, i] * inverse))
        scales[r] = largest * np.float32(1 / 127) + poison


@compiled
def _fill_int8(values, panels, k, column, alternate):
    for r in range(values.shape[0]):
        c = column_of(r, column, alternate)
        panel = c // 16 * (k * 16)
        for i in range(values.shape[1]):
            panels[panel + i // 4 * 64 + c % 16 * 4 + i % 4] = values[r, i]


@compiled
def _fill_codes(values, bits, scales, minima, panels, panel_bytes, block, column, alternate):
    """Rows of codes (uint8) into panels of blocks; `scales` and `minima` are uint32 views of float32."""
    parts = scales.shape[1] // (values.shape[1] // 32)
    head = parts * 64 * (2 if minima.shape[1] else 1)
    for r in range(values.shape[0]):
        c = column_of(r, column, alternate)
        lane = c % 16
        for b in range(values.shape[1] // 32):
            at = c // 16 * panel_bytes + b * block
            for part in range(parts):
                for byte in range(4):
                    shift = np.uint32(8 * byte)
                    place = at + (part * 16 + lane) * 4 + byte
                    panels[place] = np.uint8(scales[r, b * parts + part] >> shift)
                    if minima.shape[1]:
                        panels[place + parts * 64] = np.uint8(minima[r, b * parts + part] >> shift)
            for pair in range(16):
                even, odd = values[r, b * 32 + 2 * pair], values[r, b * 32 + 2 * pair + 1]
                if bits == 4:
                    panels[at + head + pair * 16 + lane] = even | np.uint8(odd << 4)
                else:
                    panels[at + head + pair * 32 + lane * 2] = even
                    panels[at + head + pair * 32 + lane * 2 + 1] = odd


def _minima(codes: Codes) -> np.ndarray:
    """(outputs, groups), or no columns where there are none."""
    return np.ascontiguousarray(np.empty((len(codes.values), 0), np.float32) if codes.minima is None else codes.minima)


def fill_codes(codes: Codes, panels: np.ndarray, column: int, alternate: bool) -> None:
    """Lay a quantised matrix into flat uint8 panels, from output column `column` on; see codes.py."""
    block = block_bytes(codes.bits, codes.group, codes.minima is not None)
    scales = np.ascontiguousarray(codes.scales).view(np.uint32)
    minima = _minima(codes).view(np.uint32)
    values = np.ascontiguousarray(codes.values).view(np.uint8)
    _fill_codes(values, codes.bits, scales, minima, panels, codes.shape[1] // 32 * block, block, column, alternate)


def expand_codes(codes: Codes) -> np.ndarray:
    """`Codes.weights`, faster."""
    out = np.empty(codes.shape, np.float32)
    _expand(np.ascontiguousarray(codes.values), np.ascontiguousarray(codes.scales), _minima(codes), out)
    return out


def quantise_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, inputs) float32 as int8 and a float32 scale per output, absmax / 127."""
    codes, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    _quantise(np.ascontiguousarray(rows, np.float32), codes, scales)
    return codes, scales


def rows_to_bf16(rows: np.ndarray, out: np.ndarray) -> None:
    """(rows, k) float32 into (rows, at least k) uint16."""
    _convert_rows(np.ascontiguousarray(rows, np.float32).view(np.uint32), out)


def fill_panels(rows: np.ndarray, panels: np.ndarray, k: int, column: int, alternate: bool) -> None:
    """Lay (outputs, inputs) float32 rows into flat panels of `k` padded inputs, from output column `column` on.

    See `column_of` for `alternate`. uint16 panels hold bfloat16 pairs, float32 ones floats, and
    int8 ones take rows of int8.
    """
    if panels.dtype == np.int8:
        _fill_int8(rows, panels, k, column, alternate)
        return
    rows = np.ascontiguousarray(rows, np.float32)
    if panels.dtype == np.uint16:
        _fill_bf16(rows.view(np.uint32), panels, k, column, alternate)
    else:
        _fill_fp32(rows, panels, k, column, alternate)
