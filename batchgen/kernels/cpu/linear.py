"""Matrix products of a program: rows of an activation times pairs of weight panels, and what becomes of each block."""

from typing import Any

import numpy as np

from batchgen.kernels.cpu import codes, gemm, sampling, simd
from batchgen.kernels.cpu.compiling import helper, inlined, spliced
from batchgen.kernels.cpu.records import FORMAT_CODES, FORMAT_INT8, LINEAR_ADD, LINEAR_SWIGLU

CHUNK_BYTES = 1 << 19
"""Of activations that stay in a core's second-level cache while the weights pass by."""
ITEM_PAIRS = 3
"""Pairs of weight panels per work item."""
PART_TILES = 20
"""Tiles along K whose two panels fit the first-level cache (40 KiB)."""
BLOCK_BYTES = 4096
"""A block of 32 x 32 results."""
INTEGERS_HEADER = 64
"""Bytes before a thread's rows in int8, which say which rows they are."""


@inlined
def tile_address(base, row, column, k, size):
    """Address of (row, column) of an activation with `k` columns, in 16 x 32 tiles of `size`-byte elements."""
    tile = (row // 16) * (k // 32) + column // 32
    return base + (tile * 512 + (row % 16) * 32 + column % 32) * size


@inlined
def store_any(address, value, is_bf16):
    if is_bf16:
        simd.store_bf16(address, value)
    else:
        simd.store(address, value)


@helper
def fill_zeros(address, size):
    for i in range(0, size, 64):
        simd.store(address + i, simd.zero())


@inlined
def swiglu(gate, up):
    """SiLU(gate) * up (Shazeer 2020)."""
    one = simd.broadcast(np.float32(1))
    decay = simd.exp2(gate * simd.broadcast(np.float32(-sampling.LOG2_E)))
    return simd.divide(gate, one + decay) * up


@inlined
def floats(c, r, scales):
    """Row `r` of a block of float32, in two halves."""
    return simd.load(c + r * 128), simd.load(c + r * 128 + 64)


@inlined
def scaled_integers(c, r, scales):
    """Row `r` of a block of int32 as float32; `scales`: addresses of the rows' and of the columns'."""
    row = simd.broadcast(simd.read_f32(scales[0] + r * 4))
    left = simd.load_i32(c + r * 128) * simd.load(scales[1]) * row
    return left, simd.load_i32(c + r * 128 + 64) * simd.load(scales[1] + 64) * row


def _row_finisher(block_row: Any, code: str) -> Any:
    """A function `(c, target, stride, r, scales, model)` that makes results of row `r` of a block; see `block_row`."""

    @inlined
    def store_row(c, target, stride, r, scales, model):
        left, right = block_row(c, r, scales)
        simd.store(target + r * stride, left)
        simd.store(target + r * stride + 64, right)

    @inlined
    def add_row(c, target, stride, r, scales, model):
        left, right = block_row(c, r, scales)
        target += r * stride
        simd.store(target, left + simd.load(target))
        simd.store(target + 64, right + simd.load(target + 64))

    @inlined
    def swiglu_row(c, target, stride, r, scales, model):
        """Of a row's two halves into sixteen columns of an activation, whose tiles are `stride` bytes apart."""
        gate, up = block_row(c, r, scales)
        place = target + r // 16 * stride + r % 16 * 32 * (2 if model.act_bf16 else 4)
        store_any(place, swiglu(gate, up), model.act_bf16)

    return {"store": store_row, "add": add_row, "swiglu": swiglu_row}[code]


def _blocks_on_tiles(finish_row: Any, integers: bool) -> Any:
    """See `_linear_blocks`. The rows of a block are finished while the next one is multiplied: vector and tile units
    are busy together. Long sums go part by part, so that a pair's panels stay in the first-level cache from row to row.
    """
    block_amx = gemm.amx_block(finish_row, integers)

    @helper
    def blocks(op, model, rows, pairs, x, row_scales, scratch):
        k_tiles = gemm.k_tiles(op.k, integers)
        parts = (k_tiles + PART_TILES - 1) // PART_TILES
        done, target, stride, count = scratch, np.int64(0), np.int64(0), np.int64(0)
        scales = row_scales, op.scales
        for pair in range(pairs[0], pairs[1]):
            weight = pair_address(op, pair, scratch + model.panels_offset)
            for part in range(parts):
                tiles = part * k_tiles // parts, (part + 1) * k_tiles // parts
                for row in range(0, rows[1] - rows[0], 32):
                    here = min(32, rows[1] - rows[0] - row)
                    c = scratch + (row // 32 if parts > 1 else row // 32 % 2) * BLOCK_BYTES
                    a = x + row * k_tiles * 64
                    block_amx(a, weight, k_tiles, tiles, here > 16, c, done, target, stride, count, scales, model)
                    count = np.int64(0)
                    if part == parts - 1:
                        done, count = c, here
                        target, stride = block_target(op, model, rows[0] + row, pair)
                        scales = row_scales + row * 4, op.scales + pair * 128
        for r in range(count):
            finish_row(done, target, stride, r, scales, model)

    return blocks


def _blocks_on_vectors(finish_row: Any, integers: bool) -> Any:
    """See `_linear_blocks`."""
    block = gemm.block_integers if integers else gemm.block_vector

    @helper
    def blocks(op, model, rows, pairs, x, row_scales, scratch):
        k_tiles = gemm.k_tiles(op.k, integers)
        row_bytes = k_tiles * (64 if model.act_bf16 or integers else 128)
        for pair in range(pairs[0], pairs[1]):
            weight = pair_address(op, pair, scratch + model.panels_offset)
            for row in range(0, rows[1] - rows[0], 32):
                here = min(32, rows[1] - rows[0] - row)
                block(model.kernel, x + row * row_bytes, weight, k_tiles, here, scratch)
                target, stride = block_target(op, model, rows[0] + row, pair)
                for r in range(here):
                    finish_row(scratch, target, stride, r, (row_scales + row * 4, op.scales + pair * 128), model)

    return blocks


def _linear_blocks(block_row: Any, integers: bool, code: str) -> Any:
    """A function `(op, model, rows, pairs, x, row_scales, scratch)`: all blocks of some rows and pairs of panels.

    `x`: address of the first row's tiles, `row_scales` that of the rows' scales.
    """
    finish_row = _row_finisher(block_row, code)
    on_tiles, on_vectors = _blocks_on_tiles(finish_row, integers), _blocks_on_vectors(finish_row, integers)

    @spliced
    def linear_blocks(op, model, rows, pairs, x, row_scales, scratch):
        if model.kernel == gemm.KERNEL_AMX:
            on_tiles(op, model, rows, pairs, x, row_scales, scratch)
        else:
            on_vectors(op, model, rows, pairs, x, row_scales, scratch)

    return linear_blocks


_store, _add, _swiglu = (_linear_blocks(floats, False, code) for code in ("store", "add", "swiglu"))
_store_i8, _add_i8, _swiglu_i8 = (_linear_blocks(scaled_integers, True, code) for code in ("store", "add", "swiglu"))


@helper
def pair_address(op, pair, room):
    """Address of two panels that a kernel can multiply; codes are expanded into `room`."""
    address = op.w + pair * op.pair_bytes
    if op.format == FORMAT_CODES:
        codes.expand_panels(address, op.k, op.bits, op.group, op.minima, room)
        return room
    return address


@helper
def block_target(op, model, row, pair):
    """Where the block at `row` and column pair `pair` goes, and the stride that the epilogue of `op` expects."""
    if op.code == LINEAR_SWIGLU:
        size = 2 if model.act_bf16 else 4
        return tile_address(op.out, row, pair * 16, op.n, size), op.n * 16 * size
    return op.out + (row * op.ld + pair * 32) * 4, op.ld * 4


@helper
def activation(op, model, rows, scratch):
    """Addresses of the rows' tiles and of their scales; for int8 weights they are quantised into the scratch, once."""
    if op.format != FORMAT_INT8:
        return op.x + rows[0] * op.k * (2 if model.act_bf16 else 4), np.int64(0)
    key = scratch + model.integers_offset
    scales = key + INTEGERS_HEADER
    x = scales + round_up((rows[1] - rows[0]) * 4, 4096)
    if simd.read_i64(key) != rows[0] + 1:
        quantise_rows(op, model, rows, x, scales)
        simd.write_i64(key, rows[0] + 1)
    return x, scales


@inlined
def forget_activation(op, model, scratch):
    """Before the first of a thread's items of an operation: rows that lie quantised in the scratch are of another."""
    if op.format == FORMAT_INT8:
        simd.write_i64(scratch + model.integers_offset, 0)


@inlined
def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@helper
def quantise_rows(op, model, rows, x, scales):
    """Rows of an activation as int8 in 16 x 64 tiles, each row with a scale of its own, absmax / 127."""
    size, width = 2 if model.act_bf16 else 4, round_up(op.k, 64)
    for row in range(rows[0], rows[1]):
        source, number = tile_address(op.x, row, 0, op.k, size), row - rows[0]
        largest, poison = simd.zero(), simd.zero()
        for i in range(0, op.k, 16):
            value = simd.load_any(source + (i // 32 * 512 + i % 32) * size, model.act_bf16)
            largest = simd.maximum(largest, simd.absolute(value))
            poison = simd.fma(value, simd.zero(), poison)  # not zero when something is not finite
        top = simd.reduce_max(largest)
        simd.write_f32(scales + number * 4, top * np.float32(1 / 127) + simd.reduce_add(poison))
        inverse = simd.inverse_scale(simd.broadcast(top))
        target = x + number // 16 * width * 16 + number % 16 * 64
        for i in range(0, op.k, 16):
            value = simd.load_any(source + (i // 32 * 512 + i % 32) * size, model.act_bf16)
            simd.store_i8(target + i // 64 * 1024 + i % 64, value * inverse)
        for i in range(op.k, width, 16):
            simd.store_i8(target + i // 64 * 1024 + i % 64, simd.zero())


@spliced
def linear(op, model, rows, pairs, scratch):
    """Rows `rows[0]` (a multiple of 32) to `rows[1]` times the pairs of panels `pairs[0]` to `pairs[1]`."""
    x, scales = activation(op, model, rows, scratch)
    if op.format == FORMAT_INT8:
        if op.code == LINEAR_SWIGLU:
            _swiglu_i8(op, model, rows, pairs, x, scales, scratch)
        elif op.code == LINEAR_ADD:
            _add_i8(op, model, rows, pairs, x, scales, scratch)
        else:
            _store_i8(op, model, rows, pairs, x, scales, scratch)
    elif op.code == LINEAR_SWIGLU:
        _swiglu(op, model, rows, pairs, x, scales, scratch)
    elif op.code == LINEAR_ADD:
        _add(op, model, rows, pairs, x, scales, scratch)
    else:
        _store(op, model, rows, pairs, x, scales, scratch)


@helper
def count_pairs(op):
    return (2 * op.n if op.code == LINEAR_SWIGLU else op.n) // 32


def rows_at_once(k: int, size: int) -> int:
    """Rows of `k` elements of `size` bytes that an item takes, so that they stay in a core's second-level cache."""
    return max(64, CHUNK_BYTES // (k * size) // 32 * 32)


_rows_at_once = helper(rows_at_once)


@helper
def row_chunk(op, model):
    return _rows_at_once(op.k, 2 if model.act_bf16 else 4)


@helper
def count_chunks(op, model, rows):
    chunk = row_chunk(op, model)
    return (rows + chunk - 1) // chunk


@helper
def count_linear_items(op, model, rows):
    return count_chunks(op, model, rows) * ((count_pairs(op) + ITEM_PAIRS - 1) // ITEM_PAIRS)


@helper
def linear_item(op, model, total, item, scratch):
    """A few pairs of weight panels times a chunk of rows."""
    groups = (count_pairs(op) + ITEM_PAIRS - 1) // ITEM_PAIRS
    first, pair = item // groups * row_chunk(op, model), item % groups * ITEM_PAIRS
    rows = first, min(total, first + row_chunk(op, model))
    linear(op, model, rows, (pair, min(count_pairs(op), pair + ITEM_PAIRS)), scratch)
