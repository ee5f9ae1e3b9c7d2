"""What a model's metadata says of its architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import ModelShape

SUPPORTED_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's sizes and constants; the whole of a head is rotated."""

    architecture: str
    name: str
    shape: ModelShape
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "ModelConfig":
        """Read the GGUF keys of the architecture; ModelError names the key that is missing or unsupported."""
        architecture = _require(metadata, "general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            known = ", ".join(SUPPORTED_ARCHITECTURES)
            raise ModelError(f"architecture '{architecture}' is not supported; supported: {known}")
        keys = _Keys(metadata, architecture)
        heads = keys.integer("attention.head_count")
        hidden = keys.integer("embedding_length")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        shape = ModelShape(
            hidden_size=hidden,
            intermediate_size=keys.integer("feed_forward_length"),
            num_layers=keys.integer("block_count"),
            num_heads=heads,
            num_kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=len(_require(metadata, "tokenizer.ggml.tokens")),
            context_length=keys.integer("context_length"),
        )
        _check_shape(shape)
        keys.refuse_other("attention.value_length", head_dim)
        keys.refuse_other("rope.dimension_count", head_dim)
        keys.refuse_other("rope.scaling.type", "none")
        keys.refuse_other("rope.scale_linear", 1.0)
        keys.refuse_other("expert_count", 0)
        return cls(
            architecture=architecture,
            name=str(metadata.get("general.name", architecture)),
            shape=shape,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope_theta=keys.number("rope.freq_base", 10000.0),
        )

    def rope_table(self, positions: int | None = None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, each (1, positions, head_dim / 2) float32, in float64; by default all of the context."""
        half = self.shape.head_dim // 2
        frequencies = self.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(positions or self.shape.context_length, dtype=np.float64)[:, None] * frequencies
        return np.cos(angles)[None].astype(np.float32), np.sin(angles)[None].astype(np.float32)


def _require(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"the model's metadata lacks '{key}'")
    return metadata[key]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata keys that start with the architecture's name."""

    metadata: Mapping[str, Any]
    architecture: str

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        return _require(self.metadata, f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ModelError(
                f"the model's metadata has {self.architecture}.{key} = {value!r}; a positive integer is needed"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ModelError(f"{self.architecture}.{key} is {value!r} in the model's metadata, not a positive number")
        return float(value)

    def refuse_other(self, key: str, supported: Any) -> None:
        value = self.get(key, supported)
        if value != supported:
            raise ModelError(f"{self.architecture}.{key} = {value!r} is not supported (only {supported!r})")


def _check_shape(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key-value heads evenly")
    if shape.head_dim % 16:
        raise ModelError(f"a head size of {shape.head_dim} is not supported (multiples of 16 are)")
