"""What is supported, in tables: for each architecture the blocks it is composed of, and its names in model files.

Files come in two namings. GGUF's tensors have the same names in all architectures; Hugging Face's, and the keys of its
`config.json`, differ. What varies from model to model of one architecture is read from metadata (config.py), and
biases and norms of queries and keys are used where a file has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Naming = Literal["gguf", "hf"]
Stems = Mapping[str, str]
"""Part of a decoder → name of its tensors without `.weight` or `.bias`; `{}` is the number of the layer, `{number}`
that of the expert or head where each has its own."""

GGUF_STEMS: Stems = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "output_norm": "output_norm",
    "output": "output",
    "rope_factors": "rope_freqs",
    "rope_short": "rope_factors_short",
    "rope_long": "rope_factors_long",
    "attention_norm": "blk.{}.attn_norm",
    "attention_norm_2": "blk.{}.attn_norm_2",
    "ffn_norm": "blk.{}.ffn_norm",
    "ffn_norm_2": "blk.{}.attn_norm",
    "qkv": "blk.{}.attn_qkv",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "attention_output": "blk.{}.attn_output",
    "attention_post_norm": "blk.{}.post_attention_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "ffn_post_norm": "blk.{}.post_ffw_norm",
    "router": "blk.{}.ffn_gate_inp",
    "expert_gate": "blk.{}.ffn_gate_exps",
    "expert_up": "blk.{}.ffn_up_exps",
    "expert_down": "blk.{}.ffn_down_exps",
}

_LAYER = "model.layers.{}."
HF_STEMS: Stems = {
    "embedding": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attention_norm": _LAYER + "input_layernorm",
    "ffn_norm": _LAYER + "post_attention_layernorm",
    "qkv": _LAYER + "self_attn.qkv_proj",
    "q": _LAYER + "self_attn.q_proj",
    "k": _LAYER + "self_attn.k_proj",
    "v": _LAYER + "self_attn.v_proj",
    "q_norm": _LAYER + "self_attn.q_norm",
    "k_norm": _LAYER + "self_attn.k_norm",
    "attention_output": _LAYER + "self_attn.o_proj",
    "gate": _LAYER + "mlp.gate_proj",
    "up": _LAYER + "mlp.up_proj",
    "down": _LAYER + "mlp.down_proj",
    "router": _LAYER + "mlp.gate",
    "expert_gate": _LAYER + "mlp.experts.{number}.gate_proj",
    "expert_up": _LAYER + "mlp.experts.{number}.up_proj",
    "expert_down": _LAYER + "mlp.experts.{number}.down_proj",
}
_GEMMA_NORMS: Stems = {
    "attention_post_norm": _LAYER + "post_attention_layernorm",
    "ffn_norm": _LAYER + "pre_feedforward_layernorm",
    "ffn_post_norm": _LAYER + "post_feedforward_layernorm",
}
_MIXTRAL: Stems = {
    "router": _LAYER + "block_sparse_moe.gate",
    "expert_gate": _LAYER + "block_sparse_moe.experts.{number}.w1",
    "expert_up": _LAYER + "block_sparse_moe.experts.{number}.w3",
    "expert_down": _LAYER + "block_sparse_moe.experts.{number}.w2",
}
_GPT2: Stems = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attention_norm": "transformer.h.{}.ln_1",
    "ffn_norm": "transformer.h.{}.ln_2",
    "qkv": "transformer.h.{}.attn.c_attn",
    "attention_output": "transformer.h.{}.attn.c_proj",
    "up": "transformer.h.{}.mlp.c_fc",
    "down": "transformer.h.{}.mlp.c_proj",
}
_NEOX: Stems = {
    "embedding": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attention_norm": "gpt_neox.layers.{}.input_layernorm",
    "ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "attention_output": "gpt_neox.layers.{}.attention.dense",
    "up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
_FALCON: Stems = {
    "embedding": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "attention_norm": "transformer.h.{}.input_layernorm",
    "attention_norm_2": "transformer.h.{}.ln_attn",  # where there are two norms
    "ffn_norm_2": "transformer.h.{}.ln_mlp",
    "qkv": "transformer.h.{}.self_attention.query_key_value",
    "attention_output": "transformer.h.{}.self_attention.dense",
    "up": "transformer.h.{}.mlp.dense_h_to_4h",
    "down": "transformer.h.{}.mlp.dense_4h_to_h",
}

GGUF_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "context_length": "context_length",
    "rms_eps": "attention.layer_norm_rms_epsilon",
    "layer_eps": "attention.layer_norm_epsilon",
    "window": "attention.sliding_window",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "attention_scale": "attention.scale",
    "logit_scale": "logit_scale",
    "num_experts": "expert_count",
    "experts_per_token": "expert_used_count",
    "expert_size": "expert_feed_forward_length",
    "parallel": "use_parallel_residual",
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
}
"""Fields of a configuration → keys of GGUF's metadata, which follow the architecture's name and a dot."""

HF_KEYS: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "layer_eps": "layer_norm_eps",
    "window": "sliding_window",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logit_scale",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "parallel": "use_parallel_residual",
    "activation": "hidden_act",
    "rope_theta": "rope_theta",
}
"""The same → keys of `config.json`; an empty one where an architecture has no choice."""


HF_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("q", "k", "v", "qkv", "attention_output"),
    "use_qkv_bias": ("q", "k", "v"),
    "mlp_bias": ("gate", "up", "down"),
    "use_bias": ("q", "k", "v", "attention_output", "gate", "up", "down"),
    "bias": ("qkv", "attention_output", "up", "down"),
}
"""Keys of `config.json` → parts that have biases where they are true."""
HF_QK_NORMS = "use_qk_norm", "qk_layernorm"
"""Keys that say whether every head has a norm with weights of its own."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a decoder is composed of.

    `qkv`: how the rows of a fused Hugging Face tensor lie: `blocks` (all of q, k, v), `heads` (q, k, v of each head),
    `groups` (queries, key and value of each KV head); GGUF's are blocks. `interleaved`: namings in which dimensions 2i
    and 2i + 1 of a head are rotated together, not i and i + half. `zero_centred`: namings whose norm weights lack 1.
    `window_period`: every so-manieth layer sees all keys (0: none does, if there is a window). `local_rope`: layers
    with a window have a rotary table of their own, which is not stretched, by `local_rope_theta` (0: the others').
    `biases`: parts that must have one; `unbiased`: that have none, whatever `config.json` says of biases.
    """

    name: str
    model_type: str
    norm: Literal["rms", "layer"] = "rms"
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    parallel: bool = False
    learned_positions: bool = False
    rotary: float = 1.0
    interleaved: tuple[Naming, ...] = ()
    zero_centred: tuple[Naming, ...] = ()
    qkv: Literal["", "blocks", "heads", "groups"] = ""
    fused_gate_up: bool = False
    transposed: tuple[Naming, ...] = ()
    biases: tuple[str, ...] = ()
    unbiased: tuple[str, ...] = ()
    tied: bool = False
    root_embedding_scale: bool = False
    divides_logits: bool = False
    window_period: int = 0
    window: int = 0
    rope_on: Literal["all", "windowed", "three of four"] = "all"
    local_rope: bool = False
    local_rope_theta: float = 0.0
    experts: bool = False
    experts_normalised: bool = True
    stems: Stems = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of `config.json` with the only value that is supported, which is the default, too."""

    def stem(self, part: str, naming: Naming) -> str | None:
        """The template of a part's tensor names; None where the naming has none."""
        return GGUF_STEMS.get(part) if naming == "gguf" else {**HF_STEMS, **self.stems}.get(part)

    def blocks(self) -> str:
        """The choices in words."""
        norms = {"rms": "RMSNorm", "layer": "LayerNorm"}[self.norm]
        places = "after" if not self.pre_norms else "before and after" if self.post_norms else "before"
        gates = {"silu": "SwiGLU", "gelu_tanh": "GeGLU", "gelu": "GeGLU"}
        words = (
            f"{norms} {places}",
            "experts" if self.experts else "",
            gates[self.activation] if self.gated else "GELU",
            {"": "", "head": "norms of q and k per head", "whole": "norms of q and k"}[self.qk_norm],
            "side by side" if self.parallel else "",
            "learned positions" if self.learned_positions else "",
            f"{self.rotary:.0%} rotary" if 0 < self.rotary < 1 else "",
            f"1 layer in {self.window_period} sees all" if self.window_period else "",
        )
        return ", ".join(word for word in words if word)

    def key(self, name: str, naming: Naming) -> str | None:
        """The metadata key of a field."""
        if naming == "gguf":
            key = GGUF_KEYS.get(name)
            return key and f"{self.name}.{key}"
        return {**HF_KEYS, **self.keys}.get(name)


_ATTENTION = ("q", "k", "v", "attention_output")
_LINEARS = (*_ATTENTION, "up", "down")
_NORMS = ("attention_norm", "attention_norm_2", "ffn_norm", "ffn_norm_2", "output_norm")
_LLAMA = Architecture("llama", "llama", interleaved=("gguf",))
_GEMMA = Architecture(
    "gemma", "gemma", activation="gelu_tanh", zero_centred=("hf",), tied=True, root_embedding_scale=True,
    keys={"activation": "hidden_activation"},
)  # fmt: skip
_OLMO = Architecture(
    "olmo2", "olmo2", pre_norms=False, post_norms=True, qk_norm="whole", window_period=4, local_rope=True,
    stems=_GEMMA_NORMS,
)  # fmt: skip
_GLM = Architecture(
    "chatglm", "glm", rotary=0.5, interleaved=("gguf", "hf"), fused_gate_up=True, unbiased=("attention_output",),
    stems={"up": _LAYER + "mlp.gate_up_proj"},
)  # fmt: skip
_LAYER_NORMED = Architecture("", "", norm="layer", activation="gelu", gated=False)

_ROWS = (
    _LLAMA,
    replace(_LLAMA, model_type="mistral"),
    replace(_LLAMA, model_type="mixtral", experts=True, stems=_MIXTRAL),
    Architecture("qwen2", "qwen2", biases=("q", "k", "v")),
    Architecture("qwen3", "qwen3", qk_norm="head"),
    Architecture(
        "qwen3moe", "qwen3_moe", qk_norm="head", experts=True, fixed={"decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    _GEMMA,
    replace(
        _GEMMA, name="gemma2", model_type="gemma2", post_norms=True, window_period=2, window=4096, stems=_GEMMA_NORMS
    ),
    replace(
        _GEMMA, name="gemma3", model_type="gemma3_text", post_norms=True, qk_norm="head", window_period=6,
        local_rope=True, local_rope_theta=10000.0, stems=_GEMMA_NORMS,
    ),
    Architecture("phi3", "phi3", qkv="blocks", fused_gate_up=True, stems={"up": _LAYER + "mlp.gate_up_proj"}),
    _OLMO,
    replace(_OLMO, model_type="olmo3"),
    _GLM,
    replace(
        _GLM, name="glm4", model_type="glm4", post_norms=True,
        stems={
            "up": _LAYER + "mlp.gate_up_proj",
            "attention_post_norm": _LAYER + "post_self_attn_layernorm",
            "ffn_post_norm": _LAYER + "post_mlp_layernorm",
        },
    ),
    Architecture("ernie4_5", "ernie4_5", interleaved=("gguf", "hf"), tied=True),
    Architecture("olmoe", "olmoe", qk_norm="whole", experts=True, experts_normalised=False, fixed={"clip_qkv": None}),
    replace(
        _LLAMA, name="granite", model_type="granite", divides_logits=True, keys={"logit_scale": "logits_scaling"}
    ),
    replace(_LLAMA, name="smollm3", model_type="smollm3", tied=True, rope_on="three of four"),
    replace(
        _LAYER_NORMED, name="gpt2", model_type="gpt2", activation="gelu_tanh", learned_positions=True, rotary=0.0,
        qkv="blocks", transposed=("hf",), tied=True, biases=("qkv", *_LINEARS, *_NORMS), stems=_GPT2,
        keys={
            "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_layers": "n_layer", "num_heads": "n_head",
            "context_length": "n_positions", "layer_eps": "layer_norm_epsilon", "activation": "activation_function",
            "num_kv_heads": "",
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    replace(
        _LAYER_NORMED, name="gptneox", model_type="gpt_neox", parallel=True, rotary=0.25, qkv="heads",
        biases=("up", "down", *_NORMS), stems=_NEOX, keys={"num_kv_heads": ""},
    ),
    Architecture(
        "stablelm", "stablelm", norm="layer", rotary=0.25, biases=_NORMS,
        stems={
            "q_norm": _LAYER + "self_attn.q_layernorm.norms.{number}",
            "k_norm": _LAYER + "self_attn.k_layernorm.norms.{number}",
        },
    ),
    replace(
        _LAYER_NORMED, name="starcoder2", model_type="starcoder2", activation="gelu_tanh", tied=True,
        biases=(*_LINEARS, *_NORMS),
        stems={"up": _LAYER + "mlp.c_fc", "down": _LAYER + "mlp.c_proj"}, keys={"layer_eps": "norm_epsilon"},
        fixed={"use_bias": True},
    ),
    replace(
        _LAYER_NORMED, name="falcon", model_type="falcon", parallel=True, qkv="groups", tied=True, biases=_NORMS,
        stems=_FALCON,
        keys={
            "num_kv_heads": "num_kv_heads", "layer_eps": "layer_norm_epsilon", "activation": "activation",
            "intermediate_size": "ffn_hidden_size",
        },
        fixed={"alibi": False, "parallel_attn": True},
    ),
    Architecture(
        "command-r", "cohere", norm="layer", parallel=True, tied=True, interleaved=("gguf", "hf"),
    ),
    Architecture(
        "cohere2", "cohere2", norm="layer", parallel=True, tied=True, interleaved=("gguf", "hf"), window_period=4,
        rope_on="windowed",
    ),
)  # fmt: skip

BY_MODEL_TYPE: Mapping[str, Architecture] = {row.model_type: row for row in _ROWS}
BY_GGUF_NAME: Mapping[str, Architecture] = {row.name: row for row in reversed(_ROWS)}
