"""A llama-shaped model of random weights, small enough to run thousands of tokens in a test, on any backend.

    config = tiny_config()
    backend = build_backend("portable", "fp32", "fp32", threads=1)
    result = backend.run(make_batch([Chunk([5, 6, 7], start=0, pages=[0])], needs_logits=True))

Its sizes are awkward on purpose: no vocabulary or head size that is a multiple of the kernels' blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import SAMPLE_DTYPE, Backend, Codes, Matrix, ModelShape, StepBatch, StepLimits
from batchgen.models.architectures import BY_GGUF_NAME
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import forward
from batchgen.models.rope import Rope
from batchgen.models.weights import load_weights

LIMITS = StepLimits(max_tokens=256, max_seqs=32, num_pages=64, page_size=32)


def tiny_config(**shape: int) -> ModelConfig:
    """The model's configuration; keywords replace fields of `ModelShape`."""
    base = ModelShape(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=300,
        context_length=512,
    )
    sizes = replace(base, **shape)
    return ModelConfig(BY_GGUF_NAME["llama"], "gguf", "tiny", sizes, norm_eps=1e-5, ropes=(Rope(sizes.head_dim),))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """GGUF names of the llama architecture with (outputs, inputs)."""
    s = config.shape
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    block = {
        "attn_norm": (s.hidden_size,),
        "attn_q": (q, s.hidden_size),
        "attn_k": (kv, s.hidden_size),
        "attn_v": (kv, s.hidden_size),
        "attn_output": (s.hidden_size, q),
        "ffn_norm": (s.hidden_size,),
        "ffn_gate": (s.intermediate_size, s.hidden_size),
        "ffn_up": (s.intermediate_size, s.hidden_size),
        "ffn_down": (s.hidden_size, s.intermediate_size),
    }
    layers = {f"blk.{i}.{name}.weight": shape for i in range(s.num_layers) for name, shape in block.items()}
    table = (s.vocab_size, s.hidden_size)
    return {"token_embd.weight": table, "output_norm.weight": (s.hidden_size,), "output.weight": table, **layers}


def tiny_weights(seed: int = 0, config: ModelConfig | None = None) -> dict[str, NDArray[np.float32]]:
    """Random tensors, scaled so that activations keep their size from layer to layer; norms are near 1."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config or tiny_config()).items():
        values = rng.standard_normal(shape)
        values = 1 + values / 10 if len(shape) == 1 else values * (2 if name == "output.weight" else 1)
        weights[name] = (values if len(shape) == 1 else values / np.sqrt(shape[-1])).astype(np.float32)
    return weights


def tiny_codes(seed: int = 0, config: ModelConfig | None = None) -> dict[str, Matrix]:
    """The same with matrices as codes, of 4 and 8 bits, with minima and without, in turn.

    Their inputs are multiples of 32.
    """
    weights: dict[str, Matrix] = {}
    for number, (name, values) in enumerate(tiny_weights(seed, config).items()):
        bits, group, minima = ((4, 32, True), (8, 32, False), (8, 16, False))[number % 3]
        weights[name] = quantise(values, bits, group, minima) if values.ndim == 2 else values
    return weights


def quantise(values: NDArray[np.float32], bits: int, group: int, minima: bool) -> Codes:
    """The nearest codes to (outputs, inputs) floats; scales and minima are float16 numbers, as in files."""
    groups = values.reshape(len(values), -1, group)
    least = groups.min(axis=2) if minima else np.zeros(groups.shape[:2])
    most = (groups - least[..., None]).max(axis=2) if minima else np.abs(groups).max(axis=2)
    scales = (most / (2**bits - 1 if minima else 2 ** (bits - 1) - 1)).astype(np.float16).astype(np.float32)
    lowest = least.astype(np.float16).astype(np.float32)
    codes = np.rint((groups - lowest[..., None]) / scales[..., None]).reshape(values.shape)
    limits = (0, 15) if bits == 4 else (-128, 127)
    kept = codes.clip(*limits).astype(np.uint8 if bits == 4 else np.int8)
    return Codes(kept, bits, scales, lowest if minima else None)


@dataclass(frozen=True)
class ArraySource:
    """Arrays and codes in memory as the `TensorSource` that weights are loaded from."""

    tensors: Mapping[str, Matrix]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self.tensors[name].shape if name in self.tensors else None

    def dequantize(self, name: str) -> NDArray[np.float32]:
        tensor = self.tensors[name]
        return tensor.weights() if isinstance(tensor, Codes) else tensor

    def codes(self, name: str) -> Codes | None:
        tensor = self.tensors[name]
        return tensor if isinstance(tensor, Codes) else None


def make_backend(kernel: str, weights: str = "fp32", kv: str = "fp32", threads: int = 1) -> Backend:
    """An empty backend: `kernel` is "reference" or a kernel of the CPU backend; `weights` and `kv` are dtypes."""
    if kernel == "reference":
        from batchgen.kernels.reference import ReferenceBackend

        return ReferenceBackend(weights, kv)
    from batchgen.kernels.cpu.backend import CpuBackend

    return CpuBackend(kernel, weights, kv, threads)


def build_backend(
    kernel: str,
    weights: str = "fp32",
    kv: str = "fp32",
    threads: int = 1,
    *,
    config: ModelConfig | None = None,
    tensors: Mapping[str, Matrix] | None = None,
    limits: StepLimits = LIMITS,
) -> Backend:
    """A backend with the tiny model loaded, ready to run; see `make_backend`. Close it when done."""
    config = config or tiny_config()
    backend = make_backend(kernel, weights, kv, threads)
    loaded = load_weights(ArraySource(tiny_weights(0, config) if tensors is None else tensors), config, backend)
    backend.build(
        lambda ops: forward(ops, config, loaded), config.shape, limits, config.rope_tables(factors=loaded.rope_factors)
    )
    return backend


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence in a step, the first of which is its token number `start`."""

    tokens: Sequence[int] | NDArray[Any]
    start: int
    pages: Sequence[int] | NDArray[Any]
    wants_logits: bool = True

    @property
    def positions(self) -> NDArray[np.int32]:
        return np.arange(self.start, self.start + len(self.tokens), dtype=np.int32)

    def slots(self, page_size: int) -> NDArray[np.int64]:
        at = self.positions.astype(np.int64)
        return np.asarray(self.pages, np.int64)[at // page_size] * page_size + at % page_size


def greedy_samples(count: int) -> NDArray[np.void]:
    """One arg-max draw per logits row."""
    samples = np.zeros(count, SAMPLE_DTYPE)
    samples["row"], samples["greedy"], samples["top_p"], samples["temperature"] = np.arange(count), 1, 1, 1
    samples["repetition_penalty"] = 1
    return samples


def make_batch(chunks: Sequence[Chunk], needs_logits: bool = False, page_size: int = 32, **fields: Any) -> StepBatch:
    """One step; `fields` replace those of `StepBatch` (samples, copies, cleared_pages, shared_runs, …)."""
    counts = [len(c.tokens) for c in chunks]
    ends = np.cumsum([0, *counts]).astype(np.int32)
    tables = np.full((len(chunks), max(len(c.pages) for c in chunks)), -1, np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.pages)] = chunk.pages
    rows = fields.get("logits_rows", (ends[1:] - 1)[[c.wants_logits for c in chunks]])
    values: dict[str, Any] = {
        "input_ids": np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks]),
        "positions": np.concatenate([c.positions for c in chunks]),
        "slot_mapping": np.concatenate([c.slots(page_size) for c in chunks]),
        "block_tables": tables,
        "cu_seqlens_q": ends,
        "seq_lens": np.array([c.start + len(c.tokens) for c in chunks], np.int32),
        "logits_rows": rows,
        "needs_logits": np.full(len(rows), needs_logits),
        "samples": greedy_samples(len(rows)),
        "history": np.zeros(0, np.int32),
        "suppress": np.zeros(0, np.int32),
        "copies": np.zeros((0, 2), np.int64),
        "cleared_pages": np.zeros(0, np.int32),
        "shared_runs": np.zeros((0, 3), np.int32),
    }
    return StepBatch(**(values | fields))
