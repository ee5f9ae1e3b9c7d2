"""A job killed with SIGKILL before each of its durable operations in turn, and finished by the same command."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Runs in a process of its own, which forks one child for every place to die in.
DRIVER = """
import itertools, os, shutil, signal, sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.engine.types import RequestOutput, StepRecord
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.deliver import Expected, deliver
from batchgen.io.table import open_table
from batchgen.io.writer import JobWriter

ROWS = 3
fsync = os.fsync
base, before = Path(sys.argv[1]), sys.argv[2]
pq.write_table(pa.table({"x": range(ROWS)}), base / "in.parquet")


def run(directory, identity, fresh=False):
    checkpoint = Checkpoint.open(directory, identity, fresh)
    if checkpoint.state == "finished":
        return
    rows = np.arange(ROWS)[::-1]
    todo = rows[~checkpoint.is_done(rows, np.zeros(ROWS, int))]
    writer = JobWriter(checkpoint, part_rows=2, part_seconds=99, timings=True, clock=lambda: 0)
    one = np.ones(1, np.int32)
    for number, row in enumerate(todo):
        text = f"{identity} {row}"
        arrays = (one, one.astype(np.float32), one * number, one.astype(int))
        writer.add([RequestOutput(int(row), 0, "stop", text, None, 1, 0, *arrays)])
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


def check(directory, identity):
    results = read(directory, "results")
    assert results["x"].to_pylist() == results["row_index"].to_pylist() == list(range(ROWS))
    assert results["text"].to_pylist() == [f"{identity} {row}" for row in range(ROWS)]
    assert sorted(read(directory, "timings")["row_index"].to_pylist()) == list(range(ROWS))
    assert read(directory, "steps")["step"].to_pylist() == list(range(ROWS))
    assert sorted(set(os.listdir(directory)) - {".work"}) == ["job.json", "results", "steps", "timings"]


new = {"job": "new"}
for count in range(30 if before == "replaced" else 999):  # clearing the old job is all that differs
    directory = base / "out"
    shutil.rmtree(directory, ignore_errors=True)
    if before == "replaced":
        assert child(-1, lambda: run(directory, {"job": "old"})) == 0
    status = child(count, lambda: run(directory, new, fresh=before == "replaced"))
    if status == 0:
        check(directory, new)
        break
    assert status == signal.SIGKILL, status
    untouched = before == "replaced" and '"old"' in (directory / "job.json").read_text()
    if untouched:
        check(directory, {"job": "old"})
    assert child(-1, lambda: run(directory, new, fresh=untouched)) == 0, count
    check(directory, new)
    assert not (directory / ".work").exists()
print(count)
"""


@pytest.mark.parametrize(("before", "least"), [("empty", 55), ("replaced", 29)])
def test_killed_anywhere_and_finished_by_the_same_command(tmp_path, before, least):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), before]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= least  # places to die in
