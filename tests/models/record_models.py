"""Computes with transformers, in float32, what test_recorded_models.py compares with. Needs torch and transformers.

python -m tests.models.record_models FOLDER [NAME ...]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.recorded import seeded_weights

TOKENS, VOCAB = 80, 96
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE = {"rope_theta": 10000.0}
WINDOW = 20
FULL, SLIDING = "full_attention", "sliding_attention"
NO_HEAD_DIM: dict[str, Any] = {"head_dim": None}  # transformers computes it
FACTORS = np.linspace(1.0, 3.0, 8).round(3).tolist()

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}),
    "gemma2-scaled": (
        "gemma2",
        {
            "tie_word_embeddings": True, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
            "num_hidden_layers": 6, "layer_types": [*5 * [SLIDING], FULL],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75}}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                **ROPE, "rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": [*3 * [SLIDING], FULL],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", **ROPE},
                FULL: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **ROPE},
            },
        },
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.5},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "gpt_neox-serial": (
        "gpt_neox", {"use_parallel_residual": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "falcon": (
        "falcon",
        {"multi_query": True, "new_decoder_architecture": False, "tie_word_embeddings": True, **NO_HEAD_DIM},
    ),
    "falcon-new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": True, **NO_HEAD_DIM},
    ),
    "cohere": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere-normed": ("cohere", {"tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {
            "tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": WINDOW,
            "layer_types": [*3 * [SLIDING], FULL],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 48},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False}),
}  # fmt: skip


def record(name: str, folder: Path) -> None:
    """Build the model, give it seeded weights under the names of its files, run it, write what came out."""
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model_type, changes = MODELS[name]
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    config = AutoConfig.for_model(model_type, **sizes)
    config._attn_implementation = "eager"
    with tempfile.TemporaryDirectory() as place:
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        weights = Path(place) / "model.safetensors"
        with safe_open(weights, "np") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        save_file(seeded_weights(shapes, model_type.startswith("gemma")), weights, {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
        text = (Path(place) / "config.json").read_text()
    tokens = np.random.default_rng(7).integers(3, VOCAB, TOKENS)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0].numpy()
    at = np.array([*range(0, TOKENS - 6, 6), *range(TOKENS - 6, TOKENS)])
    kept = {"tokens": tokens.astype(np.uint8), "at": at.astype(np.uint8), "logits": logits[at]}
    np.savez_compressed(folder / f"{name}.npz", config=text, shapes=json.dumps(shapes), **kept)


def main(folder: str, *names: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        record(name, Path(folder))
        print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
