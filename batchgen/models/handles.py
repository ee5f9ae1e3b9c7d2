"""Handles of a decoder's packed weights, as the decoder asks for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Norm:
    """Handles of a norm's vectors."""

    weight: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class Linear:
    """Handles of a matrix, or several side by side, and of their bias."""

    weight: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class ColumnNorm:
    """A norm of `groups` equal groups of the columns of q, k and v, from column `first` on."""

    first: int
    groups: int
    weight: Any


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Handles of a gated pair for SwiGLU, or else of what an activation function is applied to; and of down."""

    swiglu: Any
    up: Linear | None
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Handles of the router and, one per expert, of gate and up and of down."""

    router: Any
    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Handles of one decoder block; `qkv` is fused."""

    attention_norm: Norm | None
    qkv: Linear
    column_norms: tuple[ColumnNorm, ...]
    attention_output: Linear
    attention_post_norm: Norm | None
    ffn_norm: Norm | None
    feed: FeedForward | ExpertWeights
    ffn_post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Handles of a whole decoder. `rope_factors` divide the frequencies of the rotary embedding."""

    embedding: Any
    positions: Any
    layers: tuple[LayerWeights, ...]
    output_norm: Norm
    output: Any
    rope_factors: NDArray[np.float32] | None
