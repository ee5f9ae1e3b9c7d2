"""Small programs of a few operations each, which any backend runs, so that one operation at a time can be looked at.

Activations come out of an embedding and a norm. To know them exactly, embeddings are +1 or -1 (their mean square is 1,
so the norm multiplies by its weights alone) and weights are numbers that bfloat16 holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Backend, ModelShape, Ops, StepBatch, StepLimits
from batchgen.kernels.reference import ReferenceBackend, round_bf16
from tests.tiny_model import Chunk, make_batch

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Variant:
    """A kernel with its weight and KV types."""

    kernel: str
    weights: str
    kv: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.weights}-{self.kv}"

    @property
    def names(self) -> tuple[str, str, str]:
        return self.kernel, self.weights, self.kv

    @property
    def rounds_activations(self) -> bool:
        return self.kernel != "portable"

    def rounded(self, values: Floats) -> Floats:
        """Weights as this variant holds them."""
        return round_bf16(values) if self.weights == "bf16" else values

    def reference(self) -> ReferenceBackend:
        """The oracle with the same weight and KV types."""
        return ReferenceBackend(self.weights, self.kv)


VARIANTS = [
    Variant("portable", "fp32", "fp32"),
    Variant("portable", "fp32", "bf16"),
    Variant("portable", "bf16", "fp32"),
    Variant("portable", "bf16", "bf16"),
    Variant("avx512_bf16", "bf16", "fp32"),
    Variant("avx512_bf16", "bf16", "bf16"),
    Variant("amx_bf16", "bf16", "fp32"),
    Variant("amx_bf16", "bf16", "bf16"),
    Variant("portable", "fp32", "int8"),
    Variant("portable", "fp32", "q8_0"),
    Variant("avx512_bf16", "bf16", "q8_0"),
    Variant("amx_bf16", "bf16", "int8"),
    Variant("amx_bf16", "bf16", "q8_0"),
]
INT8_WEIGHTS = [Variant(kernel, "int8", "fp32") for kernel in ("portable", "avx512_bf16", "amx_bf16")]


def build(
    backend: Backend,
    program: Callable[[Backend], Callable[[Ops], None]],
    hidden: int,
    vocab: int,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 16,
    page_size: int = 32,
    max_tokens: int = 352,
) -> Backend:
    """Load `program(backend)`, which packs weights and returns a function of `Ops`."""
    shape = ModelShape(hidden, 32, 1, heads, kv_heads, head_dim, vocab, 512)
    limits = StepLimits(max_tokens=max_tokens, max_seqs=max_tokens, num_pages=32, page_size=page_size)
    backend.build(program(backend), shape, limits, rope_table(head_dim))
    return backend


def rope_table(head_dim: int, length: int = 512) -> tuple[Floats, Floats]:
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(head_dim // 2) * 2 / head_dim)
    return np.cos(angles)[None].astype(np.float32), np.sin(angles)[None].astype(np.float32)


def head(table: Floats, norm: Floats, weight: Floats, eps: float = 0.0) -> Callable[[Backend], Callable[[Ops], None]]:
    """logits = norm(embedding) @ weight.T"""

    def program(backend: Backend) -> Callable[[Ops], None]:
        packed = backend.table(table), backend.vector(norm), backend.linear([weight])

        def forward(ops: Ops) -> None:
            ops.sample_head(ops.final_norm(ops.embed(packed[0]), packed[1], eps), packed[2])

        return forward

    return program


def every_token(ids: Sequence[int] | NDArray[Any], **fields: Any) -> StepBatch:
    """One sequence, all of whose tokens want whole rows of logits."""
    pages = range(-(-len(ids) // 32))
    return make_batch([Chunk(ids, 0, pages)], True, **({"logits_rows": np.arange(len(ids), dtype=np.int32)} | fields))


def signs(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    return rng.choice(np.array([-1, 1], np.float32), (rows, columns))


def logits_of(backend: Backend, batch: StepBatch) -> Floats:
    """A copy of the step's logits (the next step overwrites a backend's own)."""
    return backend.run(batch).logits[: len(batch.logits_rows)].copy()


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def relative_error(got: Floats, expected: Floats) -> float:
    """The largest difference in units of the largest expected value."""
    assert np.isfinite(got).all()
    return float(np.abs(got - expected).max() / np.abs(expected).max())
