"""The output head: arg-max, log-sum-exp, stored logits."""

from dataclasses import replace

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from batchgen.kernels.reference import log_softmax, round_bf16
from tests.kernels.kernel_programs import Floats, Variant, build, every_token, head, logits_of, same_bits, signs
from tests.tiny_model import greedy_samples

VOCABULARIES = (1, 16, 31, 32, 33, 255, 256, 257, 300, 1025)
"""One short of, equal to and one more than 32 columns and a work item of the head."""


def open_logits(backend: Backend, wanted: Floats) -> Backend:
    """A backend whose every row of logits is `wanted` (bfloat16 numbers), and whose token 1 has the opposite."""
    table = np.stack([np.ones(32, np.float32), -np.ones(32, np.float32)])
    weight = np.repeat(wanted[:, None] / 32, 32, axis=1)
    return build(backend, head(table, np.ones(32, np.float32), weight), 32, len(wanted))


def random_head(backend: Backend, vocab: int, seed: int = 0) -> Backend:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((vocab, 64)).astype(np.float32) / 2
    return build(backend, head(signs(rng, 64, 64), np.ones(64, np.float32), weight), 64, vocab)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_token_and_logprob_agree_with_the_logits(weight_variant, open_backend, vocab):
    backend = random_head(open_backend(*weight_variant.names), vocab)
    result = backend.run(every_token(range(50)))
    logits = result.logits[:50]
    assert logits.shape == (50, vocab)
    np.testing.assert_array_equal(result.token_ids, logits.argmax(axis=1))
    expected = log_softmax(logits)[np.arange(50), result.token_ids]
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("places", [(5, 9), (3, 20), (17, 18), (31, 32), (40, 255), (255, 256), (0, 299), (256, 299)])
def test_the_lowest_of_equal_tokens_wins(gemm_variant, open_backend, places):
    wanted = round_bf16(np.random.default_rng(0).uniform(-4, 4, 300).astype(np.float32))
    wanted[list(places)] = 6
    backend = open_logits(open_backend(*gemm_variant.names), wanted)
    result = backend.run(every_token([0]))
    np.testing.assert_array_equal(result.logits[0], wanted)
    assert result.token_ids[0] == places[0]
    np.testing.assert_allclose(result.logprobs[0], log_softmax(wanted)[places[0]], atol=1e-5)


@pytest.mark.parametrize("vocab", [33, 300])
def test_all_tokens_equal(gemm_variant, open_backend, vocab):
    result = open_logits(open_backend(*gemm_variant.names), np.full(vocab, -2, np.float32)).run(every_token([0, 1]))
    assert result.token_ids.tolist() == [0, 0]
    np.testing.assert_allclose(result.logprobs, -np.log(vocab), atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 100.0, 30000.0])
def test_large_logits_do_not_overflow(gemm_variant, open_backend, size):
    """Padding columns hold zero, which is far above every real logit of token 1's row; they must not win."""
    wanted = round_bf16((size * (1 + np.random.default_rng(1).uniform(0, 1, 300))).astype(np.float32))
    result = open_logits(open_backend(*gemm_variant.names), wanted).run(every_token([0, 1]))
    np.testing.assert_array_equal(result.token_ids, [wanted.argmax(), wanted.argmin()])
    expected = [log_softmax(wanted).max(), log_softmax(-wanted).max()]
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_asking_for_logits_changes_no_bit(weight_variant, open_backend):
    backend = random_head(open_backend(*weight_variant.names), 300)
    batch = every_token(range(40))
    asked = backend.run(batch)
    tokens, logprobs = asked.token_ids.copy(), asked.logprobs.copy()
    some = np.arange(40) % 3 == 0
    for needs in (np.zeros(40, bool), some):
        result = backend.run(replace(batch, needs_logits=needs))
        assert same_bits(result.token_ids, tokens)
        assert same_bits(result.logprobs, logprobs)


def test_rows_and_their_order_change_no_bit(weight_variant: Variant, open_backend):
    """Also where a work item ends, at 128 rows."""
    backend = random_head(open_backend(*weight_variant.names), 300)
    whole = backend.run(every_token(np.arange(300) % 64))
    tokens, logprobs, logits = whole.token_ids.copy(), whole.logprobs.copy(), whole.logits[:300].copy()
    for rows in ([3], [63, 0], np.arange(33), np.arange(300)[::-1], np.arange(127, 256), [7] * 17):
        rows = np.asarray(rows, np.int32)
        batch = every_token(np.arange(300) % 64, logits_rows=rows)
        result = backend.run(batch)
        assert same_bits(result.token_ids, tokens[rows])
        assert same_bits(result.logprobs, logprobs[rows])
        assert same_bits(logits_of(backend, batch), logits[rows])


def test_a_step_may_want_no_logits_at_all(weight_variant, open_backend):
    backend = random_head(open_backend(*weight_variant.names), 300)
    result = backend.run(every_token(range(8), logits_rows=np.zeros(0, np.int32)))
    assert len(result.token_ids) == len(result.logprobs) == 0


def test_log_softmax_against_its_definition():
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32) * 10
    probabilities = np.exp(logits.astype(np.longdouble))
    expected = np.log(probabilities / probabilities.sum(axis=1, keepdims=True)).astype(np.float64)
    np.testing.assert_allclose(log_softmax(logits), expected, atol=1e-12)


def test_scores_are_the_twin_s_and_those_of_likeliest_tokens_are_the_draw_s(weight_variant: Variant, open_backend):
    """Several tokens of a row, in any order."""
    backend, twin = random_head(open_backend(*weight_variant.names), 300), random_head(weight_variant.reference(), 300)
    samples = np.tile(greedy_samples(40), 3)[np.random.default_rng(3).permutation(120)]
    samples["scored"], samples["target"] = 1, np.random.default_rng(4).integers(0, 300, 120)
    batch = every_token(range(40), samples=samples)
    result, expected = backend.run(batch), twin.run(batch)
    logits = result.logits[:40].copy()
    assert result.token_ids.tolist() == logits.argmax(axis=1)[samples["row"]].tolist()
    np.testing.assert_allclose(result.logprobs, log_softmax(logits)[samples["row"], samples["target"]], atol=1e-5)
    tolerance = 1e-4 if weight_variant.weights == "fp32" else 0.05
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=tolerance * np.abs(logits).max())
    samples["target"] = result.token_ids
    likeliest = backend.run(every_token(range(40), samples=samples)).logprobs
    drawn = backend.run(every_token(range(40))).logprobs
    assert same_bits(likeliest, drawn[samples["row"]])
