"""What a model's metadata says: GGUF's, or Hugging Face's `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import ModelShape
from batchgen.models.architectures import (
    BY_GGUF_NAME,
    BY_MODEL_TYPE,
    HF_BIASES,
    HF_QK_NORMS,
    Architecture,
    Naming,
)
from batchgen.models.rope import Rope
from batchgen.models.rope_settings import read_ropes
from batchgen.models.settings import Settings, positive, require

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Hugging Face's names."""
MOST_LAYERS, MOST_COLUMNS = 1 << 16, 1 << 22
"""Metadata that asks for more is damaged."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """`window`: keys that a query sees, itself included (0: all); `rope`: number of the rotary table."""

    window: int = 0
    rope: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """`chosen` of `count` experts of `size` make a token's result; `normalised`: their shares sum to 1."""

    count: int
    chosen: int
    size: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's sizes and constants.

    `layers` is empty where all are alike. Scores are multiplied by `attention_scale`, then limited by `attention_cap`;
    what a layer adds is multiplied by `residual_scale`. A cap of 0 is none. `biases` are parts that must have one, and
    `norms_of_heads` says that there must be a norm with weights for every head; others are used where a file has them.
    """

    architecture: Architecture
    naming: Naming
    name: str
    shape: ModelShape
    norm_eps: float
    ropes: tuple[Rope, ...]
    activation: str = "silu"
    parallel: bool = False
    tied: bool = False
    layers: tuple[LayerKind, ...] = ()
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    biases: frozenset[str] = frozenset()
    norms_of_heads: bool = False

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "ModelConfig":
        """Read the GGUF keys of the architecture; ModelError names the key that is missing or unsupported."""
        name = require(metadata, "general.architecture", "the model's metadata")
        if not isinstance(name, str) or name not in BY_GGUF_NAME:
            known = ", ".join(sorted(BY_GGUF_NAME))
            raise ModelError(f"architecture '{name}' is not supported; supported: {known}")
        settings = Settings(metadata, BY_GGUF_NAME[name], "gguf", "the model's metadata")
        vocab = len(require(metadata, "tokenizer.ggml.tokens", settings.what))
        config = _config(settings, str(metadata.get("general.name", name)), vocab)
        settings.refuse_other(f"{name}.attention.value_length", config.shape.head_dim)
        return config

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str) -> "ModelConfig":
        """Read `config.json`, of which `name` is a model's name for people. ModelError names the key."""
        kind = require(values, "model_type", "config.json")
        if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
            known = ", ".join(sorted(BY_MODEL_TYPE))
            raise ModelError(f"model_type {kind!r} is not supported; supported: {known}")
        settings = Settings(values, BY_MODEL_TYPE[kind], "hf", "config.json")
        for key, supported in settings.architecture.fixed.items():
            settings.refuse_other(key, supported)
        return _config(settings, name, settings.integer("vocab_size"))

    def layer(self, number: int) -> LayerKind:
        return self.layers[number] if self.layers else LayerKind()

    def rope_tables(
        self, positions: int | None = None, factors: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, each (tables, positions, head_dim / 2) float32; by default all of the context.

        `factors` of a model file, if it has any, divide the frequencies of the first table.
        """
        count, dim = positions or self.shape.context_length, self.shape.head_dim
        tables = [rope.table(count, dim, None if n else factors) for n, rope in enumerate(self.ropes)]
        cos, sin = (np.stack(values).astype(np.float32) for values in zip(*tables, strict=True))
        return cos, sin


def _config(settings: Settings, name: str, vocab: int) -> ModelConfig:
    architecture = settings.architecture
    shape = _shape(settings, vocab)
    ropes = read_ropes(settings, shape.head_dim, shape.context_length)
    if ropes[0].kind == "longrope":  # the short factors serve the original context; the long ones would spoil it
        shape = replace(shape, context_length=min(shape.context_length, ropes[0].original_context))
    return ModelConfig(
        architecture=architecture,
        naming=settings.naming,
        name=name,
        shape=shape,
        norm_eps=settings.number("rms_eps" if architecture.norm == "rms" else "layer_eps"),
        ropes=ropes,
        activation=_activation(settings),
        parallel=bool(settings.get("parallel", architecture.parallel)),
        tied=settings.naming == "hf" and settings.flag("tie_word_embeddings", architecture.tied),
        layers=_layers(settings, shape),
        attention_scale=_attention_scale(settings, shape),
        attention_cap=_cap(settings, "attention_soft_cap"),
        logit_cap=_cap(settings, "logit_soft_cap"),
        embedding_scale=_embedding_scale(settings, shape),
        residual_scale=settings.number("residual_scale", 1.0),
        logit_scale=_logit_scale(settings),
        experts=_experts(settings, shape),
        biases=_biases(settings),
        norms_of_heads=any(settings.flag(key, False) for key in HF_QK_NORMS),
    )


def _shape(settings: Settings, vocab: int) -> ModelShape:
    heads, hidden = settings.integer("num_heads"), settings.integer("hidden_size")
    one = settings.values.get("multi_query") and not settings.values.get("new_decoder_architecture")
    wide = 4 * hidden if settings.naming == "hf" and settings.architecture.keys.get("intermediate_size") else None
    shape = ModelShape(
        hidden_size=hidden,
        intermediate_size=settings.integer("intermediate_size", wide),
        num_layers=settings.integer("num_layers"),
        num_heads=heads,
        num_kv_heads=1 if one else settings.integer("num_kv_heads", heads),
        head_dim=settings.integer("head_dim", hidden // heads),
        vocab_size=vocab,
        context_length=settings.integer("context_length"),
    )
    if shape.num_layers > MOST_LAYERS:
        raise ModelError(f"{settings.what} asks for {shape.num_layers} layers; {MOST_LAYERS} are possible")
    if shape.num_heads * shape.head_dim > MOST_COLUMNS:
        sizes = f"{shape.num_heads} heads of {shape.head_dim}"
        raise ModelError(f"{settings.what} asks for {sizes}; {MOST_COLUMNS} dimensions are possible")
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key-value heads evenly")
    if shape.head_dim % 16:
        raise ModelError(f"a head size of {shape.head_dim} is not supported (multiples of 16 are)")
    return shape


def _activation(settings: Settings) -> str:
    name = settings.get("activation")
    if name is None:
        return settings.architecture.activation
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _biases(settings: Settings) -> frozenset[str]:
    asked = [parts for key, parts in HF_BIASES.items() if settings.flag(key, False)]
    return frozenset(settings.architecture.biases).union(*asked) - frozenset(settings.architecture.unbiased)


def _cap(settings: Settings, field: str) -> float:
    return settings.number(field) if settings.get(field) else 0.0


def _attention_scale(settings: Settings, shape: ModelShape) -> float:
    """What scores are multiplied by: given as such, or as what is divided by the root of; else 1 / sqrt(head_dim)."""
    scalar = settings.values.get("query_pre_attn_scalar")
    if scalar is None and settings.architecture.post_norms and settings.architecture.root_embedding_scale:
        large = settings.naming == "gguf" and shape.num_layers in (46, 62)  # the 27B models of Gemma 2 and 3
        scalar = shape.hidden_size // shape.num_heads if large else shape.head_dim
    if scalar is not None:
        return positive(scalar, "query_pre_attn_scalar", settings.what) ** -0.5
    return settings.number("attention_scale", shape.head_dim**-0.5)


def _embedding_scale(settings: Settings, shape: ModelShape) -> float:
    if settings.architecture.root_embedding_scale:
        return float(shape.hidden_size**0.5)
    return settings.number("embedding_scale", 1.0)


def _logit_scale(settings: Settings) -> float:
    scale = settings.number("logit_scale", 1.0)
    return 1 / scale if settings.architecture.divides_logits else scale


def _experts(settings: Settings, shape: ModelShape) -> Experts | None:
    if not settings.architecture.experts and not settings.get("num_experts"):
        return None
    if _activation(settings) != "silu":
        raise ModelError("experts with an activation function other than silu are not supported")
    return Experts(
        count=settings.integer("num_experts", settings.values.get("num_local_experts")),  # newer files' name
        chosen=settings.integer("experts_per_token"),
        size=settings.integer("expert_size", shape.intermediate_size),
        normalised=settings.flag("norm_topk_prob", settings.architecture.experts_normalised),
    )


def _layers(settings: Settings, shape: ModelShape) -> tuple[LayerKind, ...]:
    """A window that holds the whole context is none, but its layers still are of the other kind."""
    window, count = _window(settings), shape.num_layers
    windowed = _windowed(settings, count) if window else [False] * count
    rotated = _rotated(settings, windowed)
    second = windowed if settings.architecture.local_rope else [not on for on in rotated]
    size = window if window < shape.context_length else 0
    return tuple(LayerKind(size * local, int(table)) for local, table in zip(windowed, second, strict=True))


def _window(settings: Settings) -> int:
    """0 where no layer has one. Qwen's have none unless they say so."""
    if not settings.flag("use_sliding_window", "max_window_layers" not in settings.values):
        return 0
    window = settings.get("window", settings.architecture.window if settings.naming == "gguf" else 0)
    return settings.integer("window", window) if window else 0


def _windowed(settings: Settings, count: int) -> list[bool]:
    """By the list of types that `config.json` may have, or by a period, or from some layer on."""
    types, first = settings.values.get("layer_types"), settings.values.get("max_window_layers", 0)
    if isinstance(types, list) and len(types) == count:
        return [kind == "sliding_attention" for kind in types]
    period = _period(settings)
    return [n >= first and not (period and (n + 1) % period == 0) for n in range(count)]


def _period(settings: Settings) -> int:
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if key in settings.values:
            return int(positive(settings.values[key], key, settings.what))
    return settings.architecture.window_period


def _rotated(settings: Settings, windowed: list[bool]) -> list[bool]:
    """Which layers have rotary positions at all."""
    if settings.architecture.rope_on == "windowed":
        return windowed
    if settings.architecture.rope_on == "all":
        return [True] * len(windowed)
    given = settings.values.get("no_rope_layers")
    if isinstance(given, list) and len(given) == len(windowed):
        return [bool(on) for on in given]
    key = "no_rope_layer_interval"
    interval = positive(settings.values.get(key, 4), key, settings.what)
    return [(n + 1) % interval != 0 for n in range(len(windowed))]
