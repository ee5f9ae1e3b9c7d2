"""Kernels that only some models need, compiled one by one when a program that has them is first run.

The main program (program.py) is compiled once for all models, so what is not in every model's way is not part of it:
it calls such a kernel by the address that the operation carries. All have one signature, of int64:

    kernel(operation, model, step, first, end, counter, scratch)

The first three are addresses of records. Kernels of rows (`ROWS`) take the rows `first` to `end`; those of whole steps
(`WHOLE`) take work items from `counter` until there are none.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from batchgen.kernels.cpu.compiling import compiled_callback
from batchgen.kernels.cpu.records import MODEL_DTYPE, OP_DTYPE, STEP_DTYPE
from batchgen.kernels.cpu.simd import I64, intrinsic

Kernel = Callable[..., None]
SIGNATURE = types.void(*[types.int64] * 7)


def _record_at(dtype: np.dtype) -> Any:
    record = numba.from_dtype(dtype)

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return record(types.int64), codegen

    return at


operation_at, model_at, step_at = (_record_at(dtype) for dtype in (OP_DTYPE, MODEL_DTYPE, STEP_DTYPE))
"""A record as kernels know it, from its address."""


@intrinsic
def address_of(typingctx, record):
    """Where a record lies."""
    return types.int64(record), lambda context, builder, sig, args: builder.ptrtoint(args[0], I64)


@intrinsic
def call(typingctx, function, op, model, step, first, end, counter, scratch):
    """Call a kernel by its address."""

    def codegen(context, builder, sig, args):
        kernel = ir.FunctionType(ir.VoidType(), [I64] * 7)
        builder.call(builder.inttoptr(args[0], kernel.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def int32_rows(typingctx, address, rows, columns):
    """(rows, columns) int32 in C order at an address, as an array."""
    array = types.Array(types.int32, 2, "C")

    def codegen(context, builder, sig, args):
        from numba.np.arrayobj import make_array, populate_array

        made = make_array(array)(context, builder)
        four, row = I64(4), builder.mul(args[2], I64(4))
        populate_array(
            made,
            data=builder.inttoptr(args[0], made.data.type),
            shape=[args[1], args[2]],
            strides=[row, four],
            itemsize=four,
            meminfo=None,
        )
        return made._getvalue()

    return array(types.int64, types.int64, types.int64), codegen


@cache
def kernel_address(kernel: Kernel) -> int:
    """Compile a kernel, or load it from disk."""
    address: int = compiled_callback(kernel, SIGNATURE).address
    return address
