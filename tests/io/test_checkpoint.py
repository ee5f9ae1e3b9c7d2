import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from batchgen.engine.types import RequestOutput, RowFailure, StepRecord
from batchgen.errors import OutputError
from batchgen.io.checkpoint import Checkpoint, read_job, result_keys, split_key
from batchgen.io.files import remove
from batchgen.io.manifest import Manifest
from batchgen.io.writer import JobWriter, results_table, timings_table

JOB = {"spec": {"sampling": {"max_tokens": 8}, "name": "a"}, "input": "f00d"}
OTHER = {"spec": {"sampling": {"max_tokens": 9}, "name": "a"}, "input": "f00d"}
REPOSITORY = Path(__file__).parents[2]


class Clock:
    def __init__(self, now=1_000):
        self.now = now

    def __call__(self):
        return self.now


def output(row, sample=0, tokens=3, step=0, time=1_000):
    number = np.arange(tokens, dtype=np.int32)
    return RequestOutput(
        row,
        sample,
        "length",
        text=f"answer {row}",
        num_prompt_tokens=4,
        token_ids=number + 10,
        logprobs=-number.astype(np.float32),
        token_steps=number + step,
        token_times=number.astype(np.int64) + time,
        arrived_ns=1_000,
        scheduled_ns=2_000,
        first_token_ns=5_000,
        finished_ns=9_000,
    )


def step(number, start=1_000):
    return StepRecord(number, start, 50, 6, 5, 4, 3, 2, 1, 1, 1)


def writer(checkpoint, clock, **options):
    return JobWriter(checkpoint, **{"part_rows": 2, "part_seconds": 10, "timings": True, "clock": clock, **options})


def read_parts(checkpoint, kind):
    return pl.concat([pl.read_parquet(path) for path in checkpoint.part_files(kind)])


# --- what the parts hold


def test_results_columns():
    failed = RequestOutput(7, 1, "error", error=RowFailure("prompt_missing", "it is null"))
    answered, bad = results_table([output(2), failed]).to_pylist()
    assert answered["token_ids"] == [10, 11, 12] and answered["cumulative_logprob"] == -3.0
    assert (answered["queued_s"], answered["prefill_s"], answered["decode_s"]) == (1e-6, 3e-6, 4e-6)
    assert answered["error"] is None and answered["num_generated_tokens"] == 3
    assert bad["error"] == {"code": "prompt_missing", "message": "it is null"} and bad["text"] is None
    assert (bad["row_index"], bad["sample_index"], bad["token_ids"]) == (7, 1, [])
    assert (bad["queued_s"], bad["prefill_s"], bad["decode_s"]) == (None, None, None)


def test_an_answer_of_no_tokens_has_only_a_prefill():
    scored = output(0, tokens=0)
    scored.first_token_ns = 0
    (row,) = results_table([scored]).to_pylist()
    assert (row["prefill_s"], row["decode_s"], row["cumulative_logprob"]) == (7e-6, 0.0, 0.0)


def test_timings_columns():
    rows = timings_table(
        [output(5, tokens=2), output(6, tokens=0), output(4, sample=1, tokens=1)], 100, -900
    ).to_pylist()
    assert [(row["row_index"], row["sample_index"], row["token_index"], row["phase"]) for row in rows] == [
        (5, 0, 0, "prefill"),
        (5, 0, 1, "decode"),
        (4, 1, 0, "prefill"),
    ]
    assert rows[1] | {"phase": ""} == {
        "row_index": 5,
        "sample_index": 0,
        "token_index": 1,
        "token_id": 11,
        "step": 101,
        "t_ns": 101,
        "phase": "",
        "logprob": -1.0,
    }


def test_keys_order_and_split():
    rows, samples = np.array([0, 0, 1, 1 << 40]), np.array([0, 5, 0, 3], np.int32)
    keys = result_keys(rows, samples)
    assert (np.diff(keys) > 0).all()
    assert [split_key(key) for key in keys] == list(zip(rows.tolist(), samples.tolist(), strict=True))
    with pytest.raises(ValueError, match="sample_index"):
        result_keys(np.array([0]), np.array([1 << 20]))


# --- when parts are made


def test_parts_are_due_by_rows_and_by_time(tmp_path):
    clock = Clock()
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        job = writer(checkpoint, clock)
        job.add([output(0)])
        assert not job.maybe_flush()
        job.add([output(1)])
        assert job.maybe_flush() and not job.flush() and len(checkpoint.parts) == 1
        job.add([output(2)])
        clock.now += 9_999_999_999
        assert not job.maybe_flush()
        clock.now += 1
        assert job.maybe_flush() and not job.flush()
        clock.now += 10**12
        assert not job.maybe_flush() and not job.flush()
        assert [part.totals["rows"] for part in checkpoint.parts] == [2, 1]


def test_a_part_is_due_by_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.io.writer.PART_TOKENS", 6)
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        job = writer(checkpoint, Clock(), part_rows=100)
        job.add([output(0, tokens=5)])
        assert not job.maybe_flush()
        job.add([output(1, tokens=1)])
        assert job.maybe_flush()
        job.flush()


def test_others_wait_while_a_part_is_written_but_no_more_than_two_parts(tmp_path, monkeypatch):
    """A disk that writes nothing until it is told to."""
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint, writer(checkpoint, Clock(), part_seconds=0) as job:
        go, commit = threading.Event(), checkpoint.commit
        monkeypatch.setattr(checkpoint, "commit", lambda *tables, **given: go.wait() and commit(*tables, **given))
        job.add([output(0)])
        assert job.maybe_flush()
        for row in (1, 2, 3):
            job.add([output(row)])
            assert not job.maybe_flush() and checkpoint.parts == ()
        job.add([output(4)])
        timer = threading.Timer(0.1, go.set)
        timer.start()
        assert job.maybe_flush() and [part.totals["rows"] for part in checkpoint.parts] >= [1]
        job.flush()
        assert [part.totals["rows"] for part in checkpoint.parts] == [1, 4]


@pytest.mark.parametrize("surfaces", ["maybe_flush", "flush"])
def test_a_failed_write_surfaces_at_the_next_call_and_loses_nothing(tmp_path, monkeypatch, surfaces):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint, writer(checkpoint, Clock(), part_rows=1) as job:
        monkeypatch.setattr(os, "fsync", fail)
        job.add([output(0)])
        assert job.maybe_flush()  # so far nobody knows
        futures.wait([job._writing])
        job.add([output(1)])
        with pytest.raises(OutputError, match="No space left on device; free some space"):
            getattr(job, surfaces)()
        monkeypatch.undo()
        assert checkpoint.parts == ()
        job.add([output(2)])
        job.flush()
        assert read_parts(checkpoint, "results")["row_index"].to_list() == [0, 1, 2]


def fail(descriptor):
    raise OSError(errno.ENOSPC, "full")


def test_the_directory_is_held_until_the_part_under_way_is_written(tmp_path, monkeypatch):
    begun, go, append = threading.Event(), threading.Event(), Manifest.append

    def slow(manifest, part):
        begun.set()
        go.wait()
        append(manifest, part)

    monkeypatch.setattr(Manifest, "append", slow)
    checkpoint = Checkpoint.open(tmp_path / "out", JOB)
    job = writer(checkpoint, Clock(), part_rows=1)
    job.add([output(0)])
    assert job.maybe_flush() and begun.wait(10)
    threading.Timer(0.1, go.set).start()
    checkpoint.close()
    assert len(Manifest(checkpoint.work / "manifest.jsonl").parts) == 1
    job.add([output(1)])
    with pytest.raises(OutputError, match="not held by this process any more"):
        job.flush()


def test_without_timings(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        job = writer(checkpoint, Clock(), timings=False)
        job.add([output(0, step=4)])
        job.flush()
        assert checkpoint.part_files("timings") == [] and len(checkpoint.part_files("results")) == 1
        assert checkpoint.next_step == 7  # the tokens' steps still count


def test_steps_and_times_go_on_after_a_resume(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        assert checkpoint.state == "new"
        job = writer(checkpoint, Clock(1_000))
        job.add([output(3, step=0, time=1_010), output(1, sample=2, step=1, time=1_020)])
        job.add_step(step(0, 1_000))
        job.add_step(step(3, 1_100))
        job.flush()
        assert (checkpoint.next_step, checkpoint.elapsed_ns) == (4, 151)
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        assert checkpoint.state == "resumed"
        job = writer(checkpoint, Clock(500), started_ns=400)
        job.add([output(9, step=0, time=450)])
        job.add_step(step(0, 410))
        job.flush()
        rows, samples = np.array([3, 1, 1, 9, 0]), np.array([0, 2, 0, 0, 0])
        assert checkpoint.is_done(rows, samples).tolist() == [True, True, False, False, False]
        assert read_parts(checkpoint, "timings").filter(row_index=9)["t_ns"].to_list() == [201, 202, 203]
        assert read_parts(checkpoint, "steps").select("step", "start_ns").rows() == [(0, 0), (3, 100), (4, 161)]
        assert checkpoint.totals["results"] == 3 and checkpoint.totals["rows"] == 2
        assert checkpoint.totals["generated_tokens"] == 9 and checkpoint.totals["computed_prompt_tokens"] == 18
        assert [split_key(key) for key in checkpoint.committed_keys()] == [(1, 2), (3, 0), (9, 0)]


# --- the manifest


def test_a_torn_manifest_line_never_counts(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        for row in range(3):
            job = writer(checkpoint, Clock())
            job.add([output(row)])
            job.flush()
        path = checkpoint.work / "manifest.jsonl"
    raw = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(raw) if byte == ord("\n")]
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        assert len(Manifest(path).parts) == sum(end <= size for end in ends)
    path.write_bytes(raw[: ends[1] + 20])
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        assert len(checkpoint.parts) == 2
        assert sorted(file.name for file in (checkpoint.work / "parts").iterdir()) == [
            f"{kind}-00000{part}.parquet" for kind in ("results", "timings") for part in (0, 1)
        ]
        job = writer(checkpoint, Clock())
        job.add([output(2)])
        job.flush()
    assert len(Manifest(path).parts) == 3


def test_damage_inside_the_manifest_is_told(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        for row in range(2):
            job = writer(checkpoint, Clock())
            job.add([output(row)])
            job.flush()
    path = tmp_path / "out" / ".work" / "manifest.jsonl"
    raw = bytearray(path.read_bytes())
    raw[12] ^= 1
    path.write_bytes(raw)
    with pytest.raises(OutputError, match="damaged at line 1"):
        Checkpoint.open(tmp_path / "out", JOB)


def test_a_lost_part_is_told(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        job = writer(checkpoint, Clock())
        job.add([output(0)])
        job.flush()
        checkpoint.part_files("timings")[0].unlink()
    with pytest.raises(OutputError, match=r"timings-000000\.parquet is missing or damaged"):
        Checkpoint.open(tmp_path / "out", JOB)
    with Checkpoint.open(tmp_path / "out", JOB, fresh=True) as checkpoint:
        assert checkpoint.state == "new" and checkpoint.parts == ()


# --- whose directory it is


def test_a_job_that_has_committed_nothing_makes_room(tmp_path):
    """As one whose spec was wrong, and has been mended."""
    Checkpoint.open(tmp_path / "out", JOB).close()
    with Checkpoint.open(tmp_path / "out", OTHER) as checkpoint:
        assert checkpoint.state == "new"
    assert read_job(tmp_path / "out")["identity"] == OTHER


def test_another_job_is_refused_unless_fresh(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        checkpoint.commit({})
    with pytest.raises(OutputError, match=r"spec.sampling.max_tokens: 8 there, 9 now.*--fresh"):
        Checkpoint.open(tmp_path / "out", OTHER)
    (tmp_path / "out" / "mine.txt").write_text("kept")
    (tmp_path / "out" / "results").mkdir()
    with Checkpoint.open(tmp_path / "out", OTHER, fresh=True) as checkpoint:
        assert checkpoint.state == "new"
    assert read_job(tmp_path / "out")["identity"] == OTHER
    assert sorted(os.listdir(tmp_path / "out")) == [".work", "job.json", "mine.txt"]


def test_a_finished_job_is_left_alone(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        checkpoint.finish({"totals": {"rows": 0}})
    assert os.listdir(tmp_path / "out") == ["job.json"]
    assert read_job(tmp_path / "out")["totals"] == {"rows": 0}
    assert Checkpoint.open(tmp_path / "out", JOB).state == "finished"
    with pytest.raises(OutputError, match="holds another job"):
        Checkpoint.open(tmp_path / "out", OTHER)
    with Checkpoint.open(tmp_path / "out", JOB, fresh=True) as checkpoint:
        assert checkpoint.state == "new"


def test_what_is_no_place_for_a_job(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "alien").mkdir()
    (tmp_path / "alien" / "job.json").write_text('{"job": "of another program"}')
    (tmp_path / "link").symlink_to(tmp_path / "full")
    places = {"full": "not empty", "alien": "not empty", "link": "symbolic link", "full/thesis.tex": "is a file"}
    for place, words in places.items():
        for fresh in (False, True):
            with pytest.raises(OutputError, match=words):
                Checkpoint.open(tmp_path / place, JOB, fresh)
    assert os.listdir(tmp_path / "full") == ["thesis.tex"] and os.listdir(tmp_path / "alien") == ["job.json"]


@pytest.mark.parametrize("name", ["", "lock", "parts", "manifest.jsonl"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_link_in_the_working_state_is_not_followed(tmp_path, name, fresh):
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("x")
    with Checkpoint.open(out, JOB) as checkpoint:
        checkpoint.commit({})
    link = out / ".work" / name
    remove(link)
    link.symlink_to(elsewhere if name in ("", "parts") else elsewhere / "thesis.tex")
    with pytest.raises(OutputError, match=r"\.work.* is a symbolic link"):
        Checkpoint.open(out, JOB, fresh)
    assert (elsewhere / "thesis.tex").read_text() == "x" and os.listdir(elsewhere) == ["thesis.tex"]


def test_links_beside_it_are_replaced(tmp_path):
    """Of the delivered files; what they lead to stays."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("x")
    Checkpoint.open(out, JOB).finish({})
    for name in ("results", "steps", "timings"):
        (out / name).symlink_to(elsewhere)
    (out / "report.html").symlink_to(elsewhere / "thesis.tex")
    with Checkpoint.open(out, OTHER, fresh=True):
        assert os.listdir(elsewhere) == ["thesis.tex"] and (elsewhere / "thesis.tex").read_text() == "x"
        assert sorted(os.listdir(out)) == [".work", "job.json"]


def test_an_empty_directory_is_taken(tmp_path):
    with Checkpoint.open(tmp_path, JOB) as checkpoint:
        assert checkpoint.state == "new"


def test_a_living_process_keeps_the_directory_and_a_dead_one_does_not(tmp_path):
    code = (
        "import sys, time; from batchgen.io.checkpoint import Checkpoint\n"
        "held = Checkpoint.open(sys.argv[1], {'a': 1}); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            for fresh in (False, True):
                with pytest.raises(OutputError, match=f"in use by process {process.pid} on "):
                    Checkpoint.open(tmp_path / "out", {"a": 1}, fresh)
        finally:
            process.kill()
    with Checkpoint.open(tmp_path / "out", {"a": 1}) as checkpoint:
        assert checkpoint.state == "new"  # the lock is free; nothing had been committed


def test_a_lock_file_that_its_holder_has_just_removed_is_not_enough(tmp_path, monkeypatch):
    real, path = fcntl.flock, tmp_path / "out" / ".work" / "lock"

    def late(file, how):
        monkeypatch.undo()
        path.unlink()  # a finishing process, between our open and our lock
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Checkpoint.open(tmp_path / "out", JOB):
        assert path.exists()
        with pytest.raises(OutputError, match="in use"):
            Checkpoint.open(tmp_path / "out", JOB)


# --- writes that fail

FULL_DISK = """
import resource, signal, sys
import numpy as np
from batchgen.engine.types import RequestOutput
from batchgen.errors import OutputError
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.writer import JobWriter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoint = Checkpoint.open(sys.argv[1], {"a": 1})
writer = JobWriter(checkpoint, part_rows=1, part_seconds=9, timings=True, clock=lambda: 0)
writer.add([RequestOutput(0, 0, "stop", text="small")])
writer.flush()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
text = np.random.default_rng(0).bytes(100_000).hex()
writer.add([RequestOutput(1, 0, "stop", text=text)])
for attempt in range(2):
    try:
        writer.flush()
    except OutputError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.flush()
print(len(checkpoint.parts), checkpoint.totals["rows"])
"""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    first, second, last = result.stdout.splitlines()
    assert result.stderr == "" and result.returncode == 0
    assert first == second and "free some space and run the same command again" in first and "File too large" in first
    assert last == "2 2"
    with Checkpoint.open(tmp_path / "out", {"a": 1}) as checkpoint:
        assert [len(text) for text in read_parts(checkpoint, "results")["text"]] == [5, 200_000]
        assert not list(checkpoint.work.rglob("*.tmp"))


def test_an_unwritable_manifest_leaves_the_part_uncommitted(tmp_path, monkeypatch):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        job = writer(checkpoint, Clock())
        job.add([output(0)])
        job.flush()
        real, manifest = os.fsync, (checkpoint.work / "manifest.jsonl").stat().st_ino

        def failing(descriptor):
            if os.fstat(descriptor).st_ino == manifest:
                raise OSError(5, "Input/output error")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        job.add([output(1)])
        with pytest.raises(OutputError, match="Input/output error; repair that and run the same command again"):
            job.flush()
        monkeypatch.undo()
        assert len(checkpoint.parts) == 1
        job.flush()
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        assert read_parts(checkpoint, "results")["row_index"].to_list() == [0, 1]


def test_job_json_is_plain_json(tmp_path):
    with Checkpoint.open(tmp_path / "out", JOB) as checkpoint:
        assert json.loads((checkpoint.directory / "job.json").read_text())["state"] == "running"
