"""How long a job takes, from what its rows ask for and what steps cost (`calibration`).

The tokens of prompts and answers and what they attend to are counted exactly for answers of given lengths. The number
of steps is that of sequences which come and go evenly: first prompts until as many sequences run as may, then as many
steps as the answers take side by side or the longest one has, and at least as many as all tokens fill.

High: every answer is as long as it may be. Low: answers end as often per token as they did in earlier runs of the
model, or, where none is known, after `UNKNOWN_SHARE` of the tokens that they may have. Both are widened by how well the
steps' costs are known.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.calibration import Answers, Calibration, relative_costs, step_costs
from batchgen.engine.scheduler import attended
from batchgen.kernels.base import ModelShape

UNKNOWN_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """What runs, one entry per prompt that does, int64 but for `ends`.

    A prompt of `lengths` tokens is computed `prefills` times, from the `shared`-th token on, and has `answers` answers
    of at most `rooms` tokens; `ends` (bool): the model may end them earlier. `at_once` sequences run in a step, of
    `max_batch_tokens` tokens.
    """

    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    prefills: NDArray[np.int64]
    answers: NDArray[np.int64]
    rooms: NDArray[np.int64]
    ends: NDArray[np.bool_]
    max_batch_tokens: int
    at_once: int

    @property
    def prefill_tokens(self) -> int:
        return int(((self.lengths - self.shared) * self.prefills).sum())


def estimate_seconds(sequences: Sequences, known: Calibration, shape: ModelShape) -> tuple[float, float]:
    """(low, high) seconds from the first step to the last row."""
    costs = step_costs(known, relative_costs(shape))
    short, error_short = costs.of(work(sequences, expected_tokens(sequences, known.answers)))
    long, error_long = costs.of(work(sequences, sequences.rooms.astype(np.float64)))
    return short / (1 + error_short), long * (1 + error_long)


def expected_tokens(sequences: Sequences, answers: Answers) -> NDArray[np.float64]:
    """Mean tokens of each answer: a token is the last with the probability that it was in earlier runs."""
    rooms = sequences.rooms.astype(np.float64)
    if not answers.tokens:
        short = np.maximum(1, UNKNOWN_SHARE * rooms)
    elif not answers.ended:
        short = rooms
    else:
        end = min(answers.ended / answers.tokens, 1.0)
        short = (1 - (1 - end) ** rooms) / end
    return np.where(sequences.ends, short, rooms)


def work(sequences: Sequences, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """The total terms of `calibration.TERMS` when answers have these numbers of tokens.

    The first token of an answer comes with its prompt; each further one is computed from the one before.
    """
    s, further = sequences, tokens - 1
    prefill, decode = float(s.prefill_tokens), float((s.answers * further).sum())
    prefill_context = float((attended(s.shared, s.lengths) * s.prefills).sum())
    decode_context = float((s.answers * further * (s.lengths + tokens / 2)).sum())
    steps = _steps(sequences, prefill, decode, tokens)
    return np.array([steps, prefill, decode, prefill_context, decode_context])


def _steps(sequences: Sequences, prefill: float, decode: float, tokens: NDArray[np.float64]) -> float:
    count = int(sequences.answers.sum())
    if not count:
        return 0.0
    at_once = min(sequences.at_once, count)
    filling = np.ceil(prefill * at_once / count / sequences.max_batch_tokens)
    side_by_side = float((sequences.answers * tokens).sum()) / at_once
    longest = float(tokens.max())
    return float(max(filling - 1 + max(side_by_side, longest), (prefill + decode) / sequences.max_batch_tokens))
