"""The tensors of one layer into a backend's packed weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Backend, Matrix
from batchgen.models.config import ModelConfig
from batchgen.models.handles import ColumnNorm, ExpertWeights, FeedForward, LayerWeights, Linear, Norm
from batchgen.models.matrices import fused_rows, rows_of, scaled, split_rotary
from batchgen.models.tensors import Tensors

Floats = NDArray[np.float32]


class LayerLoader:
    """The tensors of one layer after the other, as the decoder wants them.

    Constant factors of a model are multiplied into its weights: what a layer adds, and what scores are multiplied by
    beside 1 / sqrt(head_dim). Rows of q and k are reordered so that halves of a head are rotated together.
    """

    def __init__(self, tensors: Tensors, config: ModelConfig, backend: Backend):
        self._tensors, self._config, self._backend = tensors, config, backend
        self._architecture, self._shape = config.architecture, config.shape
        self._query_scale = config.attention_scale * config.shape.head_dim**0.5 if config.attention_scale else 1.0

    def load(self, i: int) -> LayerWeights:
        two = self._tensors.has("attention_norm_2", i)
        return LayerWeights(
            attention_norm=self._pre_norm("attention_norm_2" if two else "attention_norm", i),
            qkv=self._qkv(i),
            column_norms=self._column_norms(i),
            attention_output=self._output("attention_output", i, self._shape.num_heads * self._shape.head_dim),
            attention_post_norm=self._post_norm("attention_post_norm", i),
            ffn_norm=self._pre_norm("ffn_norm_2", i) if two else self._ffn_norm(i),
            feed=self._experts(i) if self._config.experts else self._feed(i),
            ffn_post_norm=self._post_norm("ffn_post_norm", i),
        )

    # Norms

    def norm(self, part: str, i: int | None, scale: float = 1.0) -> Norm:
        size = self._shape.hidden_size
        weight = self._norm_weight(self._tensors.values(part, (size,), i))
        bias = self._bias(part, i, size, scale) if self._architecture.norm == "layer" else None
        return Norm(self._backend.vector(scaled(weight, scale)), None if bias is None else self._backend.vector(bias))

    def _ffn_norm(self, i: int) -> Norm | None:
        """Blocks side by side may share the norm before attention."""
        shared = self._config.parallel and not self._tensors.has("ffn_norm", i)
        return None if shared else self._pre_norm("ffn_norm", i)

    def _pre_norm(self, part: str, i: int) -> Norm | None:
        return self.norm(part, i) if self._architecture.pre_norms else None

    def _post_norm(self, part: str, i: int) -> Norm | None:
        if not self._architecture.post_norms:
            return None
        weight = self._tensors.values(part, (self._shape.hidden_size,), i)
        return Norm(self._backend.vector(self._norm_weight(weight)))

    def _norm_weight(self, weight: Floats) -> Floats:
        return weight + np.float32(1) if self._config.naming in self._architecture.zero_centred else weight

    def _column_norms(self, i: int) -> tuple[ColumnNorm, ...]:
        """Norms of queries and keys: with one weight for every head, with weights for each, or over all heads."""
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        q, k = (self._head_norm(part, i, n) for part, n in (("q_norm", heads), ("k_norm", kv_heads)))
        if q is None or k is None:
            return ()
        q = scaled(q, self._query_scale)
        if self._architecture.qk_norm == "whole":
            return ColumnNorm(0, 1, self._backend.vector(q)), ColumnNorm(len(q), 1, self._backend.vector(k))
        return (ColumnNorm(0, heads + kv_heads, self._backend.vector(np.concatenate([q, k]))),)

    def _head_norm(self, part: str, i: int, heads: int) -> Floats | None:
        """(heads * head_dim,), in the order of the rotated dimensions."""
        dim, kind, tensors = self._shape.head_dim, self._architecture.qk_norm, self._tensors
        if kind == "head":
            values = np.tile(self._norm_weight(tensors.values(part, (dim,), i)), heads)
        elif kind == "whole":
            values = tensors.values(part, (heads * dim,), i)
        elif not tensors.has("q_norm", i) and not self._config.norms_of_heads:
            return None
        elif "{number}" in (self._architecture.stem(part, self._config.naming) or ""):
            values = np.concatenate([tensors.values(part, (dim,), i, number=h) for h in range(heads)])
        else:
            values = tensors.values(part, (heads, dim), i).ravel()
        return self._turned(values[:, None])[:, 0]

    # Attention

    def _qkv(self, i: int) -> Linear:
        fused = self._architecture.qkv or (self._config.naming == "gguf" and self._tensors.has("qkv", i))
        parts = self._fused(i) if fused else self._apart(i)
        return self._packed([part.weight for part in parts], [part.bias for part in parts])

    def _apart(self, i: int) -> list[Linear]:
        """q, k and v of a file that has them one by one, in numpy."""
        q, kv = (heads * self._shape.head_dim for heads in (self._shape.num_heads, self._shape.num_kv_heads))
        parts = []
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            weight = self._tensors.matrix(part, (size, self._shape.hidden_size), i)
            parts.append(self._finished(part, i, weight, self._bias(part, i, size)))
        return parts

    def _fused(self, i: int) -> list[Linear]:
        """The same of a file that has them in one tensor."""
        rows = fused_rows(self._shape, self._architecture.qkv if self._config.naming == "hf" else "blocks")
        size = sum(len(r) for r in rows)
        weight, bias = self._tensors.matrix("qkv", (size, self._shape.hidden_size), i), self._bias("qkv", i, size)
        return [
            self._finished(part, i, rows_of(weight, r), None if bias is None else bias[r])
            for part, r in zip("qkv", rows, strict=True)
        ]

    def _finished(self, part: str, i: int, weight: Matrix, bias: Floats | None) -> Linear:
        """Queries and keys in the order of the rotated dimensions, queries scaled where no norm follows that is."""
        if part == "v":
            return Linear(weight, bias)
        scale = self._query_scale if part == "q" and not self._has_column_norms(i) else 1.0
        turned = None if bias is None else self._turned(scaled(bias, scale)[:, None])[:, 0]
        return Linear(self._turned(scaled(weight, scale)), turned)

    def _has_column_norms(self, i: int) -> bool:
        return bool(self._architecture.qk_norm) or self._tensors.has("q_norm", i)

    def _turned(self, rows: Any) -> Any:
        interleaved = self._config.naming in self._architecture.interleaved
        return split_rotary(rows, self._shape.head_dim, self._config.ropes[0].dimensions, interleaved)

    # What follows

    def _output(self, part: str, i: int, inputs: int) -> Linear:
        """A linear whose result is added to the stream."""
        size, scale = self._shape.hidden_size, self._config.residual_scale
        weight, bias = self._tensors.matrix(part, (size, inputs), i), self._bias(part, i, size, scale)
        return self._packed([scaled(weight, scale)], [bias])

    def _feed(self, i: int) -> FeedForward:
        down = self._output("down", i, self._shape.intermediate_size)
        weights, biases = self._ups(i)
        if self._architecture.gated and self._config.activation == "silu" and not any(b is not None for b in biases):
            return FeedForward(self._backend.gated_pair(*weights), None, down)
        return FeedForward(None, self._packed(weights, biases), down)

    def _ups(self, i: int) -> tuple[list[Matrix], list[Floats | None]]:
        """Gate and up, or up alone where the activation function is not gated, with their biases."""
        size, hidden = self._shape.intermediate_size, self._shape.hidden_size
        if self._architecture.fused_gate_up:
            both = self._tensors.matrix("up", (2 * size, hidden), i)
            return [rows_of(both, np.arange(size)), rows_of(both, np.arange(size, 2 * size))], [None, None]
        parts = ("gate", "up") if self._architecture.gated else ("up",)
        weights = [self._tensors.matrix(part, (size, hidden), i) for part in parts]
        return weights, [self._bias(part, i, size) for part in parts]

    def _packed(self, weights: Sequence[Matrix], biases: Sequence[Floats | None]) -> Linear:
        """Side by side, with zeros where one has a bias and another none."""
        packed = self._backend.linear(weights)
        if not any(bias is not None for bias in biases):
            return Linear(packed)
        parts = [np.zeros(w.shape[0], np.float32) if b is None else b for w, b in zip(weights, biases, strict=True)]
        return Linear(packed, self._backend.vector(np.concatenate(parts)))

    def _experts(self, i: int) -> ExpertWeights:
        assert self._config.experts is not None
        count, size, hidden = self._config.experts.count, self._config.experts.size, self._shape.hidden_size
        gate, up = (self._tensors.experts(part, (count, size, hidden), i) for part in ("expert_gate", "expert_up"))
        down = self._tensors.experts("expert_down", (count, hidden, size), i)
        return ExpertWeights(
            router=self._backend.linear([self._tensors.matrix("router", (count, hidden), i)]),
            gate_up=tuple(self._backend.gated_pair(g, u) for g, u in zip(gate, up, strict=True)),
            down=tuple(self._backend.linear([scaled(d, self._config.residual_scale)]) for d in down),
        )

    def _bias(self, part: str, i: int | None, size: int, scale: float = 1.0) -> Floats | None:
        """Where the file has one; ModelError where the model must have it."""
        if part not in self._config.biases and not self._tensors.has(part, i, "bias"):
            return None
        return scaled(self._tensors.values(part, (size,), i, "bias"), scale)
