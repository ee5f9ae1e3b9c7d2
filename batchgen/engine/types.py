"""The values that travel through the engine. Names follow vLLM and OpenAI where they have one."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import RowErrorCode

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is generated; fields and semantics as in vLLM's class of the same name.

    `temperature` 0 is greedy. `top_k` 0 is off. `max_tokens` 0 generates nothing.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def without_unused(self) -> "SamplingParams":
        """Equal for parameters that give equal answers: greedy ones do not look at seed and filters."""
        if not self.greedy:
            return self
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


SCORING = SamplingParams(max_tokens=1)
"""Parameters of a sample that scores or embeds: a last token that is looked at, and nothing is drawn."""


@dataclass(frozen=True, slots=True)
class Score:
    """A continuation of `count` tokens to be scored: the last `count - 1` of the prompt, then `last_token`.

    So a prompt is a context (one token at least) and its continuation but for the last token, whose keys nobody reads.
    """

    count: int
    last_token: int


@dataclass(frozen=True, slots=True)
class Pooling:
    """An embedding of the prompt: the final hidden states of all its tokens averaged, or that of the last.

    `normalize`: divided by its length, in the sense of Euclid. Names are vLLM's.
    """

    kind: Literal["last", "mean"]
    normalize: bool = True

    def count(self, prompt_tokens: int) -> int:
        """Of how many of the prompt's last tokens it needs the hidden states."""
        return prompt_tokens if self.kind == "mean" else 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer wanted of a prompt, or the log-probabilities of a given one (`score`), or an embedding (`pooling`).

    `sample_number` selects the random stream: the k-th of several equal rows, or of one row's `n`, is number k.
    `targets` lists the (row_index, sample_index) pairs that receive the answer: more than one where equal rows
    must get equal answers, which are then computed once.
    """

    params: SamplingParams
    targets: tuple[tuple[int, int], ...]
    sample_number: int = 0
    rng_key: int = 0  # filled in by the engine, see `sampler.random_key`
    room: int = 1  # tokens that may be generated, filled in by the engine, see `Admission.room`
    request_hash: str = ""  # see `requests.make_requests`
    score: Score | None = None
    pooling: Pooling | None = None

    def num_logits(self, prompt_tokens: int) -> int:
        """Of how many of the prompt's last tokens it needs the logits, or the hidden states."""
        if self.pooling:
            return self.pooling.count(prompt_tokens)
        return self.score.count if self.score else 1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A distinct prompt (int32 token ids) and every answer that is wanted of it.

    Requests of one `lane` come in an order in which each shares most with the one before it; there may be two, from
    both ends of a plan. `shared_tokens`: leading ones that some other request has, too.
    """

    prompt_token_ids: NDArray[np.int32]
    samples: tuple[Sample, ...]
    lane: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why a row has no answer; the `error` struct of a result."""

    code: RowErrorCode
    message: str


@dataclass(slots=True, eq=False)
class RequestOutput:
    """The answer to one (row, sample). Times are nanoseconds on the engine's monotonic clock.

    `token_ids` (int32) holds the generated tokens, the end token included when one was generated; `logprobs`
    (float32), `token_steps` (int32, engine step) and `token_times` (int64) run parallel to it. `text` has no end
    token and is cut before a stop string. Of a scored continuation these are its tokens, there is no text, and
    `is_greedy` says whether each is the likeliest. `num_cached_tokens` counts prompt tokens whose KV came from another
    row or from a tier below the device; `num_restored_tokens` are the latter. `truncated_tokens` were cut off the
    prompt.
    `request_hash`: equal for equal answers, None where there was nothing to ask.
    """

    row_index: int
    sample_index: int
    finish_reason: FinishReason
    text: str | None = None
    stop_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    token_steps: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    token_times: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    arrived_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    error: RowFailure | None = None
    num_restored_tokens: int = 0
    truncated_tokens: int = 0
    request_hash: str | None = None
    is_greedy: bool | None = None
    embedding: NDArray[np.float32] | None = None

    @property
    def cumulative_logprob(self) -> float:
        return float(np.sum(self.logprobs, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one engine step did and where its time went (nanoseconds; `start_ns` on the engine's clock).

    `num_prefill_context` and `num_decode_context` count the tokens that those of the step attend to, summed over them.
    """

    step: int
    start_ns: int
    duration_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    pages_used: int
    schedule_ns: int
    forward_ns: int
    sample_ns: int
    write_ns: int
    num_prefill_context: int = 0
    num_decode_context: int = 0
