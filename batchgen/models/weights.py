"""Tensors of a model file into a backend's packed weights."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Backend
from batchgen.models.config import ModelConfig
from batchgen.models.handles import DecoderWeights
from batchgen.models.layer_loader import LayerLoader
from batchgen.models.matrices import scaled
from batchgen.models.tensors import Tensors, TensorSource

PACKERS = 2
"""Threads that dequantise and pack, each a layer at a time."""


def load_weights(source: TensorSource, config: ModelConfig, backend: Backend) -> DecoderWeights:
    """Dequantise and pack part by part. ModelError for a tensor that is missing, misshapen or not known here."""
    tensors = Tensors(source, config, backend.wants_codes)
    layer = LayerLoader(tensors, config, backend)
    shape = config.shape
    hidden, vocab = shape.hidden_size, shape.vocab_size
    head = "embedding" if config.tied or (not tensors.has("output") and config.naming == "gguf") else "output"
    with ThreadPoolExecutor(PACKERS) as pool:
        output = pool.submit(lambda: backend.linear([tensors.matrix(head, (vocab, hidden))]))
        table = pool.submit(
            lambda: backend.table(scaled(tensors.values("embedding", (vocab, hidden)), config.embedding_scale))
        )
        layers = tuple(pool.map(layer.load, range(shape.num_layers)))
        weights = DecoderWeights(
            embedding=table.result(),
            positions=_positions(tensors, config, backend),
            layers=layers,
            output_norm=layer.norm("output_norm", None, config.logit_scale),
            output=output.result(),
            rope_factors=_rope_factors(tensors, config),
        )
    tensors.refuse_unused()
    return weights


def _positions(tensors: Tensors, config: ModelConfig, backend: Backend) -> Any:
    if not config.architecture.learned_positions:
        return None
    return backend.table(tensors.values("positions", (config.shape.context_length, config.shape.hidden_size)))


def _rope_factors(tensors: Tensors, config: ModelConfig) -> NDArray[np.float32] | None:
    """Of LongRoPE those for the original context, which is all that is used of the model's."""
    rope, part = config.ropes[0], "rope_factors"
    if rope.kind == "longrope" and not rope.divisors:
        tensors.ignore("rope_long")
        part = "rope_short"
    elif not tensors.has(part):
        return None
    return tensors.values(part, (rope.dimensions // 2,))
