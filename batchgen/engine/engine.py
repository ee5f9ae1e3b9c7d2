"""The engine: requests in, finished answers out, one step at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.cache_tiers import CacheTiers
from batchgen.engine.isolation import NOT_OF_A_ROW, Ran, StepOutcome, StepRunner, row_failure
from batchgen.engine.planner import Admission
from batchgen.engine.sampler import Sampler, random_key
from batchgen.engine.scheduler import ScheduledSequence, Scheduler, Sequence, StepPlan
from batchgen.engine.types import FinishReason, Pooling, Request, RequestOutput, RowFailure, Sample, Score, StepRecord
from batchgen.errors import RowErrorCode
from batchgen.kernels.base import Backend


class TextStream(Protocol):
    """Decodes tokens one by one."""

    def push(self, token_id: int) -> str: ...


class Detokenizer(Protocol):
    """Token ids to text."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def decode(self, ids: NDArray[np.int32]) -> str: ...
    def incremental(self) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Tokens and sequences per step, KV pages and their size, the model's context and vocabulary.

    `max_num_logits`: see `Scheduler`.
    """

    max_batch_tokens: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    context_length: int
    vocab_size: int
    prefix_sharing: bool = True
    prefill_first: bool = False
    max_num_logits: int | None = None


@dataclass(slots=True, eq=False)
class StopWatcher:
    """The text of a sequence that has stop strings, as far as it is known."""

    stream: TextStream
    text: str = ""


class Engine:
    """`submit` requests in the order of their plan, `step` while `has_work`; a step returns the answers it finished.

    Bad requests, and those whose computation fails, come back as answers with `finish_reason="error"`. Times are
    nanoseconds of `clock`. `tiers` keep prefixes below the device; they are the caller's to close.
    """

    def __init__(
        self,
        backend: Backend,
        detokenizer: Detokenizer,
        limits: EngineLimits,
        *,
        tiers: CacheTiers | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self._backend, self._detokenizer, self._limits, self._clock = backend, detokenizer, limits, clock
        self._tiers = tiers
        self.admission = Admission(limits.context_length, limits.vocab_size, limits.num_pages * limits.page_size)
        self.blocks = BlockManager(limits.num_pages, tiers.let_go if tiers else None)
        self.scheduler = Scheduler(
            self.blocks,
            page_size=limits.page_size,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            prefix_sharing=limits.prefix_sharing,
            prefill_first=limits.prefill_first,
            tiers=tiers,
            max_num_logits=limits.max_num_logits,
        )
        sampler = Sampler(detokenizer.eos_token_ids)
        self._runner = StepRunner(backend, sampler, limits.page_size, limits.prefix_sharing, clock)
        self._step = 0
        self._ready: list[RequestOutput] = []
        self._watchers: dict[int, StopWatcher] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._ready) or self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request. What cannot be answered is refused at once and returned by the next `step`."""
        now, prompt = self._clock(), request.prompt_token_ids
        samples = []
        for sample in request.samples:
            failure = self.admission.refusal(prompt, sample.params, sample.score)
            if failure or sample.params.max_tokens == 0:
                self._answer_at_once(request, sample, failure, now)
            else:
                key = 0 if sample.params.greedy else random_key(prompt, sample.params)
                samples.append(replace(sample, rng_key=key, room=self.admission.room(len(prompt), sample.params)))
        if samples:
            tokens = np.zeros(len(prompt) + samples[0].room, np.int32)
            tokens[: len(prompt)] = prompt
            self.scheduler.add(Sequence(replace(request, samples=tuple(samples)), tokens, len(prompt), now))
            if self._tiers:
                self._tiers.expect(prompt)

    def step(self) -> tuple[list[RequestOutput], StepRecord | None]:
        """Run one step; returns finished answers and what the step did (None when nothing was computed)."""
        outputs, self._ready = self._ready, []
        if not self.scheduler.has_work:
            return outputs, None
        start = self._clock()
        plan = self.scheduler.schedule(start)
        self._restore(plan)
        outcome = self._runner.run(plan)
        parts, scheduled, computed = outcome.scheduled, outcome.started_ns, self._clock()
        self._offer(parts)
        pages = self.blocks.num_used
        tokens, prefill = sum(s.count for s in parts), sum(s.num_prompt_tokens for s in parts)
        contexts = [s.context for s in parts]
        outputs += self._update(outcome, computed)
        if not parts:
            return outputs, None
        end = self._clock()
        record = StepRecord(
            step=self._step,
            start_ns=start,
            duration_ns=end - start,
            num_prefill_tokens=prefill,
            num_decode_tokens=tokens - prefill,
            num_seqs=len(parts),
            pages_used=pages,
            schedule_ns=scheduled - start,
            forward_ns=computed - scheduled,
            sample_ns=end - computed,
            write_ns=0,
            num_prefill_context=sum(prompt for prompt, _ in contexts),
            num_decode_context=sum(others for _, others in contexts),
        )
        self._step += 1
        return outputs, record

    def _restore(self, plan: StepPlan) -> None:
        """Put into pages what the tiers below had of them."""
        for part in plan.restored:
            assert self._tiers is not None
            for page, data in zip(part.pages, part.content, strict=True):
                self._backend.write_page(page, data)
            self._tiers.hold(part.sequence.request.prompt_token_ids, part.first, part.pages)

    def _offer(self, parts: list[ScheduledSequence]) -> None:
        """Tell the tiers below of the pages that the step has filled with what several requests share."""
        if self._tiers is None:
            return
        size = self._limits.page_size
        for part in parts:
            request = part.sequence.request
            first, end = part.start // size, min(part.start + part.count, request.shared_tokens) // size
            if first < end:
                self._tiers.computed(request.prompt_token_ids, first, part.sequence.block_table[first:end])

    def _answer_at_once(self, request: Request, sample: Sample, failure: RowFailure | None, now: int) -> None:
        reason: FinishReason = "error" if failure else "length"
        for row, number in sample.targets:
            output = RequestOutput(row, number, reason, None if failure else "", error=failure)
            output.request_hash, output.num_prompt_tokens = sample.request_hash, len(request.prompt_token_ids)
            output.arrived_ns = output.scheduled_ns = output.first_token_ns = output.finished_ns = now
            self._ready.append(output)

    def _update(self, outcome: StepOutcome, now: int) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for ran in outcome.ran:
            self._take_scores(ran, now)
            outputs += self._take_hidden(ran, now)
            drawn = slice(len(ran.sampling.draws))
            tokens, logprobs = ran.result.token_ids[drawn].tolist(), ran.result.logprobs[drawn].tolist()
            for sequence, token, logprob in zip(self._forked(ran.sampling.draws), tokens, logprobs, strict=True):
                outputs += self._take(sequence, token, logprob, now)
        outputs += self._give_up(outcome, now)
        self.scheduler.end_step()
        return outputs

    def _give_up(self, outcome: StepOutcome, now: int) -> list[RequestOutput]:
        """Answer those that cannot be computed, and compute those anew that are held up by them."""
        outputs: list[RequestOutput] = []
        if outcome.failed:
            self.scheduler.abandon([sequence for sequence, _ in outcome.failed], outcome.held_up)
        for sequence, failure in outcome.failed:
            if sequence.sample is not None:
                ids = sequence.generated.copy()
                outputs += self._outputs(sequence, RequestOutput(0, 0, "error", token_ids=ids, error=failure), now)
                continue
            for sample in sequence.request.samples:
                self._answer_at_once(sequence.request, sample, failure, now)
        return outputs

    def _take_scores(self, ran: Ran, now: int) -> None:
        """Log-probabilities of tokens of prompts: they come after those of the draws."""
        begin = len(ran.sampling.draws)
        for sequence, first, count in ran.sampling.scored:
            part = slice(begin, begin + count)
            hits = ran.result.token_ids[part] == sequence.token_ids[first : first + count]
            self.scheduler.append_scores(sequence, ran.result.logprobs[part].tolist(), hits.tolist(), self._step, now)
            begin += count

    def _take_hidden(self, ran: Ran, now: int) -> list[RequestOutput]:
        """Add up what is pooled; who has reached its end has its embedding."""
        outputs: list[RequestOutput] = []
        for part, end in ran.sampling.pooled:
            self.scheduler.add_hidden(part.sequence, ran.result.hidden[end - part.num_logits : end])
            if part.reaches_end:
                outputs += self._finish_pooled(part.sequence, now)
        return outputs

    def _take(self, sequence: Sequence, token: int, logprob: float, now: int) -> list[RequestOutput]:
        assert sequence.sample is not None
        if (score := sequence.sample.score) is not None:
            self.scheduler.append_scores(sequence, [logprob], [token == score.last_token], self._step, now)
            return self._finish_scored(sequence, score, now)
        self.scheduler.append_token(sequence, token, logprob, self._step, now)
        try:
            return self._finish_if_done(sequence, token, now)
        except NOT_OF_A_ROW:
            raise
        except Exception as error:  # in its text or stop strings
            return self._finish(sequence, "error", None, now, row_failure(error))

    def _forked(self, draws: list[tuple[Sequence, Sample]]) -> list[Sequence]:
        """The sequence of each draw; a prompt that has just been computed becomes one sequence per sample."""
        sequences: list[Sequence] = []
        seen: set[int] = set()
        for sequence, _ in draws:
            if sequence.sample is not None and id(sequence) not in seen:
                sequences.append(sequence)
            elif id(sequence) not in seen:
                seen.add(id(sequence))
                sequences += self.scheduler.fork(sequence, sequence.request.samples)
        return sequences

    def _finish_if_done(self, sequence: Sequence, token: int, now: int) -> list[RequestOutput]:
        assert sequence.sample is not None
        params = sequence.sample.params
        if not np.isfinite(sequence.logprobs[-1]):
            return self._finish(sequence, "error", None, now, _not_a_number(sequence))
        if token in self._detokenizer.eos_token_ids and not params.ignore_eos:
            return self._finish(sequence, "stop", None, now)
        stop = self._watch(sequence, token) if params.stop else None
        if stop is not None:
            return self._finish(sequence, "stop", stop, now)
        if sequence.num_generated >= sequence.room:
            return self._finish(sequence, "length", None, now)
        return []

    def _watch(self, sequence: Sequence, token: int) -> str | None:
        """The stop string that the text now contains, the earliest one; the watcher's text is cut before it."""
        assert sequence.sample is not None
        watcher = self._watchers.setdefault(id(sequence), StopWatcher(self._detokenizer.incremental()))
        known = len(watcher.text)
        watcher.text += watcher.stream.push(token)
        if sequence.num_generated < sequence.sample.params.min_tokens:
            return None
        found = [(watcher.text.find(s, max(0, known - len(s) + 1)), s) for s in sequence.sample.params.stop]
        hits = sorted((at, -len(s), s) for at, s in found if at >= 0)
        if not hits:
            return None
        at, _, stop = hits[0]
        watcher.text = watcher.text[:at]
        return stop

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: str | None, now: int, failure: RowFailure | None = None
    ) -> list[RequestOutput]:
        text = None if failure else self._text(sequence, reason, stop)
        self.scheduler.finish(sequence)
        answer = RequestOutput(0, 0, reason, text, stop, token_ids=sequence.generated.copy(), error=failure)
        return self._outputs(sequence, answer, now)

    def _finish_scored(self, sequence: Sequence, score: Score, now: int) -> list[RequestOutput]:
        self.scheduler.finish(sequence)
        prompt, count = sequence.request.prompt_token_ids, score.count
        ids = np.append(prompt[len(prompt) - count + 1 :], np.int32(score.last_token))
        if not np.isfinite(sequence.logprobs[-count:]).all():
            failure = RowFailure("internal_error", "the model's logits are not finite where the continuation is scored")
            return self._outputs(sequence, RequestOutput(0, 0, "error", token_ids=ids, error=failure), now)
        answer = RequestOutput(0, 0, "stop", token_ids=ids, is_greedy=all(sequence.hits[-count:]))
        return self._outputs(sequence, answer, now)

    def _finish_pooled(self, sequence: Sequence, now: int) -> list[RequestOutput]:
        [sample] = sequence.request.samples
        assert sample.pooling is not None and sequence.hidden_sum is not None
        self.scheduler.fork(sequence, sequence.request.samples)
        self.scheduler.finish(sequence)
        answer = RequestOutput(0, 0, "stop")
        answer.embedding = pooled(sequence.hidden_sum, sequence.num_prompt_tokens, sample.pooling)
        if not np.isfinite(answer.embedding).all():
            failure = RowFailure("internal_error", "the model's hidden states are not finite")
            answer = RequestOutput(0, 0, "error", error=failure)
        return self._outputs(sequence, answer, now)

    def _outputs(self, sequence: Sequence, answer: RequestOutput, now: int) -> list[RequestOutput]:
        """The answer for each that asked for it, with its counts and times: those of the last tokens are its own."""
        assert sequence.sample is not None
        self._watchers.pop(id(sequence), None)
        kept = slice(len(sequence.logprobs) - len(answer.token_ids), None)
        answer = replace(
            answer,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_prompt_tokens,
            logprobs=np.array(sequence.logprobs[kept], np.float32),
            token_steps=np.array(sequence.token_steps[kept], np.int32),
            token_times=np.array(sequence.token_times[kept], np.int64),
            arrived_ns=sequence.arrived_ns,
            scheduled_ns=sequence.scheduled_ns,
            first_token_ns=sequence.token_times[0] if sequence.token_times else now,
            finished_ns=now,
            request_hash=sequence.sample.request_hash,
        )
        outputs = [replace(answer, row_index=row, sample_index=number) for row, number in sequence.sample.targets]
        if sequence.sample.targets[0] == sequence.request.samples[0].targets[0]:
            # The others found the whole prompt computed.
            outputs[0].num_cached_tokens = sequence.num_cached_tokens
            outputs[0].num_restored_tokens = sequence.num_restored_tokens
        return outputs

    def _text(self, sequence: Sequence, reason: FinishReason, stop: str | None) -> str:
        if stop is not None:
            return self._watchers[id(sequence)].text
        ids = sequence.generated
        ended = reason == "stop" and len(ids) and int(ids[-1]) in self._detokenizer.eos_token_ids
        return self._detokenizer.decode(ids[:-1] if ended else ids)


def pooled(hidden_sum: NDArray[np.float64], prompt_tokens: int, pooling: Pooling) -> NDArray[np.float32]:
    """(hidden size,): the average, of length 1 if that is asked for."""
    mean = hidden_sum / pooling.count(prompt_tokens)
    return (mean / np.sqrt(np.sum(np.square(mean))) if pooling.normalize else mean).astype(np.float32)


def _not_a_number(sequence: Sequence) -> RowFailure:
    code: RowErrorCode = "internal_error"
    return RowFailure(code, f"the model's logits are not finite at generated token {sequence.num_generated - 1}")
