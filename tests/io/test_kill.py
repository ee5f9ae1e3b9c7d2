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

from tests.io.small_job import NEW, OLD, check, run, write_input

fsync = os.fsync
base, before, stride = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
write_input(base)


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


kept_of = OLD if before.startswith("kept") else None
how = {"fresh": before == "replaced", "reuse": kept_of is not None}
last = 30 if before == "replaced" else 999  # clearing the old job is all that differs
for count in range(0, last, stride):
    directory = base / "out"
    shutil.rmtree(directory, ignore_errors=True)
    if before != "empty":
        assert child(-1, lambda: run(base, directory, OLD, delivers=before != "kept unfinished")) == 0
    status = child(count, lambda: run(base, directory, NEW, **how))
    if status == 0:
        check(directory, NEW, kept_of)
        break
    assert status == signal.SIGKILL, status
    untouched = before != "empty" and '"old"' in (directory / "job.json").read_text()
    if untouched and before != "kept unfinished":
        assert child(-1, lambda: run(base, directory, OLD)) == 0
        check(directory, OLD)
    if (count // stride) % 2 and not untouched:
        how["reuse"] = False  # the job has the answers now
    again = {"fresh": untouched and how["fresh"], "reuse": how["reuse"]}
    assert child(-1, lambda: run(base, directory, NEW, **again)) == 0, count
    how["reuse"] = kept_of is not None
    check(directory, NEW, kept_of)
    assert not (directory / ".work").exists()
print(count)
"""


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["often", "anywhere"])
@pytest.mark.parametrize(("before", "least"), [("empty", 55), ("replaced", 29), ("kept", 70), ("kept unfinished", 70)])
def test_killed_anywhere_and_finished_by_the_same_command(tmp_path, before, least, stride):
    command = [sys.executable, "-c", DRIVER, str(tmp_path), before, str(stride)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > least - stride  # places to die in
