"""Paged attention with the online softmax of FlashAttention (Dao et al. 2022), one block of 32 keys at a time.

A work item is up to 16 consecutive query rows (a row is one head of one token; the heads that share a KV head are
neighbours) and a run of key blocks. Runs that several sequences share are items of their own whose state (maximum, sum,
accumulator) is carried over in memory, so each query meets its keys in position order with the same arithmetic
whether it is alone or in company (cascade as in Hydragen, Juravsky et al. 2024).

Two ways through an item, chosen once for a backend; `dim` is `head_dim` padded to a multiple of 32:

- on AMX tiles, transposed, so that a query is a lane and the softmax needs no sum across lanes;
- on vectors, a query row at a time.

How blocks of keys and values lie in memory for either is said in kv_cache.py.
"""

from typing import Any

import numpy as np

from batchgen.kernels.cpu import simd, tiles
from batchgen.kernels.cpu.compiling import compiled, helper, inlined

LOWEST = np.float32(-1e30)
ZERO, ONE = np.float32(0), np.float32(1)

SLACK = np.float32(8)
"""Powers of two by which weights may exceed 1 before the maximum follows."""
IN_REGISTERS = 64
"""The head size whose accumulator is kept in tile registers."""

ITEM_FIELDS = 7
ROW, ROWS, SEQUENCE, FIRST, END, STATE, FINAL = range(ITEM_FIELDS)
"""Columns of the work list: first query row, rows, block-table row, first and end key block, row of carried state.

An item that is not final starts afresh and leaves its state at STATE; a final one starts from there, or afresh if -1.
"""


@helper
def set_item(item, row, rows, sequence, first, end, state, final):
    item[ROW], item[ROWS], item[SEQUENCE], item[FIRST] = row, rows, sequence, first
    item[END], item[STATE], item[FINAL] = end, state, final


@inlined
def first_block(position, window, key_block):
    """The block of the first key that a query at `position` sees."""
    return max(np.int64(0), np.int64(position) + 1 - window) // key_block


@compiled
def plan_items(cu_seqlens_q, seq_lens, shared_runs, group, key_block, page_size, window, items):
    """Fill the work list for one step; returns (items over shared runs, items in all).

    Shared runs come first, since the rows beneath them start from their state. State rows are counted in whole items.
    With a `window` (0: none) items begin at the first block of which a row sees a key; a shared item has one at least.
    """
    count = 0
    for g in range(shared_runs.shape[0]):
        first, end, pages = shared_runs[g]
        row, stop = cu_seqlens_q[first] * group, cu_seqlens_q[end] * group
        blocks = pages * page_size // key_block
        begin = blocks * 0
        if window:
            begin = blocks - 1
            for s in range(first, end):
                lowest = seq_lens[s] - (cu_seqlens_q[s + 1] - cu_seqlens_q[s])
                begin = min(begin, first_block(lowest, window, key_block))
        while row < stop:
            set_item(items[count], row, min(16, stop - row), first, begin, blocks, count * 16, 0)
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
            here = begin
            if window:
                position = seq_lens[s] - (cu_seqlens_q[s + 1] - row // group)
                here = max(begin, first_block(position, window, key_block))
            set_item(items[count], row, rows, s, here, last_position // key_block + 1, carried, 1)
            row += 16
            count += 1
    return shared, count


# On tiles: scratch holds q (dim/2, 16, 2) bf16 · twice scores (32, 16) · twice weights (16, 16, 2) bf16 ·
# acc (dim, 16) · maxima, sums (16) and visible keys (16,) int32, each lane a query · room for a block in bf16.


@inlined
def scores_on_tiles(q, k, dim, first, end, scores):
    """scores (32 keys, 16 queries) = K @ q; dimensions [first, end) of it, so that other work can go between."""
    if first == 0:
        tiles.zero4(), tiles.zero5()
    for t in range(first * 32, end * 32, 1024):
        tiles.load6(q + t, 64), tiles.load7(k + t, 64), tiles.dot_476()
        tiles.load7(k + dim * 32 + t, 64), tiles.dot_576()
    if end == dim:
        tiles.store4(scores, 64), tiles.store5(scores + 1024, 64)


@inlined
def add_values(p, v, dim, half, acc):
    """acc (dim, 16 queries) += V @ weights, one half of the dimensions."""
    if dim != IN_REGISTERS:
        add_to_memory(p, v, half * dim // 2, (half + 1) * dim // 2, acc)
    elif half == 0:
        tiles.load6(p, 64), tiles.load7(v, 64), tiles.dot_076(), tiles.load7(v + 1024, 64), tiles.dot_176()
    else:
        tiles.load6(p, 64), tiles.load7(v + 2048, 64), tiles.dot_276(), tiles.load7(v + 3072, 64), tiles.dot_376()


@helper
def add_to_memory(p, v, first, end, acc):
    tiles.load6(p, 64)
    for d in range(first * 64, end * 64, 1024):
        tiles.load0(acc + d, 64), tiles.load7(v + d, 64), tiles.dot_076(), tiles.store0(acc + d, 64)


@inlined
def load_acc(acc, dim):
    if dim == IN_REGISTERS:
        tiles.load0(acc, 64), tiles.load1(acc + 1024, 64), tiles.load2(acc + 2048, 64), tiles.load3(acc + 3072, 64)


@inlined
def store_acc(acc, dim):
    if dim == IN_REGISTERS:
        tiles.store0(acc, 64), tiles.store1(acc + 1024, 64), tiles.store2(acc + 2048, 64), tiles.store3(acc + 3072, 64)


@helper
def hide_keys(scores, limits):
    """Scores of the keys that a query must not see become the lowest."""
    for key in range(32):
        simd.store(scores + key * 64, simd.keep_above(simd.load(scores + key * 64), limits, key, LOWEST))


@inlined
def highest_score(scores):
    a, b = simd.load(scores), simd.load(scores + 64)
    c, d = simd.load(scores + 128), simd.load(scores + 192)
    for key in range(256, 2048, 256):
        a, b = simd.maximum(simd.load(scores + key), a), simd.maximum(simd.load(scores + key + 64), b)
        c, d = simd.maximum(simd.load(scores + key + 128), c), simd.maximum(simd.load(scores + key + 192), d)
    return simd.maximum(simd.maximum(a, b), simd.maximum(c, d))


@helper
def raise_maxima(stats, acc, dim, top, limit):
    """Lanes whose `top` exceeds `limit` take it as their maximum; their sum and accumulator are scaled to it."""
    before = simd.load(stats)
    after = simd.where_above(top, limit, top, before)
    factor = simd.exp2(before - after)
    store_acc(acc, dim)
    for d in range(0, dim * 64, 64):
        simd.store(acc + d, simd.load(acc + d) * factor)
    load_acc(acc, dim)
    simd.store(stats, after)
    simd.store(stats + 64, simd.load(stats + 64) * factor)


@inlined
def weigh_keys(scores, p, reference, first, hidden, limits):
    """Scores of eight keys to weights at `p`; returns their sums, of even and of odd keys."""
    even, odd = simd.broadcast(ZERO), simd.broadcast(ZERO)
    for key in range(first, first + 8, 2):
        left = simd.exp2_bf16(simd.load(scores + key * 64) - reference)
        right = simd.exp2_bf16(simd.load(scores + key * 64 + 64) - reference)
        if hidden:
            left = simd.keep_above(left, limits, key, ZERO)
            right = simd.keep_above(right, limits, key + 1, ZERO)
        even, odd = even + left, odd + right
        simd.store_pairs_ties_away(p + key * 32, left, right)
    return even + odd


@inlined
def fetch(address, size):
    for line in range(0, size, 64):
        simd.prefetch(address + line)


@helper
def turn_lanes(q, dim, stats, acc, later, now, hidden, limits, earlier, ahead, ahead_bytes):
    """One turn of the pipeline: scores of a later block, softmax of this one, values of the one before.

    `later` is (keys, scores), `now` (scores, weights), `earlier` (weights, values); a zero address where there is none.
    `ahead_bytes` (a multiple of 256) at `ahead` are fetched into the second-level cache meanwhile.
    A lane's maximum follows its scores only when they exceed it by `SLACK`, so that the accumulator is seldom scaled
    (as in FlashAttention 4); the result is the same up to rounding, for every lane by itself. Vector and tile
    instructions alternate, since a processor looks only some hundred instructions ahead.
    """
    keys, next_scores = later
    scores, p = now
    weights, values = earlier
    if hidden:
        hide_keys(scores, limits)
    top, limit = highest_score(scores), simd.load(stats) + simd.broadcast(SLACK)
    if simd.any_above(top, limit):
        if values:
            add_values(weights, values, dim, 0, acc), add_values(weights, values, dim, 1, acc)
            values = 0
        raise_maxima(stats, acc, dim, top, limit)
    reference, middle = simd.load(stats), dim // 64 * 32
    if keys:
        scores_on_tiles(q, keys, dim, 0, middle, next_scores)
    quarter = ahead_bytes // 4
    fetch(ahead, quarter)
    first = weigh_keys(scores, p, reference, 0, hidden, limits)
    if keys:
        scores_on_tiles(q, keys, dim, middle, dim, next_scores)
    fetch(ahead + quarter, quarter)
    second = weigh_keys(scores, p, reference, 8, hidden, limits)
    if values:
        add_values(weights, values, dim, 0, acc)
    fetch(ahead + 2 * quarter, quarter)
    third = weigh_keys(scores, p, reference, 16, hidden, limits)
    if values:
        add_values(weights, values, dim, 1, acc)
    fetch(ahead + 3 * quarter, quarter)
    fourth = weigh_keys(scores, p, reference, 24, hidden, limits)
    simd.store(stats + 64, simd.load(stats + 64) + ((first + second) + (third + fourth)))


# On vectors: scratch holds acc (16, dim) · scores (16, 32) · weights (16, 32) · (maximum, sum) (16, 2), float32.


@helper
def scores_on_vectors(q, k, dim, rows, kv_bf16, scores):
    """scores (rows, 32) = q (rows, dim) float32 @ K (dim, 32)."""
    size = 2 if kv_bf16 else 4
    for r in range(rows):
        left, right = simd.broadcast(ZERO), simd.broadcast(ZERO)
        for i in range(dim):
            factor = simd.broadcast(simd.read_f32(q + (r * dim + i) * 4))
            left = simd.fma(factor, simd.load_any(k + i * 32 * size, kv_bf16), left)
            right = simd.fma(factor, simd.load_any(k + (i * 32 + 16) * size, kv_bf16), right)
        simd.store(scores + r * 128, left)
        simd.store(scores + r * 128 + 64, right)


@helper
def values_on_vectors(p, v, dim, rows, kv_bf16, acc):
    """acc (rows, dim) += p (rows, 32) float32 @ V (32, dim)."""
    size = 2 if kv_bf16 else 4
    for r in range(rows):
        for d in range(0, dim, 16):
            total = simd.load(acc + (r * dim + d) * 4)
            for t in range(32):
                weight = simd.broadcast(simd.read_f32(p + (r * 32 + t) * 4))
                total = simd.fma(weight, simd.load_any(v + (t * dim + d) * size, kv_bf16), total)
            simd.store(acc + (r * dim + d) * 4, total)


@inlined
def first_keys(value, visible, window, fill):
    """The lanes of the first `visible` keys, of the others `fill`."""
    return simd.keep_below(value, visible, fill)


@inlined
def last_keys(value, visible, window, fill):
    """Of these the last `window`."""
    return simd.keep_from(simd.keep_below(value, visible, fill), visible - window, fill)


def softener(keep: Any) -> Any:
    """A function `(scores, p, visible, window, stats, acc, dim)`; `keep` is `first_keys` or `last_keys`."""

    @helper
    def soften_row(scores, p, visible, window, stats, acc, dim):
        """Online softmax of one row over one block; a row that sees none of the keys gets weights of zero."""
        left = keep(simd.load(scores), visible, window, LOWEST)
        right = keep(simd.load(scores + 64), visible - 16, window, LOWEST)
        before, total = simd.read_f32(stats), simd.read_f32(stats + 4)
        top = max(before, simd.reduce_max(simd.maximum(left, right)))
        if top != before:
            factor = simd.exp2(simd.broadcast(before) - simd.broadcast(top))
            for d in range(0, dim * 4, 64):
                simd.store(acc + d, simd.load(acc + d) * factor)
            total = total * simd.reduce_max(factor)
            simd.write_f32(stats, top)
        highest = simd.broadcast(top)
        left = keep(simd.exp2(left - highest), visible, window, ZERO)
        right = keep(simd.exp2(right - highest), visible - 16, window, ZERO)
        simd.write_f32(stats + 4, total + simd.reduce_add(left + right))
        simd.store(p, left)
        simd.store(p + 64, right)

    return soften_row
