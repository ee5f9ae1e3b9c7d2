"""What each draw is told."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from batchgen.engine.sampler import Sampler, SamplerInputs, random_key
from batchgen.engine.scheduler import ScheduledSequence, Sequence, StepPlan
from batchgen.engine.types import Request, Sample, SamplingParams

GREEDY = SamplingParams()
HOT = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=3)
PENALISED = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.25)


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def scheduled(
    prompt: NDArray[np.int32], params: list[SamplingParams], generated: tuple[int, ...] = (), wants: bool = True
) -> ScheduledSequence:
    """A prompt that is complete, with a sample per parameters; or one sample after these tokens."""
    samples = tuple(Sample(p, ((0, k),), k) for k, p in enumerate(params))
    tokens = np.concatenate([prompt, ids(*generated), np.zeros(8, np.int32)])
    known = len(prompt) + len(generated)
    sequence = Sequence(Request(prompt, samples), tokens, known, 0, samples[0] if generated else None)
    return ScheduledSequence(sequence, 0, known, wants)


def prepare(*parts: ScheduledSequence, eos: frozenset[int] = frozenset({9, 2})) -> SamplerInputs:
    return Sampler(eos).prepare(StepPlan(list(parts)))


# The random key


def test_key_is_the_same_for_the_same_row() -> None:
    assert random_key(ids(1, 2, 3), HOT) == random_key(np.array([1, 2, 3], np.int64), replace(HOT))
    assert 0 <= random_key(ids(1, 2, 3), HOT) < 2**64


def test_key_is_what_it_was_in_earlier_versions() -> None:
    """A change here changes every sampled answer; a job that is resumed would mix old and new."""
    assert random_key(ids(1, 2, 3), SamplingParams(temperature=0.7, seed=3)) == 18164364159483231322


@pytest.mark.parametrize("changed", [replace(HOT, seed=4), replace(HOT, temperature=0.8), replace(HOT, max_tokens=5)])
def test_key_changes_with_seed_and_parameters(changed: SamplingParams) -> None:
    assert random_key(ids(1, 2), HOT) != random_key(ids(1, 2), changed)


def test_key_changes_with_the_prompt() -> None:
    prompts = [ids(), ids(1), ids(1, 2), ids(2, 1), ids(258), ids(0, 1)]
    assert len({random_key(prompt, HOT) for prompt in prompts}) == len(prompts)


def test_key_does_not_know_the_row_or_its_place() -> None:
    """Rows with other numbers, in another place of the step and after other rows."""
    alone = prepare(scheduled(ids(1, 2), [HOT]))
    part = scheduled(ids(1, 2), [HOT])
    sample = Sample(HOT, ((77, 5),), 0, rng_key=random_key(ids(1, 2), HOT))
    moved = Sequence(Request(ids(1, 2), (sample,)), part.sequence.token_ids, 2, arrived_ns=99)
    later = prepare(scheduled(ids(4), [PENALISED]), ScheduledSequence(moved, 0, 2, True))
    assert alone.samples[0]["rng_key"] == 0  # nobody has filled it in
    assert later.samples[1]["rng_key"] == sample.rng_key


# Draws


def test_greedy_draws_need_no_logits() -> None:
    found = prepare(scheduled(ids(1), [GREEDY]), scheduled(ids(2), [GREEDY], generated=(5,)))
    assert found.needs_logits.tolist() == [False, False]
    assert found.samples["greedy"].tolist() == [1, 1]
    assert found.samples["row"].tolist() == [0, 1]
    assert len(found.history) == 0


def test_top_k_of_one_needs_no_logits() -> None:
    assert prepare(scheduled(ids(1), [replace(HOT, top_k=1)])).needs_logits.tolist() == [False]


def test_logits_are_wanted_only_where_needed() -> None:
    parts = [[GREEDY], [HOT], [GREEDY], [PENALISED], [replace(GREEDY, min_tokens=1)], [GREEDY, HOT]]
    found = prepare(*(scheduled(ids(1), params) for params in parts))
    assert found.needs_logits.tolist() == [False, True, False, True, True, True]
    assert found.samples["row"].tolist() == [0, 1, 2, 3, 4, 5, 5]
    assert found.samples["greedy"].tolist() == [1, 0, 1, 1, 1, 1, 0]


def test_sequences_that_are_not_at_their_last_token_draw_nothing() -> None:
    found = prepare(scheduled(ids(1), [GREEDY], wants=False), scheduled(ids(2), [HOT]))
    assert [sequence.request.prompt_token_ids.tolist() for sequence, _ in found.draws] == [[2]]
    assert (found.samples["row"].tolist(), found.needs_logits.tolist()) == ([0], [True])


def test_nobody_draws() -> None:
    found = prepare(scheduled(ids(1), [HOT], wants=False))
    assert (len(found.draws), len(found.samples), len(found.needs_logits)) == (0, 0, 0)


def test_a_fresh_prompt_draws_for_all_samples_and_later_each_for_itself() -> None:
    first = prepare(scheduled(ids(1, 2), [HOT, HOT, HOT]))
    assert first.samples["sample_number"].tolist() == [0, 1, 2]
    assert first.samples["token_index"].tolist() == [0, 0, 0]
    assert [sample.sample_number for _, sample in first.draws] == [0, 1, 2]
    later = prepare(scheduled(ids(1, 2), [HOT, HOT, HOT], generated=(7, 8)))
    assert (later.samples["sample_number"].tolist(), later.samples["token_index"].tolist()) == ([0], [2])


def test_parameters_reach_the_record() -> None:
    record = prepare(scheduled(ids(1), [HOT])).samples[0]
    assert [record[name].item() for name in ("temperature", "top_p", "top_k", "min_p")] == [0.7, 0.9, 40, 0.05]


def test_history_holds_prompt_and_generated_tokens_of_each_penalised_draw() -> None:
    found = prepare(
        scheduled(ids(1, 2), [PENALISED], generated=(3,)),
        scheduled(ids(4), [HOT]),
        scheduled(ids(5, 6, 7), [PENALISED, GREEDY, PENALISED]),
    )
    assert found.history.tolist() == [1, 2, 3, 5, 6, 7, 5, 6, 7]
    names = ("history_begin", "history_prompt_end", "history_end")
    spans = [tuple(int(record[name]) for name in names) for record in found.samples]
    assert spans == [(0, 2, 3), (0, 0, 0), (3, 6, 6), (0, 0, 0), (6, 9, 9)]
    scales = [found.samples[0][f"{name}_penalty"].item() for name in ("repetition", "presence", "frequency")]
    assert scales == [1.2, 0.5, -0.25]


def test_end_tokens_are_suppressed_before_min_tokens() -> None:
    params = replace(GREEDY, min_tokens=2)
    found = prepare(
        scheduled(ids(1), [params]),
        scheduled(ids(1), [params], generated=(5,)),
        scheduled(ids(1), [params], generated=(5, 6)),
    )
    assert found.suppress.tolist() == [2, 9]
    spans = list(zip(found.samples["suppress_begin"].tolist(), found.samples["suppress_end"].tolist(), strict=True))
    assert spans == [(0, 2), (0, 2), (0, 0)]
    assert found.needs_logits.tolist() == [True, True, False]
