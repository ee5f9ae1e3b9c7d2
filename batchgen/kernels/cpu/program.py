"""The recorded program of a model and the function that every thread runs, step after step.

A program is an array of `OP_DTYPE` records, made once at load (backend.py). `run` is entered by all threads at once for
a whole step: for each operation the threads take work items from a shared counter, so that a thread that the system
set aside delays nobody until the barrier at the operation's end. Results do not depend on the split
into items.
"""

import numpy as np

from batchgen.kernels.cpu import gemm, kv_cache, on_demand, sampling, simd, tiles
from batchgen.kernels.cpu.attend import attention_level
from batchgen.kernels.cpu.compiling import compiled, helper, spliced
from batchgen.kernels.cpu.head import count_head_items, head_item, pick_row
from batchgen.kernels.cpu.linear import (
    count_linear_items,
    count_pairs,
    fill_zeros,
    forget_activation,
    linear,
    linear_item,
    store_any,
    tile_address,
)
from batchgen.kernels.cpu.on_demand import address_of
from batchgen.kernels.cpu.records import (
    ATTENTION,
    CLEAR,
    EMBED,
    HEAD,
    LINEAR,
    LINEAR_ADD,
    LINEAR_SWIGLU,
    NORM,
    PICK,
    ROPE,
    ROWS,
    SAMPLE,
    WHOLE,
)

ROW_BY_ROW = (EMBED, NORM, LINEAR, LINEAR_ADD, LINEAR_SWIGLU, ROPE, ROWS)
LEAST_ROWS, MOST_ROWS = 96, 256
"""Per chunk: fewer do not pay for reading all weights, more leave the second-level cache."""

LEAST_SHARE = 0.8
"""Of the rows of all threads' chunks that must be filled; else threads would wait for each other."""

COUNTERS_PER_OP = 8


@helper
def wait_for_all(barrier, threads, generation):
    """Spin, then give the processor away while others still work."""
    simd.fetch_add(barrier, 1)
    spins = 0
    while simd.load_acquire(barrier) < generation * threads:
        spins += 1
        if spins > 4000:
            simd.sched_yield()


@helper
def embed_rows(op, model, input_ids, first, end):
    size = 2 if model.table_bf16 else 4
    for t in range(first, end):
        source, target = op.w + np.int64(input_ids[t]) * op.k * size, op.out + t * op.ld * 4
        for i in range(0, op.k, 16):
            simd.store(target + i * 4, simd.load_any(source + i * size, model.table_bf16))


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
def rope_rows(op, model, positions, slot_mapping, first, end, scratch):
    """Rotate q and k, scale q for exp2, lay q out by KV head and write k and v into the cache."""
    d, half, q_size = model.head_dim, model.head_dim // 2, 2 if model.kv_amx else 4
    packed = scratch + model.dim * 4
    fill_zeros(scratch, model.dim * 4)
    for t in range(first, end):
        source = op.x + t * op.ld * 4
        angle = op.rope + np.int64(positions[t]) * half * 4
        cos, sin = model.cos + angle, model.sin + angle
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
def count_items(op, model, step):
    rows = step.rows if op.logits_rows else step.tokens
    if op.code == EMBED or op.code == NORM or op.code == ROPE or op.code == ROWS:
        return (rows + 15) // 16
    if op.code == LINEAR or op.code == LINEAR_ADD or op.code == LINEAR_SWIGLU:
        return count_linear_items(op, model, rows)
    if op.code == CLEAR:
        return step.cleared * model.layers
    if op.code == HEAD:
        return count_head_items(op, rows)
    if op.code == PICK:
        return rows
    return step.samples


@helper
def call(op, model, step, first, end, counter, scratch):
    """An operation whose kernel is not part of the program; see on_demand.py."""
    on_demand.call(op.function, address_of(op), address_of(model), address_of(step), first, end, counter, scratch)


@spliced
def do_rows(op, model, step, first, end, scratch, arrays):
    """An operation that looks at one row at a time, on some of the step's rows."""
    if op.code == EMBED:
        embed_rows(op, model, arrays.input_ids, first, end)
    elif op.code == NORM:
        norm_rows(op, model, arrays.logits_rows, first, end)
    elif op.code == ROPE:
        rope_rows(op, model, arrays.positions, arrays.slot_mapping, first, end, scratch)
    elif op.code == ROWS:
        call(op, model, step, first, end, 0, scratch)
    else:
        linear(op, model, (first, end), (0, count_pairs(op)), scratch)


@spliced
def do_item(op, model, step, item, scratch, arrays, vocab_scratch):
    """Execute one work item of an operation other than attention."""
    rows = step.rows if op.logits_rows else step.tokens
    if op.code == LINEAR or op.code == LINEAR_ADD or op.code == LINEAR_SWIGLU:
        linear_item(op, model, rows, item, scratch)
    elif op.code == CLEAR:
        kv_cache.clear_page(model, np.int64(arrays.cleared_pages[item // model.layers]), item % model.layers)
    elif op.code == HEAD:
        head_item(op, model, step, rows, item, arrays.needs_logits, scratch)
    elif op.code == PICK:
        pick_row(op, model, item, arrays.best, arrays.best_logit, arrays.log_sum)
    elif op.code == SAMPLE:
        sample_item(model, item, arrays, vocab_scratch)
    else:
        do_rows(op, model, step, item * 16, min(rows, item * 16 + 16), scratch, arrays)


@helper
def sample_item(model, item, arrays, vocab_scratch):
    sample = arrays.samples[item]
    row, token = sample.row, arrays.best[sample.row]
    logit = arrays.best_logit[row]
    if sample.scored:
        logit = arrays.logits[row, sample.target]
    # Logits that are not finite are the engine's to report; there is nothing to draw from then.
    elif arrays.needs_logits[row] and np.isfinite(arrays.log_sum[row]):
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


@spliced
def copy_level(op, model, arrays, copies, counter):
    """Items are copies; the first of a run of neighbours that stays within two blocks stands for all of it."""
    while True:
        n = simd.fetch_add(counter, 1)
        if n >= copies:
            break
        source, target = arrays.copies[n, 0], arrays.copies[n, 1]
        begins = source % 32 == 0 or target % 32 == 0
        if begins or n == 0 or arrays.copies[n - 1, 0] != source - 1 or arrays.copies[n - 1, 1] != target - 1:
            count, most = 1, min(copies - n, 32 - source % 32, 32 - target % 32)
            while count < most and arrays.copies[n + count, 0] == source + count:
                if arrays.copies[n + count, 1] != target + count:
                    break
                count += 1
            kv_cache.copy_slots(model, op.layer, source, target, count)


@spliced
def attend(op, model, step, arrays, counter, generation, scratch):
    """Copies, then runs of keys that sequences share, then the rest; returns the barriers passed."""
    if step.copies:
        copy_level(op, model, arrays, step.copies, counter + 16)
        generation += 1
        wait_for_all(model.barrier, model.threads, generation)
    first, shared, end = 0, step.shared_items, step.items
    if op.window:
        first, shared, end = step.items, step.window_shared, step.window_items
    if shared > first:
        attend_level(op, model, step, arrays, first, shared, counter + 8, scratch)
        generation += 1
        wait_for_all(model.barrier, model.threads, generation)
    attend_level(op, model, step, arrays, shared, end, counter, scratch)
    return generation


@spliced
def attend_level(op, model, step, arrays, first, end, counter, scratch):
    if op.function:
        call(op, model, step, first, end, counter, scratch)
    else:
        attention_level(op, model, arrays.positions, arrays.block_tables, arrays.items, first, end, counter, scratch)


@spliced
def by_rows(ops, first, end, model, step, scratch, arrays, times):
    """Operations [first, end), none of which looks across rows, one after the other on a chunk of rows at a time."""
    counter = model.counters + first * COUNTERS_PER_OP * 8
    while True:
        row = simd.fetch_add(counter, 1) * step.chunk
        if row >= step.tokens:
            break
        for i in range(first, end):
            began = simd.now_ns(scratch)
            forget_activation(ops[i], model, scratch)
            do_rows(ops[i], model, step, row, min(step.tokens, row + step.chunk), scratch, arrays)
            times[i, 0] += simd.now_ns(scratch) - began


@spliced
def by_items(op, number, model, step, scratch, arrays, vocab_scratch):
    counter = model.counters + number * COUNTERS_PER_OP * 8
    total = count_items(op, model, step)
    forget_activation(op, model, scratch)
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
    padded = -(-rows // 32) * 32
    return padded if rows >= LEAST_ROWS and tokens >= LEAST_SHARE * chunks * padded else 0


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
            elif op.code == WHOLE:
                call(op, model, step, 0, step.tokens, model.counters + i * COUNTERS_PER_OP * 8, scratch)
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
