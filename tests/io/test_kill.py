"""A job killed with SIGKILL before each of its durable operations in turn, and finished by the same command."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Runs in a process of its own, which forks one child for every place to die in.
DRIVER = '''
import itertools, os, shutil, signal, sys
from pathlib import Path

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
fsync = os.fsync
base, before = Path(sys.argv[1]), sys.argv[2]
pq.write_table(pa.table({"x": range(ROWS)}), base / "in.parquet")


KEPT = 2  # of an earlier job's rows, which are then in places of their own


def answer(identity, row):
    """Of row 0 and 1 both jobs ask the same."""
    return f"{row}" if row < KEPT else f"{identity} {row}"


def run(directory, identity, fresh=False, reuse=False):
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
    table = open_table(base / "in.parquet")
    expected = Expected(np.arange(ROWS), np.ones(ROWS, np.int32))
    deliver(checkpoint, table, expected=expected, columns="all", prefix="", part_rows=2)
    checkpoint.finish({})


def die_at(count):
    calls = itertools.count()
    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
        def wrapped(*arguments, real=getattr(os, name), **options):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            if real is not fsync:  # slow, and SIGKILL alone loses no written page
                return real(*arguments, **options)
        setattr(os, name, wrapped)


def child(count, job):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_at(count)
            job()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def read(directory, kind):
    return pa.concat_tables([pq.ParquetFile(path).read() for path in sorted((directory / kind).iterdir())])


def check(directory, identity, kept_of=None):
    results = read(directory, "results")
    assert results["x"].to_pylist() == results["row_index"].to_pylist() == list(range(ROWS))
    owners = [kept_of if kept_of and row < KEPT else identity for row in range(ROWS)]
    assert results["text"].to_pylist() == [f"{owner} {row}" for row, owner in enumerate(owners)]
    assert sorted(read(directory, "timings")["row_index"].to_pylist()) == list(range(ROWS))
    steps = 2 * ROWS - KEPT if kept_of else ROWS
    assert read(directory, "steps")["step"].to_pylist() == list(range(steps))
    assert sorted(set(os.listdir(directory)) - {".work"}) == ["job.json", "results", "steps", "timings"]


old, new = {"job": "old"}, {"job": "new"}
kept_of = old if before.startswith("kept") else None
how = {"fresh": before == "replaced", "reuse": kept_of is not None}


def unfinished(directory):
    """The old job, with all answers there and nothing delivered."""
    def stop(*arguments, **options):
        os._exit(0)
    globals()["deliver"] = stop
    run(directory, old)


last = 30 if before == "replaced" else 999  # clearing the old job is all that differs
stride = {"kept": 2, "kept unfinished": 3}.get(before, 1)  # most is as in the others
for count in range(0, last, stride):
    directory = base / "out"
    shutil.rmtree(directory, ignore_errors=True)
    if before != "empty":
        assert child(-1, lambda: unfinished(directory) if before == "kept unfinished" else run(directory, old)) == 0
    status = child(count, lambda: run(directory, new, **how))
    if status == 0:
        check(directory, new, kept_of)
        break
    assert status == signal.SIGKILL, status
    untouched = before != "empty" and '"old"' in (directory / "job.json").read_text()
    if untouched and before != "kept unfinished":
        assert child(-1, lambda: run(directory, old)) == 0
        check(directory, old)
    if count % 2 and not untouched:
        how["reuse"] = False  # the job has the answers now
    assert child(-1, lambda: run(directory, new, fresh=untouched and how["fresh"], reuse=how["reuse"])) == 0, count
    how["reuse"] = kept_of is not None
    check(directory, new, kept_of)
    assert not (directory / ".work").exists()
print(count)
'''


@pytest.mark.parametrize(("before", "least"), [("empty", 55), ("replaced", 29), ("kept", 70), ("kept unfinished", 70)])
def test_killed_anywhere_and_finished_by_the_same_command(tmp_path, before, least):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), before]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= least  # places to die in
