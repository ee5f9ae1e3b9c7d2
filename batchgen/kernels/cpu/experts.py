"""A mixture of experts (Shazeer et al. 2017), in kernels of `on_demand.py`.

Each row chooses experts; the rows of an expert are brought together, from a multiple of 32 on, multiplied by its
weights and brought back. A row's products do not depend on the rows beside it, so nothing depends on who chose what.

`op.routes` holds, of int32 for the most tokens of a step and `op.chosen` each: the experts, their shares (float32),
places among the rows that were brought together; then of every expert its rows and the first of them; then of every
place the row that is there, or -1.
"""

import numpy as np

from batchgen.kernels.cpu import sampling, simd
from batchgen.kernels.cpu.compiling import helper, inlined
from batchgen.kernels.cpu.linear import (
    ITEM_PAIRS,
    count_pairs,
    fill_zeros,
    forget_activation,
    linear,
    round_up,
    row_chunk,
    tile_address,
)
from batchgen.kernels.cpu.on_demand import model_at, operation_at
from batchgen.kernels.cpu.records import OP_DTYPE
from batchgen.kernels.cpu.row_kernels import lanes

OP_BYTES = OP_DTYPE.itemsize


def most_places(tokens: int, chosen: int, experts: int) -> int:
    """Rows that are brought together, each expert's padded to 32."""
    return (tokens * chosen + 31 * min(experts, tokens * chosen) + 31) // 32 * 32


def routes_size(tokens: int, chosen: int, experts: int) -> int:
    """int32 at `op.routes`."""
    return 3 * tokens * chosen + 2 * experts + most_places(tokens, chosen, experts)


@inlined
def route(op, model, kind, row, k):
    """Address of the expert (0), share (1) or place (2) of a row's choice number k."""
    return op.routes + ((kind * model.max_tokens + row) * op.chosen + k) * 4


@inlined
def rows_of(op, model, expert):
    """Address of an expert's number of rows; the first one's place is `op.expert_count` further on."""
    return op.routes + (3 * model.max_tokens * op.chosen + expert) * 4


@inlined
def row_at(op, model, place):
    """Address of the row that is at a place."""
    return op.routes + (3 * model.max_tokens * op.chosen + 2 * op.expert_count + place) * 4


@helper
def best_expert(op, source, lowest, before):
    """The likeliest expert after number `before` of value `lowest` in the order of values, then of numbers.

    A value that is no number is taken as the last; the first experts stand where nothing is comparable.
    """
    best, top = op.expert_count, np.float32(0)
    for e in range(op.expert_count):
        value = simd.read_f32(source + e * 4)
        follows = before < 0 or value < lowest or (value == lowest and e > before)
        if follows and (best == op.expert_count or value > top):
            best, top = e, value
    return best if best < op.expert_count else min(before + 1, op.expert_count - 1)


@inlined
def likelihood(value, top):
    """exp(value - top) in every lane."""
    return simd.exp2((value - top) * simd.broadcast(np.float32(sampling.LOG2_E)))


@helper
def sum_of_likelihoods(op, source, top):
    total = simd.zero()
    for i in range(0, op.expert_count, 16):
        here = likelihood(lanes(source, i, op.expert_count), top)
        total = total + simd.keep_below(here, op.expert_count - i, np.float32(0))
    return simd.reduce_add(total)


def route_rows(op, model, step, first, end, counter, scratch):
    """The experts of each row, the likeliest first, and their shares; `op.kind`: whether these sum to 1."""
    op, model = operation_at(op), model_at(model)
    for r in range(first, end):
        source = op.x + r * op.ld * 4
        expert = best_expert(op, source, np.float32(0), np.int64(-1))
        top = simd.broadcast(simd.read_f32(source + expert * 4))
        total = np.float32(0)
        for k in range(op.chosen):
            value = simd.read_f32(source + expert * 4)
            share = simd.reduce_max(likelihood(simd.broadcast(value), top))
            total += share
            simd.write_i32(route(op, model, 0, r, k), np.int32(expert))
            simd.write_f32(route(op, model, 1, r, k), share)
            expert = best_expert(op, source, value, expert)
        if not op.kind:
            total = sum_of_likelihoods(op, source, top)
        for k in range(op.chosen):
            place = route(op, model, 1, r, k)
            simd.write_f32(place, simd.read_f32(place) / total)


def group_rows(op, model, step, first, end, counter, scratch):
    """Places for all rows, expert by expert and in order; by the first thread that comes."""
    op, model = operation_at(op), model_at(model)
    if simd.fetch_add(counter, 1) > 0:
        return
    for e in range(op.expert_count):
        simd.write_i32(rows_of(op, model, e), np.int32(0))
    for t in range(end):
        for k in range(op.chosen):
            count = rows_of(op, model, np.int64(simd.read_i32(route(op, model, 0, t, k))))
            simd.write_i32(count, np.int32(simd.read_i32(count) + 1))
    place = 0
    for e in range(op.expert_count):
        count = np.int64(simd.read_i32(rows_of(op, model, e)))
        simd.write_i32(rows_of(op, model, op.expert_count + e), np.int32(place))
        for i in range(count, round_up(count, 32)):
            simd.write_i32(row_at(op, model, place + i), np.int32(-1))
        simd.write_i32(rows_of(op, model, e), np.int32(0))
        place += round_up(count, 32)
    for t in range(end):
        for k in range(op.chosen):
            expert = np.int64(simd.read_i32(route(op, model, 0, t, k)))
            count = rows_of(op, model, expert)
            here = simd.read_i32(rows_of(op, model, op.expert_count + expert)) + simd.read_i32(count)
            simd.write_i32(count, np.int32(simd.read_i32(count) + 1))
            simd.write_i32(route(op, model, 2, t, k), np.int32(here))
            simd.write_i32(row_at(op, model, here), np.int32(t))


@inlined
def end_of_places(op, model):
    last = op.expert_count - 1
    first = simd.read_i32(rows_of(op, model, op.expert_count + last))
    return np.int64(first) + round_up(np.int64(simd.read_i32(rows_of(op, model, last))), 32)


def gather_rows(op, model, step, first, end, counter, scratch):
    """Rows of an activation to their places; items are sixteen places."""
    op, model = operation_at(op), model_at(model)
    size, places = 2 if model.act_bf16 else 4, end_of_places(op, model)
    while True:
        place = simd.fetch_add(counter, 1) * 16
        if place >= places:
            break
        for p in range(place, place + 16):
            row = np.int64(simd.read_i32(row_at(op, model, p)))
            for i in range(0, op.k, 32):
                target = tile_address(op.out, p, i, op.k, size)
                if row < 0:
                    fill_zeros(target, 32 * size)
                else:
                    source = tile_address(op.x, row, i, op.k, size)
                    for byte in range(0, 32 * size, 64):
                        simd.store(target + byte, simd.load(source + byte))


def multiply_experts(op, model, step, first, end, counter, scratch):
    """Each expert's rows times its weights; items are a few pairs of weight panels of an expert."""
    op, model = operation_at(op), model_at(model)
    groups = (count_pairs(operation_at(op.experts)) + ITEM_PAIRS - 1) // ITEM_PAIRS
    forget_activation(operation_at(op.experts), model, scratch)
    while True:
        item = simd.fetch_add(counter, 1)
        if item >= groups * op.expert_count:
            break
        expert, pair = item // groups, item % groups * ITEM_PAIRS
        own = operation_at(op.experts + expert * OP_BYTES)
        begin = np.int64(simd.read_i32(rows_of(op, model, op.expert_count + expert)))
        stop = begin + np.int64(simd.read_i32(rows_of(op, model, expert)))
        for row in range(begin, stop, row_chunk(own, model)):
            rows = row, min(stop, row + row_chunk(own, model))
            linear(own, model, rows, (pair, min(count_pairs(own), pair + ITEM_PAIRS)), scratch)


def combine_rows(op, model, step, first, end, counter, scratch):
    """Add to each row its experts' results, the likeliest first, each times its share."""
    op, model = operation_at(op), model_at(model)
    for r in range(first, end):
        for k in range(op.chosen):
            share = simd.broadcast(simd.read_f32(route(op, model, 1, r, k)))
            source = op.x + np.int64(simd.read_i32(route(op, model, 2, r, k))) * op.ld * 4
            for i in range(0, op.k * 4, 64):
                target = op.out + r * op.k * 4 + i
                simd.store(target, simd.fma(share, simd.load(source + i), simd.load(target)))
