"""Paged attention with the online softmax of FlashAttention (Dao et al. 2022), one block of 32 keys at a time.

A work item is up to 16 consecutive query rows (a row is one head of one token; the heads that share a KV head are
neighbours) and a run of key blocks. Runs that several sequences share are items of their own whose state (maximum, sum,
accumulator) is carried over in memory, so each query meets its keys in position order with the same arithmetic
whether it is alone or in company (cascade as in Hydragen, Juravsky et al. 2024).

Two ways through an item, chosen once for a backend; `dim` is `head_dim` padded to a multiple of 32:

- on AMX tiles, transposed, so that a query is a lane and the softmax needs no sum across lanes. A block's keys are
  (2 halves, dim/32, 16 keys, 32 dims), its values (dim/16, 16 dims, 32 keys), both bfloat16: left operands of
  `tdpbf16ps` as they lie;
- on vectors, a query row at a time. Keys are (dim, 32 keys), values (32 keys, dim), float32 or bfloat16.
"""

import numpy as np
from numba import njit

from batchgen.kernels.cpu import simd, tiles
from batchgen.kernels.cpu.compiling import compiled

LOWEST = np.float32(-1e30)
ZERO, ONE = np.float32(0), np.float32(1)

ITEM_FIELDS = 7
ROW, ROWS, SEQUENCE, FIRST, END, STATE, FINAL = range(ITEM_FIELDS)
"""Columns of the work list: first query row, rows, block-table row, first and end key block, row of carried state.

An item that is not final starts afresh and leaves its state at STATE; a final one starts from there, or afresh if -1.
"""


@njit(nogil=True, error_model="numpy")
def set_item(item, row, rows, sequence, first, end, state, final):
    item[ROW], item[ROWS], item[SEQUENCE], item[FIRST] = row, rows, sequence, first
    item[END], item[STATE], item[FINAL] = end, state, final


@compiled
def plan_items(cu_seqlens_q, seq_lens, shared_runs, group, key_block, page_size, items):
    """Fill the work list for one step; returns (items over shared runs, items in all).

    Shared runs come first, since the rows beneath them start from their state. State rows are counted in whole items.
    """
    count = 0
    for g in range(shared_runs.shape[0]):
        first, end, pages = shared_runs[g]
        row, stop = cu_seqlens_q[first] * group, cu_seqlens_q[end] * group
        while row < stop:
            set_item(items[count], row, min(16, stop - row), first, 0, pages * page_size // key_block, count * 16, 0)
            row += 16
            count += 1
    shared = count
    run, state = 0, 0
    for s in range(seq_lens.shape[0]):
        while run < shared_runs.shape[0] and shared_runs[run, 1] <= s:
            first, end, _ = shared_runs[run]
            state += ((cu_seqlens_q[end] - cu_seqlens_q[first]) * group + 15) // 16 * 16
            run += 1
        inside = run < shared_runs.shape[0] and shared_runs[run, 0] <= s
        begin = shared_runs[run, 2] * page_size // key_block if inside else 0
        row, stop = cu_seqlens_q[s] * group, cu_seqlens_q[s + 1] * group
        while row < stop:
            rows = min(16, stop - row)
            last_position = seq_lens[s] - (cu_seqlens_q[s + 1] - (row + rows - 1) // group)
            carried = state + row - cu_seqlens_q[shared_runs[run, 0]] * group if inside else -1
            set_item(items[count], row, rows, s, begin, last_position // key_block + 1, carried, 1)
            row += 16
            count += 1
    return shared, count


# On tiles: scratch holds q (dim/2, 16, 2) bf16 · scores (32, 16) · weights (16, 16, 2) bf16 · acc (dim, 16) ·
# maxima, sums (16) and visible keys (16,) int32, each lane a query.


@njit(nogil=True, error_model="numpy")
def scores_on_tiles(q, k, dim, scores):
    """scores (32 keys, 16 queries) = K @ q."""
    tiles.zero0(), tiles.zero1()
    half = dim * 32
    for t in range(0, dim * 32, 1024):
        tiles.load6(q + t, 64), tiles.load4(k + t, 64), tiles.load5(k + half + t, 64)
        tiles.dot_046(), tiles.dot_156()
    tiles.store0(scores, 64), tiles.store1(scores + 1024, 64)


@njit(nogil=True, error_model="numpy")
def values_on_tiles(p, v, dim, acc):
    """acc (dim, 16 queries) += V @ weights."""
    tiles.load6(p, 64)
    for d in range(0, dim * 64, 2048):
        tiles.load0(acc + d, 64), tiles.load1(acc + d + 1024, 64)
        tiles.load4(v + d, 64), tiles.load5(v + d + 1024, 64)
        tiles.dot_046(), tiles.dot_156()
        tiles.store0(acc + d, 64), tiles.store1(acc + d + 1024, 64)


@njit(nogil=True, error_model="numpy")
def hide_keys(scores, limits):
    """Scores of the keys that a query must not see become the lowest."""
    for key in range(32):
        simd.store(scores + key * 64, simd.keep_above(simd.load(scores + key * 64), limits, key, LOWEST))


@njit(nogil=True, error_model="numpy")
def highest_score(scores):
    a, b = simd.load(scores), simd.load(scores + 64)
    c, d = simd.load(scores + 128), simd.load(scores + 192)
    for key in range(256, 2048, 256):
        a, b = simd.maximum(simd.load(scores + key), a), simd.maximum(simd.load(scores + key + 64), b)
        c, d = simd.maximum(simd.load(scores + key + 128), c), simd.maximum(simd.load(scores + key + 192), d)
    return simd.maximum(simd.maximum(a, b), simd.maximum(c, d))


@njit(nogil=True, error_model="numpy")
def soften_lanes(scores, p, maxima, sums, acc, dim, hidden, limits):
    """Online softmax of one block: scores -> weights at `p`; maxima, sums and the accumulator move along."""
    if hidden:
        hide_keys(scores, limits)
    before = simd.load(maxima)
    top = simd.maximum(highest_score(scores), before)
    total = simd.load(sums)
    if simd.any_above(top, before):
        factor = simd.exp2(before - top)
        for d in range(0, dim * 64, 64):
            simd.store(acc + d, simd.load(acc + d) * factor)
        total = total * factor
        simd.store(maxima, top)
    even, odd = simd.broadcast(ZERO), simd.broadcast(ZERO)
    for key in range(0, 32, 2):
        left = simd.exp2(simd.load(scores + key * 64) - top)
        right = simd.exp2(simd.load(scores + key * 64 + 64) - top)
        if hidden:
            left = simd.keep_above(left, limits, key, ZERO)
            right = simd.keep_above(right, limits, key + 1, ZERO)
        even, odd = even + left, odd + right
        simd.store_pairs_bf16(p + key * 32, left, right)
    simd.store(sums, total + (even + odd))


# On vectors: scratch holds acc (16, dim) · scores (16, 32) · weights (16, 32) · (maximum, sum) (16, 2), float32.


@njit(nogil=True, error_model="numpy")
def load_any(address, is_bf16):
    """Sixteen consecutive elements."""
    if is_bf16:
        return simd.load_bf16(address)
    return simd.load(address)


@njit(nogil=True, error_model="numpy")
def scores_on_vectors(q, k, dim, rows, kv_bf16, scores):
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


@njit(nogil=True, error_model="numpy")
def values_on_vectors(p, v, dim, rows, kv_bf16, acc):
    """acc (rows, dim) += p (rows, 32) float32 @ V (32, dim)."""
    size = 2 if kv_bf16 else 4
    for r in range(rows):
        for d in range(0, dim, 16):
            total = simd.load(acc + (r * dim + d) * 4)
            for t in range(32):
                weight = simd.broadcast(simd.read_f32(p + (r * 32 + t) * 4))
                total = simd.fma(weight, load_any(v + (t * dim + d) * size, kv_bf16), total)
            simd.store(acc + (r * dim + d) * 4, total)


@njit(nogil=True, error_model="numpy")
def soften_row(scores, p, visible, stats, acc, dim):
    """Online softmax of one row over one block; a row that sees none of the keys gets weights of zero."""
    left = simd.keep_below(simd.load(scores), visible, LOWEST)
    right = simd.keep_below(simd.load(scores + 64), visible - 16, LOWEST)
    before, total = simd.read_f32(stats), simd.read_f32(stats + 4)
    top = max(before, simd.reduce_max(simd.maximum(left, right)))
    if top != before:
        factor = simd.exp2(simd.broadcast(before) - simd.broadcast(top))
        for d in range(0, dim * 4, 64):
            simd.store(acc + d, simd.load(acc + d) * factor)
        total = total * simd.reduce_max(factor)
        simd.write_f32(stats, top)
    highest = simd.broadcast(top)
    left = simd.keep_below(simd.exp2(left - highest), visible, ZERO)
    right = simd.keep_below(simd.exp2(right - highest), visible - 16, ZERO)
    simd.write_f32(stats + 4, total + simd.reduce_add(left + right))
    simd.store(p, left)
    simd.store(p + 64, right)
