"""Steps of many rows, which threads take chunk by chunk through several operations, and what the clock saw of them."""

import time

import numpy as np
import pytest

from batchgen.kernels.base import StepBatch, StepLimits
from batchgen.kernels.cpu import program
from tests.kernels.conftest import require
from tests.kernels.kernel_programs import INT8_WEIGHTS, VARIANTS, Variant, logits_of, same_bits
from tests.tiny_model import Chunk, build_backend, make_batch, tiny_codes, tiny_config, tiny_weights

NATIVE = [Variant(v.kernel, "native", v.kv) for v in VARIANTS if v.weights == "bf16" and v.kv == "bf16"]
TYPES = [*VARIANTS, *INT8_WEIGHTS, *NATIVE]
TOKENS, PIECE = 600, 50
PAGES = (list(range(12)), list(range(20, 27)))
CONFIG = tiny_config()


def open_tiny(variant: Variant, threads: int):
    limits = StepLimits(max_tokens=TOKENS, max_seqs=TOKENS, num_pages=32, page_size=32)
    tensors = tiny_codes() if variant.weights == "native" else tiny_weights()
    return build_backend(*variant.names, threads, tensors=tensors, limits=limits)


def prompts() -> list[np.ndarray]:
    tokens = np.random.default_rng(12).integers(0, CONFIG.shape.vocab_size, TOKENS)
    return [tokens[:384], tokens[384:]]


def all_rows(chunks: list[Chunk]) -> StepBatch:
    rows = np.arange(sum(len(c.tokens) for c in chunks), dtype=np.int32)
    return make_batch(chunks, True, logits_rows=rows)


def in_one_step(variant: Variant, threads: int) -> np.ndarray:
    """Logits (600, vocabulary) of two prompts computed together."""
    backend = open_tiny(variant, threads)
    logits = logits_of(backend, all_rows([Chunk(p, 0, pages) for p, pages in zip(prompts(), PAGES, strict=True)]))
    backend.close()
    return logits


def in_pieces(variant: Variant) -> np.ndarray:
    """The same logits from steps of 50 tokens."""
    backend, rows = open_tiny(variant, 1), []
    for prompt, pages in zip(prompts(), PAGES, strict=True):
        for first in range(0, len(prompt), PIECE):
            rows.append(logits_of(backend, all_rows([Chunk(prompt[first : first + PIECE], first, pages)])))
    backend.close()
    return np.concatenate(rows)


def test_these_steps_are_chunked_and_those_pieces_are_not():
    assert all(32 <= program.chunk_rows(TOKENS, threads) < TOKENS for threads in (1, 2, 3))
    assert program.chunk_rows(PIECE, 1) == 0


@pytest.mark.parametrize("variant", TYPES, ids=str)
def test_chunks_change_no_bit(variant):
    require(variant.kernel)
    expected = in_pieces(variant)
    for threads in (1, 2, 3):
        assert same_bits(in_one_step(variant, threads), expected), threads


@pytest.mark.parametrize("count", [40, TOKENS])
@pytest.mark.parametrize("threads", [1, 2])
def test_times_of_every_operation(threads, count):
    """Work of every operation and waits, in nanoseconds, add up over the steps; chunked or not."""
    backend = open_tiny(Variant("portable", "fp32", "fp32"), threads)
    batch = make_batch([Chunk(p[:count], 0, pages) for p, pages in zip(prompts(), PAGES, strict=True)])
    batch.cleared_pages = np.arange(4, dtype=np.int32)
    assert not backend.times.any()
    began = time.monotonic_ns()
    backend.run(batch)
    elapsed = time.monotonic_ns() - began
    first = backend.times.copy()
    assert first.dtype == np.int64
    assert first.shape == (threads, 2 + CONFIG.shape.num_layers * 8 + 4, 2)
    assert (first >= 0).all()
    assert (first[:, :, 0].sum(axis=0) > 0).all()
    assert first[:, :, 1].any()
    assert (first.sum(axis=(1, 2)) <= elapsed).all()
    backend.run(batch)
    assert (backend.times >= first).all()
    assert (backend.times[:, :, 0].sum(axis=0) > first[:, :, 0].sum(axis=0)).all()
    backend.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_chunks_leave_no_thread_without_work(threads):
    for tokens in range(1, 5000, 37):
        rows = program.chunk_rows(tokens, threads)
        if rows:
            rounds = -(-tokens // (rows * threads))
            assert rows % 32 == 0 and program.LEAST_ROWS <= rows <= program.MOST_ROWS, tokens
            assert tokens >= program.LEAST_SHARE * rounds * threads * rows, tokens
