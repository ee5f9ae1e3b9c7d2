"""Mixtures of experts: routing, grouping and products against the numpy twin; rows do not depend on each other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from batchgen.kernels.reference import expert_shares
from tests.kernels.kernel_programs import build, every_token, logits_of, same_bits, signs

HIDDEN, SIZE, TOKENS = 48, 80, 64
RNG = np.random.default_rng(11)
TABLE = signs(RNG, TOKENS, HIDDEN)
CASES = [(7, 3, True), (7, 3, False), (40, 8, True), (3, 3, False), (5, 1, True)]
"""Experts, chosen ones, whether shares sum to 1."""


def program(count: int, chosen: int, normalised: bool, popular: int = -1) -> Callable[[Backend], Callable[[Any], None]]:
    """x + experts(x), where x is +1 or -1 in every column, so that all kernels find the same routing.

    Its logits are multiples of 1/4: there are equal ones. `popular`: an expert that all choose.
    """
    rng = np.random.default_rng(count)
    router = rng.integers(-2, 3, (count, HIDDEN)).astype(np.float32) / 4
    if popular >= 0:
        router[:] = 0
        router[popular] = np.where(np.arange(HIDDEN) == 0, 4, 0)
    shapes = (SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE)
    gates, ups, downs = ((rng.standard_normal((count, *shape)) / 7).astype(np.float32) for shape in shapes)

    def load(backend: Backend) -> Callable[[Any], None]:
        table, ones = backend.table(TABLE), backend.vector(np.ones(HIDDEN, np.float32))
        routing, eye = backend.linear([router]), backend.linear([np.eye(HIDDEN, dtype=np.float32)])
        pairs = [backend.gated_pair(g, u) for g, u in zip(gates, ups, strict=True)]
        down = [backend.linear([d]) for d in downs]

        def forward(ops: Any) -> None:
            x = ops.embed(table)
            h = ops.rms_norm(x, ones, 0.0)
            x = ops.add_experts(h, ops.linear(h, routing), pairs, down, chosen, normalised, x)
            ops.sample_head(ops.operand(x), eye)

        return forward

    return load


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_twin(weight_variant, open_backend, case):
    """Also with more rows than a thread takes at a time."""
    backend = build(open_backend(*weight_variant.names, threads=2), program(*case), HIDDEN, HIDDEN)
    twin = build(weight_variant.reference(), program(*case), HIDDEN, HIDDEN)
    tolerance = 4e-2 if weight_variant.weights == "int8" else 1e-2 if weight_variant.rounds_activations else 2e-6
    for count in (1, 33, 300):
        batch = every_token(np.random.default_rng(count).integers(0, TOKENS, count))
        got, expected = logits_of(backend, batch), logits_of(twin, batch)
        error = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
        # Products with a scale are not exact, so of two experts that are even either may be chosen.
        assert (np.median(error) if weight_variant.weights == "int8" else error.max()) < tolerance, count


def test_all_rows_to_one_expert(gemm_variant, open_backend):
    for popular in (0, 4):
        load = program(5, 1, False, popular)
        backend = build(open_backend(*gemm_variant.names), load, HIDDEN, HIDDEN)
        twin = build(gemm_variant.reference(), load, HIDDEN, HIDDEN)
        batch = every_token(np.random.default_rng(0).integers(0, TOKENS, 200))
        got, expected = logits_of(backend, batch), logits_of(twin, batch)
        assert np.abs(got - expected).max() < (3e-2 if gemm_variant.rounds_activations else 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_company_and_threads_change_no_bit(weight_variant, open_backend, case):
    one, two = (build(open_backend(*weight_variant.names, threads=n), program(*case), HIDDEN, HIDDEN) for n in (1, 2))
    ids = np.random.default_rng(1).integers(0, TOKENS, 300)
    whole = logits_of(one, every_token(ids))
    assert same_bits(logits_of(two, every_token(ids)), whole)
    for rows in (1, 5, 33, 100):
        assert same_bits(logits_of(two, every_token(ids[:rows])), whole[:rows]), rows
        assert same_bits(logits_of(two, every_token(ids[300 - rows :])), whole[300 - rows :]), rows


def test_logits_that_are_no_numbers_stay_with_their_row(gemm_variant, open_backend):
    """Whatever experts such a row gets, the others get theirs."""
    backend = build(open_backend(*gemm_variant.names), program(7, 3, True), HIDDEN, HIDDEN)
    ids = np.random.default_rng(2).integers(1, TOKENS, 40)
    clean = logits_of(backend, every_token(ids))
    TABLE[0] = np.nan
    poisoned = build(open_backend(*gemm_variant.names), program(7, 3, True), HIDDEN, HIDDEN)
    TABLE[0] = 1
    mixed = ids.copy()
    mixed[[3, 20]] = 0
    got = logits_of(poisoned, every_token(mixed))
    others = np.delete(np.arange(40), [3, 20])
    assert np.isnan(got[[3, 20]]).all()
    assert same_bits(got[others], clean[others])


def test_shares():
    routing = np.log(np.array([[1, 4, 3, 2], [2, 2, 2, 2]], np.float32))
    np.testing.assert_allclose(expert_shares(routing, 2, False), [[0, 0.4, 0.3, 0], [0.25, 0.25, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(expert_shares(routing, 2, True), [[0, 4 / 7, 3 / 7, 0], [0.5, 0.5, 0, 0]], rtol=1e-6)
