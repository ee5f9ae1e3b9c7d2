"""Attention of one step: work items over the paged cache, on tiles or on vectors (attention.py has the arithmetic)."""

from typing import Any

import numpy as np

from batchgen.kernels.cpu import attention, kv_cache, sampling, simd
from batchgen.kernels.cpu.compiling import helper, inlined, spliced
from batchgen.kernels.cpu.linear import fill_zeros, store_any, tile_address
from batchgen.kernels.cpu.on_demand import int32_rows, model_at, operation_at, step_at
from batchgen.kernels.cpu.row_kernels import softly_capped

HIDDEN = np.float32(2 * attention.LOWEST)


def scratch_bytes(dim: int) -> int:
    """Of a thread, for a head padded to `dim`: the layouts of `attend_on_tiles` and `attend_on_vectors`, the larger."""
    on_tiles = dim * 32 + 2 * 2048 + 2 * 1024 + dim * 64 + 256 + 2 * dim * 64
    on_vectors = dim * 64 + 2 * 2048 + 128 + 2 * dim * 128
    return max(on_tiles, on_vectors)


@helper
def query_address(model, kv_head, row):
    """Address of a query row; rows are tokens times the heads that share a KV head."""
    return model.q + (kv_head * model.max_tokens * model.group + row) * model.dim * (2 if model.kv_amx else 4)


@helper
def state_address(model, kv_head, row):
    """Address of the carried state of the sixteen rows that hold `row`: an accumulator, maxima, sums."""
    return model.state + (kv_head * model.state_items + row // 16) * 64 * (model.dim + 2)


@inlined
def item_block(op, model, block_tables, item, kv_head, number):
    """Address of the item's key block `number`."""
    page, offset = number, np.int64(0)
    if model.page_size != 32:  # a division costs as much as some of the arithmetic
        page, offset = number * 32 // model.page_size, number * 32 % model.page_size
    page = np.int64(block_tables[item[attention.SEQUENCE], page])
    return kv_cache.block_address(model, op.layer, page, offset, kv_head)


@helper
def block_ahead(op, model, block_tables, item, following, kv_head, number):
    """Address of block `number` of an item or, past its end, of those of the item that follows; 0: none."""
    if number < item[attention.END]:
        return item_block(op, model, block_tables, item, kv_head, number)
    number += np.int64(following[attention.FIRST]) - item[attention.END]
    if number < following[attention.END]:
        return item_block(op, model, block_tables, following, kv_head, number)
    return np.int64(0)


@inlined
def hides_keys(op, model, positions, row0, rows, slot, scores, limits):
    """Whether some lane must not see all keys of the block at `slot`; what each may see is then at `limits`."""
    hidden = positions[row0 // model.group] - slot < 31
    if hidden:
        write_limits(model, positions, row0, rows, slot, limits)
    return hidden


def _on_tiles(hides_keys: Any) -> Any:
    """The way through an item on tiles; `hides_keys` as that above or `shape_lanes`."""

    @helper
    def attend_on_tiles(op, model, positions, block_tables, item, following, kv_head, scratch):
        """One work item for one KV head, a query in each lane; `following` is this thread's likely next one.

        Three blocks are under way at a time, so that tile and vector units need not wait for each other: the scores of
        one, the softmax of the one before, the values of the one before that.
        """
        dim, rows, row0 = model.dim, np.int64(item[attention.ROWS]), np.int64(item[attention.ROW])
        first, end = np.int64(item[attention.FIRST]), np.int64(item[attention.END])
        q, scores, p = scratch, scratch + dim * 32, scratch + dim * 32 + 4096
        acc = p + 2048
        stats = acc + dim * 64
        room = stats + 256
        load_queries(model, query_address(model, kv_head, row0), q)
        start_lanes(model, item, kv_head, acc, rows)
        attention.load_acc(acc, dim)
        size = 2 * kv_cache.block_bytes(model)
        before, here, after = np.int64(0), np.int64(0), np.int64(0)
        for b in range(first - 1, end + 1):
            before, here, after = here, after, np.int64(0)
            keys, values, ahead = np.int64(0), np.int64(0), np.int64(0)
            if b + 1 < end:
                after = item_block(op, model, block_tables, item, kv_head, b + 1)
                keys = kv_cache.keys_on_tiles(model, after, room)
            if b > first:
                values = kv_cache.values_on_tiles(model, before, room + dim * 64)
            later, earlier = (keys, scores + (b + 1) % 2 * 2048), (p + (b - 1) % 2 * 1024, values)
            if b < first:
                attention.scores_on_tiles(q, keys, dim, 0, dim, later[1])
            elif b < end:
                now = scores + b % 2 * 2048, p + b % 2 * 1024
                hidden = hides_keys(op, model, positions, row0, rows, b * 32, now[0], stats + 128)
                if rows < 16:  # full tiles find their keys in the cache
                    ahead = block_ahead(op, model, block_tables, item, following, kv_head, b + 2)
                fetched = size if ahead else 0
                attention.turn_lanes(q, dim, stats, acc, later, now, hidden, stats + 128, earlier, ahead, fetched)
            elif values:
                (
                    attention.add_values(earlier[0], values, dim, 0, acc),
                    attention.add_values(earlier[0], values, dim, 1, acc),
                )
        attention.store_acc(acc, dim)
        if item[attention.FINAL]:
            write_lanes(op, model, row0, rows, kv_head, acc, stats + 64, scores)
        else:
            state = state_address(model, kv_head, np.int64(item[attention.STATE]))
            for d in range(0, (dim + 2) * 64, 64):
                simd.store(state + d, simd.load(acc + d))

    return attend_on_tiles


@helper
def load_queries(model, source, q):
    """Sixteen rows of queries to (dim/2, 16, 2)."""
    for t in range(0, model.dim * 2, 64):
        simd.transpose(source + t, model.dim * 2, q + t * 16, 64)


@helper
def start_lanes(model, item, kv_head, acc, rows):
    """Accumulator, maxima and sums: zeros, or what the item carries on from."""
    fill_zeros(acc, (model.dim + 2) * 64)
    simd.store(acc + model.dim * 64, simd.broadcast(attention.LOWEST))
    if item[attention.FINAL] and item[attention.STATE] >= 0:
        for r in range(rows):
            row = np.int64(item[attention.STATE]) + r
            state = state_address(model, kv_head, row) + row % 16 * 4
            for d in range(0, (model.dim + 2) * 64, 64):
                simd.write_f32(acc + d + r * 4, simd.read_f32(state + d))


@helper
def write_limits(model, positions, row0, rows, slot, limits):
    """How many keys from `slot` on each lane may see; lanes without a row see what the last row sees."""
    for r in range(16):
        token = (row0 + (r if r < rows else rows - 1)) // model.group
        simd.write_i32(limits + r * 4, np.int32(positions[token] + 1 - slot))


@helper
def write_lanes(op, model, row0, rows, kv_head, acc, sums, block):
    """Normalise finished lanes into the next activation, at (token, head * head_dim)."""
    inverse = simd.divide(simd.broadcast(attention.ONE), simd.load(sums))
    for d in range(0, model.head_dim * 64, 64):
        simd.store(acc + d, simd.load(acc + d) * inverse)
    for i in range(0, model.head_dim, 16):
        simd.transpose(acc + i * 64, 64, block, 64)
        for r in range(rows):
            token, head = (row0 + r) // model.group, kv_head * model.group + (row0 + r) % model.group
            target = tile_address(op.out, token, head * model.head_dim + i, op.n, 2)
            simd.store_bf16(target, simd.load(block + r * 64))


def _on_vectors(shape_row: Any, soften_row: Any) -> Any:
    """The way through an item on vectors, with what is done to a row of scores and how the softmax takes them."""

    @helper
    def attend_on_vectors(op, model, positions, block_tables, item, kv_head, scratch):
        """One work item of attention.py for one KV head, a query at a time."""
        dim, rows, row0 = model.dim, np.int64(item[attention.ROWS]), np.int64(item[attention.ROW])
        acc, scores, p, stats = scratch, scratch + dim * 64, scratch + dim * 64 + 2048, scratch + dim * 64 + 4096
        room, is_bf16 = stats + 128, model.kv_type == kv_cache.KV_BF16
        q, window = query_address(model, kv_head, row0), window_of(op)
        carried = item[attention.FINAL] and item[attention.STATE] >= 0
        for r in range(rows):
            for d in range(0, dim * 4, 64):
                simd.store(acc + r * dim * 4 + d, simd.broadcast(attention.ZERO))
            simd.write_f32(stats + r * 8, attention.LOWEST)
            simd.write_f32(stats + r * 8 + 4, attention.ZERO)
            if carried:
                move_row(model, kv_head, np.int64(item[attention.STATE]) + r, acc + r * dim * 4, stats + r * 8, False)
        for b in range(item[attention.FIRST], item[attention.END]):
            slot = b * 32
            keys = item_block(op, model, block_tables, item, kv_head, b)
            values = keys + kv_cache.block_bytes(model)
            if model.kv_type == kv_cache.KV_INT8:
                kv_cache.expand_keys(model, keys, room)
                kv_cache.expand_values(model, values, room + dim * 128)
                keys, values = room, room + dim * 128
            attention.scores_on_vectors(q, keys, dim, rows, is_bf16, scores)
            for r in range(rows):
                visible = np.int64(positions[(row0 + r) // model.group]) + 1 - slot
                shape_row(op, scores + r * 128)
                soften_row(scores + r * 128, p + r * 128, visible, window, stats + r * 8, acc + r * dim * 4, dim)
            attention.values_on_vectors(p, values, dim, rows, is_bf16, acc)
        for r in range(rows):
            if item[attention.FINAL]:
                write_row(op, model, row0 + r, kv_head, acc + r * dim * 4, simd.read_f32(stats + r * 8 + 4))
            else:
                move_row(model, kv_head, np.int64(item[attention.STATE]) + r, acc + r * dim * 4, stats + r * 8, True)

    return attend_on_vectors


@helper
def move_row(model, kv_head, row, acc, stats, save):
    """One row's accumulator, maximum and sum to its carried state, or back from there."""
    state = state_address(model, kv_head, row) + row % 16 * (model.dim + 2) * 4
    for d in range(0, model.dim * 4, 4):
        if save:
            simd.write_f32(state + d, simd.read_f32(acc + d))
        else:
            simd.write_f32(acc + d, simd.read_f32(state + d))
    for i in range(0, 8, 4):
        if save:
            simd.write_f32(state + model.dim * 4 + i, simd.read_f32(stats + i))
        else:
            simd.write_f32(stats + i, simd.read_f32(state + model.dim * 4 + i))


@helper
def write_row(op, model, row, kv_head, acc, total):
    """Normalise a finished row into the next activation, at (token, head * head_dim)."""
    size = 2 if model.act_bf16 else 4
    token, head = row // model.group, kv_head * model.group + row % model.group
    for i in range(0, model.head_dim, 16):
        value = simd.divide(simd.load(acc + i * 4), simd.broadcast(total))
        store_any(tile_address(op.out, token, head * model.head_dim + i, op.n, size), value, model.act_bf16)


@inlined
def window_of(op):
    """Keys that a query sees, itself included."""
    return op.window if op.window else np.int64(1 << 30)


@inlined
def shape_lanes(op, model, positions, row0, rows, slot, scores, limits):
    """Cap the scores of a block and hide the keys outside each lane's window; then none is left to be hidden.

    What is hidden gets a score so low that its weight is zero even where a lane has seen no key yet.
    """
    write_limits(model, positions, row0, rows, slot, limits)
    window = window_of(op)
    for key in range(32):
        value = simd.load(scores + key * 64)
        if op.soft_cap:
            value = softly_capped(value, op.soft_cap * sampling.LOG2_E)
        simd.store(scores + key * 64, simd.keep_within(value, limits, key, window, HIDDEN))
    return False


@inlined
def shape_row(op, scores):
    if op.soft_cap:
        for half in (0, 64):
            simd.store(scores + half, softly_capped(simd.load(scores + half), op.soft_cap * sampling.LOG2_E))


@inlined
def leave_row(op, scores):
    pass


def _attention_level(on_tiles: Any, on_vectors: Any) -> Any:
    """A function that takes items [first, end) of the work list, each for every KV head."""

    @spliced
    def attention_level(op, model, positions, block_tables, items, first, end, counter, scratch):
        total = (end - first) * model.kv_heads
        while True:
            n = simd.fetch_add(counter, 1)
            if n >= total:
                break
            item, kv_head = items[first + n % (end - first)], n // (end - first)
            if model.kv_amx:
                following = items[first + (n + model.threads) % (end - first)]
                on_tiles(op, model, positions, block_tables, item, following, kv_head, scratch)
            else:
                on_vectors(op, model, positions, block_tables, item, kv_head, scratch)

    return attention_level


attention_level = _attention_level(
    _on_tiles(hides_keys), _on_vectors(leave_row, attention.softener(attention.first_keys))
)
_shaped_level = _attention_level(
    _on_tiles(shape_lanes), _on_vectors(shape_row, attention.softener(attention.last_keys))
)


def shaped_attention(op, model, step, first, end, counter, scratch):
    """A kernel of on_demand.py: attention within a window, or with capped scores."""
    op, model, step = operation_at(op), model_at(model), step_at(step)
    positions = int32_rows(step.positions, 1, step.tokens)[0]
    block_tables = int32_rows(step.block_tables, step.sequences, step.table_columns)
    items = int32_rows(step.work, step.window_items, attention.ITEM_FIELDS)
    _shaped_level(op, model, positions, block_tables, items, first, end, counter, scratch)
