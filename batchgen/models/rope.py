"""Rotary embedding (Su et al. 2021): the frequencies of a head's pairs of dimensions, also of stretched contexts."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["none", "linear", "llama3", "yarn", "longrope"]
KINDS: tuple[Kind, ...] = ("none", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """One table of angles. `dimensions` of a head are rotated, in pairs; the others stay as they are.

    `factor`: how often the original context goes into the model's. `attention_factor` multiplies queries and keys.
    `low` and `high` are what llama3 calls frequency factors, and YaRN beta_slow and beta_fast: turns within the
    original context below which a frequency is divided by the factor, and above which it stays. `divisors` are
    longrope's.
    """

    dimensions: int
    theta: float = 10000.0
    kind: Kind = "none"
    factor: float = 1.0
    original_context: int = 0
    low: float = 1.0
    high: float = 1.0
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = field(default=(), repr=False)

    def frequencies(self) -> Floats:
        """Radians per position, (dimensions / 2,)."""
        half = self.dimensions // 2
        plain = self.theta ** (-np.arange(half, dtype=np.float64) / max(half, 1))
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain)
        return plain / np.array(self.divisors or 1.0)

    def _llama3(self, plain: Floats) -> Floats:
        """Llama 3.1's: by turns within the original context, with a linear passage between."""
        turns = self.original_context * plain / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (1 - kept) * plain / self.factor + kept * plain

    def _yarn(self, plain: Floats) -> Floats:
        """YaRN (Peng et al. 2023): the same, linear in the number of the pair."""
        first, last = (self._pair_of_turns(turns) for turns in (self.high, self.low))
        begin, end = max(math.floor(first), 0), min(math.ceil(last), self.dimensions - 1)
        stretched = np.clip((np.arange(len(plain)) - begin) / max(end - begin, 1e-3), 0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def _pair_of_turns(self, turns: float) -> float:
        return self.dimensions * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def table(self, positions: int, head_dim: int, factors: NDArray[np.float32] | None = None) -> tuple[Floats, Floats]:
        """Cosines and sines (positions, head_dim / 2); the angle of a pair that is not rotated is 0.

        `factors` divide the frequencies, as a model file's own tensor says.
        """
        frequencies = self.frequencies() if factors is None else self.frequencies() / factors
        angles = np.zeros((positions, head_dim // 2))
        scale = np.ones(head_dim // 2)
        angles[:, : len(frequencies)] = np.arange(positions, dtype=np.float64)[:, None] * frequencies
        scale[: len(frequencies)] = self.attention_factor
        return np.cos(angles) * scale, np.sin(angles) * scale


def yarn_attention_factor(factor: float) -> float:
    """YaRN's recommended temperature, as what multiplies both queries and keys."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE's (Ding et al. 2024)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def rotary_order(head_dim: int, dimensions: int, interleaved: bool) -> NDArray[np.int64]:
    """The order of a head's dimensions in which number i and number i + head_dim / 2 are rotated together."""
    numbers, half = np.arange(head_dim), dimensions // 2
    rotated = numbers[:dimensions].reshape(-1, 2).T if interleaved else numbers[:dimensions].reshape(2, -1)
    rest = numbers[dimensions:].reshape(2, -1)
    assert rotated.shape[1] == half
    return np.concatenate([rotated, rest], axis=1).ravel()
