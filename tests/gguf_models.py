"""Whole small GGUF models by gguf's own writer, their matrices of any types.

write_model(path, ["Q4_K", "IQ3_S"])                 # the types in turn
write_model(path, ["Q8_0"], split_max_tensors=5)     # part after part
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from batchgen.models.config import ModelConfig
from tests.gguf_bytes import tiny_metadata
from tests.quantised import random_blocks
from tests.tiny_model import tensor_shapes, tiny_config

FLOATS = ("F32", "F16", "BF16")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def sizes(num_layers: int) -> ModelConfig:
    """A whole block of every type in each row."""
    vocab = len(tiny_metadata()["tokenizer.ggml.tokens"])
    return tiny_config(**SIZES, num_layers=num_layers, vocab_size=vocab, context_length=64)


def write_model(path: Path, types: Sequence[str], num_layers: int = 1, **options: Any) -> None:
    """`options`: those of GGUFWriter, such as `split_max_tensors`."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    _add_metadata(writer, _metadata(num_layers))
    rng, kinds = np.random.default_rng(0), cycle(types)
    for name, shape in tensor_shapes(sizes(num_layers)).items():
        kind = "F32" if len(shape) == 1 else next(kinds)
        writer.add_tensor(name, _stored(rng, kind, shape), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if kind not in FLOATS:
        return random_blocks(rng, kind, *shape)
    values = rng.standard_normal(shape).astype(np.float32) / 16
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def _metadata(num_layers: int) -> dict[str, Any]:
    s = sizes(num_layers).shape
    changes = {"embedding_length": s.hidden_size, "feed_forward_length": s.intermediate_size, "block_count": num_layers}
    heads = {"attention.head_count": s.num_heads, "attention.head_count_kv": s.num_kv_heads}
    changes |= {**heads, "rope.dimension_count": s.head_dim}
    return tiny_metadata() | {f"llama.{key}": value for key, value in changes.items()}


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if key != "general.architecture":
            (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
