"""Tensors of a model file into a backend's packed weights."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import Backend, Codes, Matrix
from batchgen.models.config import ModelConfig

PACKERS = 2
"""Threads that dequantise and pack, each a layer at a time."""


class TensorSource(Protocol):
    """A model file: shapes are (outputs, inputs), values float32 whatever they are stored as."""

    def names(self) -> frozenset[str]: ...
    def shape_of(self, name: str) -> tuple[int, ...] | None: ...
    def dequantize(self, name: str) -> NDArray[np.float32]: ...
    def codes(self, name: str) -> Codes | None: ...


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
        self._check(name, expected)
        return self._source.dequantize(name)

    def matrix(self, name: str, outputs: int, inputs: int, as_codes: bool) -> Matrix:
        """The same, as codes where that is wanted and possible."""
        self._check(name, (outputs, inputs))
        codes = self._source.codes(name) if as_codes else None
        return self._source.dequantize(name) if codes is None else codes

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        self._unused.discard(name)
        found = self._source.shape_of(name)
        if found is None:
            raise ModelError(f"the model file lacks the tensor '{name}'")
        if found != expected:
            raise ModelError(f"tensor '{name}' has shape {found}; the metadata asks for {expected}")

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

    if shape.num_layers > len(source.names()):
        raise ModelError(f"the metadata asks for {shape.num_layers} layers; the file has {len(source.names())} tensors")
    tensor = _Tensors(source)

    def matrix(name: str, outputs: int, inputs: int) -> Matrix:
        return tensor.matrix(name, outputs, inputs, backend.wants_codes)

    def layer(i: int) -> LayerWeights:
        block = f"blk.{i}."
        q = split_rotary(matrix(block + "attn_q.weight", q_size, hidden), shape.head_dim)
        k = split_rotary(matrix(block + "attn_k.weight", kv_size, hidden), shape.head_dim)
        return LayerWeights(
            attention_norm=backend.vector(tensor(block + "attn_norm.weight", hidden)),
            qkv=backend.linear([q, k, matrix(block + "attn_v.weight", kv_size, hidden)]),
            attention_output=backend.linear([matrix(block + "attn_output.weight", hidden, q_size)]),
            ffn_norm=backend.vector(tensor(block + "ffn_norm.weight", hidden)),
            gate_up=backend.gated_pair(
                matrix(block + "ffn_gate.weight", ffn, hidden), matrix(block + "ffn_up.weight", ffn, hidden)
            ),
            down=backend.linear([matrix(block + "ffn_down.weight", hidden, ffn)]),
        )

    tied = source.shape_of("output.weight") is None
    with ThreadPoolExecutor(PACKERS) as pool:
        output = pool.submit(
            lambda: backend.linear([matrix("token_embd.weight" if tied else "output.weight", vocab, hidden)])
        )
        table = pool.submit(lambda: backend.table(tensor("token_embd.weight", vocab, hidden)))
        layers = tuple(pool.map(layer, range(shape.num_layers)))
        weights = DecoderWeights(
            embedding=table.result(),
            layers=layers,
            output_norm=backend.vector(tensor("output_norm.weight", hidden)),
            output=output.result(),
        )
    tensor.refuse_unused(config.architecture)
    return weights


def split_rotary(rows: Matrix, head_dim: int) -> Matrix:
    """Reorder each head from GGUF's interleaved pairs (2i, 2i+1) to halves (i, i + head_dim/2).

    Scores are sums over the head's dimensions, so the order is free as long as q and k share it.
    """
    order = np.arange(rows.shape[0]).reshape(-1, head_dim // 2, 2).transpose(0, 2, 1).ravel()
    return rows.rows(order) if isinstance(rows, Codes) else rows[order]
