"""Penalties, filters and draws: the twin against definitions, then the kernel against the twin."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from batchgen.kernels import reference
from batchgen.kernels.base import StepResult
from batchgen.kernels.cpu import sampling
from batchgen.kernels.cpu.compiling import compiled
from tests.kernels.kernel_programs import Floats, build, every_token, head, same_bits, signs
from tests.tiny_model import greedy_samples

NONE = np.zeros(0, np.int32)


def records(count: int, **fields: Any) -> np.ndarray:
    """Draws at temperature 1 without filters or penalties; `fields` replace values."""
    samples = np.resize(greedy_samples(1), count)
    samples["greedy"] = 0
    for name, value in fields.items():
        samples[name] = value
    return samples


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """From Random123's kat_vectors, philox4x32-10."""
    assert reference.philox4x32(counter, key) == expected


@compiled
def uniform(key, token_index, sample_number):
    return sampling.philox_uniform(key, token_index, sample_number)


def test_uniform_numbers_of_the_kernel_are_the_twin_s():
    assert uniform(np.uint64(0), 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    rng = np.random.default_rng(0)
    keys = [*rng.integers(0, 2**64, 200, np.uint64), np.uint64(2**64 - 1)]
    for key in keys:
        token, number = (int(n) for n in rng.integers(0, 2**31, 2))
        expected = reference.philox_uniform(key, token, number)
        assert uniform(key, token, number) == expected
        assert 0 <= expected < 1


# The twin against definitions


def penalised_by_hand(logits: Floats, sample: np.void, prompt: list[int], generated: list[int]) -> list[float]:
    """vLLM's definition, token by token."""
    expected = []
    for token, logit in enumerate(logits.tolist()):
        if token in prompt or token in generated:
            repetition = sample["repetition_penalty"]
            logit = logit / repetition if logit > 0 else logit * repetition
        times = generated.count(token)
        expected.append(logit - times * sample["frequency_penalty"] - (times > 0) * sample["presence_penalty"])
    return expected


@pytest.mark.parametrize(("repetition", "presence", "frequency"), [(1.3, 0, 0), (1, 0.7, 0), (1, 0, 0.4), (0.8, -1, 2)])
def test_penalties_against_their_definition(repetition, presence, frequency):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(30).astype(np.float32)
    prompt, generated = rng.integers(0, 15, 20).tolist(), rng.integers(8, 25, 30).tolist()
    history = np.array([29, *prompt, *generated, 28], np.int32)  # others' tokens around
    sample = records(
        1, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        history_begin=1, history_prompt_end=21, history_end=51,
    )[0]  # fmt: skip
    expected = penalised_by_hand(logits, sample, prompt, generated)
    np.testing.assert_allclose(reference.penalised(logits, sample, history), expected, atol=1e-5)


def test_filters_against_hand_made_cases():
    p = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
    np.testing.assert_array_equal(reference.keep_top_k(p, 2), [0, 0.4, 0.2, 0.2, 0])  # equals of the second stay
    np.testing.assert_array_equal(reference.keep_top_k(p, 0), p)
    np.testing.assert_array_equal(reference.keep_top_k(p, 9), p)
    np.testing.assert_array_equal(reference.keep_top_p(p, 0.3), [0, 0.4, 0, 0, 0])
    np.testing.assert_array_equal(reference.keep_top_p(p, 0.5), [0, 0.4, 0.2, 0, 0])  # of equals, the lower id
    np.testing.assert_array_equal(reference.keep_top_p(p, 0.7), [0, 0.4, 0.2, 0.2, 0])
    np.testing.assert_array_equal(reference.keep_top_p(p, 1e-9), [0, 0.4, 0, 0, 0])
    np.testing.assert_array_equal(reference.keep_top_p(p, 1.0), p)


def test_a_draw_inverts_the_cumulative_distribution():
    p = np.array([0, 1.0, 0, 2.0, 1.0, 0])
    draws = [reference.inverse_cdf(p, u) for u in (0, 0.2499, 0.25, 0.7499, 0.75, np.nextafter(1, 0))]
    assert draws == [1, 1, 3, 3, 4, 4]


# The kernel against the twin

ROWS = 48
VOCAB = 300


@pytest.fixture
def draw(open_backend):
    """Runs samples over random rows of logits, which have doubles and steep tails; returns the logits too."""
    rng = np.random.default_rng(5)
    weight = (rng.standard_normal((VOCAB, 64)) * rng.choice([0.02, 0.1, 0.2], (VOCAB, 1))).astype(np.float32)
    weight[50:60] = weight[150:160]  # equal logits in every row
    program = head(signs(rng, 64, 64), np.ones(64, np.float32), weight)
    backend = build(open_backend("portable", threads=2), program, 64, VOCAB)

    def run(samples: np.ndarray, history: np.ndarray = NONE, suppress: np.ndarray = NONE) -> tuple[StepResult, Floats]:
        batch = every_token(range(ROWS), samples=samples, history=history, suppress=suppress)
        result = backend.run(batch)
        return result, result.logits[:ROWS].copy()

    return run


def random_records(count: int, seed: int, **fields: Any) -> np.ndarray:
    rng = np.random.default_rng(seed)
    samples = records(count, row=rng.integers(0, ROWS, count), token_index=rng.integers(0, 5000, count))
    samples["rng_key"] = rng.integers(0, 2**64, count, np.uint64)
    samples["sample_number"] = rng.integers(0, 100, count)
    for name, value in fields.items():
        samples[name] = value(rng, count) if callable(value) else value
    return samples


def spread(low, high):
    return lambda rng, count: rng.uniform(low, high, count)


def some_of(*values):
    return lambda rng, count: rng.choice(values, count)


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": spread(0.05, 3)},
    "cold": {"temperature": 1e-4},
    "top_k": {"top_k": some_of(1, 2, 3, 10, 50, 299, 300, 5000)},
    "top_p": {"top_p": some_of(1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999)},
    "min_p": {"min_p": some_of(0.001, 0.05, 0.3, 1.0)},
    "all": {
        "temperature": spread(0.3, 2),
        "top_k": some_of(0, 5, 40),
        "top_p": some_of(0.5, 0.9, 1),
        "min_p": some_of(0, 0.01),
    },
}


def accepts(p: np.ndarray, sample: np.void, token: int) -> bool:
    """Whether `token` is the draw but for rounding where two tokens meet on the cumulative distribution."""
    cumulative = np.cumsum(p) / p.sum()
    at = reference.philox_uniform(sample["rng_key"], sample["token_index"], sample["sample_number"])
    before = cumulative[token - 1] if token else 0.0
    return bool(p[token] > 0 and before - 1e-6 <= at <= cumulative[token] + 1e-6)


def check_draws(result: StepResult, logits: Floats, samples: np.ndarray, history: np.ndarray, suppress: np.ndarray):
    equal = 0
    for sample, token in zip(samples, result.token_ids.tolist(), strict=True):
        row = logits[sample["row"]]
        assert accepts(reference.filtered_likelihoods(row, sample, history, suppress), sample, token), sample
        equal += token == reference.sample_row(row, sample, history, suppress)
    assert equal >= len(samples) - 2
    expected = reference.log_softmax(logits)[samples["row"], result.token_ids]
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_of_the_kernel_are_the_twin_s(draw, name):
    samples = random_records(600, len(name), **FILTERS[name])
    result, logits = draw(samples)
    check_draws(result, logits, samples, NONE, NONE)


def test_scores_of_the_kernel_are_the_twin_s(draw):
    """Of any token, several per row; the likeliest token's is what a greedy draw gives, to the bit."""
    samples = random_records(300, 11, scored=1, greedy=1, target=lambda rng, count: rng.integers(0, VOCAB, count))
    result, logits = draw(samples)
    assert result.token_ids.tolist() == logits.argmax(axis=1)[samples["row"]].tolist()
    expected = reference.log_softmax(logits)[samples["row"], samples["target"]]
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-5, atol=2e-6)
    samples["target"] = result.token_ids
    likeliest, _ = draw(samples)
    samples["scored"] = 0
    drawn, _ = draw(samples)
    assert same_bits(likeliest.logprobs, drawn.logprobs) and same_bits(likeliest.token_ids, drawn.token_ids)


def penalty_inputs(count: int, seed: int, **fields: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples with histories of their own (some empty, some without output), and forbidden tokens."""
    rng = np.random.default_rng(seed)
    history, suppress = rng.integers(0, VOCAB, 4000).astype(np.int32), rng.permutation(VOCAB)[:40].astype(np.int32)
    begin = rng.integers(0, 3800, count)
    middle = begin + rng.integers(0, 2, count) * rng.integers(0, 100, count)
    samples = random_records(
        count, seed, history_begin=begin, history_prompt_end=middle,
        history_end=middle + rng.integers(0, 2, count) * rng.integers(0, 100, count),
        suppress_end=rng.integers(0, 40, count), repetition_penalty=some_of(1, 1.2, 0.9),
        presence_penalty=spread(-1, 1), frequency_penalty=spread(-0.5, 1), **fields,
    )  # fmt: skip
    samples["suppress_begin"] = np.minimum(samples["suppress_end"], 7)
    return samples, history, suppress


def test_penalised_draws_of_the_kernel_are_the_twin_s(draw):
    samples, history, suppress = penalty_inputs(600, 1, **FILTERS["all"])
    result, logits = draw(samples, history, suppress)
    check_draws(result, logits, samples, history, suppress)


def test_penalised_arg_max_of_the_kernel_is_the_twin_s(draw):
    samples, history, suppress = penalty_inputs(400, 2, greedy=1)
    result, logits = draw(samples, history, suppress)
    expected = [reference.sample_row(logits[s["row"]], s, history, suppress) for s in samples]
    assert result.token_ids.tolist() == expected
    plain = logits.argmax(axis=1)[samples["row"]]
    assert (result.token_ids != plain).sum() > 30  # penalties did something


def test_forbidden_tokens_are_never_drawn(draw):
    suppress = np.arange(0, VOCAB, 2).astype(np.int32)
    for greedy in (0, 1):
        samples = random_records(400, 9, suppress_end=len(suppress), temperature=5.0, greedy=greedy)
        result, _ = draw(samples, suppress=suppress)
        assert (result.token_ids % 2 == 1).all()


def test_equal_tokens_have_the_top_p_order_of_their_ids(draw):
    """Tokens 50 to 59 have the logits of 150 to 159; a nucleus of one token is the lower of the two."""
    others = np.array([t for t in range(VOCAB) if not (50 <= t < 60 or 150 <= t < 160)], np.int32)
    samples = random_records(200, 3, top_p=1e-9, suppress_end=len(others))
    result, _ = draw(samples, suppress=others)
    assert set(result.token_ids.tolist()) <= set(range(50, 60))
    both, _ = draw(random_records(400, 3, top_k=1, suppress_end=len(others)), suppress=others)
    assert {t >= 150 for t in both.token_ids.tolist()} == {False, True}  # top-k keeps both


def test_a_draw_depends_on_its_own_record_alone(draw):
    samples = random_records(300, 4, **FILTERS["all"])
    together, _ = draw(samples)
    order = np.random.default_rng(0).permutation(300)
    shuffled, _ = draw(samples[order])
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    assert [draw(samples[i : i + 1])[0].token_ids[0] for i in range(20)] == together.token_ids[:20].tolist()


@pytest.mark.parametrize("varied", ["sample_number", "token_index", "rng_key"])
def test_draws_follow_the_distribution(draw, varied):
    """Pearson's chi-square over the 20 likeliest tokens and the rest; six standard deviations are allowed."""
    count = 20000
    samples = records(count, row=1, rng_key=12345)
    samples[varied] = np.arange(count)
    result, logits = draw(samples)
    p = np.exp(reference.log_softmax(logits[1]))
    tops = np.argsort(-p)[:20]
    expected = np.append(p[tops], 1 - p[tops].sum()) * count
    assert expected.min() > 20
    counts = Counter(result.token_ids.tolist())
    observed = np.array([counts[t] for t in tops.tolist()])
    observed = np.append(observed, count - observed.sum())
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert chi_square < 20 + 6 * np.sqrt(2 * 20)


def test_streams_of_neighbouring_numbers_are_not_alike(draw):
    """Two sample numbers agree on a token no more often than chance has it."""
    count = 5000
    draws = []
    for number in (0, 1):
        samples = records(count, row=1, rng_key=7, token_index=np.arange(count), sample_number=number)
        result, logits = draw(samples)
        draws.append(result.token_ids.copy())
    chance = np.sum(np.exp(2 * reference.log_softmax(logits[1])))
    deviation = np.sqrt(chance * (1 - chance) / count)
    assert abs(np.mean(draws[0] == draws[1]) - chance) < 5 * deviation


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", FILTERS)
def test_logits_that_are_not_finite_give_a_logprob_that_is_not(open_backend, bad, name):
    """And harm neither the process nor the rows beside them."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((VOCAB, 64)).astype(np.float32)
    table = signs(rng, 64, 64)
    sick = table.copy()
    sick[0] = bad
    samples = random_records(40, 6, **FILTERS[name])
    results = []
    for rows in (table, sick):
        backend = build(open_backend("portable"), head(rows, np.ones(64, np.float32), weight), 64, VOCAB)
        results.append(backend.run(every_token(range(ROWS), samples=samples, history=NONE, suppress=NONE)))
    well, ill = results
    healthy = samples["row"] != 0
    assert not np.isfinite(ill.logprobs[~healthy]).any() and (~healthy).any()
    assert well.token_ids[healthy].tolist() == ill.token_ids[healthy].tolist()
    assert same_bits(well.logprobs[healthy], ill.logprobs[healthy])


def test_a_temperature_next_to_zero_takes_the_likeliest(draw):
    samples = random_records(50, 8, temperature=1e-300)
    result, logits = draw(samples)
    best = logits[samples["row"]].max(axis=1)
    assert (logits[samples["row"], result.token_ids] == best).all()
