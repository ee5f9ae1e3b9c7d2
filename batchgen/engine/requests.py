"""Requests of a plan, made as they are asked for."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import PrefixPlan
from batchgen.engine.prompt_table import PromptTable
from batchgen.engine.run_order import RunOrder
from batchgen.engine.types import Pooling, Request, Sample, SamplingParams, Score

CHUNK_REQUESTS = 1 << 14
"""Requests whose place in the plan is turned into Python's numbers at a time."""


@dataclass(frozen=True, slots=True)
class RowWish:
    """What a row asks for: `n` answers under `params`; `own_seed` when the seed is a value of the row itself.

    Or that a continuation is scored, as the row's result number `sample_index`, or an embedding by `pooling`.
    """

    params: SamplingParams
    n: int
    own_seed: bool
    score: Score | None = None
    sample_index: int = 0
    pooling: Pooling | None = None


def make_requests(
    table: PromptTable,
    plan: PrefixPlan,
    order: RunOrder,
    wish: Callable[[int], RowWish],
    *,
    sharing: bool = True,
    root: bytes = b"",
) -> Iterator[Request]:
    """The requests in their order; `wish` is asked once per position of the table.

    Equal prompts become one request. Without `sharing` every answer is a request of its own, with the same random
    numbers as it has with sharing. A sample's `request_hash` is 32 hex digits, equal for equal answers: of `root` (the
    model and the arithmetic), the prompt's tokens, the parameters and the sample number, not of where its rows stand.
    """
    for begin, end, lane in _places(order):
        members = plan.order[begin:end].tolist()
        prompt, samples = table.prompt(members[0]), _join_samples(table, members, wish)
        request = Request(prompt, _hashed(samples, prompt, root), lane, _shared_tokens(plan, begin, end))
        if sharing:
            yield request
        else:
            for sample in request.samples:
                yield from (replace(request, samples=(replace(sample, targets=(t,)),)) for t in sample.targets)


def _places(order: RunOrder) -> Iterator[tuple[int, int, int]]:
    """(begin, end, lane) of each request."""
    for first in range(0, len(order), CHUNK_REQUESTS):
        part = slice(first, first + CHUNK_REQUESTS)
        yield from zip(order.begins[part].tolist(), order.ends[part].tolist(), order.lanes[part].tolist(), strict=True)


def _shared_tokens(plan: PrefixPlan, begin: int, end: int) -> int:
    """What a prompt has in common with one of its neighbours in the plan, so with any other prompt."""
    return int(np.max(plan.shared[[begin, end]] if end < len(plan.shared) else plan.shared[begin]))


def _join_samples(table: PromptTable, members: list[int], wish: Callable[[int], RowWish]) -> tuple[Sample, ...]:
    """The k-th of several equal rows draws from the k-th streams; rows that must agree share one sample."""
    numbers: dict[SamplingParams, int] = {}
    targets: dict[tuple[SamplingParams, int, Score | None, Pooling | None], list[tuple[int, int]]] = {}
    for position in members:
        row, asked = int(table.row_index[position]), wish(position)
        params = asked.params.without_unused()
        first = 0 if asked.own_seed else numbers.get(params, 0)
        numbers[params] = first + asked.n
        for k in range(asked.n):
            number = 0 if params.greedy else first + k
            key = (params, number, asked.score, asked.pooling)
            targets.setdefault(key, []).append((row, asked.sample_index + k))
    return tuple(
        Sample(params, tuple(rows), number, score=score, pooling=pooling)
        for (params, number, score, pooling), rows in targets.items()
    )


def _hashed(samples: tuple[Sample, ...], prompt: NDArray[np.int32], root: bytes) -> tuple[Sample, ...]:
    common = hashlib.blake2b(root, digest_size=16)
    common.update(prompt.astype("<i4").tobytes())
    hashed = []
    for sample in samples:
        digest = common.copy()
        digest.update(repr(_asked(sample)).encode())
        hashed.append(replace(sample, request_hash=digest.hexdigest()))
    return tuple(hashed)


NOT_ASKED = {"params", "targets", "request_hash", "rng_key", "room"}
"""Fields of a sample that are no part of what it asks for, or hashed by themselves."""


def _asked(sample: Sample) -> list[tuple[str, Any]]:
    """What a sample asks for, without defaults, so that a new parameter changes nobody's hash."""
    params: list[tuple[Any, Field[Any]]] = [(sample.params, f) for f in fields(sample.params)]
    others = [(sample, f) for f in fields(sample) if f.name not in NOT_ASKED]
    return [(f.name, getattr(of, f.name)) for of, f in params + others if getattr(of, f.name) != f.default]
