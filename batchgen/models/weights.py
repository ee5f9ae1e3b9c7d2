"""Tensors of a model file into a backend's packed weights."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import Backend
from batchgen.models.config import ModelConfig


class TensorSource(Protocol):
    """A model file: shapes are (outputs, inputs), values float32 whatever they are stored as."""

    def names(self) -> frozenset[str]: ...
    def shape_of(self, name: str) -> tuple[int, ...] | None: ...
    def dequantize(self, name: str) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Handles of one decoder block; `qkv` and `gate_up` are fused."""

    attention_norm: Any
    qkv: Any
    attention_output: Any
    ffn_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Handles of a whole decoder."""

    embedding: Any
    layers: tuple[LayerWeights, ...]
    output_norm: Any
    output: Any


class _Tensors:
    """`tensor(name, *shape)`: its values, presence and shape checked. Knows which have not been asked for."""

    def __init__(self, source: TensorSource):
        self._source = source
        self._unused = set(source.names())

    def __call__(self, name: str, *expected: int) -> NDArray[np.float32]:
        self._unused.discard(name)
        found = self._source.shape_of(name)
        if found is None:
            raise ModelError(f"the model file lacks the tensor '{name}'")
        if found != expected:
            raise ModelError(f"tensor '{name}' has shape {found}; the metadata asks for {expected}")
        return self._source.dequantize(name)

    def refuse_unused(self, architecture: str) -> None:
        """Ignoring a tensor would mean to compute something else than the model says."""
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"the model has tensors that are not used for {architecture} here: {', '.join(names[:3])}{more}"
            )


def load_llama(source: TensorSource, config: ModelConfig, backend: Backend) -> DecoderWeights:
    """Dequantise and pack part by part. ModelError for a tensor that is missing, misshapen or not known here."""
    shape = config.shape
    hidden, vocab, ffn = shape.hidden_size, shape.vocab_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    tensor = _Tensors(source)

    def layer(i: int) -> LayerWeights:
        block = f"blk.{i}."
        q = split_rotary(tensor(block + "attn_q.weight", q_size, hidden), shape.head_dim)
        k = split_rotary(tensor(block + "attn_k.weight", kv_size, hidden), shape.head_dim)
        return LayerWeights(
            attention_norm=backend.vector(tensor(block + "attn_norm.weight", hidden)),
            qkv=backend.linear([q, k, tensor(block + "attn_v.weight", kv_size, hidden)]),
            attention_output=backend.linear([tensor(block + "attn_output.weight", hidden, q_size)]),
            ffn_norm=backend.vector(tensor(block + "ffn_norm.weight", hidden)),
            gate_up=backend.gated_pair(
                tensor(block + "ffn_gate.weight", ffn, hidden), tensor(block + "ffn_up.weight", ffn, hidden)
            ),
            down=backend.linear([tensor(block + "ffn_down.weight", hidden, ffn)]),
        )

    embedding = tensor("token_embd.weight", vocab, hidden)
    tied = source.shape_of("output.weight") is None
    table = backend.table(embedding)
    output = backend.linear([embedding if tied else tensor("output.weight", vocab, hidden)])
    del embedding
    weights = DecoderWeights(
        embedding=table,
        layers=tuple(layer(i) for i in range(shape.num_layers)),
        output_norm=backend.vector(tensor("output_norm.weight", hidden)),
        output=output,
    )
    tensor.refuse_unused(config.architecture)
    return weights


def split_rotary(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder each head from GGUF's interleaved pairs (2i, 2i+1) to halves (i, i + head_dim/2).

    Scores are sums over the head's dimensions, so the order is free as long as q and k share it.
    """
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)
