"""Model directories of Hugging Face: what transformers computed, and the same numbers as from a GGUF file."""

import json

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.kernels.base import StepLimits
from batchgen.kernels.reference import ReferenceBackend
from batchgen.loading import describe_model, load_model, open_model
from tests.gguf_bytes import tiny_metadata
from tests.hf_models import hf_name, write_directory, write_tokenizer, write_weights
from tests.kernels.kernel_programs import relative_error
from tests.models.recorded import FOLDER, load
from tests.tiny_model import Chunk, build_backend, make_batch, tiny_weights

LIMITS = StepLimits(max_tokens=256, max_seqs=32, num_pages=64, page_size=32)
STEP = make_batch([Chunk(range(4, 40), 0, [0, 1])], needs_logits=True)


def logits(folder):
    backend = ReferenceBackend()
    load_model(open_model(folder), backend, LIMITS, lambda text: None)
    return backend.run(STEP).logits


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.npz")))
def test_every_architecture_is_read_from_files(tmp_path, name):
    recorded = load(name)
    (tmp_path / "config.json").write_text(json.dumps(recorded.config))
    write_weights(tmp_path, recorded.weights(), parts=2)
    tokens = tiny_metadata()["tokenizer.ggml.tokens"][:96]
    few = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    write_tokenizer(tmp_path, tiny_metadata() | few)
    model = open_model(tmp_path)
    backend = ReferenceBackend()
    load_model(model, backend, LIMITS, lambda text: None)
    rows = np.asarray(recorded.at, np.int32)
    step = make_batch([Chunk(recorded.tokens, 0, [0, 1, 2])], needs_logits=True, logits_rows=rows)
    assert relative_error(backend.run(step).logits[: len(rows)], recorded.logits) < 1e-4
    assert model.has_tied_output is recorded.config.get("tie_word_embeddings", False)
    assert model.weight_bytes("fp32") >= 4 * sum(values.size for values in recorded.weights().values())


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


CONFIGS = {
    "layers without end": ({"num_hidden_layers": 2**31 - 1}, "asks for 2147483647 layers; 65536 are possible"),
    "more layers than there are": ({"num_hidden_layers": 999}, "asks for 999 layers; the file has 21 tensors"),
    "heads without end": ({"num_attention_heads": 2**30}, "asks for 1073741824 heads of 16; 4194304 dimensions"),
    "a vocabulary without end": ({"vocab_size": 2**31 - 1}, "vocab_size is 2147483647, but no tensor of the model has"),
    "another width": ({"intermediate_size": 100}, "the metadata asks for (64, 100)"),
    "ends that are none": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': one or several token ids are expected"),
    "a type that is a list": ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
}


@pytest.mark.parametrize(("changes", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_lie(tmp_path, changes, words):
    write_directory(tmp_path / "m", changes)
    with pytest.raises(ModelError) as caught:
        logits(tmp_path / "m")
    assert words in str(caught.value) and str(tmp_path / "m") in str(caught.value)


def test_tensors_that_are_not_there(tmp_path):
    config = write_directory(tmp_path / "m")
    weights = {hf_name(n): t for n, t in tiny_weights(0, config).items() if n != "output.weight"}
    write_weights(tmp_path / "m", weights)
    with pytest.raises(ModelError, match=r"m: the model file lacks the tensor 'lm_head\.weight'"):
        logits(tmp_path / "m")
    write_weights(tmp_path / "m", {"x": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"vocab_size is 264, but no tensor of the model has as many rows"):
        open_model(tmp_path / "m")


def test_a_tensor_that_would_be_ignored(tmp_path):
    config = write_directory(tmp_path / "m")
    weights = {hf_name(n): t for n, t in tiny_weights(0, config).items()}
    write_weights(tmp_path / "m", {**weights, "model.layers.0.self_attn.x": np.zeros(64, np.float32)})
    with pytest.raises(ModelError, match=r"not used for llama here: model\.layers\.0\.self_attn\.x"):
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
