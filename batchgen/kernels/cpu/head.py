"""The output head: logits of the rows that want them, searched for the best token while they are in the cache."""

import numpy as np

from batchgen.kernels.cpu import attention, gemm, on_demand, sampling, simd
from batchgen.kernels.cpu.compiling import helper
from batchgen.kernels.cpu.linear import BLOCK_BYTES, activation, pair_address, round_up, scaled_integers
from batchgen.kernels.cpu.on_demand import address_of
from batchgen.kernels.cpu.records import FORMAT_INT8, HEAD_PAIRS, PARTIAL_FIELDS

HEAD_ROWS = 128
"""Rows per work item."""


@helper
def head_groups(op):
    return (op.n + 32 * HEAD_PAIRS - 1) // (32 * HEAD_PAIRS)


@helper
def count_head_items(op, rows):
    return (rows + HEAD_ROWS - 1) // HEAD_ROWS * head_groups(op)


@helper
def head_item(op, model, step, rows, item, needs_logits, scratch):
    """A group of the output head's columns: per row its maximum, where that is, and the sum of exponentials."""
    groups = head_groups(op)
    first, group = item // groups * HEAD_ROWS, item % groups
    end = min(rows, first + HEAD_ROWS)
    begin, stop = group * HEAD_PAIRS, min(op.n // 32, (group + 1) * HEAD_PAIRS)
    blocks = scratch + model.head_offset
    multiply_head(op, model, (first, end), (begin, stop), blocks, scratch)
    for row in range(first, end):
        c = blocks + (row - first) // 32 * HEAD_PAIRS * BLOCK_BYTES + (row - first) % 32 * 128
        if op.function:
            blocks_end = c + (stop - begin) * BLOCK_BYTES
            on_demand.call(
                op.function, address_of(op), address_of(model), address_of(step), c, blocks_end, BLOCK_BYTES, scratch
            )
        hide_padding(model, c, begin, stop)
        partial = model.partial + (row * groups + group) * PARTIAL_FIELDS * 4
        head_row(c, begin * 32, stop - begin, partial)
        if needs_logits[row]:
            keep_logits(model, c, begin, stop, row)


@helper
def multiply_head(op, model, rows, pairs, blocks, scratch):
    """Blocks of logits in float32: (32 rows, HEAD_PAIRS) one after the other."""
    integers = op.format == FORMAT_INT8
    x, scales = activation(op, model, rows, scratch)
    k_tiles = gemm.k_tiles(op.k, integers)
    row_bytes = k_tiles * 64 if model.act_bf16 or integers else k_tiles * 128
    for pair in range(pairs[0], pairs[1]):
        weight = pair_address(op, pair, scratch + model.panels_offset)
        for row in range(0, rows[1] - rows[0], 32):
            c = blocks + (row // 32 * HEAD_PAIRS + pair - pairs[0]) * BLOCK_BYTES
            here = min(32, rows[1] - rows[0] - row)
            if integers:
                gemm.block_i8(model.kernel, x + row * row_bytes, weight, k_tiles, here, c)
                for r in range(here):
                    left, right = scaled_integers(c, r, (scales + row * 4, op.scales + pair * 128))
                    simd.store(c + r * 128, left)
                    simd.store(c + r * 128 + 64, right)
            else:
                gemm.block(model.kernel, x + row * row_bytes, weight, k_tiles, here, c)


@helper
def hide_padding(model, c, begin, end):
    """The columns past the vocabulary, in a row's last block, must not win."""
    column = (end - 1) * 32
    if column + 32 > model.vocab:
        c += (end - 1 - begin) * BLOCK_BYTES
        simd.store(c, simd.keep_below(simd.load(c), model.vocab - column, attention.LOWEST))
        simd.store(c + 64, simd.keep_below(simd.load(c + 64), model.vocab - column - 16, attention.LOWEST))


@helper
def keep_logits(model, c, begin, end, row):
    target = model.logits + (row * round_up(model.vocab, 32) + begin * 32) * 4
    for pair in range(end - begin):
        simd.store(target + pair * 128, simd.load(c + pair * BLOCK_BYTES))
        simd.store(target + pair * 128 + 64, simd.load(c + pair * BLOCK_BYTES + 64))


@helper
def head_row(c, column, pairs, partial):
    """Maximum, sum of exponentials and arg-max of one row over `pairs` blocks, BLOCK_BYTES apart."""
    left, right = simd.load(c), simd.load(c + 64)
    for pair in range(1, pairs):
        left = simd.maximum(simd.load(c + pair * BLOCK_BYTES), left)
        right = simd.maximum(simd.load(c + pair * BLOCK_BYTES + 64), right)
    top = simd.reduce_max(simd.maximum(left, right))
    highest, log2_e = simd.broadcast(top), simd.broadcast(np.float32(sampling.LOG2_E))
    even, odd = simd.broadcast(attention.ZERO), simd.broadcast(attention.ZERO)
    for pair in range(pairs):
        even = even + simd.exp2((simd.load(c + pair * BLOCK_BYTES) - highest) * log2_e)
        odd = odd + simd.exp2((simd.load(c + pair * BLOCK_BYTES + 64) - highest) * log2_e)
    simd.write_f32(partial, top)
    simd.write_f32(partial + 4, simd.reduce_add(even + odd))
    simd.write_i32(partial + 8, np.int32(column))  # stands if every logit is NaN
    for half in range(2 * pairs):
        lane = simd.first_lane_equal(simd.load(c + half // 2 * BLOCK_BYTES + half % 2 * 64), top)
        if lane < 16:
            simd.write_i32(partial + 8, np.int32(column + half * 16 + lane))
            break


@helper
def pick_row(op, model, row, best, best_logit, log_sum):
    """Join a row's partial results in column order: arg-max, its logit, log of the sum of exponentials."""
    groups = head_groups(op)
    top, total = attention.LOWEST, 0.0
    for g in range(groups):
        partial = model.partial + (row * groups + g) * PARTIAL_FIELDS * 4
        here = simd.read_f32(partial)
        if g == 0 or here > top:
            total *= np.exp(np.float64(top) - np.float64(here))
            top = here
            best[row] = simd.read_i32(partial + 8)
        total += simd.read_f32(partial + 4) * np.exp(np.float64(here) - np.float64(top))
    best_logit[row] = top
    log_sum[row] = np.float64(top) + np.log(total)
