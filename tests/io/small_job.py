"""A job of three rows without an engine, to be interrupted, and one after an edit that asks the same of two of them."""

import os

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.engine.types import RequestOutput, StepRecord
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.deliver import Expected, deliver
from batchgen.io.reuse import ASKED, take_over
from batchgen.io.table import open_table
from batchgen.io.writer import JobWriter

ROWS = 3
KEPT = 2
OLD, NEW = {"job": "old"}, {"job": "new"}


def write_input(base):
    pq.write_table(pa.table({"x": range(ROWS)}), base / "in.parquet")


def answer(identity, row):
    """Of row 0 and 1 both jobs ask the same."""
    return f"{row}" if row < KEPT else f"{identity} {row}"


def run(base, directory, identity, fresh=False, reuse=False, delivers=True):
    """The rows of `base`/in.parquet, from the last to the first, two to a part."""
    checkpoint = Checkpoint.open(directory, identity, fresh, reuse=reuse)
    if checkpoint.state == "finished":
        return
    if checkpoint.state == "kept":
        asked = [(row, 0, answer(identity, row), 0) for row in range(ROWS)]
        assert take_over(checkpoint, pl.DataFrame(asked, ASKED, orient="row")) == (KEPT, ROWS)
    rows = np.arange(ROWS)[::-1]
    todo = rows[~checkpoint.is_done(rows, np.zeros(ROWS, int))]
    writer = JobWriter(checkpoint, part_rows=2, part_seconds=99, timings=True, clock=lambda: 0)
    one = np.ones(1, np.int32)
    for number, row in enumerate(todo):
        hashed = answer(identity, row)
        text = f"{identity} {row}"
        arrays = (one, one.astype(np.float32), one * number, one.astype(int))
        writer.add([RequestOutput(int(row), 0, "stop", text, None, 1, 0, *arrays, request_hash=hashed)])
        writer.add_step(StepRecord(number, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0))
        writer.maybe_flush()
    writer.flush()
    if not delivers:
        return checkpoint.close()
    table = open_table(base / "in.parquet")
    expected = Expected(np.arange(ROWS), np.ones(ROWS, np.int32))
    deliver(checkpoint, table, expected=expected, columns="all", prefix="", part_rows=2)
    checkpoint.finish({})


def read(directory, kind):
    return pa.concat_tables([pq.ParquetFile(path).read() for path in sorted((directory / kind).iterdir())])


def check(directory, identity, kept_of=None):
    """The job is finished; what it could keep of another one is that one's."""
    results = read(directory, "results")
    assert results["x"].to_pylist() == results["row_index"].to_pylist() == list(range(ROWS))
    owners = [kept_of if kept_of and row < KEPT else identity for row in range(ROWS)]
    assert results["text"].to_pylist() == [f"{owner} {row}" for row, owner in enumerate(owners)]
    assert sorted(read(directory, "timings")["row_index"].to_pylist()) == list(range(ROWS))
    steps = 2 * ROWS - KEPT if kept_of else ROWS
    assert read(directory, "steps")["step"].to_pylist() == list(range(steps))
    assert sorted(set(os.listdir(directory)) - {".work"}) == ["job.json", "results", "steps", "timings"]
