"""What each draw needs: parameters, random key, tokens that penalties look at, tokens that are forbidden."""

import hashlib
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.scheduler import ScheduledSequence, Sequence, StepPlan
from batchgen.engine.types import Sample, SamplingParams
from batchgen.kernels.base import SAMPLE_DTYPE


@dataclass(slots=True, eq=False)
class SamplerInputs:
    """The sampling part of a `StepBatch`: `samples` are one for each of `draws`, then those of `scored`.

    `scored` are tokens of prompts whose log-probabilities are wanted: (sequence, first of them, how many). `pooled` are
    parts whose hidden states are, with where these end; then there is nothing else.
    """

    draws: list[tuple[Sequence, Sample]]
    scored: list[tuple[Sequence, int, int]]
    needs_logits: NDArray[np.bool_]
    samples: NDArray[np.void]
    history: NDArray[np.int32]
    suppress: NDArray[np.int32]
    pooled: list[tuple[ScheduledSequence, int]] = field(default_factory=list)


def random_key(prompt: NDArray[np.int32], params: SamplingParams) -> int:
    """64 bits from the seed, the prompt's tokens and the parameters: nothing about where the row stands."""
    digest = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=8)
    given = [(f.name, getattr(params, f.name)) for f in fields(params) if getattr(params, f.name) != f.default]
    digest.update(repr(given).encode())  # without defaults, so that a new parameter changes nobody's answers
    return int.from_bytes(digest.digest(), "little")


class Sampler:
    """Prepares draws; the drawing itself is a kernel."""

    def __init__(self, eos_token_ids: frozenset[int]):
        self._eos = np.array(sorted(eos_token_ids), np.int32)

    def _inputs(
        self, draws: list[tuple[Sequence, Sample]], wanting: list[tuple[ScheduledSequence, int]]
    ) -> SamplerInputs:
        """With the tokens of prompts that are scored filled in, and the end of `wanting`'s rows of logits given."""
        parts = [(s, end, s.num_logits - s.reaches_end) for s, end in wanting if s.num_logits > s.reaches_end]
        scored = [(s.sequence, s.start + s.count - s.num_logits + 1, count) for s, _, count in parts]
        samples = np.zeros(len(draws) + sum(count for _, _, count in parts), SAMPLE_DTYPE)
        needs_logits = np.zeros(sum(s.num_logits for s, _ in wanting), bool)
        samples["greedy"] = 1
        if parts:
            of_prompts = samples[len(draws) :]
            of_prompts["scored"] = 1
            of_prompts["row"] = np.concatenate([np.arange(c) + end - s.num_logits for s, end, c in parts])
            of_prompts["target"] = np.concatenate([q.token_ids[first : first + c] for q, first, c in scored])
            needs_logits[of_prompts["row"]] = True
        return SamplerInputs(draws, scored, needs_logits, samples, np.zeros(0, np.int32), self._eos)

    def prepare(self, plan: StepPlan) -> SamplerInputs:
        """One draw per sequence that reaches its last token, or per sample where a prompt has just been computed."""
        ends = np.cumsum([s.num_logits for s in plan.scheduled]).tolist()
        wanting = [(s, end) for s, end in zip(plan.scheduled, ends, strict=True) if s.num_logits]
        if wanting and wanting[0][0].sequence.request.samples[0].pooling:
            return replace(self._inputs([], []), needs_logits=np.zeros(ends[-1], bool), pooled=wanting)
        done = [(s.sequence, end - 1) for s, end in wanting if s.reaches_end]
        draws = [(q, row, sample) for q, row in done for sample in ((q.sample,) if q.sample else q.request.samples)]
        inputs = self._inputs([(q, sample) for q, _, sample in draws], wanting)
        inputs.samples["row"][: len(draws)] = [row for _, row, _ in draws]
        history: list[NDArray[np.int32]] = []
        for i, (sequence, sample) in enumerate(inputs.draws):
            forbid_eos = sequence.num_generated < sample.params.min_tokens
            if sample.score is not None:
                inputs.samples[i]["scored"], inputs.samples[i]["target"] = 1, sample.score.last_token
                inputs.needs_logits[inputs.samples["row"][i]] = True
            elif forbid_eos or sample.params.has_penalties or not sample.params.greedy:
                self._describe(inputs.samples[i], sequence, sample, forbid_eos, history)
                inputs.needs_logits[inputs.samples["row"][i]] = True
        if history:
            inputs.history = np.concatenate(history)
        return inputs

    def _describe(
        self, record: np.void, sequence: Sequence, sample: Sample, forbid_eos: bool, history: list[NDArray[np.int32]]
    ) -> None:
        params = sample.params
        record["greedy"] = params.greedy
        record["temperature"], record["top_k"] = params.temperature, params.top_k
        record["top_p"], record["min_p"] = params.top_p, params.min_p
        record["suppress_end"] = len(self._eos) if forbid_eos else 0
        if not params.greedy:
            record["rng_key"] = sample.rng_key
            record["sample_number"], record["token_index"] = sample.sample_number, sequence.num_generated
        if params.has_penalties:
            begin = sum(len(h) for h in history)
            history.append(sequence.token_ids[: sequence.num_tokens])
            record["history_begin"], record["history_end"] = begin, begin + sequence.num_tokens
            record["history_prompt_end"] = begin + sequence.num_prompt_tokens
            record["repetition_penalty"] = params.repetition_penalty
            record["presence_penalty"] = params.presence_penalty
            record["frequency_penalty"] = params.frequency_penalty
