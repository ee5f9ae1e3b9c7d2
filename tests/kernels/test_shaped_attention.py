"""Attention within a sliding window, and with capped scores: against the oracle, and the same bits in any company."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from tests.kernels.kernel_programs import build, logits_of, relative_error, same_bits
from tests.kernels.test_attention_kernels import (
    GROUP_OF_1,
    GROUP_OF_3,
    TOKENS,
    Heads,
    attention_program,
    shared_run_steps,
    step,
    story,
    tolerance,
)
from tests.tiny_model import Chunk

SHAPES = [GROUP_OF_1, GROUP_OF_3, Heads(8, 1, 80, 32), Heads(2, 1, 256, 32)]
KINDS = [(1, 0.0), (20, 0.0), (33, 3.0), (100, 0.0), (0, 3.0)]
"""Windows and caps; the scores have a standard deviation of about 1, or of 9 where they are scaled."""


def open_shaped(backend: Backend, shape: Heads, window: int, cap: float, scale: float = 1.0) -> Backend:
    program = attention_program(shape, scale, window=window, soft_cap=cap)
    return build(
        backend, program, 32, shape.columns, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        page_size=shape.page_size,
    )  # fmt: skip


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Heads:
    return request.param


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> tuple[int, float]:
    return request.param


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_against_the_oracle(variant, open_backend, shape, kind, scale):
    backend = open_shaped(open_backend(*variant.names), shape, *kind, scale)
    oracle = open_shaped(variant.reference(), shape, *kind, scale)
    for number, batch in enumerate(story(shape)):
        got, expected = logits_of(backend, batch), logits_of(oracle, batch)
        error = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
        # Where two keys are nearly even, rounded operands may prefer the other one.
        typical = np.median(error) if variant.rounds_activations and scale > 1 else error.max()
        assert typical < tolerance(variant) * (2 if scale > 1 else 1), number


def test_a_window_that_holds_everything_is_none(open_backend):
    shape = GROUP_OF_3
    backends = [open_shaped(open_backend("portable"), shape, window, 0.0) for window in (0, 500)]
    for batch in story(shape):
        assert relative_error(*(logits_of(backend, batch) for backend in backends)) < 1e-6


def test_chunking_and_company_change_no_bit(variant, open_backend, shape, kind):
    backend = open_shaped(open_backend(*variant.names, threads=2), shape, *kind)
    tokens = np.random.default_rng(2).integers(0, TOKENS, 100)
    whole = logits_of(backend, step(shape, [Chunk(tokens, 0, [4, 2, 9, 1])]))
    for cuts in ([1, 32, 33, 64], [17], list(range(1, 100, 7))):
        parts = []
        for first, end in pairwise([0, *cuts, 100]):
            other = Chunk(tokens[: end - first], 0, [20, 21, 22, 23])
            batch = step(shape, [other, Chunk(tokens[first:end], first, [5, 8, 0, 3])])
            parts.append(logits_of(backend, batch)[end - first :])
        assert same_bits(np.concatenate(parts), whole), cuts


def test_runs_of_pages_that_sequences_share_change_no_bit(variant, open_backend, kind):
    shape = Heads(6, 2, 64, 32)
    backend = open_shaped(open_backend(*variant.names), shape, *kind)
    fill, chunks, runs = shared_run_steps(shape)
    for batch in fill:
        logits_of(backend, batch)
    alone = logits_of(backend, step(shape, chunks))
    shared: Any = {"shared_runs": np.array(runs, np.int32)}
    assert same_bits(logits_of(backend, step(shape, chunks, **shared)), alone)


def test_two_windows_in_one_model_are_refused(open_backend):
    def program(backend: Backend) -> Any:
        table, norm = backend.table(np.ones((4, 32), np.float32)), backend.vector(np.ones(32, np.float32))
        qkv, eye = backend.linear([np.ones((48, 32), np.float32)]), backend.linear([np.eye(16, dtype=np.float32)])

        def forward(ops: Any) -> None:
            q = ops.rope_and_cache(ops.linear(ops.rms_norm(ops.embed(table), norm, 0.0), qkv), 0)
            ops.attention(q, 0, window=8)
            ops.sample_head(ops.attention(q, 0, window=9), eye)

        return forward

    with pytest.raises(ValueError, match=r"windows of \[8, 9\] keys"):
        build(open_backend("portable"), program, 32, 16)
