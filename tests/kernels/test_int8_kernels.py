"""int8 weights: integer products of rows and columns that each have a scale, against numpy and across kernels."""

import numpy as np
import pytest

from batchgen.kernels.cpu.features import available_kernels
from batchgen.kernels.reference import round_bf16, stored
from tests.kernels.conftest import require
from tests.kernels.kernel_programs import (
    INT8_WEIGHTS,
    build,
    every_token,
    head,
    logits_of,
    relative_error,
    same_bits,
    signs,
)

ROWS = (1, 5, 16, 17, 33, 128, 129)
SIZES = [(64, 32), (128, 300), (96, 64), (80, 33), (100, 31), (33, 17), (576, 257)]
"""(K, N): K a multiple of 64, of 32 only, and of neither; N of 16 and not."""
EPS = 1e-30
"""Leaves the scale of ordinary rows at exactly 1 and makes zeros of zeros."""

MEAN_ERROR = {"portable": 2e-5, "avx512_bf16": 3e-3, "amx_bf16": 3e-3}
"""Of epilogues, relative to the largest value. All but portable round activations to bfloat16 before int8.

Two values on either side of a code's border come out one code apart, about 1/127 of the largest: rarely on portable.
"""


@pytest.fixture(params=INT8_WEIGHTS, ids=str)
def int8(request):
    require(request.param.kernel)
    return request.param


def inputs(k, n):
    """A table whose rows 0 and 40 are zeros, a norm of bfloat16 numbers, a weight whose row 1 is zeros."""
    rng = np.random.default_rng(k * n)
    table, norm = signs(rng, 160, k), round_bf16(rng.standard_normal(k).astype(np.float32))
    weight = (rng.standard_normal((n, k)) * 10.0 ** rng.integers(-2, 3, (n, 1))).astype(np.float32)
    table[[0, 40]], weight[1] = 0, 0
    return table, norm, weight


def exact(x, weight):
    """Products of what int8 keeps of rows and columns, in float64."""
    return stored(x, "int8").astype(np.float64) @ stored(weight, "int8").T.astype(np.float64)


def open_head(open_backend, kernel, table, norm, weight):
    n, k = weight.shape
    return build(open_backend(kernel, "int8"), head(table, norm, weight, EPS), k, n)


@pytest.mark.parametrize(("k", "n"), SIZES)
def test_products_and_the_same_bits_for_any_number_of_rows(int8, open_backend, k, n):
    table, norm, weight = inputs(k, n)
    backend = open_head(open_backend, int8.kernel, table, norm, weight)
    whole = logits_of(backend, every_token(range(160)))
    expected = exact(table * norm, weight)
    scale = np.abs(expected).max(axis=0)
    assert (np.abs(whole - expected) <= 1e-6 * scale).all()
    assert not whole[[0, 40]].any()
    for rows in ROWS:
        assert same_bits(logits_of(backend, every_token(range(rows))), whole[:rows]), rows
        assert same_bits(logits_of(backend, every_token(range(160 - rows, 160))), whole[160 - rows :]), rows


@pytest.mark.parametrize(("k", "n"), SIZES)
def test_all_kernels_give_the_same_bits_for_the_same_activations(open_backend, k, n):
    """Activations here are bfloat16 numbers, so that rounding them to bfloat16 first makes no difference."""
    table, norm, weight = inputs(k, n)
    results = [
        logits_of(open_head(open_backend, kernel, table, norm, weight), every_token(range(160)))
        for kernel in available_kernels()
    ]
    assert all(same_bits(r, results[-1]) for r in results)


@pytest.mark.parametrize("power", [-100, 100])
def test_huge_and_tiny_values_differ_by_their_scales_alone(int8, open_backend, power):
    table, norm, weight = inputs(96, 64)
    batch = every_token(range(160))
    plain = logits_of(open_head(open_backend, int8.kernel, table, norm, weight), batch)
    factor = np.float32(2.0**power)
    scaled = logits_of(open_head(open_backend, int8.kernel, table, norm * factor, weight), batch)
    np.testing.assert_array_equal(scaled, plain * factor)
    scaled = logits_of(open_head(open_backend, int8.kernel, table, norm, weight * factor), batch)
    np.testing.assert_array_equal(scaled, plain * factor)


def test_one_outlier_flattens_its_own_row_alone(int8, open_backend):
    """A value 1000 times the others leaves no more of them than zero, in its row or in its column."""
    table, norm = np.ones((2, 64), np.float32), np.ones(64, np.float32)
    table[1, 1:] = 2.0**-10
    weight = np.ones((40, 64), np.float32)
    weight[5, 1:] = 2.0**-10
    backend = open_head(open_backend, int8.kernel, table, norm, weight)
    # The norm divides the second row by its root mean square, about 1/8.
    peak = 1 / np.sqrt(np.mean(np.square(table[1], dtype=np.float64)))
    got = logits_of(backend, every_token([0, 1]))
    expected = np.array([[64.0], [peak]]) * np.ones(40)
    expected[0, 5], expected[1, 5] = 1, peak
    np.testing.assert_allclose(got, expected, rtol=2.0**-8)


def stages(rng, k, n):
    """swiglu of a gated pair; and a linear of that which is added to the residual."""
    table = signs(rng, 160, k)
    gate, up = (rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k) for _ in range(2))
    down, eye = rng.standard_normal((k, n)).astype(np.float32) / np.sqrt(n), np.eye(max(k, n), dtype=np.float32)

    def program_of(add):
        def program(backend):
            packed, pair, ones = (
                backend.table(table),
                backend.gated_pair(gate, up),
                backend.vector(np.ones(k, np.float32)),
            )
            last = backend.linear([down]), backend.linear([eye[:k, :k] if add else eye[:n, :n]])

            def forward(ops):
                x = ops.embed(packed)
                gated = ops.linear_swiglu(ops.rms_norm(x, ones, 0.0), pair)
                if add:
                    gated = ops.final_norm(ops.linear_add(gated, last[0], x), ones, 1e-5)
                ops.sample_head(gated, last[1])

            return forward

        return program

    return program_of


@pytest.mark.parametrize("add", [False, True], ids=["swiglu", "swiglu and add"])
@pytest.mark.parametrize(("k", "n"), [(64, 96), (80, 40), (100, 300)])
def test_epilogues_against_the_twin(int8, open_backend, k, n, add):
    program_of, width = stages(np.random.default_rng(n), k, n), k if add else n
    backend = build(open_backend(*int8.names), program_of(add), k, width)
    twin = build(int8.reference(), program_of(add), k, width)
    whole = logits_of(backend, every_token(range(160)))
    expected = logits_of(twin, every_token(range(160)))
    assert relative_error(whole, expected) < 2e-2
    assert np.abs(whole - expected).mean() < MEAN_ERROR[int8.kernel] * np.abs(expected).max()
    for rows in ROWS:
        assert same_bits(logits_of(backend, every_token(range(rows))), whole[:rows]), rows


@pytest.mark.parametrize("add", [False, True], ids=["swiglu", "swiglu and add"])
def test_epilogues_give_the_same_bits_on_tiles_and_on_vectors(open_backend, add):
    for kernel in ("amx_bf16", "avx512_bf16"):
        require(kernel)
    program_of, width = stages(np.random.default_rng(0), 80, 100), 80 if add else 100
    a, b = (
        logits_of(build(open_backend(kernel, "int8"), program_of(add), 80, width), every_token(range(160)))
        for kernel in ("amx_bf16", "avx512_bf16")
    )
    assert same_bits(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["row", "weight"])
def test_what_is_not_finite_does_not_become_an_answer(int8, open_backend, bad, where):
    """An int8 code cannot hold it, so the scale does."""
    table, norm, weight = inputs(96, 64)
    if where == "row":
        table[3, 50] = bad
    else:
        weight[5, 50] = bad
    got = logits_of(open_head(open_backend, int8.kernel, table, norm, weight), every_token([3, 4]))
    if where == "row":
        assert not np.isfinite(got[0]).any() and np.isfinite(got[1]).all()
    else:
        assert not np.isfinite(got[:, 5]).any() and np.isfinite(np.delete(got, 5, axis=1)).all()
