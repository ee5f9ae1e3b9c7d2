"""Sixteen floats as one value in njit code, plus raw memory access and atomics.

Numba arrays leave vectorisation to chance; `f32x16` maps to LLVM's `<16 x float>`, which becomes one AVX-512
register, two AVX2 or four NEON ones, with the same lanes and the same order of every reduction. Addresses are
plain int64 byte addresses. `+`, `-` and `*` work lane by lane; `fma` is fused wherever the processor fuses.
"""

import operator
import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from batchgen.kernels.cpu.compiling import helper, inlined
from batchgen.kernels.cpu.features import HAS_AVX512, HAS_AVX512_BF16, HAS_FMA

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context, which type checkers cannot know

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
V32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)
VI16 = ir.VectorType(I16, LANES)
VI8 = ir.VectorType(I8, LANES)


class BFloatType(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


BF16 = BFloatType()
VBF16 = ir.VectorType(BF16, LANES)


class F32x16(types.Type):
    """Numba's type of a vector of sixteen floats."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V32)


def constant(value: float) -> ir.Constant:
    """A vector with the same float in every lane."""
    return ir.Constant(V32, [value] * LANES)


def int_constant(value: int) -> ir.Constant:
    return ir.Constant(VI32, [value] * LANES)


def call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(VI32, [0] * LANES))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    if HAS_FMA:
        return call(builder, "llvm.fma.v16f32", V32, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def emit_load(builder: Any, address: Any) -> Any:
    value = builder.load(pointer(builder, address, V32))
    value.align = 4
    return value


def emit_load_bf16(builder: Any, address: Any) -> Any:
    value = builder.load(pointer(builder, address, VI16))
    value.align = 2
    return builder.bitcast(builder.shl(builder.zext(value, VI32), int_constant(16)), V32)


def emit_store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, V32)).align = 4


def emit_store_bf16(builder: Any, address: Any, value: Any) -> None:
    """Round to nearest even, as IEEE conversions do."""
    builder.store(builder.fptrunc(value, VBF16), pointer(builder, address, VBF16)).align = 2


def emit_store_two_bf16(builder: Any, address: Any, first: Any, second: Any) -> None:
    """32 bfloat16 side by side, by one instruction where there is one."""
    if HAS_AVX512_BF16:
        vector = ir.VectorType(BF16, 32)
        both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector, [second, first])
        builder.store(both, pointer(builder, address, vector)).align = 2
    else:
        emit_store_bf16(builder, address, first)
        emit_store_bf16(builder, builder.add(address, I64(32)), second)


def lane_numbers() -> ir.Constant:
    return ir.Constant(VI32, list(range(LANES)))


def emit_exp2(builder: Any, x: Any) -> Any:
    """2**x to about 2 ulp, x taken as at least -126 and at most 127; NaN stays NaN.

    A degree-6 polynomial (Cephes' exp2f) of x - round(x), then round(x) is added to the exponent.
    """
    low, high = constant(-126.0), constant(127.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = call(builder, "llvm.rint.v16f32", V32, [x])
    r = builder.fsub(x, n)
    coefficients = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
                    2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # fmt: skip
    p = constant(coefficients[0])
    for c in coefficients[1:]:
        p = emit_fma(builder, p, r, constant(c))
    shift = builder.shl(builder.fptosi(n, VI32), int_constant(23))
    return builder.bitcast(builder.add(builder.bitcast(p, VI32), shift), V32)


UNIT_EXP2 = (0.013534167781472206, 0.052011460065841675, 0.2414427548646927, 0.6930038332939148, 1.0000026226043701)
"""Coefficients of 2**r for r in [0, 1], the highest first: a minimax fit of degree 4."""


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    value = constant(coefficients[0])
    for c in coefficients[1:]:
        value = emit_fma(builder, value, x, constant(c))
    return value


def emit_exp2_bf16(builder: Any, x: Any) -> Any:
    """2**x to 3e-6, far below what bfloat16 resolves, x less than 127; NaN stays NaN."""
    if not HAS_AVX512:  # there are no tiles either, so nothing depends on its speed
        return emit_exp2(builder, x)
    keep, mask, rounding, floor = ir.Constant(V32, ir.Undefined), I16(-1), I32(4), I32(1)
    r = call(builder, "llvm.x86.avx512.mask.reduce.ps.512", V32, [x, floor, keep, mask, rounding])
    p = _polynomial(builder, r, UNIT_EXP2)
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", V32, [p, x, keep, mask, rounding])


def emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger lane; `b` where one is NaN (one instruction, unlike IEEE's maximum)."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors as columns: four rounds that interleave row i with row i + 8."""
    low = ir.Constant(VI32, [i // 2 + 16 * (i % 2) for i in range(LANES)])
    high = ir.Constant(VI32, [8 + i // 2 + 16 * (i % 2) for i in range(LANES)])
    for _ in range(4):
        rows = [builder.shuffle_vector(rows[i], rows[i + 8], half) for i in range(8) for half in (low, high)]
    return rows


INT32: Any = types.int32
VOID, INT64, FLOAT32 = types.void, types.int64, types.float32


@intrinsic
def load(typingctx, address):
    """Sixteen float32 from an address."""
    return f32x16(INT64), lambda context, builder, sig, args: emit_load(builder, args[0])


@intrinsic
def load_bf16(typingctx, address):
    """Sixteen bfloat16 from an address, widened."""
    return f32x16(INT64), lambda context, builder, sig, args: emit_load_bf16(builder, args[0])


@intrinsic
def store(typingctx, address, value):
    """Sixteen float32 to an address."""

    def codegen(context, builder, sig, args):
        emit_store(builder, *args)
        return context.get_dummy_value()

    return VOID(INT64, f32x16), codegen


@intrinsic
def store_bf16(typingctx, address, value):
    """Sixteen bfloat16 to an address, rounded to nearest even."""

    def codegen(context, builder, sig, args):
        emit_store_bf16(builder, *args)
        return context.get_dummy_value()

    return VOID(INT64, f32x16), codegen


@intrinsic
def broadcast(typingctx, value):
    """The same float32 in every lane."""
    return f32x16(FLOAT32), lambda context, builder, sig, args: splat(builder, args[0], V32)


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c."""
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: emit_fma(builder, *args)


@intrinsic
def maximum(typingctx, a, b):
    """The larger of each lane; `b` where one is NaN."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: emit_maximum(builder, *args)


@intrinsic
def exp2(typingctx, x):
    """2**x of each lane."""
    return f32x16(f32x16), lambda context, builder, sig, args: emit_exp2(builder, args[0])


@intrinsic
def exp2_bf16(typingctx, x):
    """2**x of each lane, exact enough for bfloat16; see `emit_exp2_bf16`."""
    return f32x16(f32x16), lambda context, builder, sig, args: emit_exp2_bf16(builder, args[0])


@intrinsic
def where_above(typingctx, a, b, x, y):
    """`x` in the lanes where a > b, `y` in the others."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return f32x16(f32x16, f32x16, f32x16, f32x16), codegen


@intrinsic
def load_i8(typingctx, address):
    """Sixteen int8 from an address, as float32."""

    return f32x16(INT64), lambda context, builder, sig, args: emit_load_i8(builder, args[0])


def emit_load_i8(builder: Any, address: Any) -> Any:
    value = builder.load(pointer(builder, address, VI8))
    value.align = 1
    return builder.sitofp(builder.sext(value, VI32), V32)


@intrinsic
def expand_i8(typingctx, source, left, right, target):
    """32 int8 at `source`, the first sixteen times `left` and the last times `right`, as bfloat16 to `target`."""

    def codegen(context, builder, sig, args):
        source, left, right, target = args
        left = builder.fmul(emit_load_i8(builder, source), left)
        right = builder.fmul(emit_load_i8(builder, builder.add(source, I64(16))), right)
        emit_store_two_bf16(builder, target, left, right)
        return context.get_dummy_value()

    return VOID(INT64, f32x16, f32x16, INT64), codegen


@intrinsic
def load_i32(typingctx, address):
    """Sixteen int32 from an address, as float32."""

    def codegen(context, builder, sig, args):
        value = builder.load(pointer(builder, args[0], VI32))
        value.align = 4
        return builder.sitofp(value, V32)

    return f32x16(INT64), codegen


def _pair_loader(element_bits: int) -> Any:
    """Sixteen pairs of codes from an address as two vectors of float32: nibbles (unsigned) or int8."""
    element = ir.VectorType(ir.IntType(2 * element_bits), LANES)

    def codegen(context, builder, sig, args):
        value = builder.load(pointer(builder, args[0], element))
        value.align = 1
        words = builder.zext(value, VI32)
        if element_bits == 4:
            both = builder.and_(words, int_constant(15)), builder.lshr(words, int_constant(4))
        else:
            both = (
                builder.ashr(builder.shl(words, int_constant(24)), int_constant(24)),
                builder.ashr(builder.shl(words, int_constant(16)), int_constant(24)),
            )
        return context.make_tuple(builder, sig.return_type, [builder.sitofp(codes, V32) for codes in both])

    @intrinsic
    def load_pairs(typingctx, address):
        return types.UniTuple(f32x16, 2)(INT64), codegen

    return load_pairs


load_nibbles, load_byte_pairs = _pair_loader(4), _pair_loader(8)


@intrinsic
def store_pairs_ties_even(typingctx, address, a, b):
    """Sixteen (a, b) pairs of bfloat16 to an address, lane i's at 4 * i; rounded to nearest even."""

    def codegen(context, builder, sig, args):
        address, a, b = args
        order = ir.Constant(ir.VectorType(I32, 32), [i // 2 + 16 * (i % 2) for i in range(32)])
        if HAS_AVX512_BF16:
            vector = ir.VectorType(BF16, 32)
            both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector, [b, a])
            both = builder.bitcast(both, ir.VectorType(I16, 32))
            pairs = builder.shuffle_vector(both, ir.Constant(both.type, ir.Undefined), order)
        else:
            low, high = (builder.bitcast(builder.fptrunc(v, VBF16), VI16) for v in (a, b))
            pairs = builder.shuffle_vector(low, high, order)
        builder.store(pairs, pointer(builder, address, pairs.type)).align = 4
        return context.get_dummy_value()

    return VOID(INT64, f32x16, f32x16), codegen


@intrinsic
def zero(typingctx):
    """Zero in every lane."""
    return f32x16(), lambda context, builder, sig, args: constant(0.0)


@intrinsic
def store_i8(typingctx, address, value):
    """Sixteen float32, rounded to nearest even, as int8 to an address; they must lie within [-128, 127]."""

    def codegen(context, builder, sig, args):
        rounded = builder.fptosi(call(builder, "llvm.rint.v16f32", V32, [args[1]]), VI32)
        builder.store(builder.trunc(rounded, VI8), pointer(builder, args[0], VI8)).align = 1
        return context.get_dummy_value()

    return VOID(INT64, f32x16), codegen


@intrinsic
def divide(typingctx, a, b):
    """a / b of each lane."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fdiv(*args)


@intrinsic
def reduce_max(typingctx, a):
    """The largest lane."""
    return FLOAT32(f32x16), lambda context, builder, sig, args: call(
        builder, "llvm.vector.reduce.fmax.v16f32", F32, [args[0]]
    )


@intrinsic
def reduce_add(typingctx, a):
    """The sum of the lanes, pairing halves: (i, i+8), (i, i+4), (i, i+2), (i, i+1)."""

    def codegen(context, builder, sig, args):
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            halves = [
                builder.shuffle_vector(
                    value, undefined, ir.Constant(ir.VectorType(I32, width), list(range(s, s + width)))
                )
                for s in (0, width)
            ]
            value = builder.fadd(*halves)
        return builder.extract_element(value, I32(0))

    return FLOAT32(f32x16), codegen


@intrinsic
def keep_below(typingctx, value, count, fill):
    """`value` in the lanes below `count`, `fill` in the others."""

    def codegen(context, builder, sig, args):
        value, count, fill = args
        limit = splat(builder, builder.trunc(count, I32), VI32)
        return builder.select(builder.icmp_signed("<", lane_numbers(), limit), value, splat(builder, fill, V32))

    return f32x16(f32x16, INT64, FLOAT32), codegen


@intrinsic
def keep_from(typingctx, value, count, fill):
    """`value` in the lanes from `count` on, `fill` in the others."""

    def codegen(context, builder, sig, args):
        value, count, fill = args
        limit = splat(builder, builder.trunc(count, I32), VI32)
        return builder.select(builder.icmp_signed("<", lane_numbers(), limit), splat(builder, fill, V32), value)

    return f32x16(f32x16, INT64, FLOAT32), codegen


@intrinsic
def keep_within(typingctx, value, limits, number, window, fill):
    """`value` in the lanes whose int32 of sixteen at address `limits` is more than `number`, by at most `window`."""

    def codegen(context, builder, sig, args):
        value, address, number, window, fill = args
        limits = builder.load(pointer(builder, address, VI32))
        limits.align = 4
        above = builder.sub(limits, splat(builder, builder.trunc(number, I32), VI32))
        before = builder.icmp_signed(">", above, int_constant(0))
        within = builder.icmp_signed("<=", above, splat(builder, builder.trunc(window, I32), VI32))
        return builder.select(builder.and_(before, within), value, splat(builder, fill, V32))

    return f32x16(f32x16, INT64, INT64, INT64, FLOAT32), codegen


@intrinsic
def keep_above(typingctx, value, limits, number, fill):
    """`value` in the lanes whose int32 in the sixteen at address `limits` exceeds `number`, `fill` in the others."""

    def codegen(context, builder, sig, args):
        value, address, number, fill = args
        limits = builder.load(pointer(builder, address, VI32))
        limits.align = 4
        seen = builder.icmp_signed(">", limits, splat(builder, builder.trunc(number, I32), VI32))
        return builder.select(seen, value, splat(builder, fill, V32))

    return f32x16(f32x16, INT64, INT64, FLOAT32), codegen


@intrinsic
def any_above(typingctx, a, b):
    """Whether a > b in some lane."""

    def codegen(context, builder, sig, args):
        mask = builder.bitcast(builder.fcmp_ordered(">", *args), I16)
        return builder.icmp_unsigned("!=", mask, I16(0))

    return types.boolean(f32x16, f32x16), codegen


@intrinsic
def store_pairs_ties_away(typingctx, address, a, b):
    """Sixteen (a, b) pairs of bfloat16 to an address, lane i's at 4 * i; rounded to nearest, ties away from zero."""

    def codegen(context, builder, sig, args):
        address, a, b = args
        low, high = (builder.add(builder.bitcast(v, VI32), int_constant(0x8000)) for v in (a, b))
        low, high = builder.lshr(low, int_constant(16)), builder.and_(high, int_constant(-65536))
        pairs = builder.or_(low, high)
        builder.store(pairs, pointer(builder, address, pairs.type)).align = 4
        return context.get_dummy_value()

    return VOID(INT64, f32x16, f32x16), codegen


@intrinsic
def transpose(typingctx, source, source_stride, target, target_stride):
    """Transpose a 16 x 16 block of 32-bit elements; strides in bytes from one row to the next."""

    def codegen(context, builder, sig, args):
        source, source_stride, target, target_stride = args
        rows = [emit_load(builder, builder.add(source, builder.mul(source_stride, I64(i)))) for i in range(LANES)]
        for i, row in enumerate(emit_transpose(builder, rows)):
            emit_store(builder, builder.add(target, builder.mul(target_stride, I64(i))), row)
        return context.get_dummy_value()

    return VOID(INT64, INT64, INT64, INT64), codegen


@intrinsic
def first_lane_equal(typingctx, value, wanted):
    """The lowest lane that equals `wanted`, or 16."""

    def codegen(context, builder, sig, args):
        equal = builder.fcmp_ordered("==", args[0], splat(builder, args[1], V32))
        mask = builder.zext(builder.bitcast(equal, I16), I32)
        found = call(builder, "llvm.cttz.i32", I32, [builder.or_(mask, I32(1 << 16)), I1(0)])
        return builder.zext(found, I64)

    return INT64(f32x16, FLOAT32), codegen


def _lanewise(name: str) -> Any:
    @intrinsic
    def operation(typingctx, a, b):
        return f32x16(f32x16, f32x16), lambda context, builder, sig, args: getattr(builder, name)(*args)

    return operation


_add, _sub, _mul = (_lanewise(name) for name in ("fadd", "fsub", "fmul"))


@overload(operator.add)
def _vector_add(a, b):
    if isinstance(a, F32x16) and isinstance(b, F32x16):
        return lambda a, b: _add(a, b)


@overload(operator.sub)
def _vector_sub(a, b):
    if isinstance(a, F32x16) and isinstance(b, F32x16):
        return lambda a, b: _sub(a, b)


@overload(operator.mul)
def _vector_mul(a, b):
    if isinstance(a, F32x16) and isinstance(b, F32x16):
        return lambda a, b: _mul(a, b)


def _reader(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, sig, args):
            value = builder.load(pointer(builder, args[0], llvm_type))
            value.align = 1
            return value

        return numba_type(INT64), codegen

    return read


def _writer(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def write(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type)).align = 1
            return context.get_dummy_value()

        return VOID(INT64, numba_type), codegen

    return write


read_f32, write_f32 = _reader(FLOAT32, F32), _writer(FLOAT32, F32)
read_i32, write_i32 = _reader(types.int32, I32), _writer(types.int32, I32)
read_i64, write_i64 = _reader(types.int64, I64), _writer(types.int64, I64)
read_u8, write_u8 = _reader(types.uint8, I8), _writer(types.uint8, I8)
read_u16, write_u16 = _reader(types.uint16, I16), _writer(types.uint16, I16)


def _prefetcher(write: int, locality: int) -> Any:
    @intrinsic
    def prefetch_line(typingctx, address):
        def codegen(context, builder, sig, args):
            hints = [I32(write), I32(locality), I32(1)]
            call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, args[0], I8), *hints])
            return context.get_dummy_value()

        return VOID(INT64), codegen

    return prefetch_line


prefetch, prefetch_write = _prefetcher(0, 2), _prefetcher(1, 3)
"""Ask for the cache line at an address: into the second-level cache; to be written."""


@intrinsic
def fetch_add(typingctx, address, amount):
    """Atomically add to an int64 and return what was there before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "acq_rel")

    return INT64(INT64, INT64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """Atomically read an int64."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return INT64(INT64), codegen


@inlined
def load_any(address, is_bf16):
    """Sixteen consecutive elements."""
    if is_bf16:
        return load_bf16(address)
    return load(address)


@inlined
def absolute(value):
    return maximum(value, zero() - value)


@inlined
def inverse_scale(largest):
    """What floats are multiplied by to become int8 codes, 127 / largest; 0 where all are zero."""
    return where_above(largest, broadcast(np.float32(1e-35)), divide(broadcast(np.float32(127)), largest), zero())


_clock_gettime: Any = types.ExternalFunction("clock_gettime", INT32(INT32, INT64))
MONOTONIC = np.int32(getattr(time, "CLOCK_MONOTONIC", 1))


@helper
def now_ns(scratch):
    """Nanoseconds of `time.monotonic_ns`'s clock; overwrites 16 bytes at the address `scratch`."""
    _clock_gettime(MONOTONIC, scratch)
    return read_i64(scratch) * 1_000_000_000 + read_i64(scratch + 8)


sched_yield = types.ExternalFunction("sched_yield", types.int32())
