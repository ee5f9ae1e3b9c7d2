"""Quantised matrices of Hugging Face directories: their numbers, and whole models of them."""

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.io.hf_weights import HfWeights
from batchgen.kernels.base import StepLimits
from batchgen.kernels.cpu.features import available_kernels
from batchgen.loading import Numerics, load_model, make_backend, open_model
from tests.hf_models import hf_tensors, safetensors_bytes, write_directory
from tests.hf_models import stored as stored_floats
from tests.hf_quantised import SCHEMES, stored
from tests.tiny_model import Chunk, make_batch, tiny_weights

LIMITS = StepLimits(max_tokens=64, max_seqs=64, num_pages=4, page_size=32)
SHAPE = (48, 256)


def opened(folder, tensors, config):
    """The directory with one module, "m"."""
    files = {f"m.{part}": value for part, value in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(files))
    return HfWeights.open(folder, config)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("shape", [SHAPE, (200, 384)], ids=str)
def test_numbers(tmp_path, scheme, shape):
    tensors, expected = scheme.make(np.random.default_rng(0), *shape)
    weights = opened(tmp_path, tensors, scheme.config)
    assert list(weights.tensors) == ["m.weight"] and weights.tensors["m.weight"].shape == shape
    np.testing.assert_array_equal(weights.dequantize("m.weight"), expected)
    codes = weights.codes("m.weight")
    assert (codes is not None) is scheme.kept
    if codes is not None:
        np.testing.assert_array_equal(codes.weights(), expected)
        assert codes.group == 32


def write_model(folder, scheme):
    """A llama whose linear layers are quantised but its head; the same with floats beside it."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_layers": 2, "head_dim": 64}
    config = write_directory(folder / "plain", **sizes)
    write_directory(folder / "quantised", {"quantization_config": scheme.config}, **sizes)
    rng, plain, quantised = np.random.default_rng(0), {}, {}
    for name, values in hf_tensors(tiny_weights(0, config), config.shape.head_dim).items():
        if name.endswith("_proj.weight"):
            parts, values = scheme.make(rng, *values.shape)
            quantised |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            quantised[name] = ("F32", values.shape, stored_floats(values, "F32"))
        plain[name] = ("F32", values.shape, stored_floats(values, "F32"))
    (folder / "plain" / "model.safetensors").write_bytes(safetensors_bytes(plain))
    (folder / "quantised" / "model.safetensors").write_bytes(safetensors_bytes(quantised))


def logits(folder, kernel, weights):
    backend = make_backend(Numerics(kernel, weights, "fp32"), 1)
    load_model(open_model(folder), backend, LIMITS, lambda text: None)
    found = backend.run(make_batch([Chunk(range(4, 40), 0, [0, 1])], needs_logits=True)).logits[:1].copy()
    backend.close()
    return found


@pytest.mark.parametrize("name", ["gptq", "gptq, reordered", "awq", "packed", "packed, 8 bits", "fp8, blocks"])
def test_whole_models(tmp_path, name):
    write_model(tmp_path, SCHEMES[name])
    plain = logits(tmp_path / "plain", "reference", "fp32")
    assert np.isfinite(plain).all() and np.ptp(plain) > 0.1
    np.testing.assert_array_equal(logits(tmp_path / "quantised", "reference", "fp32"), plain)
    kernel = available_kernels()[0]
    expanded = logits(tmp_path / "plain", kernel, "bf16")
    np.testing.assert_array_equal(logits(tmp_path / "quantised", kernel, "native"), expanded)


def test_memory_of_quantised_weights(tmp_path):
    write_model(tmp_path, SCHEMES["awq"])
    model = open_model(tmp_path / "quantised")
    assert model.weight_bytes("native") < 0.75 * model.weight_bytes("bf16")


RNG = np.random.default_rng(1)
GOOD = {name: scheme.make(RNG, *SHAPE)[0] for name, scheme in SCHEMES.items()}
WORDS = stored(np.zeros((3, 3), np.int32))
REFUSED = {
    "another method": ({}, {"quant_method": "hqq"}, "quant_method 'hqq' is not supported (those that are: gptq, awq,"),
    "no method": ({}, {"bits": 4}, "quant_method None is not supported"),
    "bits": (GOOD["gptq"], {"quant_method": "gptq", "bits": 3}, "'m': GPTQ of 3 bits is not supported (4 and 8 are)"),
    "AWQ of other bits": (GOOD["awq"], {"quant_method": "awq", "bits": 8}, "AWQ of 8 bits, version 'gemm'"),
    "AWQ of another version": (GOOD["awq"], {"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "no scales": ({"qweight": WORDS}, SCHEMES["gptq"].config, "the model has no tensor 'm.scales'"),
    "a matrix that is none": (
        {**GOOD["gptq"], "qweight": stored(np.zeros(9, np.int32))},
        SCHEMES["gptq"].config,
        "'m': qweight has shape (9,)",
    ),
    "zero points of another shape": (
        {**GOOD["gptq"], "qzeros": WORDS},
        SCHEMES["gptq"].config,
        "qzeros has shape (3, 3), not",
    ),
    "scales of another shape": ({**GOOD["awq"], "scales": WORDS}, SCHEMES["awq"].config, "256 inputs in 3 groups"),
    "a group that is none": (
        {**GOOD["gptq"], "g_idx": stored(np.full(256, 9, np.int32))},
        SCHEMES["gptq"].config,
        "g_idx names groups from 9 to 9 of 2",
    ),
    "weights of another shape": (
        {**GOOD["packed"], "weight_shape": stored(np.array([48, 250]))},
        SCHEMES["packed"].config,
        "weight_packed of shape (48, 32) holds no 48 x 250 weights of 4 or 8 bits",
    ),
    "no weights at all": (
        {**GOOD["packed"], "weight_shape": stored(np.array([48, -1]))},
        SCHEMES["packed"].config,
        "holds no 48 x -1 weights",
    ),
    "reordered ones": (
        {**GOOD["packed"], "weight_g_idx": WORDS},
        SCHEMES["packed"].config,
        "groups of 32 inputs or reordered ones are not supported",
    ),
    "floats for words": (
        {**GOOD["packed"], "weight_packed": stored(np.zeros((48, 32), np.float32))},
        SCHEMES["packed"].config,
        "tensor 'm.weight_packed' has type F32, where integers are expected",
    ),
    "integers for scales": (
        {**GOOD["packed"], "weight_scale": stored(np.zeros((48, 8), np.int32))},
        SCHEMES["packed"].config,
        "tensor 'm.weight_scale' has type I32, where numbers are expected",
    ),
    "blocks of another size": (
        GOOD["fp8, blocks"],
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "has scales of shape (1, 2) for 48 x 256 weights in blocks of [64, 64]",
    ),
    "blocks that are none": (
        GOOD["fp8, blocks"],
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        "weight_block_size is [0, 128]",
    ),
}


@pytest.mark.parametrize(("tensors", "config", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(tmp_path, tensors, config, words):
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, tensors, config).dequantize("m.weight")
    assert words in str(caught.value)
