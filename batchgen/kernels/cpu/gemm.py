"""Matrix products. One block of C is 32 rows by 32 columns, summed over K in one order whatever M is.

Layouts, shared by all kernels (K padded to 32, or to 64 for int8, and N to 32 with zeros):

- activations: tiles of 16 rows x 32 columns, `(M/16, K/32, 16, 32)`, float32 or bfloat16;
- weights in float32: panels of 16 columns, `(N/16, K, 16)`;
- weights in bfloat16: panels of 16 columns with two consecutive k side by side, `(N/16, K/2, 16, 2)`;
- weights in int8: panels of 16 columns with four consecutive k side by side, `(N/16, K/4, 16, 4)`, and activations to
  go with them in tiles of 16 rows x 64 columns, `(M/16, K/64, 16, 64)`. Their products are exact int32.

A block of 32 x 32 results (float32, or int32 of int8) goes to a scratch of the calling thread; what becomes of it is
said in linear.py (stored, added, fed to SwiGLU) and head.py (searched for the best token).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu import tiles
from batchgen.kernels.cpu.compiling import helper, inlined
from batchgen.kernels.cpu.features import HAS_AVX512, HAS_AVX512_BF16
from batchgen.kernels.cpu.simd import (
    BF16,
    F32,
    I32,
    I64,
    LANES,
    V32,
    VI32,
    call,
    constant,
    emit_fma,
    emit_load,
    emit_store,
    int_constant,
    intrinsic,
    pointer,
    splat,
)

KERNEL_F32, KERNEL_BF16_WEIGHTS, KERNEL_AVX512_BF16, KERNEL_AMX = range(4)
"""float32 x float32 · float32 activations x bfloat16 weights · vdpbf16ps · tdpbf16ps."""

ROW_GROUP, COLUMN_PANELS = (8, 2) if HAS_AVX512 else (4, 1)
"""Rows and panels held in registers: 16 of 32 AVX-512 registers, 8 of 16 AVX2 ones, 16 of 32 NEON ones."""


def amx_block(finish_row: Any, integers: bool) -> Any:
    """A function `(a, b, k_tiles, part, two, c, done, target, stride, count, scales, model)` that multiplies on tiles.

    It takes the rows of `a` (two tiles when `two`) and the two panels at `b` to the block `c`, of float32 or, for
    `integers`, of int32; `part`: first and end of the tiles along K that are added to what `c` holds, if not the first.
    Meanwhile it calls `finish_row(done, target, stride, row, scales, model)` for the `count` rows of the block before.
    `a` is read past the first-level cache, in which the panels stay for the next rows.
    """
    names = ("046", "147", "256", "357")
    dot_046, dot_147, dot_256, dot_357 = (getattr(tiles, ("idot_" if integers else "dot_") + n) for n in names)

    @helper
    def block_amx(a, b, k_tiles, part, two, c, done, target, stride, count, scales, model):
        a1, b1 = a + k_tiles * 1024, b + k_tiles * 1024
        each, row = (31 + part[1] - part[0]) // (part[1] - part[0]), 0
        if part[0]:
            tiles.load0(c, 128), tiles.load1(c + 64, 128)
            if two:
                tiles.load2(c + 2048, 128), tiles.load3(c + 2112, 128)
        else:
            tiles.zero0(), tiles.zero1()
            if two:
                tiles.zero2(), tiles.zero3()
        for k in range(part[0] * 1024, part[1] * 1024, 1024):
            tiles.stream4(a + k, 64), tiles.load6(b + k, 64), tiles.load7(b1 + k, 64)
            if two:
                tiles.stream5(a1 + k, 64)
                dot_046(), dot_147(), dot_256(), dot_357()
            else:
                dot_046(), dot_147()
            for _ in range(min(each, count - row)):
                finish_row(done, target, stride, row, scales, model)
                row += 1
        tiles.store0(c, 128), tiles.store1(c + 64, 128)
        if two:
            tiles.store2(c + 2048, 128), tiles.store3(c + 2112, 128)

    return block_amx


@inlined
def _no_row(c, target, stride, r, scales, model):
    pass


_amx_alone, _amx_integers_alone = amx_block(_no_row, False), amx_block(_no_row, True)


def _dot_bf16(builder: Any, acc: Any, a_pair: Any, b_pairs: Any) -> Any:
    """acc + a[0] * b[0] + a[1] * b[1] on pairs of bfloat16 (Intel's vdpbf16ps)."""
    vector = ir.VectorType(BF16, 32)
    operands = [acc, builder.bitcast(splat(builder, a_pair, VI32), vector), builder.bitcast(b_pairs, vector)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V32, operands)


def _load_pairs(builder: Any, address: Any) -> Any:
    value = builder.load(pointer(builder, address, VI32))
    value.align = 4
    return value


def _steps(kind: int) -> range:
    """Rows of B of one unrolled run of eight, by twos where the kernel takes pairs."""
    return range(0, 8, 2 if kind == KERNEL_AVX512_BF16 else 1)


def _weights(builder: Any, kind: int, base: Any, k: int) -> Any:
    """The vector of sixteen columns at row `k` of a panel (a pair of rows for the pairwise kernel)."""
    if kind == KERNEL_F32:
        return emit_load(builder, builder.add(base, I64(k * 64)))
    pairs = _load_pairs(builder, builder.add(base, I64(k // 2 * 64)))
    if kind == KERNEL_AVX512_BF16:
        return pairs
    bits = builder.and_(pairs, int_constant(-65536)) if k % 2 else builder.shl(pairs, int_constant(16))
    return builder.bitcast(bits, V32)


def _rows_kernel(kind: int, rows: int, panels: int) -> Any:
    """An intrinsic `(a, b, panel_bytes, k_tiles, c)`: `rows` rows of one A tile times `panels` panels, in registers."""
    a_size, k_bytes = (2, 32) if kind == KERNEL_AVX512_BF16 else (4, 64 if kind == KERNEL_F32 else 32)

    def step(builder, accumulators, a, b, panel_bytes):
        for k in _steps(kind):
            columns = [
                _weights(builder, kind, builder.add(b, builder.mul(panel_bytes, I64(p))), k) for p in range(panels)
            ]
            for r in range(rows):
                address = builder.add(a, I64((r * 32 + k) * a_size))
                element = builder.load(pointer(builder, address, I32 if kind == KERNEL_AVX512_BF16 else F32))
                factor = element if kind == KERNEL_AVX512_BF16 else splat(builder, element, V32)
                for p, column in enumerate(columns):
                    slot = accumulators[r][p]
                    acc = builder.load(slot)
                    multiply = _dot_bf16 if kind == KERNEL_AVX512_BF16 else lambda bd, x, y, z: emit_fma(bd, y, z, x)
                    builder.store(multiply(builder, acc, factor, column), slot)

    def codegen(context, builder, sig, args):
        a, b, panel_bytes, k_tiles, c = args
        if kind == KERNEL_AVX512_BF16 and not HAS_AVX512_BF16:
            return context.get_dummy_value()
        accumulators = [[cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(panels)] for _ in range(rows)]
        for row in accumulators:
            for slot in row:
                builder.store(constant(0.0), slot)
        with (
            cgutils.for_range(builder, k_tiles, intp=I64) as tile,
            cgutils.for_range(builder, I64(4), intp=I64) as quarter,
        ):
            k8 = builder.add(builder.mul(tile.index, I64(4)), quarter.index)
            a_run = builder.add(a, builder.mul(tile.index, I64(16 * 32 * a_size)))
            a_run = builder.add(a_run, builder.mul(quarter.index, I64(8 * a_size)))
            step(builder, accumulators, a_run, builder.add(b, builder.mul(k8, I64(8 * k_bytes))), panel_bytes)
        for r, row in enumerate(accumulators):
            for p, slot in enumerate(row):
                emit_store(builder, builder.add(c, I64(r * 128 + p * LANES * 4)), builder.load(slot))
        return context.get_dummy_value()

    @intrinsic
    def kernel(typingctx, a, b, panel_bytes, k_tiles, c):
        return types.void(*[types.int64] * 5), codegen

    return kernel


_f32_rows, _f32_row = (_rows_kernel(KERNEL_F32, r, COLUMN_PANELS) for r in (ROW_GROUP, 1))
_mixed_rows, _mixed_row = (_rows_kernel(KERNEL_BF16_WEIGHTS, r, COLUMN_PANELS) for r in (ROW_GROUP, 1))
_pair_rows, _pair_row = (_rows_kernel(KERNEL_AVX512_BF16, r, COLUMN_PANELS) for r in (ROW_GROUP, 1))


def _vector_block(many: Any, one: Any, a_size: int, k_bytes: int) -> Any:
    group, panels = ROW_GROUP, COLUMN_PANELS

    @helper
    def block_vector(a, b, k_tiles, rows, c):
        panel_bytes = k_tiles * 32 * k_bytes
        for panel in range(0, 2, panels):
            columns, out = b + panel * panel_bytes, c + panel * 64
            row = 0
            while row < rows:
                first = a + (row // 16) * k_tiles * 512 * a_size + (row % 16) * 32 * a_size
                if row + group <= rows or (row % 16 + group <= 16 and rows - row > 1):
                    many(first, columns, panel_bytes, k_tiles, out + row * 128)
                    row += group
                else:
                    one(first, columns, panel_bytes, k_tiles, out + row * 128)
                    row += 1

    return block_vector


block_f32 = _vector_block(_f32_rows, _f32_row, 4, 64)
block_mixed = _vector_block(_mixed_rows, _mixed_row, 4, 32)
block_avx512_bf16 = _vector_block(_pair_rows, _pair_row, 2, 32)


def _int8_row() -> Any:
    """An intrinsic `(a, b, panel_bytes, k_tiles, c)`: one row of an int8 A tile times two panels."""

    def byte(builder, words, number):
        return builder.ashr(builder.shl(words, int_constant(24 - 8 * number)), int_constant(24))

    def codegen(context, builder, sig, args):
        a, b, panel_bytes, k_tiles, c = args
        sums = [cgutils.alloca_once_value(builder, int_constant(0)) for _ in range(2)]
        for slot in sums:
            builder.store(int_constant(0), slot)
        with (
            cgutils.for_range(builder, k_tiles, intp=I64) as tile,
            cgutils.for_range(builder, I64(16), intp=I64) as four,
        ):
            address = builder.add(a, builder.add(builder.mul(tile.index, I64(1024)), builder.mul(four.index, I64(4))))
            factors = splat(builder, builder.load(pointer(builder, address, I32)), VI32)
            k4 = builder.add(builder.mul(tile.index, I64(16)), four.index)
            for p, slot in enumerate(sums):
                place = builder.add(b, builder.add(builder.mul(panel_bytes, I64(p)), builder.mul(k4, I64(64))))
                words, total = _load_pairs(builder, place), builder.load(slot)
                for number in range(4):
                    product = builder.mul(byte(builder, factors, number), byte(builder, words, number))
                    total = builder.add(total, product)
                builder.store(total, slot)
        for p, slot in enumerate(sums):
            place = builder.add(c, I64(p * 64))
            builder.store(builder.load(slot), pointer(builder, place, VI32)).align = 4
        return context.get_dummy_value()

    @intrinsic
    def kernel(typingctx, a, b, panel_bytes, k_tiles, c):
        return types.void(*[types.int64] * 5), codegen

    return kernel


_int8_row_kernel = _int8_row()


@helper
def block_integers(kernel, a, b, k_tiles, rows, c):
    """`rows` rows of int8 A times 32 columns of int8 B into the scratch `c` (32, 32) int32."""
    for row in range(rows):
        first = a + row // 16 * k_tiles * 1024 + row % 16 * 64
        _int8_row_kernel(first, b, k_tiles * 1024, k_tiles, c + row * 128)


@helper
def block_i8(kernel, a, b, k_tiles, rows, c):
    """The same, on tiles where the kernel uses them."""
    if kernel == KERNEL_AMX:
        _amx_integers_alone(a, b, k_tiles, (0, k_tiles), rows > 16, c, c, c, 0, 0, (0, 0), 0)
    else:
        block_integers(kernel, a, b, k_tiles, rows, c)


@inlined
def k_tiles(k, integers):
    """Tiles that a row of an activation of `k` columns goes through."""
    return (k + 63) // 64 if integers else k // 32


@helper
def block_vector(kernel, a, b, k_tiles, rows, c):
    """`rows` (1 to 32) rows of A times 32 columns of B into the scratch `c` (32, 32) float32."""
    if kernel == KERNEL_AVX512_BF16:
        block_avx512_bf16(a, b, k_tiles, rows, c)
    elif kernel == KERNEL_BF16_WEIGHTS:
        block_mixed(a, b, k_tiles, rows, c)
    else:
        block_f32(a, b, k_tiles, rows, c)


@helper
def block(kernel, a, b, k_tiles, rows, c):
    """The same for every kernel."""
    if kernel == KERNEL_AMX:
        _amx_alone(a, b, k_tiles, (0, k_tiles), rows > 16, c, c, c, 0, 0, (0, 0), 0)
    else:
        block_vector(kernel, a, b, k_tiles, rows, c)
