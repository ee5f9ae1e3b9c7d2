"""What is read from a model's metadata, and what is refused."""

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.kernels.base import ModelShape
from batchgen.models.architectures import BY_GGUF_NAME
from batchgen.models.config import ModelConfig
from batchgen.models.rope import Rope

METADATA = {
    "general.architecture": "llama",
    "general.name": "a model",
    "llama.block_count": 3,
    "llama.context_length": 64,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def test_from_gguf():
    config = ModelConfig.from_gguf(METADATA)
    assert config.architecture is BY_GGUF_NAME["llama"]
    assert (config.name, config.naming, config.norm_eps) == ("a model", "gguf", 1e-5)
    assert config.shape == ModelShape(96, 128, 3, 6, 2, 16, 3, 64)
    assert config.ropes == (Rope(16, 100000.0),)


def test_optional_keys_have_the_defaults_of_the_format():
    optional = ("general.name", "llama.attention.head_count_kv", "llama.rope.dimension_count", "llama.rope.freq_base")
    config = ModelConfig.from_gguf({k: v for k, v in METADATA.items() if k not in optional})
    assert (config.name, config.shape.num_kv_heads, config.ropes[0].theta) == ("llama", 6, 10000.0)


def test_a_head_size_of_its_own():
    sizes = {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}
    assert ModelConfig.from_gguf(METADATA | sizes).shape.head_dim == 32


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "tokenizer.ggml.tokens",
        *(f"llama.{k}" for k in ("block_count", "context_length", "embedding_length", "feed_forward_length")),
        *(f"llama.attention.{k}" for k in ("head_count", "layer_norm_rms_epsilon")),
    ],
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_gguf({k: v for k, v in METADATA.items() if k != key})
    assert str(error.value) == f"the model's metadata lacks '{key}'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            f"architecture 'mamba' is not supported; supported: {', '.join(sorted(BY_GGUF_NAME))}",
        ),
        (
            {"llama.block_count": 0},
            "the model's metadata has llama.block_count = 0; a positive integer is needed",
        ),
        (
            {"llama.context_length": -1},
            "the model's metadata has llama.context_length = -1; a positive integer is needed",
        ),
        (
            {"llama.embedding_length": "96"},
            "the model's metadata has llama.embedding_length = '96'; a positive integer is needed",
        ),
        (
            {"llama.feed_forward_length": 2**31},
            "the model's metadata has llama.feed_forward_length = 2147483648; a positive integer is needed",
        ),
        (
            {"llama.attention.head_count_kv": [2, 2, 1]},
            "the model's metadata has llama.attention.head_count_kv = [2, 2, 1]; a positive integer is needed",
        ),
        ({"llama.attention.head_count_kv": 4}, "6 heads cannot share 4 key-value heads evenly"),
        (
            {"llama.attention.head_count": 4, "llama.rope.dimension_count": 24},
            "a head size of 24 is not supported (multiples of 16 are)",
        ),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length = 32 is not supported (only 16)"),
        (
            {"llama.rope.dimension_count": 7},
            "llama.rope.dimension_count: 7 of 16 dimensions cannot be rotated in pairs",
        ),
        (
            {"llama.rope.dimension_count": 32},
            "llama.rope.dimension_count: 32 of 16 dimensions cannot be rotated in pairs",
        ),
        (
            {"llama.rope.scaling.type": "dynamic"},
            "llama.rope.scaling.type 'dynamic' is not supported: a token's bits would depend on how long its prompt is",
        ),
        (
            {"llama.rope.scaling.type": "odd"},
            "llama.rope.scaling.type 'odd' is not supported; supported: none, linear, llama3, yarn, longrope",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -1.0},
            "rope factor is -1.0 in the model's metadata, not a positive number",
        ),
        ({"llama.expert_count": 8}, "the model's metadata lacks 'llama.expert_used_count'"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_gguf(METADATA | changes)
    assert str(error.value) == message


def test_rope_table():
    config = ModelConfig.from_gguf(METADATA)
    cos, sin = config.rope_tables()
    assert cos.shape == sin.shape == (1, 64, 8)
    assert cos.dtype == sin.dtype == np.float32
    for position in (0, 1, 63):
        for i in range(8):
            angle = position / 100000.0 ** (2 * i / 16)
            assert cos[0, position, i] == np.float32(np.cos(angle))
            assert sin[0, position, i] == np.float32(np.sin(angle))


@pytest.mark.parametrize("key", ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_constants_must_be_positive_numbers(key, value):
    with pytest.raises(ModelError, match=f"{key} is .*, not a positive number"):
        ModelConfig.from_gguf({**METADATA, key: value})
