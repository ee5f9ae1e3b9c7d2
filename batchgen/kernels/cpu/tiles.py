"""AMX tile instructions as njit calls. Tile numbers are immediates, so each function names its own.

Where the host has no AMX they compile to nothing (LLVM could not encode them); the backend never takes that path there.
In products 0-3 accumulate, 4-5 hold rows of A, 6-7 columns of B; in attention 0-5 accumulate, 7 is A, 6 is B. Every
tile is 16 rows of 64 bytes.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from batchgen.kernels.cpu.features import HAS_AMX
from batchgen.kernels.cpu.simd import I8, intrinsic, pointer


def tile_config() -> np.ndarray:
    """The 64-byte operand of `ldtilecfg`: eight tiles of 16 rows x 64 bytes (Intel SDM, AMX palette 1)."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2] = 64
    config[48:56] = 16
    return config


def _operation(name: str, tiles: tuple[int, ...] = (), pointer_arg: bool = False, stride_arg: bool = False) -> Any:
    def codegen(context, builder, sig, args):
        values: list[Any] = [ir.Constant(I8, t) for t in tiles]
        if pointer_arg:
            values.append(pointer(builder, args[0], I8))
        if stride_arg:
            values.append(args[1])
        if HAS_AMX:
            signature = ir.FunctionType(ir.VoidType(), [v.type for v in values])
            builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.x86." + name), values)
        return context.get_dummy_value()

    if stride_arg:

        @intrinsic
        def with_stride(typingctx, address, stride):
            return types.void(types.int64, types.int64), codegen

        return with_stride
    if pointer_arg:

        @intrinsic
        def with_address(typingctx, address):
            return types.void(types.int64), codegen

        return with_address

    @intrinsic
    def plain(typingctx):
        return types.void(), codegen

    return plain


load_config = _operation("ldtilecfg", pointer_arg=True)
release = _operation("tilerelease")
zero0, zero1, zero2, zero3, zero4, zero5 = (_operation("tilezero", (t,)) for t in range(6))
load0, load1, load2, load3, load4, load5, load6, load7 = (
    _operation("tileloadd64", (t,), pointer_arg=True, stride_arg=True) for t in range(8)
)
stream4, stream5 = (_operation("tileloaddt164", (t,), pointer_arg=True, stride_arg=True) for t in (4, 5))
"""Loads that leave the first-level cache to others."""
store0, store1, store2, store3, store4, store5 = (
    _operation("tilestored64", (t,), pointer_arg=True, stride_arg=True) for t in range(6)
)
dot_046, dot_147, dot_256, dot_357 = (_operation("tdpbf16ps", t) for t in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)))
idot_046, idot_147, idot_256, idot_357 = (
    _operation("tdpbssd", t) for t in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))
)
"""On int8, to int32."""
dot_076, dot_176, dot_276, dot_376, dot_476, dot_576 = (_operation("tdpbf16ps", (t, 7, 6)) for t in range(6))
