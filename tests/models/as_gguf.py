"""A recorded model under GGUF's names, as llama.cpp's converter writes it: by gguf's own table of names."""

import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from batchgen.models.architectures import BY_MODEL_TYPE
from batchgen.models.config import ModelConfig
from tests.models.recorded import Recorded

Tensors = dict[str, NDArray[np.float32]]
ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("llama", "granite", "smollm3")


def as_gguf(recorded: Recorded) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors."""
    config = ModelConfig.from_hf(recorded.config, recorded.name)
    return metadata_of(config, recorded.config), tensors_of(config, recorded.config, recorded.weights())


def metadata_of(config: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    shape, rope, name = config.shape, config.ropes[0], config.architecture.name
    keys: dict[str, Any] = {
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "block_count": shape.num_layers,
        "context_length": values.get("max_position_embeddings", shape.context_length),
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.sliding_window": max((layer.window for layer in config.layers), default=0) or None,
        "attn_logit_softcapping": config.attention_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
        f"attention.layer_norm_{'rms_' if config.architecture.norm == 'rms' else ''}epsilon": config.norm_eps,
        "use_parallel_residual": values.get("use_parallel_residual"),
        "embedding_scale": values.get("embedding_multiplier"),
        "residual_scale": values.get("residual_multiplier"),
        "attention.scale": values.get("attention_multiplier"),
        "logit_scale": values.get("logits_scaling", values.get("logit_scale")),
        "rope.dimension_count": rope.dimensions or None,
        "rope.freq_base": rope.theta,
        **scaling_of(config),
    }
    if config.experts is not None:
        experts = config.experts
        keys |= {"expert_count": experts.count, "expert_used_count": experts.chosen}
        keys |= {"expert_feed_forward_length": experts.size}
    own = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": name, "tokenizer.ggml.tokens": ["x"] * shape.vocab_size, **own}


def scaling_of(config: ModelConfig) -> dict[str, Any]:
    """Of llama3's and LongRoPE's tensors tell."""
    rope = config.ropes[0]
    if rope.kind == "longrope":
        original = {"rope.scaling.original_context_length": rope.original_context}
        return {**original, "rope.scaling.attn_factor": rope.attention_factor}
    if rope.kind in ("none", "llama3"):
        return {}
    known = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    return {**known, "rope.scaling.original_context_length": rope.original_context}


def tensors_of(config: ModelConfig, values: Mapping[str, Any], weights: Tensors) -> Tensors:
    names = gguf.get_tensor_name_map(ARCHS[config.architecture.name], config.shape.num_layers)
    found: Tensors = {}
    for name, value in merged(weights).items():
        known = names.get_name(name, (".weight", ".bias"))
        assert known is not None, name
        found[known] = converted(config, known, value)
    rope = config.ropes[0]
    if rope.kind == "llama3":
        plain = rope.theta ** (-np.arange(rope.dimensions // 2) * 2 / rope.dimensions)
        found["rope_freqs.weight"] = (plain / rope.frequencies()).astype(np.float32)
    if rope.kind == "longrope":
        for kind in ("short", "long"):
            factors = values["rope_parameters"][f"{kind}_factor"]
            found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return found


def merged(weights: Tensors) -> Tensors:
    """What files of Hugging Face have for every expert, or head, one after the other in one tensor."""
    groups: dict[str, list[tuple[int, NDArray[np.float32]]]] = {}
    for name, value in weights.items():
        number = re.search(r"(?:experts|norms)\.(\d+)\.", name)
        whole = re.sub(r"\.norms\.\d+", "", re.sub(r"experts\.\d+", "experts", name))
        groups.setdefault(whole, []).append((int(number[1]) if number else 0, value))
    return {
        name: parts[0][1] if len(parts) == 1 else np.stack([value for _, value in sorted(parts, key=lambda p: p[0])])
        for name, parts in groups.items()
    }


def converted(config: ModelConfig, name: str, value: NDArray[np.float32]) -> NDArray[np.float32]:
    architecture, shape = config.architecture, config.shape
    if "norm" in name and config.naming in architecture.zero_centred:
        return value + 1
    if architecture.name == "gpt2" and "blk" in name and value.ndim == 2:
        return np.ascontiguousarray(value.T)
    if architecture.name in PERMUTED and re.search(r"attn_[qk]\.", name):
        rows = value.reshape(-1, 2, shape.head_dim // 2, *value.shape[1:])
        return rows.swapaxes(1, 2).reshape(value.shape)
    if "attn_qkv" in name and architecture.qkv == "heads":
        return value.reshape(shape.num_heads, 3, shape.head_dim, -1).swapaxes(0, 1).reshape(value.shape)
    if "attn_qkv" in name and architecture.qkv == "groups":
        groups = value.reshape(shape.num_kv_heads, -1, shape.head_dim, *value.shape[1:])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])
    return value


assert set(PERMUTED) <= {row.name for row in BY_MODEL_TYPE.values()}
