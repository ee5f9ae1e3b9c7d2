"""Jobs whose disk is full, read-only or broken, jobs that want the same output: one clear line, and nothing lost."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen import cli
from batchgen.io import files
from tests.conftest import ROOT
from tests.test_job import answers
from tests.torture.kills import Moment, kill_and_resume, start

Answers = list[tuple[Any, ...]]


@pytest.fixture
def job(make_spec, tmp_path: Path) -> Callable[[Path], Any]:
    """`job(output)`: a small job's spec; its file is job.yaml."""

    def make(output: Path) -> Any:
        return make_spec(
            input={"path": str(ROOT / "benchmarks/data/choices.parquet"), "prompt": "{{ question }}", "limit": 12},
            sampling={"max_tokens": 3, "temperature": 0.7},
            engine={"max_num_seqs": 3, "kv_memory": "64MiB"},
            output={"path": str(output), "part_rows": 3},
        )

    return make


@pytest.fixture
def wanted(job: Callable[[Path], Any], run: Callable[..., Any], tmp_path: Path) -> Answers:
    """What an undisturbed run gives."""
    spec = job(tmp_path / "whole")
    run(spec)
    return answers(spec)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The last command said one line of an error, with these words."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot write ") and all(word in line for word in words), line
    assert line.endswith("and run the same command again")


# --- a full disk


def limited(spec: Path, most: int) -> subprocess.CompletedProcess[str]:
    """The job in a process that can make no file longer than `most` bytes."""
    code = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({most}, {most}))"
    command = [sys.executable, "-c", f"{code}; from batchgen.cli import main; raise SystemExit(main())"]
    return subprocess.run([*command, "run", str(spec), "--quiet"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("most", [0, 2500, 6000])
def test_files_that_cannot_grow(job, wanted: Answers, tmp_path: Path, most: int) -> None:
    """Not the lock, not the job's description, not a part."""
    spec = job(tmp_path / "out")
    result = limited(tmp_path / "job.yaml", most)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith("error: cannot write ") and "File too large; free some" in line
    assert cli.main(["run", str(tmp_path / "job.yaml"), "--quiet"]) == 0
    assert answers(spec) == wanted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KiB in memory, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if mount("tmpfs", folder, "size=48k"):
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def mount(kind: str, folder: Path, options: str) -> int:
    try:
        command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return 1


def test_a_full_and_then_a_read_only_disk(job, wanted: Answers, tmp_path: Path, small_disk: Path, capsys) -> None:
    spec = job(small_disk / "out")
    command = ["run", str(tmp_path / "job.yaml"), "--quiet"]
    for _ in range(2):  # and again, while nothing has changed
        assert cli.main(command) == 1
        refused(capsys, "No space left on device; free some space")
    mount("tmpfs", small_disk, "remount,ro")
    assert cli.main(command) == 1
    refused(capsys, "Read-only file system; repair that")
    mount("tmpfs", small_disk, "remount,rw,size=8m")
    assert cli.main(command) == 0
    assert answers(spec) == wanted
    assert sorted(os.listdir(small_disk / "out")) == ["job.json", "report.html", "results", "steps", "timings"]


# --- a broken one


class Broken(io.FileIO):
    """A file that takes 1,000 bytes, and fails in the middle of what comes then."""

    def write(self, data: Any) -> int:
        room = 1000 - self.tell()
        if len(memoryview(data).cast("B")) > room:
            super().write(memoryview(data).cast("B")[: max(0, room)])
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.name)
        return super().write(data)


def breaking(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the sixth call on, which is among the parts, their bytes, their way to the disk or their names fail."""
    calls = iter(range(10**6))
    real = {"write": open, "fsync": os.fsync, "replace": os.replace}[kind]

    def fails(*arguments: Any, **options: Any) -> Any:
        if next(calls) < 5:
            return real(*arguments, **options)
        if kind == "write":
            return Broken(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((files, "open") if kind == "write" else (os, kind)), fails, raising=False)


@pytest.mark.parametrize("kind", ["write", "fsync", "replace"])
def test_a_disk_that_fails_in_the_middle_of_a_job(job, wanted: Answers, tmp_path: Path, capsys, kind: str) -> None:
    spec, command = job(tmp_path / "out"), ["run", str(tmp_path / "job.yaml"), "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        breaking(kind, patch)
        assert cli.main(command) == 1
    refused(capsys, str(tmp_path / "out"), "Input/output error; repair that")
    assert (tmp_path / "out" / ".work").is_dir() and not list((tmp_path / "out").rglob("*.tmp"))
    assert cli.main(command) == 0
    assert answers(spec) == wanted


# --- two that want the same


def test_processes_that_start_at_once(job, wanted: Answers, tmp_path: Path) -> None:
    """One of them does the job; the others say who has it, or find it done."""
    spec = job(tmp_path / "out")
    processes = [start(tmp_path / "job.yaml") for _ in range(3)]
    said = [process.communicate()[1].splitlines() for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes and set(codes) <= {0, 1}
    pids = [str(process.pid) for process in processes]
    for code, lines, pid in zip(codes, said, pids, strict=True):
        assert len(lines) == code  # one line from each that was refused
        assert all("is in use by process" in line and pid not in line.split() for line in lines)
    assert 1 in codes
    assert answers(spec) == wanted


def test_a_lock_of_a_dead_process(job, wanted: Answers, tmp_path: Path) -> None:
    spec = job(tmp_path / "out")
    outcome = kill_and_resume(tmp_path / "job.yaml", tmp_path / "out", [Moment("generating")])
    assert outcome.kills == ("generating",)
    assert answers(spec) == wanted
