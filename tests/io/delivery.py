"""A job's way through the checkpoint and delivery, without a model."""

import numpy as np

from batchgen.engine.types import RequestOutput, StepRecord
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.deliver import Expected, deliver
from batchgen.io.writer import JobWriter


def expected(rows, samples=1):
    return Expected(np.array(rows, np.int64), np.broadcast_to(np.int32(samples), len(rows)))


def answer(row, sample):
    tokens = np.arange(row % 4, dtype=np.int32)
    return RequestOutput(
        row,
        sample,
        "stop",
        text=f"{row}/{sample}",
        token_ids=tokens,
        logprobs=tokens.astype(np.float32),
        token_steps=tokens,
        token_times=tokens.astype(np.int64),
    )


def run(
    directory, table, wanted, *, part_rows=16, columns="all", prefix="", skip=(), twice=(), spool_rows=5, **options
):
    """Answers what is wanted in a shuffled order, delivers, and returns the checkpoint, still open."""
    checkpoint = Checkpoint.open(directory, {"job": 1})
    writer = JobWriter(checkpoint, part_rows=spool_rows, part_seconds=9, timings=True, clock=lambda: 0)
    pairs = [(int(row), k) for row, n in zip(wanted.row_index, wanted.samples, strict=True) for k in range(n)]
    pairs = [pair for pair in pairs if pair not in skip] + list(twice)
    np.random.default_rng(0).shuffle(pairs)
    for number, (row, sample) in enumerate(pairs):
        writer.add([answer(int(row), int(sample))])
        writer.add_step(StepRecord(number, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0))
        writer.maybe_flush()
    writer.flush()
    deliver(checkpoint, table, expected=wanted, columns=columns, prefix=prefix, part_rows=part_rows, **options)
    return checkpoint
