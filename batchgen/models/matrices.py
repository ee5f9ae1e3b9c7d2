"""Matrices of files cut, scaled and reordered, whether they are floats or codes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Codes, Matrix, ModelShape
from batchgen.models.rope import rotary_order

Rows = NDArray[np.int64]


def fused_rows(shape: ModelShape, layout: str) -> list[Rows]:
    """The rows of q, of k and of v in a fused tensor; see `Architecture.qkv`."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    rows = np.arange((heads + 2 * kv_heads) * dim)
    if layout == "blocks":
        return np.split(rows, [heads * dim, (heads + kv_heads) * dim])
    if layout == "heads":
        return [part.ravel() for part in rows.reshape(heads, 3, dim).transpose(1, 0, 2)]
    groups = rows.reshape(kv_heads, heads // kv_heads + 2, dim)
    return [groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()]


def rows_of(matrix: Matrix, rows: Rows) -> Matrix:
    return matrix.rows(rows) if isinstance(matrix, Codes) else matrix[rows]


def scaled(values: Any, factor: float) -> Any:
    """A matrix or vector times a number; the same object for 1."""
    if np.float32(factor) == 1:
        return values
    if isinstance(values, Codes):
        minima = None if values.minima is None else values.minima * np.float32(factor)
        return Codes(values.values, values.bits, values.scales * np.float32(factor), minima)
    return values * np.float32(factor)


def split_rotary(rows: Matrix, head_dim: int, dimensions: int | None = None, interleaved: bool = True) -> Matrix:
    """Reorder each head so that dimensions i and i + head_dim / 2 are rotated together.

    Before, of the first `dimensions` (all of them by default) 2i and 2i + 1 are, if `interleaved`, or i and
    i + dimensions / 2. Scores are sums over the head's dimensions, so the order is free as long as q and k share it.
    """
    order = rotary_order(head_dim, head_dim if dimensions is None else dimensions, interleaved)
    if (order == np.arange(head_dim)).all():
        return rows
    return rows_of(rows, (np.arange(0, rows.shape[0], head_dim)[:, None] + order).ravel())
