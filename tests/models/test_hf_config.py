"""What is read from `config.json`, of published models' files in older and newer forms, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ModelError
from batchgen.kernels.reference import ReferenceBackend
from batchgen.models.architectures import BY_MODEL_TYPE
from batchgen.models.config import ModelConfig
from batchgen.models.weights import load_weights
from tests.models.recorded import load
from tests.tiny_model import ArraySource

LLAMA_3_1: dict[str, Any] = {
    "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN_2_5: dict[str, Any] = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_0_1: dict[str, Any] = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
GEMMA_2_2B: dict[str, Any] = {
    "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
PYTHIA: dict[str, Any] = {
    "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    "vocab_size": 50304,
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-05,
    "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "parallel_attn": True, "vocab_size": 65024, "max_position_embeddings": 2048,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
    "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip


def read(values: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**values, **changes}, "a model")


def test_llama_3_1():
    config = read(LLAMA_3_1)
    rope = config.ropes[0]
    assert (rope.kind, rope.theta, rope.factor, rope.low, rope.high) == ("llama3", 500000.0, 8.0, 1.0, 4.0)
    assert (rope.original_context, rope.dimensions) == (8192, 128)
    assert (config.shape.context_length, config.tied, config.layer(3).window) == (131072, False, 0)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, {0}),
        ({"use_sliding_window": True}, {0}),  # as large as the context
        ({"use_sliding_window": True, "sliding_window": 4096}, {0, 4096}),
        ({"sliding_window": 4096, "use_sliding_window": None}, {0}),
    ],
)
def test_windows_of_qwen(changes, windows):
    config = read(QWEN_2_5, **changes)
    assert {layer.window for layer in config.layers} == windows
    assert config.layer(20).window == 0
    assert config.tied


def test_mistral_has_its_window_in_every_layer():
    assert {layer.window for layer in read(MISTRAL_0_1).layers} == {4096}
    assert {layer.window for layer in read(MISTRAL_0_1, sliding_window=None).layers} == {0}


def test_gemma_2():
    config = read(GEMMA_2_2B)
    assert [layer.window for layer in config.layers[:4]] == [4096, 0, 4096, 0]
    assert (config.attention_cap, config.logit_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (config.embedding_scale, config.tied, config.activation) == (48.0, True, "gelu_tanh")


@pytest.mark.parametrize("window", [512, 65536])
def test_layers_of_gemma_3(window):
    """Their rotary table depends on their kind, also where the window holds the whole context."""
    config = read(GEMMA_3_1B, sliding_window=window)
    expected = window if window < 32768 else 0
    assert [layer.window for layer in config.layers[:7]] == [*5 * [expected], 0, expected]
    assert [layer.rope for layer in config.layers[:7]] == [1, 1, 1, 1, 1, 0, 1]
    assert [rope.theta for rope in config.ropes] == [1000000.0, 10000.0]


def test_cohere2_rotates_in_windowed_layers_only():
    config = read(load("cohere2").config, sliding_window=100000)
    assert [(layer.window, layer.rope) for layer in config.layers] == [(0, 0), (0, 0), (0, 0), (0, 1)]
    assert config.ropes[1].dimensions == 0


def test_older_keys():
    pythia = read(PYTHIA)
    assert (pythia.ropes[0].dimensions, pythia.ropes[0].theta, pythia.parallel) == (16, 10000.0, True)
    assert pythia.activation == "gelu"
    gpt2 = read(GPT2)
    assert (gpt2.shape.intermediate_size, gpt2.shape.context_length, gpt2.tied) == (3072, 1024, True)
    with pytest.raises(ModelError, match="a head size of"):
        read(PYTHIA, num_attention_heads=32)
    falcon = read(FALCON_7B)
    assert (falcon.shape.num_kv_heads, falcon.shape.head_dim, falcon.shape.intermediate_size) == (1, 64, 18176)


def test_longrope_serves_the_original_context():
    config = read(load("phi3-longrope").config)
    assert config.shape.context_length == 128
    assert config.ropes[0].attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(128)))
    old = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert read(load("phi3-longrope").config, rope_parameters=None, rope_scaling=old).ropes[0].kind == "longrope"


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (
            LLAMA_3_1,
            {"model_type": "mamba"},
            f"model_type 'mamba' is not supported; supported: {', '.join(sorted(BY_MODEL_TYPE))}",
        ),
        (LLAMA_3_1, {"model_type": []}, "model_type [] is not supported; supported: cohere, "),
        (LLAMA_3_1, {"hidden_act": "relu2"}, "activation 'relu2' is not supported; supported: silu, swish, gelu, "),
        (LLAMA_3_1, {"hidden_size": 0}, "config.json has hidden_size = 0; a positive integer is needed"),
        (LLAMA_3_1, {"rms_norm_eps": "1"}, "rms_norm_eps is '1' in config.json, not a positive number"),
        (LLAMA_3_1, {"tie_word_embeddings": 1}, "config.json has tie_word_embeddings = 1; true or false is needed"),
        (LLAMA_3_1, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (
            LLAMA_3_1,
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope low_freq_factor is None in config.json, ",
        ),
        (LLAMA_3_1, {"num_hidden_layers": 1 << 30}, "config.json asks for 1073741824 layers; 65536 are possible"),
        (
            LLAMA_3_1,
            {"rope_scaling": {**LLAMA_3_1["rope_scaling"], "low_freq_factor": 4.0}},
            "config.json has rope low_freq_factor = 4.0 and high_freq_factor = 4.0",
        ),
        (
            LLAMA_3_1,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}},
            "config.json has a rope of base 500000.0 and an original context of 1",
        ),
        (LLAMA_3_1, {"rope_scaling": 4}, "rope_parameters = 4 is not supported"),
        (
            LLAMA_3_1,
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "config.json has 1 short_factor of rope; 64 are needed",
        ),
        (
            LLAMA_3_1,
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "config.json has mscale for rotary embedding, which is not supported",
        ),
        (PYTHIA, {"rotary_pct": 2.0}, "partial_rotary_factor: 128 of 64 dimensions cannot be rotated in pairs"),
        (
            load("mixtral").config,
            {"hidden_act": "gelu"},
            "experts with an activation function other than silu are not supported",
        ),
        (FALCON_7B, {"alibi": True}, "alibi = True is not supported (only False)"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights = False is not supported (only True)"),
    ],
)
def test_refusals(values, changes, message):
    with pytest.raises(ModelError) as error:
        read(values, **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_hf({k: v for k, v in LLAMA_3_1.items() if k != key}, "a model")
    assert str(error.value) == f"config.json lacks '{key}'"


LAYER = "model.layers.0."
MISSING = [
    ("qwen2", LAYER + "self_attn.q_proj.bias"),
    ("qwen3", LAYER + "self_attn.k_norm.weight"),
    ("gemma2", LAYER + "post_feedforward_layernorm.weight"),
    ("olmo2", LAYER + "self_attn.q_norm.weight"),
    ("phi3", LAYER + "self_attn.qkv_proj.weight"),
    ("gpt2", "transformer.wpe.weight"),
    ("gpt2", "transformer.h.1.mlp.c_fc.bias"),
    ("gpt_neox", "embed_out.weight"),
    ("starcoder2", LAYER + "mlp.c_proj.bias"),
    ("falcon-new", "transformer.h.1.ln_mlp.weight"),
    ("llama", LAYER + "self_attn.v_proj.bias"),
    ("llama", LAYER + "mlp.gate_proj.bias"),
    ("gpt2", "transformer.ln_f.bias"),
    ("stablelm", LAYER + "post_attention_layernorm.bias"),
    ("falcon", "transformer.h.0.input_layernorm.bias"),
    ("falcon-new", "transformer.h.0.self_attention.dense.bias"),
    ("cohere-normed", LAYER + "self_attn.q_norm.weight"),
    ("cohere-normed", LAYER + "self_attn.k_norm.weight"),
    ("stablelm-parallel", LAYER + "self_attn.k_layernorm.norms.1.weight"),
    ("mixtral", LAYER + "block_sparse_moe.experts.3.w2.weight"),
    ("qwen3_moe", LAYER + "mlp.gate.weight"),
]


@pytest.mark.parametrize(("name", "tensor"), MISSING)
def test_a_missing_tensor_is_named(name, tensor):
    recorded = load(name)
    tensors = recorded.weights()
    del tensors[tensor]
    with pytest.raises(ModelError) as error:
        load_weights(ArraySource(tensors), ModelConfig.from_hf(recorded.config, name), ReferenceBackend())
    assert str(error.value) == f"the model file lacks the tensor '{tensor}'"


@pytest.mark.parametrize(("name", "tensor"), [(name, tensor) for name, tensor in MISSING if not tensor.endswith("wpe")])
def test_a_wrong_shape_is_named(name, tensor):
    recorded = load(name)
    tensors = recorded.weights()
    shape = tensors[tensor].shape
    tensors[tensor] = tensors[tensor][:-1]
    with pytest.raises(ModelError) as error:
        load_weights(ArraySource(tensors), ModelConfig.from_hf(recorded.config, name), ReferenceBackend())
    found = (shape[0] - 1, *shape[1:])
    assert str(error.value) == f"tensor '{tensor}' has shape {found}; the metadata asks for {shape}"


@pytest.mark.parametrize("tensor", ["model.norm.scale", "model.norm.bias", "model.layers.1.post_mlp_layernorm.weight"])
def test_a_tensor_that_would_be_ignored_is_refused(tensor):
    recorded = load("gemma2")
    tensors = recorded.weights() | {tensor: recorded.weights()["model.norm.weight"]}
    with pytest.raises(ModelError, match=f"not used for gemma2 here: {tensor}"):
        load_weights(ArraySource(tensors), ModelConfig.from_hf(recorded.config, "x"), ReferenceBackend())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "falcon"])
def test_files_that_were_saved_without_a_head_lack_a_prefix(name):
    """And old ones hold buffers, and a head that is the embedding."""
    recorded = load(name)
    config, tensors = ModelConfig.from_hf(recorded.config, name), recorded.weights()
    prefix = config.architecture.stem("embedding", "hf").partition(".")[0] + "."
    bare = {tensor.removeprefix(prefix): value for tensor, value in tensors.items()}
    bare["h.0.attn.bias"] = bare["layers.0.attention.rotary_emb.inv_freq"] = tensors[sorted(tensors)[0]]
    if config.tied:
        bare["lm_head.weight"] = tensors[prefix + ("wte" if name == "gpt2" else "word_embeddings") + ".weight"]
    weights = load_weights(ArraySource(bare), config, ReferenceBackend())
    assert len(weights.layers) == 2


def test_the_readme_names_them_all():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = text.split("### Architectures")[1].split("###")[0]
    assert all(f"`{model_type}`" in section for model_type in BY_MODEL_TYPE)
