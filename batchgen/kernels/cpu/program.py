"""The recorded program of a model and the function that every thread runs, step after step.

A program is an array of `OP_DTYPE` records, made once at load (backend.py). `run` is entered by all threads at once for
a whole step: for each operation the threads take work items from a shared counter, so that a thread that the system
set aside delays nobody until the barrier at the operation's end. The split into items depends on shapes alone, never on
the number of threads.
"""

from typing import Any

import numpy as np

from batchgen.kernels.cpu import attention, gemm, kv_cache, sampling, simd, tiles
from batchgen.kernels.cpu.compiling import compiled, helper, inlined

EMBED, NORM, LINEAR, LINEAR_ADD, LINEAR_SWIGLU, ROPE, CLEAR, ATTENTION, HEAD, PICK, SAMPLE = range(11)

OP_DTYPE = np.dtype(
    [
        ("code", np.int64),
        ("logits_rows", np.int64),  # 1: over the rows that want logits; 0: over the step's tokens
        ("x", np.int64),  # address of the left operand
        ("w", np.int64),  # address of the weight
        ("out", np.int64),  # address of the result
        ("k", np.int64),  # columns of x
        ("n", np.int64),  # columns of the result
        ("ld", np.int64),  # floats from one row of the float32 operand or result to the next
        ("layer", np.int64),
        ("fused_end", np.int64),  # end of the operations from this one on that look at one row at a time
        ("eps", np.float64),
    ],
    align=True,
)

MODEL_DTYPE = np.dtype(
    [
        ("threads", np.int64),
        ("kernel", np.int64),  # gemm.KERNEL_*
        ("act_bf16", np.int64),
        ("table_bf16", np.int64),
        ("kv_type", np.int64),  # kv_cache.KV_*
        ("kv_groups", np.int64),  # scales of a head's keys or values, of int8
        ("kv_amx", np.int64),
        ("layers", np.int64),
        ("heads", np.int64),
        ("kv_heads", np.int64),
        ("group", np.int64),
        ("head_dim", np.int64),
        ("dim", np.int64),  # head_dim padded to 32
        ("vocab", np.int64),
        ("page_size", np.int64),
        ("pages", np.int64),
        ("max_tokens", np.int64),
        ("state_items", np.int64),
        ("q_scale", np.float64),
        ("kv", np.int64),  # addresses from here on
        ("q", np.int64),
        ("state", np.int64),
        ("cos", np.int64),
        ("sin", np.int64),
        ("partial", np.int64),
        ("logits", np.int64),
        ("counters", np.int64),
        ("barrier", np.int64),
        ("tile_config", np.int64),
        ("scratch", np.int64),
        ("scratch_bytes", np.int64),
    ],
    align=True,
)

STEP_DTYPE = np.dtype(
    [(name, np.int64) for name in ("tokens", "rows", "samples", "copies", "cleared", "shared_items", "items", "chunk")],
    align=True,
)

ROW_BY_ROW = (EMBED, NORM, LINEAR, LINEAR_ADD, LINEAR_SWIGLU, ROPE)
LEAST_ROWS, MOST_ROWS = 96, 256
"""Per chunk: fewer do not pay for reading all weights, more leave the second-level cache."""

COUNTERS_PER_OP = 8
CHUNK_BYTES = 1 << 19
"""Of activations that stay in a core's second-level cache while the weights pass by."""
HEAD_PAIRS = 8
"""Pairs of weight panels of the output head per work item."""
ITEM_PAIRS = 3
"""Pairs of weight panels of the other products per work item."""
PARTIAL_FIELDS = 4


@inlined
def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@helper
def wait_for_all(barrier, threads, generation):
    """Spin, then give the processor away while others still work."""
    simd.fetch_add(barrier, 1)
    spins = 0
    while simd.load_acquire(barrier) < generation * threads:
        spins += 1
        if spins > 4000:
            simd.sched_yield()


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
def embed_rows(op, model, input_ids, first, end):
    size = 2 if model.table_bf16 else 4
    for t in range(first, end):
        source, target = op.w + np.int64(input_ids[t]) * op.k * size, op.out + t * op.ld * 4
        for i in range(0, op.k, 16):
            simd.store(target + i * 4, attention.load_any(source + i * size, model.table_bf16))


@helper
def norm_rows(op, model, logits_rows, first, end):
    """RMSNorm (Zhang & Sennrich 2019) of float32 rows into an activation; `op.n` columns count, `op.k` are stored."""
    size = 2 if model.act_bf16 else 4
    for r in range(first, end):
        source = op.x + (np.int64(logits_rows[r]) if op.logits_rows else r) * op.ld * 4
        squares = simd.broadcast(np.float32(0))
        for i in range(0, op.k * 4, 64):
            value = simd.load(source + i)
            squares = simd.fma(value, value, squares)
        scale = simd.broadcast(np.float32(1.0 / np.sqrt(simd.reduce_add(squares) / op.n + op.eps)))
        for i in range(0, op.k, 16):
            value = simd.load(source + i * 4) * scale * simd.load(op.w + i * 4)
            store_any(tile_address(op.out, r, i, op.k, size), value, model.act_bf16)


@inlined
def swiglu(gate, up):
    """SiLU(gate) * up (Shazeer 2020)."""
    one = simd.broadcast(np.float32(1))
    decay = simd.exp2(gate * simd.broadcast(np.float32(-sampling.LOG2_E)))
    return simd.divide(gate, one + decay) * up


@inlined
def store_row(c, target, stride, r, model):
    """Row `r` of a 32-column block of float32 to `target`, rows `stride` bytes apart."""
    simd.store(target + r * stride, simd.load(c + r * 128))
    simd.store(target + r * stride + 64, simd.load(c + r * 128 + 64))


@inlined
def add_row(c, target, stride, r, model):
    c, target = c + r * 128, target + r * stride
    simd.store(target, simd.load(c) + simd.load(target))
    simd.store(target + 64, simd.load(c + 64) + simd.load(target + 64))


@inlined
def swiglu_row(c, target, stride, r, model):
    """SwiGLU of a row's two halves into sixteen columns of an activation, whose tiles are `stride` bytes apart."""
    place = target + r // 16 * stride + r % 16 * 32 * (2 if model.act_bf16 else 4)
    store_any(place, swiglu(simd.load(c + r * 128), simd.load(c + r * 128 + 64)), model.act_bf16)


@helper
def pair_bytes(model, k):
    """Bytes of two weight panels of `k` rows."""
    return k * 32 * (4 if model.kernel == gemm.KERNEL_F32 else 2)


@helper
def block_target(op, model, row, pair):
    """Where the block at `row` and column pair `pair` goes, and the stride that the epilogue of `op` expects."""
    if op.code == LINEAR_SWIGLU:
        size = 2 if model.act_bf16 else 4
        return tile_address(op.out, row, pair * 16, op.n, size), op.n * 16 * size
    return op.out + (row * op.ld + pair * 32) * 4, op.ld * 4


def _linear_blocks(finish_row: Any) -> Any:
    """A function `(op, model, rows, pairs, scratch)`: all blocks of a range of rows and of pairs of panels.

    `finish_row` turns a row of a block into results. On tiles it works on the block before the one that is being
    multiplied, so that vector and tile units are busy together.
    """
    block_amx = gemm.amx_block(finish_row)

    @helper
    def linear_blocks(op, model, rows, pairs, scratch):
        size = 2 if model.act_bf16 else 4
        number, done, target, stride, count = 0, scratch, np.int64(0), np.int64(0), np.int64(0)
        for pair in range(pairs[0], pairs[1]):
            weight = op.w + pair * pair_bytes(model, op.k)
            for row in range(rows[0], rows[1], 32):
                here = min(32, rows[1] - row)
                x = op.x + (row // 16) * op.k * 16 * size
                if model.kernel == gemm.KERNEL_AMX:
                    c = scratch + number % 2 * 4096
                    block_amx(x, weight, op.k // 32, here > 16, c, done, target, stride, count, model)
                    done, count, number = c, here, number + 1
                    target, stride = block_target(op, model, row, pair)
                else:
                    gemm.block_vector(model.kernel, x, weight, op.k // 32, here, scratch)
                    target, stride = block_target(op, model, row, pair)
                    for r in range(here):
                        finish_row(scratch, target, stride, r, model)
        for r in range(count):
            finish_row(done, target, stride, r, model)

    return linear_blocks


_linear_store, _linear_add, _linear_swiglu = (_linear_blocks(f) for f in (store_row, add_row, swiglu_row))


@helper
def linear(op, model, rows, pairs, scratch):
    if op.code == LINEAR_SWIGLU:
        _linear_swiglu(op, model, rows, pairs, scratch)
    elif op.code == LINEAR_ADD:
        _linear_add(op, model, rows, pairs, scratch)
    else:
        _linear_store(op, model, rows, pairs, scratch)


@helper
def count_pairs(op):
    return (2 * op.n if op.code == LINEAR_SWIGLU else op.n) // 32


@helper
def row_chunk(op, model):
    """Rows of the left operand that stay in a core's second-level cache while the weights pass by."""
    return max(64, CHUNK_BYTES // (op.k * (2 if model.act_bf16 else 4)) // 32 * 32)


@helper
def count_chunks(op, model, rows):
    chunk = row_chunk(op, model)
    return (rows + chunk - 1) // chunk


@helper
def linear_item(op, model, total, item, scratch):
    """A few pairs of weight panels times a chunk of rows."""
    groups = (count_pairs(op) + ITEM_PAIRS - 1) // ITEM_PAIRS
    first, pair = item // groups * row_chunk(op, model), item % groups * ITEM_PAIRS
    rows = first, min(total, first + row_chunk(op, model))
    linear(op, model, rows, (pair, min(count_pairs(op), pair + ITEM_PAIRS)), scratch)


@helper
def rotate(source, target, cos, sin, half, scale):
    """Rotary embedding (Su et al. 2021), dimension i paired with i + half; float32 to float32."""
    if half % 16 == 0:
        factor = simd.broadcast(np.float32(scale))
        for i in range(0, half * 4, 64):
            c, s = simd.load(cos + i) * factor, simd.load(sin + i) * factor
            left, right = simd.load(source + i), simd.load(source + half * 4 + i)
            simd.store(target + i, left * c - right * s)
            simd.store(target + half * 4 + i, right * c + left * s)
    else:
        for i in range(0, half * 4, 4):
            c, s = simd.read_f32(cos + i) * np.float32(scale), simd.read_f32(sin + i) * np.float32(scale)
            left, right = simd.read_f32(source + i), simd.read_f32(source + half * 4 + i)
            simd.write_f32(target + i, left * c - right * s)
            simd.write_f32(target + half * 4 + i, right * c + left * s)


@helper
def fill_zeros(address, size):
    for i in range(0, size, 64):
        simd.store(address + i, simd.broadcast(attention.ZERO))


@helper
def rope_rows(op, model, positions, slot_mapping, first, end, scratch):
    """Rotate q and k, scale q for exp2, lay q out by KV head and write k and v into the cache."""
    d, half, q_size = model.head_dim, model.head_dim // 2, 2 if model.kv_amx else 4
    packed = scratch + model.dim * 4
    fill_zeros(scratch, model.dim * 4)
    for t in range(first, end):
        source = op.x + t * op.ld * 4
        cos, sin = model.cos + np.int64(positions[t]) * half * 4, model.sin + np.int64(positions[t]) * half * 4
        for h in range(model.heads):
            rotate(source + h * d * 4, scratch, cos, sin, half, model.q_scale)
            row = (h // model.group) * model.max_tokens * model.group + t * model.group + h % model.group
            for i in range(0, model.dim, 16):
                store_any(model.q + (row * model.dim + i) * q_size, simd.load(scratch + i * 4), model.kv_amx)
        page, offset = slot_mapping[t] // model.page_size, slot_mapping[t] % model.page_size
        alone = model.kv_amx and (t == first or slot_mapping[t] != slot_mapping[t - 1] + 1)
        for h in range(model.kv_heads):
            block = kv_cache.block_address(model, op.layer, page, offset, h)
            if alone:  # its values go to as many cache lines as it has dimensions
                kv_cache.fetch_values(model, block, offset % 32)
            rotate(source + (model.heads + h) * d * 4, scratch, cos, sin, half, 1.0)
            kv_cache.write_key(model, block, offset % 32, scratch, packed)
            if not model.kv_amx:
                for i in range(0, d * 4, 64):
                    simd.store(scratch + i, simd.load(source + (model.heads + model.kv_heads + h) * d * 4 + i))
                kv_cache.write_value(model, block, offset % 32, scratch, packed)
    if model.kv_amx:
        cache_values(op, model, slot_mapping, first, end, scratch)


@helper
def cache_values(op, model, slot_mapping, first, end, scratch):
    """Values into the layout for tiles, tokens in neighbouring slots together."""
    t = first
    while t < end:
        page, offset = slot_mapping[t] // model.page_size, slot_mapping[t] % model.page_size
        count, most = 1, min(16, end - t, 32 - offset % 32)
        while count < most and slot_mapping[t + count] == slot_mapping[t] + count:
            count += 1
        for h in range(model.kv_heads):
            source = op.x + (t * op.ld + (model.heads + model.kv_heads + h) * model.head_dim) * 4
            block = kv_cache.block_address(model, op.layer, page, offset, h)
            kv_cache.write_values(model, block, offset % 32, count, source, op.ld * 4, model.head_dim, scratch)
        t += count


@helper
def query_address(model, kv_head, row):
    """Address of a query row; rows are tokens times the heads that share a KV head."""
    return model.q + (kv_head * model.max_tokens * model.group + row) * model.dim * (2 if model.kv_amx else 4)


@helper
def state_address(model, kv_head, row):
    """Address of the carried state of the sixteen rows that hold `row`: an accumulator, maxima, sums."""
    return model.state + (kv_head * model.state_items + row // 16) * 64 * (model.dim + 2)


@helper
def item_block(op, model, block_tables, item, kv_head, number):
    """Address of the item's key block `number`."""
    slot = number * 32
    page = np.int64(block_tables[item[attention.SEQUENCE], slot // model.page_size])
    return kv_cache.block_address(model, op.layer, page, slot % model.page_size, kv_head)


@helper
def attend_on_tiles(op, model, positions, block_tables, item, following, kv_head, scratch):
    """One work item of attention.py for one KV head, a query in each lane; `following` is this thread's likely next one.

    Three blocks are under way at a time, so that tile and vector units need not wait for each other: the scores of one,
    the softmax of the one before, the values of the one before that.
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
    for b in range(first - 1, end + 1):
        keys, values = np.int64(0), np.int64(0)
        if b + 1 < end:
            block = item_block(op, model, block_tables, item, kv_head, b + 1)
            keys = kv_cache.keys_on_tiles(model, block, room)
        if b > first:
            values = kv_cache.values_on_tiles(
                model, item_block(op, model, block_tables, item, kv_head, b - 1), room + dim * 64
            )
        later, earlier = (keys, scores + (b + 1) % 2 * 2048), (p + (b - 1) % 2 * 1024, values)
        if b < first:
            attention.scores_on_tiles(q, keys, dim, 0, dim, later[1])
        elif b < end:
            hidden = positions[row0 // model.group] - b * 32 < 31
            if hidden:
                write_limits(model, positions, row0, rows, b * 32, stats + 128)
            now = scores + b % 2 * 2048, p + b % 2 * 1024
            ahead = np.int64(0)
            if rows < 16 and b + 2 < end:  # full tiles find their keys in the cache
                ahead = item_block(op, model, block_tables, item, kv_head, b + 2)
            elif rows < 16 and b + 2 - end < following[attention.END] - following[attention.FIRST]:
                number = np.int64(following[attention.FIRST]) + b + 2 - end
                ahead = item_block(op, model, block_tables, following, kv_head, number)
            size = 2 * kv_cache.block_bytes(model) if ahead else 0
            attention.turn_lanes(q, dim, stats, acc, later, now, hidden, stats + 128, earlier, ahead, size)
        elif values:
            attention.add_values(earlier[0], values, dim, 0, acc), attention.add_values(earlier[0], values, dim, 1, acc)
    attention.store_acc(acc, dim)
    if item[attention.FINAL]:
        write_lanes(op, model, row0, rows, kv_head, acc, stats + 64, scores)
    else:
        state = state_address(model, kv_head, np.int64(item[attention.STATE]))
        for d in range(0, (dim + 2) * 64, 64):
            simd.store(state + d, simd.load(acc + d))


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


@helper
def attend_on_vectors(op, model, positions, block_tables, item, kv_head, scratch):
    """One work item of attention.py for one KV head, a query at a time."""
    dim, rows, row0 = model.dim, np.int64(item[attention.ROWS]), np.int64(item[attention.ROW])
    acc, scores, p, stats = scratch, scratch + dim * 64, scratch + dim * 64 + 2048, scratch + dim * 64 + 4096
    room, is_bf16 = stats + 128, model.kv_type == kv_cache.KV_BF16
    q = query_address(model, kv_head, row0)
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
            attention.soften_row(scores + r * 128, p + r * 128, visible, stats + r * 8, acc + r * dim * 4, dim)
        attention.values_on_vectors(p, values, dim, rows, is_bf16, acc)
    for r in range(rows):
        if item[attention.FINAL]:
            write_row(op, model, row0 + r, kv_head, acc + r * dim * 4, simd.read_f32(stats + r * 8 + 4))
        else:
            move_row(model, kv_head, np.int64(item[attention.STATE]) + r, acc + r * dim * 4, stats + r * 8, True)


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


@helper
def head_groups(op):
    return (op.n + 32 * HEAD_PAIRS - 1) // (32 * HEAD_PAIRS)


@helper
def head_item(op, model, rows, item, needs_logits, scratch):
    """A group of the output head's columns: per row its maximum, where that is, and the sum of exponentials."""
    size = 2 if model.act_bf16 else 4
    groups = head_groups(op)
    chunk = row_chunk(op, model)
    first, group = (item // groups) * chunk, item % groups
    begin, end = group * HEAD_PAIRS, min(op.n // 32, (group + 1) * HEAD_PAIRS)
    for row in range(first, min(rows, first + chunk), 32):
        count = min(32, rows - row)
        for pair in range(begin, end):
            weight = op.w + pair * pair_bytes(model, op.k)
            x = op.x + (row // 16) * op.k * 16 * size
            gemm.block(model.kernel, x, weight, op.k // 32, count, scratch + (pair - begin) * 4096)
        hide_padding(model, scratch, begin, end)
        for r in range(count):
            partial = model.partial + ((row + r) * groups + group) * PARTIAL_FIELDS * 4
            head_row(scratch + r * 128, begin * 32, end - begin, partial)
            if needs_logits[row + r]:
                keep_logits(model, scratch + r * 128, begin, end, row + r)


@helper
def hide_padding(model, blocks, begin, end):
    """The columns past the vocabulary, in the last block, must not win."""
    column = (end - 1) * 32
    if end > begin and column + 32 > model.vocab:
        for r in range(32):
            c = blocks + (end - 1 - begin) * 4096 + r * 128
            simd.store(c, simd.keep_below(simd.load(c), model.vocab - column, attention.LOWEST))
            simd.store(c + 64, simd.keep_below(simd.load(c + 64), model.vocab - column - 16, attention.LOWEST))


@helper
def keep_logits(model, c, begin, end, row):
    target = model.logits + (row * round_up(model.vocab, 32) + begin * 32) * 4
    for pair in range(end - begin):
        simd.store(target + pair * 128, simd.load(c + pair * 4096))
        simd.store(target + pair * 128 + 64, simd.load(c + pair * 4096 + 64))


@helper
def head_row(c, column, pairs, partial):
    """Maximum, sum of exponentials and arg-max of one row over `pairs` blocks, 4096 bytes apart."""
    left, right = simd.load(c), simd.load(c + 64)
    for pair in range(1, pairs):
        left = simd.maximum(simd.load(c + pair * 4096), left)
        right = simd.maximum(simd.load(c + pair * 4096 + 64), right)
    top = simd.reduce_max(simd.maximum(left, right))
    highest, log2_e = simd.broadcast(top), simd.broadcast(np.float32(sampling.LOG2_E))
    even, odd = simd.broadcast(attention.ZERO), simd.broadcast(attention.ZERO)
    for pair in range(pairs):
        even = even + simd.exp2((simd.load(c + pair * 4096) - highest) * log2_e)
        odd = odd + simd.exp2((simd.load(c + pair * 4096 + 64) - highest) * log2_e)
    simd.write_f32(partial, top)
    simd.write_f32(partial + 4, simd.reduce_add(even + odd))
    simd.write_i32(partial + 8, np.int32(column))  # stands if every logit is NaN
    for half in range(2 * pairs):
        lane = simd.first_lane_equal(simd.load(c + half // 2 * 4096 + half % 2 * 64), top)
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


@helper
def count_items(op, model, step):
    rows = step.rows if op.logits_rows else step.tokens
    if op.code == EMBED or op.code == NORM or op.code == ROPE:
        return (rows + 15) // 16
    if op.code == LINEAR or op.code == LINEAR_ADD or op.code == LINEAR_SWIGLU:
        return count_chunks(op, model, rows) * ((count_pairs(op) + ITEM_PAIRS - 1) // ITEM_PAIRS)
    if op.code == CLEAR:
        return step.cleared * model.layers
    if op.code == HEAD:
        return count_chunks(op, model, rows) * head_groups(op)
    if op.code == PICK:
        return rows
    return step.samples


@helper
def do_rows(op, model, first, end, scratch, arrays):
    """An operation that looks at one row at a time, on some of the step's rows."""
    if op.code == EMBED:
        embed_rows(op, model, arrays.input_ids, first, end)
    elif op.code == NORM:
        norm_rows(op, model, arrays.logits_rows, first, end)
    elif op.code == ROPE:
        rope_rows(op, model, arrays.positions, arrays.slot_mapping, first, end, scratch)
    else:
        linear(op, model, (first, end), (0, count_pairs(op)), scratch)


@helper
def do_item(op, model, step, item, scratch, arrays, vocab_scratch):
    """Execute one work item of an operation other than attention."""
    rows = step.rows if op.logits_rows else step.tokens
    if op.code == LINEAR or op.code == LINEAR_ADD or op.code == LINEAR_SWIGLU:
        linear_item(op, model, rows, item, scratch)
    elif op.code == CLEAR:
        kv_cache.clear_page(model, np.int64(arrays.cleared_pages[item // model.layers]), item % model.layers)
    elif op.code == HEAD:
        head_item(op, model, rows, item, arrays.needs_logits, scratch)
    elif op.code == PICK:
        pick_row(op, model, item, arrays.best, arrays.best_logit, arrays.log_sum)
    elif op.code == SAMPLE:
        sample_item(model, item, arrays, vocab_scratch)
    else:
        do_rows(op, model, item * 16, min(rows, item * 16 + 16), scratch, arrays)


@helper
def sample_item(model, item, arrays, vocab_scratch):
    sample = arrays.samples[item]
    row, token = sample.row, arrays.best[sample.row]
    logit = arrays.best_logit[row]
    # Logits that are not finite are the engine's to report; there is nothing to draw from.
    if arrays.needs_logits[row] and np.isfinite(arrays.log_sum[row]):
        logits = arrays.logits[row]
        plain = sample.history_begin == sample.history_end and sample.suppress_begin == sample.suppress_end
        if not (sample.greedy and plain):
            work, counts = vocab_scratch
            token = np.int32(
                sampling.sample_row(logits, work, model.vocab, sample, arrays.history, arrays.suppress, counts)
            )
            logit = logits[token]
    arrays.tokens[item] = token
    arrays.logprobs[item] = np.float32(np.float64(logit) - arrays.log_sum[row])


@helper
def attention_level(op, model, arrays, first, end, counter, scratch):
    total = (end - first) * model.kv_heads
    while True:
        n = simd.fetch_add(counter, 1)
        if n >= total:
            break
        item, kv_head = arrays.items[first + n % (end - first)], n // (end - first)
        if model.kv_amx:
            following = arrays.items[first + (n + model.threads) % (end - first)]
            attend_on_tiles(op, model, arrays.positions, arrays.block_tables, item, following, kv_head, scratch)
        else:
            attend_on_vectors(op, model, arrays.positions, arrays.block_tables, item, kv_head, scratch)


@helper
def copy_level(op, model, arrays, copies, counter):
    while True:
        n = simd.fetch_add(counter, 1)
        if n >= copies:
            break
        kv_cache.copy_slot(model, op.layer, arrays.copies[n, 0], arrays.copies[n, 1])


@helper
def attend(op, model, step, arrays, counter, generation, scratch):
    """Copies, then runs of keys that sequences share, then the rest; returns the barriers passed."""
    if step.copies:
        copy_level(op, model, arrays, step.copies, counter + 16)
        generation += 1
        wait_for_all(model.barrier, model.threads, generation)
    if step.shared_items:
        attention_level(op, model, arrays, 0, step.shared_items, counter + 8, scratch)
        generation += 1
        wait_for_all(model.barrier, model.threads, generation)
    attention_level(op, model, arrays, step.shared_items, step.items, counter, scratch)
    return generation


@helper
def by_rows(ops, first, end, model, step, scratch, arrays, times):
    """Operations [first, end), none of which looks across rows, one after the other on a chunk of rows at a time."""
    counter = model.counters + first * COUNTERS_PER_OP * 8
    while True:
        row = simd.fetch_add(counter, 1) * step.chunk
        if row >= step.tokens:
            break
        for i in range(first, end):
            began = simd.now_ns(scratch)
            do_rows(ops[i], model, row, min(step.tokens, row + step.chunk), scratch, arrays)
            times[i, 0] += simd.now_ns(scratch) - began


@helper
def by_items(op, number, model, step, scratch, arrays, vocab_scratch):
    counter = model.counters + number * COUNTERS_PER_OP * 8
    total = count_items(op, model, step)
    while True:
        item = simd.fetch_add(counter, 1)
        if item >= total:
            break
        do_item(op, model, step, item, scratch, arrays, vocab_scratch)


def fused_ends(ops: np.ndarray) -> np.ndarray:
    """For every operation that looks at one row of tokens at a time, the end of the run of such operations."""
    ends = np.zeros(len(ops), np.int64)
    for i in reversed(range(len(ops))):
        if ops["code"][i] in ROW_BY_ROW and not ops["logits_rows"][i]:
            ends[i] = max(i + 1, ends[i + 1])
    return ends


def chunk_rows(tokens: int, threads: int) -> int:
    """Rows that a thread takes through several operations at once, or 0 when each operation is split over threads."""
    chunks = threads * -(-tokens // (threads * MOST_ROWS))
    rows = -(-tokens // chunks)
    return -(-rows // 32) * 32 if rows >= LEAST_ROWS else 0


@compiled
def run(ops, models, steps, arrays, thread, vocab_scratch, times):
    """One thread's part in one step: every operation of the program, with a barrier between them.

    With many rows (`step.chunk`), operations that look at one row at a time are taken together, chunk by chunk, so that
    what they pass on stays in the core's cache. To `times` (operations, 2) are added the nanoseconds of work, and those
    of waiting at the last operation before a barrier. All threads call this at the same time with the same arguments
    but `thread`, `vocab_scratch` and `times`. The work counters and the barrier are zero on entry.
    """
    model, step = models[0], steps[0]
    scratch = model.scratch + thread * model.scratch_bytes
    if model.kernel == gemm.KERNEL_AMX:
        tiles.load_config(model.tile_config)
    generation, i = 0, 0
    while i < len(ops):
        op, began = ops[i], simd.now_ns(scratch)
        end = max(i + 1, op.fused_end) if step.chunk else i + 1
        if end > i + 1:
            by_rows(ops, i, end, model, step, scratch, arrays, times)
        else:
            if op.code == ATTENTION:
                counter = model.counters + i * COUNTERS_PER_OP * 8
                generation = attend(op, model, step, arrays, counter, generation, scratch)
            else:
                by_items(op, i, model, step, scratch, arrays, vocab_scratch)
            times[i, 0] += simd.now_ns(scratch) - began
        worked = simd.now_ns(scratch)
        generation += 1
        wait_for_all(model.barrier, model.threads, generation)
        times[end - 1, 1] += simd.now_ns(scratch) - worked
        i = end
    if model.kernel == gemm.KERNEL_AMX:
        tiles.release()
