"""A whole decoder of random weights: every kernel against the oracle, and against itself under another schedule."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from batchgen.kernels.reference import log_softmax
from tests.kernels.conftest import require
from tests.kernels.kernel_programs import Variant, relative_error, same_bits
from tests.tiny_model import Chunk, build_backend, greedy_samples, make_batch, tiny_codes, tiny_config, tiny_weights

CONFIGS = {
    "as it is": tiny_config(),
    "three heads to a kv head": tiny_config(num_heads=6, num_kv_heads=2, head_dim=32, num_layers=3, hidden_size=96),
    "no multiple of 32 anywhere": tiny_config(
        hidden_size=80, intermediate_size=112, num_heads=3, num_kv_heads=1, head_dim=48, vocab_size=77
    ),
}


def tolerance(variant: Variant) -> float:
    """Of the logits, relative to the largest, against the oracle with the same weight and KV types.

    Where values are rounded to few bits, two that hardly differ may come out one unit apart: activations of int8
    weights by 1/127, everything by 1/256 on kernels that work on bfloat16, and what enters the cache.
    """
    if variant.weights == "int8":
        return 6e-2
    if variant.rounds_activations:
        return 3e-2
    return 1e-5 if variant.kv == "fp32" else 2e-3


@pytest.fixture
def load() -> Iterator[Callable[..., Backend]]:
    """`build_backend` whose backends are closed after the test."""
    opened: list[Backend] = []

    def load_one(*args, **kwargs) -> Backend:
        opened.append(build_backend(*args, **kwargs))
        return opened[-1]

    yield load_one
    for backend in opened:
        backend.close()


def prompts(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, vocab, n) for n in (70, 1, 33, 16)]


def pages_of(number: int) -> list[int]:
    return [40 - number * 4 - i for i in range(4)]


def decode(backend: Backend, tokens: np.ndarray, steps: int, cuts: Sequence[int] = (), number: int = 0):
    """Greedy continuation of one prompt, computed in pieces that end at `cuts`: tokens, logprobs, rows of logits."""
    edges, history = [0, *cuts, len(tokens)], list(tokens)
    for first, end in pairwise(edges[:-1]):
        backend.run(make_batch([Chunk(tokens[first:end], first, pages_of(number), wants_logits=False)]))
    piece, results = tokens[edges[-2] :], []
    for _ in range(steps):
        result = backend.run(make_batch([Chunk(piece, len(history) - len(piece), pages_of(number))], True))
        results.append((result.token_ids[0], result.logprobs[0], result.logits[0].copy()))
        piece = result.token_ids.tolist()
        history += piece
    return [np.array(column) for column in zip(*results, strict=True)]


def decode_together(backend: Backend, prompts: Sequence[np.ndarray], steps: int):
    """Greedy continuations of all prompts in the same steps."""
    chunks, results = [Chunk(p, 0, pages_of(n)) for n, p in enumerate(prompts)], []
    for _ in range(steps):
        result = backend.run(make_batch(chunks, True))
        rows = result.token_ids.copy(), result.logprobs.copy(), result.logits[: len(chunks)].copy()
        results.append(rows)
        chunks = [Chunk([t], c.start + len(c.tokens), c.pages) for t, c in zip(rows[0], chunks, strict=True)]
    return [[np.stack([step[field][n] for step in results]) for field in range(3)] for n in range(len(prompts))]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_against_the_oracle(model_variant: Variant, load, name):
    """Every step feeds both the oracle's tokens, so that they stay comparable when two tokens are nearly even."""
    config = CONFIGS[name]
    oracle = load("reference", model_variant.weights, model_variant.kv, config=config)
    backend = load(*model_variant.names, config=config)
    chunks = [Chunk(p, 0, pages_of(n)) for n, p in enumerate(prompts(config.shape.vocab_size))]
    for _ in range(6):
        expected, got = (b.run(make_batch(chunks, True)) for b in (oracle, backend))
        logits = got.logits[: len(chunks)]
        assert relative_error(logits, expected.logits) < tolerance(model_variant)
        own = log_softmax(logits)[np.arange(len(chunks)), logits.argmax(axis=1)]
        np.testing.assert_allclose(got.logprobs, own, atol=1e-5, rtol=1e-5)
        tokens = expected.token_ids
        chunks = [Chunk([t], c.start + len(c.tokens), c.pages) for t, c in zip(tokens, chunks, strict=True)]


def test_portable_fp32_generates_the_oracle_s_tokens(load):
    oracle, backend = load("reference"), load("portable")
    for prompt in prompts(300):
        expected, got = (decode(b, prompt, 12) for b in (oracle, backend))
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_allclose(got[1], expected[1], atol=1e-4)


@pytest.mark.parametrize("kv", ["fp32", "bf16"])
def test_portable_with_rounded_weights_against_the_oracle_with_rounded_weights(load, kv):
    """Nothing else is rounded, so only values of the cache that lie between two bfloat16 may differ."""
    oracle, backend = load("reference", "bf16", kv), load("portable", "bf16", kv)
    batch = make_batch([Chunk(p, 0, pages_of(n)) for n, p in enumerate(prompts(300))], True)
    tolerance = 1e-4 if kv == "fp32" else 1e-3
    assert relative_error(backend.run(batch).logits[:4], oracle.run(batch).logits) < tolerance


def assert_same(got, expected, what=None) -> None:
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b), what


def test_chunked_prefill_changes_no_bit(model_variant: Variant, load):
    backend, prompt = load(*model_variant.names), prompts(300)[0]
    whole = decode(backend, prompt, 4)
    for cuts in ([1], [32, 64], [31, 33, 69], list(range(5, 70, 5))):
        assert_same(decode(backend, prompt, 4, cuts, number=1), whole, cuts)


@pytest.mark.parametrize("name", CONFIGS)
def test_company_changes_no_bit(model_variant: Variant, load, name):
    config = CONFIGS[name]
    backend = load(*model_variant.names, config=config)
    rows = prompts(config.shape.vocab_size)
    for got, prompt in zip(decode_together(backend, rows, 5), rows, strict=True):
        assert_same(got, decode(backend, prompt, 5))


def test_threads_change_no_bit(model_variant: Variant, load):
    one, two = (decode_together(load(*model_variant.names, threads=n), prompts(300), 5) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("shape", [{}, {"num_kv_heads": 1, "head_dim": 48}], ids=["multiples of 32", "others"])
@pytest.mark.parametrize("kernel", ["portable", "avx512_bf16", "amx_bf16"])
def test_codes_give_the_bits_of_the_bfloat16_that_they_stand_for(load, kernel, shape):
    """Also where the parts of a linear are quantised in different ways, as these are."""
    require(kernel)
    config = tiny_config(**shape)
    codes = tiny_codes(0, config)
    native, plain = (load(kernel, weights, config=config, tensors=codes) for weights in ("native", "bf16"))
    for got, expected in zip(*(decode_together(b, prompts(300), 4) for b in (native, plain)), strict=True):
        assert_same(got, expected)
    oracle = load("reference", "native", config=config, tensors=codes)
    batch = make_batch([Chunk(prompts(300)[0], 0, pages_of(0))], True)
    assert relative_error(native.run(batch).logits[:1], oracle.run(batch).logits) < 3e-2


def test_a_tied_head_is_the_embedding(load):
    weights = tiny_weights(1)
    tied = {name: w for name, w in weights.items() if name != "output.weight"}
    untied = tied | {"output.weight": weights["token_embd.weight"]}
    batch = make_batch([Chunk(prompts(300)[2], 0, pages_of(0))], True)
    for kernel in ("reference", "portable"):
        a, b = (load(kernel, tensors=tensors).run(batch).logits[0].copy() for tensors in (tied, untied))
        assert same_bits(a, b)


def test_several_samples_of_one_row(variant: Variant, load):
    """A prompt's logits serve all its samples, and each draw is its own."""
    backend = load(*variant.names)
    samples = np.resize(greedy_samples(1), 5)
    samples["greedy"], samples["sample_number"] = [1, 0, 0, 0, 0], [0, 0, 1, 2, 0]
    prompt = Chunk(prompts(300)[0], 0, pages_of(0))
    tokens = backend.run(make_batch([prompt], True, samples=samples)).token_ids.tolist()
    plain = backend.run(make_batch([prompt])).token_ids[0]
    assert tokens[0] == plain
    assert tokens[1] == tokens[4]
    assert len(set(tokens[1:4])) > 1


def test_warm_up_leaves_no_trace(load):
    for kernel in ("reference", "portable"):
        fresh, warmed = load(kernel), load(kernel)
        warmed.warm_up()
        batch = make_batch([Chunk(prompts(300)[0], 0, [0, 1, 2])], True, cleared_pages=np.arange(3, dtype=np.int32))
        assert same_bits(fresh.run(batch).logits[:1].copy(), warmed.run(batch).logits[:1].copy())
