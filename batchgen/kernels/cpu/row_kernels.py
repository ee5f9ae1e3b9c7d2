"""Kernels of `on_demand.py` that look at one row at a time: norms of other kinds, biases, activations, positions.

Rows of float32 results (`op.ld` columns apart) become rows of an activation, or change where they are.
"""

import numpy as np

from batchgen.kernels.cpu import sampling, simd
from batchgen.kernels.cpu.compiling import helper, inlined
from batchgen.kernels.cpu.linear import store_any, swiglu, tile_address
from batchgen.kernels.cpu.on_demand import model_at, operation_at, step_at
from batchgen.kernels.cpu.records import ACTIVATION_GELU, ACTIVATION_SILU

ZERO = np.float32(0)


@inlined
def source_row(op, step, r):
    """Number of the row that an operation reads: of those that want logits, or of the step's tokens."""
    return np.int64(simd.read_i32(step.logits_rows + r * 4)) if op.logits_rows else r


@inlined
def lanes(address, i, n):
    """Columns [i, i + 16) of a float32 row, zero from column `n` on."""
    value = simd.load(address + i * 4)
    return simd.keep_below(value, n - i, ZERO) if i + 16 > n else value


@helper
def row_scale(source, n, eps, centred):
    """Mean (0 unless `centred`) of `n` columns, and the factor that makes the mean square about it 1."""
    mean = ZERO
    if centred:
        total = simd.zero()
        for i in range(0, n, 16):
            total = total + lanes(source, i, n)
        mean = np.float32(simd.reduce_add(total) / n)
    squares, middle = simd.zero(), simd.broadcast(mean)
    for i in range(0, n, 16):
        value = lanes(source, i, n) - middle
        if i + 16 > n:
            value = simd.keep_below(value, n - i, ZERO)
        squares = simd.fma(value, value, squares)
    return mean, np.float32(1.0 / np.sqrt(simd.reduce_add(squares) / n + eps))


def layer_norm_rows(op, model, step, first, end, counter, scratch):
    """LayerNorm (Ba et al. 2016) of float32 rows into an activation; with a bias where there is one."""
    op, model, step = operation_at(op), model_at(model), step_at(step)
    size = 2 if model.act_bf16 else 4
    for r in range(first, end):
        source = op.x + source_row(op, step, r) * op.ld * 4
        mean, factor = row_scale(source, op.n, op.eps, True)
        middle, scale = simd.broadcast(mean), simd.broadcast(factor)
        for i in range(0, op.k, 16):
            value = (simd.load(source + i * 4) - middle) * scale * simd.load(op.w + i * 4)
            if op.bias:
                value = value + simd.load(op.bias + i * 4)
            store_any(tile_address(op.out, r, i, op.k, size), value, model.act_bf16)


def operand_rows(op, model, step, first, end, counter, scratch):
    """float32 rows into an activation as they are."""
    op, model, step = operation_at(op), model_at(model), step_at(step)
    size = 2 if model.act_bf16 else 4
    for r in range(first, end):
        for i in range(0, op.k, 16):
            value = simd.load(op.x + (r * op.ld + i) * 4)
            store_any(tile_address(op.out, r, i, op.k, size), value, model.act_bf16)


def bias_rows(op, model, step, first, end, counter, scratch):
    """Add a vector to float32 rows."""
    op = operation_at(op)
    for r in range(first, end):
        for i in range(0, op.k, 16):
            place = op.out + (r * op.ld + i) * 4
            simd.store(place, simd.load(place) + simd.load(op.bias + i * 4))


def norm_columns_rows(op, model, step, first, end, counter, scratch):
    """Normalise groups of `op.width` of `op.n` columns, each group by itself, where they are."""
    op = operation_at(op)
    for r in range(first, end):
        for group in range(0, op.n, op.width):
            place, weight = op.out + (r * op.ld + group) * 4, op.w + group * 4
            mean, factor = row_scale(place, op.width, op.eps, op.kind)
            middle, scale = simd.broadcast(mean), simd.broadcast(factor)
            for i in range(0, op.width * 4, 64):
                simd.store(place + i, (simd.load(place + i) - middle) * scale * simd.load(weight + i))


def add_normed_rows(op, model, step, first, end, counter, scratch):
    """Add the RMSNorm of float32 rows to others."""
    op = operation_at(op)
    for r in range(first, end):
        source, target = op.x + r * op.ld * 4, op.out + r * op.k * 4
        _, factor = row_scale(source, op.n, op.eps, False)
        scale = simd.broadcast(factor)
        for i in range(0, op.k * 4, 64):
            value = simd.load(source + i) * scale * simd.load(op.w + i)
            simd.store(target + i, simd.load(target + i) + value)


def add_position_rows(op, model, step, first, end, counter, scratch):
    """Add to each token's row that of a table at its position."""
    op, model, step = operation_at(op), model_at(model), step_at(step)
    size = 2 if model.table_bf16 else 4
    for r in range(first, end):
        source = op.w + np.int64(simd.read_i32(step.positions + r * 4)) * op.k * size
        for i in range(0, op.k, 16):
            place = op.out + (r * op.ld + i) * 4
            simd.store(place, simd.load(place) + simd.load_any(source + i * size, model.table_bf16))


@inlined
def constant(value):
    return simd.broadcast(np.float32(value))


@inlined
def gelu_tanh(x):
    """GELU in the approximation by tanh (Hendrycks & Gimpel 2016): x * sigmoid(2u)."""
    u = constant(0.7978845608028654) * simd.fma(constant(0.044715) * x, x * x, x)
    return simd.divide(x, constant(1) + simd.exp2(u * constant(-2 * sampling.LOG2_E)))


@inlined
def gelu(x):
    """GELU by the error function, in the approximation of Abramowitz & Stegun 7.1.26 (to 1.5e-7)."""
    z = simd.absolute(x) * constant(0.7071067811865476)
    t = simd.divide(constant(1), simd.fma(constant(0.3275911), z, constant(1)))
    p = simd.fma(constant(1.061405429), t, constant(-1.453152027))
    p = simd.fma(p, t, constant(1.421413741))
    p = simd.fma(p, t, constant(-0.284496736))
    p = simd.fma(p, t, constant(0.254829592)) * t
    rest = p * simd.exp2(z * z * constant(-sampling.LOG2_E))
    half = constant(0.5) * rest  # 1 - Phi(|x|)
    return x * simd.where_above(x, simd.zero(), constant(1) - half, half)


@helper
def activated(kind, x):
    if kind == ACTIVATION_SILU:
        return swiglu(x, constant(1))
    if kind == ACTIVATION_GELU:
        return gelu(x)
    return gelu_tanh(x)


def activate_rows(op, model, step, first, end, counter, scratch):
    """An activation function of `op.n` columns; where `op.width` is not 0, times those that begin at that column."""
    op, model = operation_at(op), model_at(model)
    size = 2 if model.act_bf16 else 4
    for r in range(first, end):
        source = op.x + r * op.ld * 4
        for i in range(0, op.k, 16):
            value = activated(op.kind, lanes(source, i, op.n))
            if op.width:
                value = value * lanes(source + op.width * 4, i, op.n)
            store_any(tile_address(op.out, r, i, op.k, size), value, model.act_bf16)


@inlined
def softly_capped(value, cap):
    """cap * tanh(value / cap)."""
    grown = simd.exp2(value * simd.broadcast(np.float32(2 * sampling.LOG2_E / cap)))
    return simd.broadcast(np.float32(cap)) * (constant(1) - simd.divide(constant(2), grown + constant(1)))


def cap_logits(op, model, step, first, end, counter, scratch):
    """Cap a row's blocks of logits, from address `first` on, `counter` bytes apart; `end` is past the last."""
    op = operation_at(op)
    for c in range(first, end, counter):
        simd.store(c, softly_capped(simd.load(c), op.soft_cap))
        simd.store(c + 64, softly_capped(simd.load(c + 64), op.soft_cap))
