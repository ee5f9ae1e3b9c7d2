"""Rotary embedding, the KV cache's layouts and paged attention against plain softmax attention."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from batchgen.kernels.base import Backend, StepBatch
from batchgen.kernels.reference import round_bf16
from tests.kernels.kernel_programs import Variant, build, logits_of, relative_error, same_bits, signs
from tests.tiny_model import Chunk, make_batch

TOKENS, POISON = 64, 64
"""Tokens 0 to 63 are ordinary; the embedding of token 64 is not a number."""


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.head_dim}-over-{self.kv_heads}-pages-of-{self.page_size}"

    @property
    def columns(self) -> int:
        return self.heads * self.head_dim


GROUP_OF_1, GROUP_OF_3, GROUP_OF_8 = Heads(2, 2, 16, 32), Heads(6, 2, 64, 64), Heads(8, 1, 32, 64)
SHAPES = [
    GROUP_OF_1,
    GROUP_OF_3,
    GROUP_OF_8,
    Heads(2, 1, 80, 32),
    Heads(3, 1, 48, 64),
    Heads(4, 4, 128, 32),
    Heads(2, 1, 96, 64),
]
TOLERANCE = {"portable": 1e-5, "avx512_bf16": 2.0**-7, "amx_bf16": 2.0**-6}


def tolerance(variant: Variant) -> float:
    """Portable kernels keep float32 beside the cache; the others round what leaves attention, AMX also its operands."""
    return max(TOLERANCE[variant.kernel], 2e-3 if variant.kv == "bf16" else 0)


def attention_program(shape: Heads, scale: float = 1.0, **kind: Any):
    """The logits of a token are its attention output, head by head."""
    rng = np.random.default_rng(shape.head_dim)
    table = np.concatenate([signs(rng, TOKENS, 32), np.full((1, 32), np.nan, np.float32)])
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = round_bf16((rng.standard_normal((rows, 32)) * scale / 4).astype(np.float32))

    def program(backend: Backend) -> Any:
        packed = backend.table(table), backend.vector(np.ones(32, np.float32))
        parts = np.split(qkv, np.cumsum([shape.heads, shape.kv_heads]) * shape.head_dim)
        joined, eye = backend.linear(parts), backend.linear([np.eye(shape.columns, dtype=np.float32)])

        def forward(ops: Any) -> None:
            q = ops.rope_and_cache(ops.linear(ops.rms_norm(ops.embed(packed[0]), packed[1], 0.0), joined), 0)
            ops.sample_head(ops.attention(q, 0, **kind), eye)

        return forward

    return program


def open_attention(backend: Backend, shape: Heads, scale: float = 1.0) -> Backend:
    return build(
        backend, attention_program(shape, scale), 32, shape.columns, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, page_size=shape.page_size,
    )  # fmt: skip


def step(shape: Heads, chunks: list[Chunk], **fields: Any) -> StepBatch:
    count = sum(len(c.tokens) for c in chunks)
    rows = np.arange(count, dtype=np.int32)
    return make_batch(chunks, True, shape.page_size, logits_rows=rows, **fields)


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Heads:
    return request.param


def story(shape: Heads) -> list[StepBatch]:
    """A prompt in one piece, prompts in chunks, single tokens, all mixed; pages lie in no order."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, TOKENS, n) for n in (41, 150, 96))
    pages = rng.permutation(32).astype(np.int32)
    pa, pb, pc, pd = pages[:3], pages[3:8], pages[8:12], pages[12:13]
    return [
        step(shape, [Chunk(a[:40], 0, pa), Chunk(b[:70], 0, pb), Chunk(c[:1], 0, pc)], cleared_pages=pages[:13]),
        step(shape, [Chunk(a[40:], 40, pa), Chunk(b[70:101], 70, pb), Chunk(c[1:96], 1, pc), Chunk([7], 0, pd)]),
        step(shape, [Chunk([3], 41, pa), Chunk(b[101:150], 101, pb), Chunk([9], 96, pc), Chunk([7, 8], 1, pd)]),
    ]


def test_attention_equals_plain_softmax(variant, open_backend, shape):
    backend = open_attention(open_backend(*variant.names), shape)
    oracle = open_attention(variant.reference(), shape)
    for number, batch in enumerate(story(shape)):
        got, expected = logits_of(backend, batch), logits_of(oracle, batch)
        assert relative_error(got, expected) < tolerance(variant), number


@pytest.mark.parametrize("shape", [GROUP_OF_1, GROUP_OF_3], ids=str)
def test_one_sharp_key_takes_all_the_weight(variant, open_backend, shape):
    """Scores in the hundreds: the running maximum rises and what was summed before it vanishes."""
    backend = open_attention(open_backend(*variant.names), shape, scale=8.0)
    oracle = open_attention(variant.reference(), shape, scale=8.0)
    batch = story(shape)[0]
    got, expected = logits_of(backend, batch), logits_of(oracle, batch)
    error = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    # Where two keys are nearly even, rounded operands may prefer the other one.
    assert np.median(error) < tolerance(variant)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("shape", [GROUP_OF_3, GROUP_OF_8, Heads(2, 1, 80, 32)], ids=str)
def test_chunking_and_company_change_no_bit(variant, open_backend, shape):
    backend = open_attention(open_backend(*variant.names), shape)
    tokens = np.random.default_rng(2).integers(0, TOKENS, 100)
    whole = logits_of(backend, step(shape, [Chunk(tokens, 0, [4, 2, 9, 1])]))
    for cuts in ([1, 32, 33, 64], [17], list(range(1, 100, 7))):
        edges = [0, *cuts, 100]
        parts = []
        for first, end in pairwise(edges):
            other = Chunk(tokens[: end - first], 0, [20, 21, 22, 23])
            batch = step(shape, [other, Chunk(tokens[first:end], first, [5, 8, 0, 3])])
            parts.append(logits_of(backend, batch)[end - first :])
        assert same_bits(np.concatenate(parts), whole), cuts


@pytest.mark.parametrize("shape", [GROUP_OF_1, GROUP_OF_3, Heads(2, 1, 96, 64)], ids=str)
def test_neighbouring_slots_are_written_as_scattered_ones(variant, open_backend, shape):
    """A run of consecutive slots, from an odd one on, goes over the borders of blocks and of pages at once.

    So it does from one sequence to the next, whose first token is put where the last one's would have followed.
    """
    backend = open_attention(open_backend(*variant.names), shape)
    rng, size = np.random.default_rng(9), shape.page_size
    tokens, other = rng.integers(0, TOKENS, 2 * size + 9), rng.integers(0, TOKENS, 40)
    results = []
    for pages, more in (([3, 4, 5], [6, 7]), ([9, 2, 30], [0, 17])):
        logits_of(backend, step(shape, [Chunk(tokens[:7], 0, pages)]))
        rest = logits_of(
            backend, step(shape, [Chunk(tokens[7 : 2 * size], 7, pages), Chunk(other, 0, pages[2:] + more)])
        )
        last = logits_of(
            backend, step(shape, [Chunk([5], 2 * size, [*pages[:2], 20]), Chunk([6], 40, pages[2:] + more)])
        )
        results.append(np.concatenate([rest, last]))
    assert same_bits(*results)


def shared_run_steps(shape: Heads) -> tuple[list[StepBatch], list[Chunk], list[list[int]]]:
    """Prompts that share two pages, and three, and none; then one token of each."""
    rng, size = np.random.default_rng(3), shape.page_size
    prompt, other = rng.integers(0, TOKENS, 3 * size + 20), rng.integers(0, TOKENS, 20)
    fill = [
        step(shape, [Chunk(prompt[: 3 * size], 0, [4, 2, 7])]),
        step(shape, [Chunk(prompt[: size + 5], 2 * size, [4, 2, 10 + i, 20 + i]) for i in range(2)]),
        step(shape, [Chunk(other, 3 * size, [4, 2, 7, 12 + i]) for i in range(4)]),
        step(shape, [Chunk(other, 0, [0])]),
    ]
    first = [Chunk([i], 3 * size + 5, [4, 2, 10 + i, 20 + i]) for i in range(2)]
    second = [Chunk([i], 3 * size + 20, [4, 2, 7, 12 + i]) for i in range(4)]
    return fill, [*first, Chunk([5], 20, [0]), *second], [[0, 2, 2], [3, 7, 3]]


@pytest.mark.parametrize("shape", [Heads(2, 2, 16, 32), Heads(6, 2, 64, 32), Heads(8, 1, 80, 32)], ids=str)
def test_shared_runs_change_no_bit(variant, open_backend, shape):
    """Rows beneath a shared run start from its state; groups of eight heads fill more than one item of sixteen rows."""
    backend = open_attention(open_backend(*variant.names), shape)
    oracle = open_attention(variant.reference(), shape)
    fill, chunks, runs = shared_run_steps(shape)
    for batch in fill:
        assert relative_error(logits_of(backend, batch), logits_of(oracle, batch)) < tolerance(variant)
    alone = logits_of(backend, step(shape, chunks))
    assert relative_error(alone, logits_of(oracle, step(shape, chunks))) < tolerance(variant)
    for some in (runs, runs[:1], runs[1:], [[0, 2, 1], [4, 7, 3]], [[3, 5, 2], [5, 7, 1]]):
        shared = logits_of(backend, step(shape, chunks, shared_runs=np.array(some, np.int32)))
        assert same_bits(shared, alone), some


def test_copied_slots_are_as_good_as_computed_ones(variant, open_backend, shape):
    """Copy on write: 11 tokens of another sequence's page, then own tokens; the copy's source is of the same step."""
    rng, size = np.random.default_rng(4), shape.page_size
    prompt, own = rng.integers(0, TOKENS, size + 30), rng.integers(0, TOKENS, 9)
    forked = np.concatenate([prompt[: size + 11], own])
    backend = open_attention(open_backend(*variant.names), shape)
    alone = logits_of(backend, step(shape, [Chunk(forked, 0, [0, 1])]))[size + 11 :]
    copies = np.array([(6 * size + i, 3 * size + i) for i in range(11)], np.int64)
    chunks = [Chunk(prompt, 0, [5, 6]), Chunk(own, size + 11, [5, 3])]
    batch = step(shape, chunks, copies=copies, cleared_pages=np.array([5, 6, 3], np.int32))
    assert same_bits(logits_of(backend, batch)[size + 30 :], alone)


@pytest.mark.parametrize("shape", [GROUP_OF_3, Heads(2, 1, 80, 32)], ids=str)
def test_a_slot_may_be_copied_to_any_other(variant, open_backend, shape):
    backend = open_attention(open_backend(*variant.names), shape)
    oracle = open_attention(variant.reference(), shape)
    rng, size = np.random.default_rng(5), shape.page_size
    fill = step(shape, [Chunk(rng.integers(0, TOKENS, 2 * size), 0, [0, 1])])
    sources, targets = rng.permutation(2 * size)[:31], 2 * size + rng.permutation(31)
    copies = np.stack([sources, targets], axis=1).astype(np.int64)
    read = step(shape, [Chunk([6], 31, [2])], copies=copies)
    for batch in (fill, read):
        assert relative_error(logits_of(backend, batch), logits_of(oracle, batch)) < tolerance(variant)


def test_nan_of_a_page_s_former_owner_reaches_nobody(variant, open_backend, shape):
    """Not through unused slots of a cleared page, nor of one that is filled by copies, nor from a neighbour."""
    rng, size = np.random.default_rng(6), shape.page_size
    tokens = rng.integers(0, TOKENS, size + 6)
    backend = open_attention(open_backend(*variant.names), shape)
    clean = logits_of(backend, step(shape, [Chunk(tokens, 0, [8, 9])]))
    poison = Chunk(np.full(3 * size, POISON), 0, [0, 1, 2])
    assert np.isnan(logits_of(backend, step(shape, [poison]))).all()
    copies = np.array([(8 * size + i, 2 * size + i) for i in range(3)], np.int64)
    chunks = [Chunk(tokens, 0, [0, 1]), Chunk([POISON], 5, [20]), Chunk(tokens[3:7], 3, [2])]
    batch = step(shape, chunks, copies=copies, cleared_pages=np.array([0, 1, 2], np.int32))
    got = logits_of(backend, batch)
    assert same_bits(got[: size + 6], clean)
    assert np.isnan(got[size + 6]).all()
    assert same_bits(got[size + 7 :], clean[3:7])


def test_clearing_a_page_leaves_the_others_alone(variant, open_backend):
    shape = GROUP_OF_3
    backend = open_attention(open_backend(*variant.names), shape)
    tokens = np.random.default_rng(7).integers(0, TOKENS, 70)
    whole = logits_of(backend, step(shape, [Chunk(tokens, 0, [4, 6])]))
    logits_of(backend, step(shape, [Chunk(tokens[:69], 0, [4, 6])]))
    others = np.array([n for n in range(32) if n not in (4, 6)], np.int32)
    assert same_bits(
        logits_of(backend, step(shape, [Chunk(tokens[69:], 69, [4, 6])], cleared_pages=others)), whole[69:]
    )


def test_threads_change_no_bit(variant, open_backend):
    shape = GROUP_OF_8
    one, two = (open_attention(open_backend(*variant.names, threads=n), shape) for n in (1, 2))
    for batch in story(shape):
        assert same_bits(logits_of(one, batch), logits_of(two, batch))


@pytest.mark.parametrize(
    ("head_dim", "page_size", "message"),
    [(24, 32, "head_dim 24 is not a multiple of 16"), (16, 48, "page_size 48 is not a multiple of 32")],
)
def test_unsupported_sizes_are_refused(open_backend, head_dim, page_size, message):
    with pytest.raises(ValueError, match=message):
        open_attention(open_backend("portable"), Heads(1, 1, head_dim, page_size))


def test_unsupported_types_are_refused(open_backend):
    with pytest.raises(ValueError, match="does not run on this processor"):
        open_backend("mmx", "fp32")
    with pytest.raises(ValueError, match="dtype int3 is not supported"):
        open_backend("reference", "int3")
