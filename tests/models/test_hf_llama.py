"""Model directories of Hugging Face: settings, names, and the same numbers as from a GGUF file."""

import json

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.kernels.base import StepLimits
from batchgen.kernels.reference import ReferenceBackend
from batchgen.loading import describe_model, load_model, open_model
from batchgen.models.hf_llama import llama_config, tensor_name
from tests.hf_models import directory_config, hf_config, hf_name, write_directory, write_weights
from tests.tiny_model import Chunk, build_backend, make_batch, tensor_shapes, tiny_weights

LIMITS = StepLimits(max_tokens=256, max_seqs=32, num_pages=64, page_size=32)
STEP = make_batch([Chunk(range(4, 40), 0, [0, 1])], needs_logits=True)


def logits(folder):
    backend = ReferenceBackend()
    load_model(open_model(folder), backend, LIMITS, lambda text: None)
    return backend.run(STEP).logits


@pytest.mark.parametrize("parts", [1, 3])
def test_a_directory_gives_the_logits_of_its_gguf_twin(tmp_path, parts):
    config = write_directory(tmp_path / "m", parts=parts)
    twin = build_backend("reference", config=config, tensors=tiny_weights(0, config))
    np.testing.assert_array_equal(logits(tmp_path / "m"), twin.run(STEP).logits)


def test_narrow_weights(tmp_path):
    write_directory(tmp_path / "m", kind="BF16")
    write_directory(tmp_path / "f")
    narrow, full = logits(tmp_path / "m"), logits(tmp_path / "f")
    assert 0 < np.abs(narrow - full).mean() < 0.05 * full.std()


def test_a_tied_head(tmp_path):
    """lm_head.weight counts only where config.json does not say that the embedding is the head."""
    config = write_directory(tmp_path / "m", {"tie_word_embeddings": True})
    weights = {n: t for n, t in tiny_weights(0, config).items() if n != "output.weight"}
    expected = build_backend("reference", config=config, tensors=weights).run(STEP).logits
    np.testing.assert_array_equal(logits(tmp_path / "m"), expected)


def test_what_is_shown(tmp_path):
    write_directory(tmp_path / "little", parts=2, kind="F16")
    shown = describe_model("x", tmp_path / "little", open_model(tmp_path / "little"))
    assert (shown["name"], shown["architecture"], shown["tensor_types"]) == ("little", "llama", "F16")
    assert (shown["layers"], shown["rope_theta"], shown["tied_output"]) == (2, 10000.0, False)
    assert shown["end_tokens"] == "<|im_end|>" and shown["chat_template"]
    assert shown["file_bytes"] > shown["parameters"] * 2


def test_names():
    shapes = tensor_shapes(directory_config())
    assert {tensor_name(hf_name(name), tied=False) for name in shapes} == shapes.keys()
    assert tensor_name("lm_head.weight", tied=True) is None
    assert tensor_name("model.layers.3.self_attn.rotary_emb.inv_freq", tied=False) is None
    for strange in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.x.weight", "x"):
        assert tensor_name(strange, tied=False) == strange


CONFIG = hf_config(directory_config())


def test_a_whole_config():
    config = llama_config(CONFIG, "name")
    expected = directory_config()
    assert (config.shape, config.name, config.rope_pairs) == (expected.shape, "name", False)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 10000.0)


def test_defaults():
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = llama_config({key: CONFIG[key] for key in keys}, "name")
    assert (config.shape.num_kv_heads, config.shape.head_dim, config.shape.context_length) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_where_theta_is_said(rope):
    assert llama_config(CONFIG | rope, "name").rope_theta == 5e5


CONFIGS = {
    "another model": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama"),
    "a list for a type": ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    "an activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported (only 'silu')"),
    "biases": ({"attention_bias": True}, "attention_bias = True is not supported (only False)"),
    "other biases": ({"mlp_bias": True}, "mlp_bias = True is not supported (only False)"),
    "quantised": ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported (those that"),
    "long contexts": ({"rope_scaling": {"type": "yarn"}}, "rotary embedding {'type': 'yarn'} is not supported"),
    "a part of a head": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rotary embedding {'partial_rotary_factor': 0.5} is not supported",
    ),
    "a text for rope": ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not supported"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; a positive integer is needed"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is None; a positive integer is needed"),
    "true layers": ({"num_hidden_layers": True}, "num_hidden_layers is True; a positive integer is needed"),
    "layers without end": ({"num_hidden_layers": 2**31 - 1}, "asks for 2147483647 layers; the file has 21 tensors"),
    "a vocabulary without end": ({"vocab_size": 2**31 - 1}, "vocab_size is 2147483647, but the embedding"),
    "an uneven head": ({"head_dim": 24}, "a head size of 24 is not supported"),
    "an infinite theta": ({"rope_theta": float("inf")}, "rope_theta is inf, not a positive number"),
    "no epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
    "another width": ({"intermediate_size": 100}, "the metadata asks for (100, 64)"),
    "ends that are none": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': one or several token ids are expected"),
}


@pytest.mark.parametrize(("changes", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_lie(tmp_path, changes, words):
    write_directory(tmp_path / "m", changes)
    with pytest.raises(ModelError) as caught:
        logits(tmp_path / "m")
    assert words in str(caught.value) and str(tmp_path / "m") in str(caught.value)


def test_tensors_that_are_not_there(tmp_path):
    config = write_directory(tmp_path / "m")
    write_weights(tmp_path / "m", {"model.embed_tokens.weight": np.zeros((config.shape.vocab_size, 64), np.float32)})
    with pytest.raises(ModelError, match=r"no lm_head\.weight, and tie_word_embeddings is not true"):
        open_model(tmp_path / "m")
    write_weights(tmp_path / "m", {"x": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"the embedding \(model\.embed_tokens\.weight\) is missing"):
        open_model(tmp_path / "m")


def test_a_tensor_that_would_be_ignored(tmp_path):
    config = write_directory(tmp_path / "m")
    weights = {hf_name(n): t for n, t in tiny_weights(0, config).items()}
    write_weights(tmp_path / "m", {**weights, "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    with pytest.raises(ModelError, match=r"not used for llama here: model\.layers\.0\.self_attn\.q_proj\.bias"):
        logits(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "listed", "ends"),
    [
        ("generation_config.json", [2, 1], {1, 2, 3}),  # 3: tokenizer_config.json's eos_token
        ("generation_config.json", 1, {1, 3}),
        ("config.json", [0], {0, 3}),
    ],
)
def test_every_end_token_of_the_settings_ends_an_answer(tmp_path, name, listed, ends):
    write_directory(tmp_path / "m", {"eos_token_id": listed if name == "config.json" else 0})
    if name != "config.json":
        (tmp_path / "m" / name).write_text(json.dumps({"eos_token_id": listed}))
    assert open_model(tmp_path / "m").tokenizer.eos_token_ids == ends


def test_a_vocabulary_smaller_than_the_models(tmp_path):
    """Rows of the embedding that no token has: they add nothing to a text."""
    write_directory(tmp_path / "m", vocab_size=320)
    tokenizer = open_model(tmp_path / "m").tokenizer
    assert tokenizer.vocab_size == 320 and tokenizer.decode([319]) == ""


def test_a_vocabulary_larger_than_the_models(tmp_path):
    write_directory(tmp_path / "m", vocab_size=200)
    with pytest.raises(ModelError, match=r"has token id 263, but the model knows 200 tokens \(vocab_size\)"):
        open_model(tmp_path / "m")


def test_a_pre_tokenizer_beside_one(tmp_path):
    write_directory(tmp_path / "m")
    with pytest.raises(ModelError, match=r"model\.pre_tokenizer is 'gpt-2', but tokenizer\.json has its own"):
        open_model(tmp_path / "m", "gpt-2")
