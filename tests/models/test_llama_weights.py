"""Loading tensors: names, shapes, fusing, the order of rotary dimensions."""

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.kernels.reference import ReferenceBackend, rotate
from batchgen.models.matrices import scaled, split_rotary
from batchgen.models.weights import load_weights
from tests.tiny_model import ArraySource, tensor_shapes, tiny_config, tiny_weights


def load(tensors):
    return load_weights(ArraySource(tensors), tiny_config(), ReferenceBackend())


def test_tensors_end_up_where_they_belong():
    tensors = tiny_weights()
    weights = load(tensors)
    assert len(weights.layers) == 2
    np.testing.assert_array_equal(weights.embedding, tensors["token_embd.weight"])
    np.testing.assert_array_equal(weights.output, tensors["output.weight"])
    np.testing.assert_array_equal(weights.output_norm.weight, tensors["output_norm.weight"])
    for i, layer in enumerate(weights.layers):
        q, k, v, gate, up = (
            tensors[f"blk.{i}.{n}.weight"] for n in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        )
        np.testing.assert_array_equal(layer.qkv.weight, np.concatenate([split_rotary(q, 16), split_rotary(k, 16), v]))
        np.testing.assert_array_equal(layer.feed.swiglu, [gate, up])
        for handle, name in (
            (layer.attention_norm.weight, "attn_norm"),
            (layer.attention_output.weight, "attn_output"),
            (layer.ffn_norm.weight, "ffn_norm"),
            (layer.feed.down.weight, "ffn_down"),
        ):
            np.testing.assert_array_equal(handle, tensors[f"blk.{i}.{name}.weight"])


def test_without_an_output_tensor_the_embedding_is_used():
    tensors = {name: t for name, t in tiny_weights().items() if name != "output.weight"}
    np.testing.assert_array_equal(load(tensors).output, tensors["token_embd.weight"])


@pytest.mark.parametrize("name", [n for n in tensor_shapes(tiny_config()) if n != "output.weight"])
def test_a_missing_tensor_is_named(name):
    with pytest.raises(ModelError) as error:
        load({n: t for n, t in tiny_weights().items() if n != name})
    assert str(error.value) == f"the model file lacks the tensor '{name}'"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_embd.weight", (299, 64), (300, 64)),
        ("output.weight", (300, 32), (300, 64)),
        ("output_norm.weight", (63,), (64,)),
        ("blk.1.attn_q.weight", (32, 64), (64, 64)),
        ("blk.0.attn_k.weight", (64, 64), (32, 64)),
        ("blk.1.ffn_down.weight", (96, 64), (64, 96)),
    ],
)
def test_a_wrong_shape_is_named(name, shape, expected):
    with pytest.raises(ModelError) as error:
        load(tiny_weights() | {name: np.zeros(shape, np.float32)})
    assert str(error.value) == f"tensor '{name}' has shape {shape}; the metadata asks for {expected}"


def rotate_pairs(x, position, theta):
    """Rotary embedding as GGUF's llama tensors have it: dimensions 2i and 2i + 1 are a point in a plane."""
    points = x.reshape(*x.shape[:-1], -1, 2)
    z = points[..., 0] + 1j * points[..., 1]
    z = z * np.exp(1j * position * theta ** (-np.arange(z.shape[-1]) / z.shape[-1]))
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_split_rotary_makes_halves_of_pairs(head_dim):
    """Scores of queries and keys are the same as with pairs in the original order."""
    rng = np.random.default_rng(0)
    config = tiny_config(head_dim=head_dim)
    q_rows, k_rows = (rng.standard_normal((3 * head_dim, 32)).astype(np.float32) for _ in range(2))
    x = rng.standard_normal((2, 32)).astype(np.float32)  # the token at position 7 asks, the one at 4 is asked
    cos, sin = (table[0, [7, 4]] for table in config.rope_tables())
    q, k = (rotate((x @ split_rotary(w, head_dim).T).reshape(2, 3, head_dim), cos, sin) for w in (q_rows, k_rows))
    expected_q = rotate_pairs((x[0] @ q_rows.T).reshape(3, head_dim), 7, config.ropes[0].theta)
    expected_k = rotate_pairs((x[1] @ k_rows.T).reshape(3, head_dim), 4, config.ropes[0].theta)
    np.testing.assert_allclose((q[0] * k[1]).sum(-1), (expected_q * expected_k).sum(-1), rtol=1e-4, atol=1e-3)


def test_split_rotary_moves_rows_within_their_head_only():
    rows = np.arange(8, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(split_rotary(rows, 4)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd.weight", "blk.0.layer_scale.weight", "output.bias"])
def test_a_tensor_that_would_be_ignored_is_refused(name):
    with pytest.raises(ModelError, match=name):
        load({**tiny_weights(), name: np.ones(8, np.float32)})


def test_a_gguf_file_may_have_q_k_and_v_in_one_tensor():
    tensors = tiny_weights()
    fused = {n: t for n, t in tensors.items() if not any(part in n for part in ("attn_q", "attn_k", "attn_v"))}
    for i in range(2):
        parts = [tensors[f"blk.{i}.attn_{part}.weight"] for part in "qkv"]
        fused[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    for one, two in zip(load(fused).layers, load(tensors).layers, strict=True):
        np.testing.assert_array_equal(one.qkv.weight, two.qkv.weight)


def test_a_bias_that_one_part_has_leaves_the_others_as_they_are():
    bias = np.arange(96, dtype=np.float32)
    weights = load(tiny_weights() | {"blk.0.ffn_up.bias": bias, "blk.1.attn_v.bias": bias[:32]})
    np.testing.assert_array_equal(weights.layers[0].feed.up.bias, np.concatenate([np.zeros(96), bias]))
    np.testing.assert_array_equal(weights.layers[1].qkv.bias, np.concatenate([np.zeros(96), bias[:32]]))
    assert weights.layers[1].feed.up is None and weights.layers[0].qkv.bias is None


def test_factors_of_one_change_nothing():
    values = np.ones(3, np.float32)
    assert scaled(values, 64**-0.5 * 64**0.5) is values
    assert scaled(values, 1 + 1e-12) is values
    assert scaled(values, 2.0) is not values
