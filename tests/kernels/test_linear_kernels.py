"""Matrix products, embedding, norm, SwiGLU and weight packing against numpy, for every GEMM kernel."""

import numpy as np
import pytest

from batchgen.kernels.reference import KV_TYPES, rms_norm, round_bf16, swiglu
from tests.kernels.kernel_programs import build, every_token, head, logits_of, relative_error, same_bits, signs

ROWS = (1, 5, 16, 17, 32, 33)
PADDED = [(32, 32), (96, 64), (576, 96), (16, 300), (80, 33), (100, 31), (576, 257)]
"""(K, N), multiples of 32 and others."""


@pytest.mark.parametrize(("k", "n"), PADDED)
def test_products_of_small_integers_are_exact(gemm_variant, open_backend, k, n):
    """All partial sums are integers that float32 holds, so an error of one unit anywhere shows."""
    rng = np.random.default_rng(k * n)
    table, norm = signs(rng, 64, k), rng.integers(1, 8, k).astype(np.float32)
    weight = rng.integers(-16, 17, (n, k)).astype(np.float32)
    backend = build(open_backend(*gemm_variant.names), head(table, norm, weight), k, n)
    expected = (table * norm).astype(np.int64) @ weight.T.astype(np.int64)
    for rows in ROWS:
        ids = rng.integers(0, 64, rows)
        np.testing.assert_array_equal(logits_of(backend, every_token(ids)), expected[ids])


@pytest.mark.parametrize(("k", "n"), [(32, 32), (96, 64), (576, 65)])
def test_products_of_floats_and_the_same_bits_for_any_number_of_rows(gemm_variant, open_backend, k, n):
    rng = np.random.default_rng(k)
    table, norm = signs(rng, 64, k), round_bf16(rng.standard_normal(k).astype(np.float32))
    weight = rng.standard_normal((n, k)).astype(np.float32)
    backend = build(open_backend(*gemm_variant.names), head(table, norm, weight), k, n)
    ids = rng.permutation(64)
    whole = logits_of(backend, every_token(ids))
    exact = (table[ids] * norm).astype(np.float64) @ gemm_variant.rounded(weight).T.astype(np.float64)
    assert relative_error(whole, exact) < 3e-6
    for rows in ROWS:
        assert same_bits(logits_of(backend, every_token(ids[:rows])), whole[:rows]), rows
        assert same_bits(logits_of(backend, every_token(ids[64 - rows :])), whole[64 - rows :]), rows


def test_parts_of_a_linear_lie_side_by_side(gemm_variant, open_backend):
    rng = np.random.default_rng(3)
    table, weight = signs(rng, 8, 48), rng.integers(-9, 9, (70, 48)).astype(np.float32)

    def program(backend):
        packed = backend.table(table), backend.vector(np.ones(48, np.float32))
        joined = backend.linear([weight[:5], weight[5:38], weight[38:]])
        return lambda ops: ops.sample_head(ops.final_norm(ops.embed(packed[0]), packed[1], 0.0), joined)

    backend = build(open_backend(*gemm_variant.names), program, 48, 70)
    np.testing.assert_array_equal(logits_of(backend, every_token(range(8))), table @ weight.T)


def norm_inputs(k):
    rng = np.random.default_rng(k)
    table = (rng.standard_normal((300, k)) * 10.0 ** rng.integers(-3, 3, (300, 1))).astype(np.float32)
    return table, rng.standard_normal(k).astype(np.float32)


@pytest.mark.parametrize("k", [32, 40, 576])
def test_embedding_and_norm(gemm_variant, open_backend, k):
    """Multiplied by the identity, the normed rows come out as they are."""
    table, weight = norm_inputs(k)
    ids = np.array([0, 299, 7, 7, 31, 32, 150, *range(40)])
    backend = build(open_backend(*gemm_variant.names), head(table, weight, np.eye(k, dtype=np.float32), 1e-5), k, k)
    got = logits_of(backend, every_token(ids))
    expected = rms_norm(gemm_variant.rounded(table[ids]), weight, 1e-5)
    tolerance = 2.0**-8 if gemm_variant.rounds_activations else 1e-6
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-6)


def test_norm_of_zeros_is_zero(gemm_variant, open_backend):
    program = head(np.zeros((1, 32), np.float32), np.ones(32, np.float32), np.eye(32, dtype=np.float32), 1e-5)
    backend = build(open_backend(*gemm_variant.names), program, 32, 32)
    np.testing.assert_array_equal(logits_of(backend, every_token([0])), np.zeros((1, 32)))


def run_swiglu(variant, backend, k, n, gate_scale):
    """swiglu of 37 tokens, from the kernel and from the twin; the products before it are exact."""
    rng = np.random.default_rng(n)
    table, norm = signs(rng, 64, k), rng.integers(1, 4, k).astype(np.float32)
    gate, up = (rng.integers(-64, 65, (n, k)).astype(np.float32) / 64 for _ in range(2))
    gate *= gate_scale

    def program(backend):
        packed = backend.table(table), backend.vector(norm), backend.gated_pair(gate, up)
        identity = backend.linear([np.eye(n, dtype=np.float32)])
        return lambda ops: ops.sample_head(
            ops.linear_swiglu(ops.rms_norm(ops.embed(packed[0]), packed[1], 0.0), packed[2]), identity
        )

    x = (table * norm)[:37]
    gates, ups = (x @ w.T for w in (gate, up))
    return logits_of(build(backend, program, k, n), every_token(range(37))), swiglu(gates, ups), gates


@pytest.mark.parametrize(("k", "n"), [(32, 32), (64, 96), (48, 40)])
def test_swiglu(gemm_variant, open_backend, k, n):
    got, expected, _ = run_swiglu(gemm_variant, open_backend(*gemm_variant.names), k, n, 1)
    tolerance = 2.0**-8 if gemm_variant.rounds_activations else 2e-6
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-30)


def test_swiglu_of_gates_whose_exponential_overflows(gemm_variant, open_backend):
    """exp(-gate) is more than float32 holds below -88; the product is next to zero there."""
    got, expected, gates = run_swiglu(gemm_variant, open_backend(*gemm_variant.names), 64, 96, 64)
    assert (gates < -1000).any() and (gates > 1000).any()
    tolerance = 2.0**-8 if gemm_variant.rounds_activations else 2e-6
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("count", [3, 300])
def test_linear_and_residual(weight_variant, open_backend, count):
    """norm(x + swiglu(norm(x)) @ down.T), also with more tokens than a thread takes at a time."""
    rng = np.random.default_rng(count)
    table, eye = signs(rng, 64, 48), np.eye(48, dtype=np.float32)
    gate, up, down = (rng.standard_normal(s).astype(np.float32) / 7 for s in ((70, 48), (70, 48), (48, 70)))

    def program(backend):
        packed = backend.table(table), backend.gated_pair(gate, up), backend.linear([down]), backend.linear([eye])
        ones = backend.vector(np.ones(48, np.float32))

        def forward(ops):
            x = ops.embed(packed[0])
            x = ops.linear_add(ops.linear_swiglu(ops.rms_norm(x, ones, 0.0), packed[1]), packed[2], x)
            ops.sample_head(ops.final_norm(x, ones, 1e-5), packed[3])

        return forward

    batch = every_token(rng.integers(0, 64, count))
    backend = build(open_backend(*weight_variant.names), program, 48, 48)
    expected = logits_of(build(weight_variant.reference(), program, 48, 48), batch)
    tolerance = {"int8": 2e-2}.get(weight_variant.weights, 1e-2 if weight_variant.rounds_activations else 1e-5)
    assert relative_error(logits_of(backend, batch), expected) < tolerance


def test_padded_page_bytes_count_keys_and_values(open_backend):
    """Two layers of two KV heads of 80 dimensions, padded to 96; a float32 scale per head, or per 32 dimensions."""
    from tests.tiny_model import tiny_config

    shape, vectors = tiny_config(head_dim=80).shape, 2 * 2 * 2 * 64
    bytes_of = {kv: open_backend("portable", "fp32", kv).page_bytes(shape, 64) for kv in KV_TYPES}
    sizes = {"fp32": 96 * 4, "bf16": 96 * 2, "int8": 96 + 4, "q8_0": 96 + 3 * 4}
    assert bytes_of == {kv: vectors * size for kv, size in sizes.items()}
    assert open_backend("reference").page_bytes(shape, 64) == vectors * 80 * 4
