"""Paged attention with the online softmax of FlashAttention (Dao et al. 2022), one block of 32 keys at a time.

A work item is up to 16 consecutive query rows (a row is one head of one token; the heads that share a KV head are
neighbours) and a run of key blocks. Runs that several sequences share are items of their own whose state (maximum, sum,
accumulator) is carried over in memory, so each query meets its keys in position order with the same arithmetic
whether it is alone or in company (cascade as in Hydragen, Juravsky et al. 2024).

A block's keys and values of one KV head, `head_dim` padded to a multiple of 32:

- for AMX (bfloat16): K as (2 key halves, head_dim/32, 16 pairs of dims, 16 keys, 2), V as (head_dim/16, 16 pairs of
  keys, 16 dims, 2), which is what `tdpbf16ps` reads as its right operand;
- otherwise (float32 or bfloat16): K as (head_dim, 32 keys), V as (32 keys, head_dim).
"""

import numpy as np
from numba import njit

from batchgen.kernels.cpu import simd, tiles
from batchgen.kernels.cpu.compiling import compiled

LOWEST = np.float32(-1e30)
ZERO = np.float32(0)

ITEM_FIELDS = 7
ROW, ROWS, SEQUENCE, FIRST, END, START, FINAL = range(ITEM_FIELDS)
"""Columns of the work list: first row, rows, block-table row, first and end key block, opens and closes its rows."""


@njit(nogil=True)
def load_any(address, is_bf16):
    """Sixteen consecutive elements; `address` counts from the element's own size."""
    if is_bf16:
        return simd.load_bf16(address)
    return simd.load(address)


@njit(nogil=True)
def set_item(item, row, rows, sequence, first, end, start, final):
    item[ROW], item[ROWS], item[SEQUENCE], item[FIRST] = row, rows, sequence, first
    item[END], item[START], item[FINAL] = end, start, final


@compiled
def plan_items(cu_seqlens_q, seq_lens, shared_runs, group, key_block, page_size, items):
    """Fill the work list for one step; returns (items over shared runs, items in all).

    Shared runs come first, since the rows beneath them start from their state.
    """
    count = 0
    for g in range(shared_runs.shape[0]):
        first, end, pages = shared_runs[g]
        row, stop = cu_seqlens_q[first] * group, cu_seqlens_q[end] * group
        while row < stop:
            set_item(items[count], row, min(16, stop - row), first, 0, pages * page_size // key_block, 1, 0)
            row += 16
            count += 1
    shared = count
    run = 0
    for s in range(seq_lens.shape[0]):
        while run < shared_runs.shape[0] and shared_runs[run, 1] <= s:
            run += 1
        inside = run < shared_runs.shape[0] and shared_runs[run, 0] <= s
        begin = shared_runs[run, 2] * page_size // key_block if inside else 0
        row, stop = cu_seqlens_q[s] * group, cu_seqlens_q[s + 1] * group
        while row < stop:
            rows = min(16, stop - row)
            last_position = seq_lens[s] - (cu_seqlens_q[s + 1] - (row + rows - 1) // group)
            set_item(items[count], row, rows, s, begin, last_position // key_block + 1, 0 if inside else 1, 1)
            row += 16
            count += 1
    return shared, count


@njit(nogil=True)
def scores_amx(q, k, dim, scores):
    """scores (16, 32) = q (16, dim) @ K, both bfloat16."""
    tiles.zero0(), tiles.zero1()
    half = dim * 32
    for t in range(dim // 32):
        tiles.load4(q + t * 64, dim * 2)
        tiles.load6(k + t * 1024, 64), tiles.load7(k + half + t * 1024, 64)
        tiles.dot_046(), tiles.dot_147()
    tiles.store0(scores, 128), tiles.store1(scores + 64, 128)


@njit(nogil=True)
def scores_vector(q, k, dim, rows, kv_bf16, scores):
    """scores (rows, 32) = q (rows, dim) float32 @ K (dim, 32)."""
    size = 2 if kv_bf16 else 4
    for r in range(rows):
        left, right = simd.broadcast(ZERO), simd.broadcast(ZERO)
        for i in range(dim):
            factor = simd.broadcast(simd.read_f32(q + (r * dim + i) * 4))
            left = simd.fma(factor, load_any(k + i * 32 * size, kv_bf16), left)
            right = simd.fma(factor, load_any(k + (i * 32 + 16) * size, kv_bf16), right)
        simd.store(scores + r * 128, left)
        simd.store(scores + r * 128 + 64, right)


@njit(nogil=True)
def add_values_amx(p, v, dim, acc):
    """acc (16, dim) += p (16, 32) @ V, p and V bfloat16."""
    tiles.load4(p, 64)
    for d in range(0, dim // 16, 2):
        tiles.load0(acc + d * 64, dim * 4), tiles.load1(acc + d * 64 + 64, dim * 4)
        tiles.load6(v + d * 1024, 64), tiles.load7(v + d * 1024 + 1024, 64)
        tiles.dot_046(), tiles.dot_147()
        tiles.store0(acc + d * 64, dim * 4), tiles.store1(acc + d * 64 + 64, dim * 4)


@njit(nogil=True)
def add_values_vector(p, v, dim, rows, kv_bf16, acc):
    """acc (rows, dim) += p (rows, 32) float32 @ V (32, dim)."""
    size = 2 if kv_bf16 else 4
    for r in range(rows):
        for d in range(0, dim, 16):
            total = simd.load(acc + (r * dim + d) * 4)
            for t in range(32):
                weight = simd.broadcast(simd.read_f32(p + (r * 32 + t) * 4))
                total = simd.fma(weight, load_any(v + (t * dim + d) * size, kv_bf16), total)
            simd.store(acc + (r * dim + d) * 4, total)


@njit(nogil=True)
def scale_row(row, dim, factor):
    for d in range(0, dim * 4, 64):
        simd.store(row + d, simd.load(row + d) * factor)


@njit(nogil=True)
def soften_row(scores, p, amx, visible, stats, acc, dim):
    """Online softmax of one row over one block: scores -> weights at `p`, (maximum, sum) at `stats`, rescaled `acc`."""
    left, right = simd.load(scores), simd.load(scores + 64)
    if visible < 32:
        left = simd.keep_below(left, visible, LOWEST)
        right = simd.keep_below(right, visible - 16, LOWEST)
    before, total = simd.read_f32(stats), simd.read_f32(stats + 4)
    top = max(before, simd.reduce_max(simd.maximum(left, right)))
    if top != before:
        factor = simd.exp2(simd.broadcast(before) - simd.broadcast(top))
        scale_row(acc, dim, factor)
        total = total * simd.reduce_max(factor)
        simd.write_f32(stats, top)
    highest = simd.broadcast(top)
    left, right = simd.exp2(left - highest), simd.exp2(right - highest)
    if visible < 32:
        left, right = simd.keep_below(left, visible, ZERO), simd.keep_below(right, visible - 16, ZERO)
    simd.write_f32(stats + 4, total + simd.reduce_add(left + right))
    if amx:
        simd.store_bf16(p, left), simd.store_bf16(p + 32, right)
    else:
        simd.store(p, left), simd.store(p + 64, right)


@njit(nogil=True)
def hide_row(p, amx):
    """Weights of a row that sees none of a block's keys."""
    zero = simd.broadcast(ZERO)
    simd.store(p, zero)
    if not amx:
        simd.store(p + 64, zero)


@njit(nogil=True)
def copy_floats(source, target, count):
    """`count` a multiple of 16."""
    for i in range(0, count * 4, 64):
        simd.store(target + i, simd.load(source + i))


@njit(nogil=True)
def begin_rows(rows, dim, acc, stats):
    zero = simd.broadcast(ZERO)
    for i in range(0, 16 * dim * 4, 64):
        simd.store(acc + i, zero)
    for r in range(rows):
        simd.write_f32(stats + r * 8, LOWEST)
        simd.write_f32(stats + r * 8 + 4, ZERO)
