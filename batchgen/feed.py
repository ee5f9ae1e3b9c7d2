"""The requests of a job, as the engine takes them: in their order, without what has been answered before."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import polars as pl

from batchgen.engine.requests import make_requests
from batchgen.engine.types import Request, RequestOutput
from batchgen.head_start import Reading
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.reuse import ASKED
from batchgen.prepare import PreparedJob

CHUNK = 1024
"""Results looked up in the checkpoint at a time."""


class Feed:
    """First the requests of `job`; then, if that is the head of a table, those of all rows, which `reading` makes."""

    def __init__(self, job: PreparedJob, reading: Reading[PreparedJob] | None, checkpoint: Checkpoint):
        self.job, self._reading, self._checkpoint = job, reading, checkpoint
        self._first_row = 0  # those before are taken care of
        self._pending = self._requests()
        self._used_up = False

    @property
    def is_reading(self) -> bool:
        """Whether there are rows that are not known yet."""
        return self._reading is not None

    def take(self, most: int) -> Iterator[Request]:
        """The next requests."""
        for _ in range(most):
            request = next(self._pending, None)
            if request is None:
                self._used_up = True
                return
            yield request

    def go_on(self, wait_s: float) -> bool:
        """Turn to all rows when those of the head are used up and the others are known, after `wait_s` at most.

        Then True, and `job` is another one.
        """
        if self._reading is None or not self._used_up or not self._reading.is_ready(wait_s):
            return False
        self._first_row = self.job.head_rows
        self.job, self._reading, self._used_up = self._reading.result(), None, False
        self._pending = self._requests()
        return True

    def failed_rows(self) -> Iterator[list[RequestOutput]]:
        """The results of rows of `job` that cannot be answered, some at a time."""
        rows = ((row, sample) for row in self.job.prompts.failures for sample in range(row.samples))
        while chunk := list(islice(rows, CHUNK)):
            done = self._are_done([(row.row_index, sample) for row, sample in chunk])
            left = [place for place, known in zip(chunk, done, strict=True) if not known]
            yield [RequestOutput(row.row_index, sample, "error", error=row.failure) for row, sample in left]

    def _requests(self) -> Iterator[Request]:
        requests = job_requests(self.job, self._checkpoint.identity)
        return self._left_of(requests) if len(self._checkpoint.done) or self._first_row else requests

    def _left_of(self, requests: Iterator[Request]) -> Iterator[Request]:
        while chunk := list(islice(requests, CHUNK)):
            targets = [target for request in chunk for sample in request.samples for target in sample.targets]
            done = iter(self._are_done(targets))
            for request in chunk:
                samples = [(s, tuple(target for target in s.targets if not next(done))) for s in request.samples]
                left = tuple(replace(sample, targets=targets) for sample, targets in samples if targets)
                if left:
                    yield replace(request, samples=left)

    def _are_done(self, targets: list[tuple[int, int]]) -> list[bool]:
        rows, samples = np.array(targets, np.int64).reshape(-1, 2).T
        return ((rows < self._first_row) | self._checkpoint.is_done(rows, samples)).tolist()


def job_requests(job: PreparedJob, identity: dict[str, Any]) -> Iterator[Request]:
    """All requests of the plan. Their hashes tell models and arithmetic apart, not what a spec says or where it is."""
    prompts, sharing = job.prompts, job.spec.engine.prefix_sharing
    root = json.dumps({name: value for name, value in sorted(identity.items()) if name not in ("spec", "input")})
    wish = prompts.wishes.__getitem__
    return make_requests(prompts.table, job.plan, job.order, wish, sharing=sharing, root=root.encode())


def asked_results(job: PreparedJob, identity: dict[str, Any]) -> pl.DataFrame:
    """The results that the requests want, for `take_over`."""
    requests, frames = job_requests(job, identity), [pl.DataFrame(schema=ASKED)]
    while chunk := list(islice(requests, CHUNK)):
        samples = [sample for request in chunk for sample in request.samples]
        wanted = [(*target, sample.request_hash, 0) for sample in samples for target in sample.targets]
        frames.append(pl.DataFrame(wanted, ASKED, orient="row"))
    asked = pl.concat(frames)
    places = np.searchsorted(job.prompts.row_index, asked["row_index"].to_numpy())
    return asked.with_columns(truncated_tokens=pl.Series(job.prompts.truncated[places], dtype=pl.Int32))
