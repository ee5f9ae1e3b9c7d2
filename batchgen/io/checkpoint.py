"""What a job has done so far, so that the same command finishes it after a crash at any instant.

    output/job.json        which job this is, and whether it is finished
    output/.work/          only while the job runs:
        lock               held by the living process
        parts/             results, timings and steps in the order they were made
        manifest.jsonl     the parts that count
        next.jsonl         the parts that will count in the job that takes over from the one that is there
        deliver/, runs/    files in the making

A part's files are written under temporary names, made durable and renamed before their manifest line is written, so
whatever is not in the manifest never happened.

A job may take results over from the one that the directory holds (see `reuse`). They are parts of its own, entered in
next.jsonl, before job.json names it (state "taking over"); only then is what the other job left removed.
"""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen.errors import OutputError
from batchgen.io.files import make_directory, output_errors, remove, sync_directory, write_atomically, write_json
from batchgen.io.manifest import Manifest, Part
from batchgen.io.schemas import BATCH_OUTPUT, SCHEMAS

State = Literal["new", "resumed", "kept", "finished"]

_JOB_FORMAT = 3
_MARK = "batchgen_job"
_OWN_NAMES = (*SCHEMAS, BATCH_OUTPUT, "report.html")
_SAMPLE_BITS = 20  # a result's key is row_index << 20 | sample_index


def result_keys(row_index: NDArray[np.integer], sample_index: NDArray[np.integer]) -> NDArray[np.int64]:
    """One int64 per (row, sample), ordered as they are; row < 2**43, sample < 2**20."""
    if np.max(sample_index, initial=0) >> _SAMPLE_BITS:
        raise ValueError(f"sample_index must be below {1 << _SAMPLE_BITS}")
    return np.asarray(row_index, np.int64) << _SAMPLE_BITS | np.asarray(sample_index, np.int64)


def split_key(key: int) -> tuple[int, int]:
    """(row_index, sample_index) of a key."""
    return int(key) >> _SAMPLE_BITS, int(key) & ((1 << _SAMPLE_BITS) - 1)


def split_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """row_index and sample_index of many keys."""
    return keys >> _SAMPLE_BITS, (keys & ((1 << _SAMPLE_BITS) - 1)).astype(np.int32)


class Checkpoint:
    """The working state of one output directory, held by this process until `close` or `finish`.

    Opened by `Checkpoint.open`; usable as a context manager. `state` says what was found: "new", "resumed", "kept"
    (results to choose from: commit those that stay, then `take_over`), or "finished", in which case there is nothing to
    do and nothing may be committed.
    """

    def __init__(self, directory: Path, identity: dict[str, Any], state: State, lock: IO[bytes] | None):
        self.directory = directory
        self.identity = identity
        self.state = state
        self._lock = lock
        self._committing = Lock()
        there = Manifest(self.work / "manifest.jsonl")
        self._next_number = there.parts[-1].number + 1 if there.parts else 0
        self._earlier = there.parts
        self._manifest = Manifest(self.work / "next.jsonl") if state == "kept" else there

    @classmethod
    def open(
        cls,
        directory: str | Path,
        identity: dict[str, Any],
        fresh: bool = False,
        *,
        retry_errors: bool = False,
        reuse: bool = False,
    ) -> "Checkpoint":
        """Opens or creates the output directory for the job that `identity` (JSON values) describes.

        `fresh` replaces whatever job is there; `retry_errors` keeps the answers of this very job, `reuse` also those of
        another one (state "kept"). Raises OutputError when the directory is a file or a link, holds something else than
        a batchgen job, holds another job, is used by a living process, or cannot be written.
        """
        directory, identity = Path(directory), json.loads(json.dumps(identity))
        with output_errors(directory):
            _check_directory(directory)
            if not fresh and not retry_errors and _is_delivered(directory, identity):
                return cls(directory, identity, "finished", None)
            lock = _acquire(directory / ".work")
            try:
                state = _prepare(directory, identity, fresh, retry_errors, reuse)
                checkpoint = cls(directory, identity, state, lock)
                checkpoint._check_parts()
                return checkpoint
            except BaseException:
                lock.close()
                raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def started(self) -> datetime:
        """When the job was first started, in local time: the date that its prompts may name, after a resume too."""
        started = (read_job(self.directory) or {}).get("started")
        try:
            return datetime.fromisoformat(started or "")
        except (TypeError, ValueError):
            raise OutputError(
                f"{self.directory / 'job.json'} does not say when the job was started; --fresh starts the job anew"
            ) from None

    @property
    def work(self) -> Path:
        return self.directory / ".work"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._manifest.parts

    @property
    def next_step(self) -> int:
        """The number that the next engine step gets, so that numbers go on after a resume."""
        return max((part.end_step for part in self.parts), default=0)

    @property
    def elapsed_ns(self) -> int:
        """The job's time up to the last committed event; times go on from here after a resume."""
        return max((part.end_ns for part in self.parts), default=0)

    @property
    def totals(self) -> dict[str, int]:
        """The sums of all parts' totals, of earlier runs too."""
        names = dict.fromkeys(name for part in self.parts for name in part.totals)
        return {name: sum(part.totals.get(name, 0) for part in self.parts) for name in names}

    @cached_property
    def done(self) -> NDArray[np.int64]:
        """The sorted keys (`result_keys`) of the results that earlier runs of the job had committed."""
        return _keys(self._paths("results", self._earlier))

    def committed_keys(self) -> NDArray[np.int64]:
        """The sorted keys of all results committed by now, as the parts hold them."""
        return _keys(self.part_files("results"))

    def is_done(self, row_index: NDArray[np.integer], sample_index: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each (row, sample) had been committed when the job was resumed."""
        keys = result_keys(row_index, sample_index)
        if not len(self.done):
            return np.zeros(len(keys), bool)
        at = np.minimum(np.searchsorted(self.done, keys), len(self.done) - 1)
        return self.done[at] == keys

    def part_files(self, kind: str) -> list[Path]:
        """The committed files of "results", "timings" or "steps", in the order they were made."""
        return self._paths(kind, self.parts)

    def _paths(self, kind: str, parts: tuple[Part, ...]) -> list[Path]:
        names = [_file_name(kind, part.number) for part in parts]
        return [self.work / "parts" / name for name, part in zip(names, parts, strict=True) if name in part.files]

    def commit(
        self,
        tables: Mapping[str, pa.Table],
        *,
        end_step: int = 0,
        end_ns: int = 0,
        totals: Mapping[str, int] | None = None,
    ) -> None:
        """Makes a part of the tables (keys of `SCHEMAS`) durable, all or nothing. Raises OutputError if it cannot."""
        with self._committing, output_errors(self.directory):
            if self._lock is None:
                raise OutputError(f"output {self.directory} is not held by this process any more")
            number = self._next_number
            sizes = dict(
                self._write(_file_name(kind, number), table) for kind, table in tables.items() if table.num_rows
            )
            self._manifest.append(Part(number, sizes, end_step, end_ns, totals or {}))
            self._next_number += 1

    def kept_files(self, kind: str) -> list[Path]:
        """In state "kept": the files to choose from, of a finished job or the parts of an unfinished one."""
        job = read_job(self.directory) or {}
        return (
            _delivered_files(self.directory, kind) if job["state"] == "finished" else self._paths(kind, self._earlier)
        )

    @property
    def kept_prefix(self) -> str:
        """What stands before the names of the columns of `kept_files("results")`."""
        return _prefix_of(read_job(self.directory) or {})

    @property
    def kept_same(self) -> bool:
        """Whether they are of this very job."""
        return bool((read_job(self.directory) or {}).get("identity") == self.identity)

    def take_over(self) -> None:
        """In state "kept", with at least one part committed: go on from these parts, and remove what else is there."""
        with output_errors(self.directory):
            _write_job(self.directory, "taking over", self.identity, {"started": self.started.isoformat()})
            _complete(self.directory)
            self.state = "resumed"
            self._manifest = Manifest(self.work / "manifest.jsonl")
            self._earlier = self.parts
            self._check_parts()

    def finish(self, job: Mapping[str, Any]) -> None:
        """Marks the delivered job as finished in job.json, together with `job`, then removes the working state."""
        with output_errors(self.directory):
            _write_job(self.directory, "finished", self.identity, {"started": self.started.isoformat(), **job})
            self.state = "finished"
            _remove_work(self.work)
        self.close()

    def close(self) -> None:
        """Lets go of the directory; what was committed stays, and what another thread is committing is awaited."""
        with self._committing:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _write(self, name: str, table: pa.Table) -> tuple[str, int]:
        path = self.work / "parts" / name
        write_atomically(path, partial(pq.write_table, table, compression="zstd"))
        return name, path.stat().st_size

    def _check_parts(self) -> None:
        """Removes what no manifest line vouches for, and makes sure that the rest is there."""
        if self.state == "finished":
            return self.close()
        directory = self.work / "parts"
        directory.mkdir(exist_ok=True)
        known = {name: size for part in self._earlier for name, size in part.files.items()}
        found = {path.name: path for path in directory.iterdir()}
        for name in found.keys() - known.keys():
            remove(found[name])
        for name, size in known.items():
            if name not in found or found[name].stat().st_size != size:
                raise OutputError(f"{directory / name} is missing or damaged; --fresh starts the job anew")


def _keys(paths: list[Path]) -> NDArray[np.int64]:
    keys = [np.zeros(0, np.int64)]
    for path in paths:
        with pq.ParquetFile(path) as file:
            table = file.read(["row_index", "sample_index"])
        keys.append(result_keys(table["row_index"].to_numpy(), table["sample_index"].to_numpy()))
    return np.sort(np.concatenate(keys))


def _file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.parquet"


# --- the directory ----------------------------------------------------------------------------------------------


def _check_directory(directory: Path) -> None:
    """Refuses what is no place for a job, before anything is written."""
    if directory.is_symlink():
        raise OutputError(f"output {directory} is a symbolic link; name the directory itself")
    work = directory / ".work"
    for path in (work, *(work.iterdir() if work.is_dir() else ())):
        if path.is_symlink():  # what it leads to would be written, or cleared
            raise OutputError(f"{path} is a symbolic link, which batchgen does not make; remove it")
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"output {directory} is a file; a directory is needed")
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if names - {".work"} and read_job(directory) is None:
        raise OutputError(f"output {directory} is not empty and holds no batchgen job; choose another directory")


def read_job(directory: Path) -> dict[str, Any] | None:
    """The content of a job directory's job.json; None when there is none, or it is not batchgen's.

    Raises OutputError for one that cannot be read, or is not JSON.
    """
    path = directory / "job.json"
    try:
        job = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise OutputError(f"{path} is no JSON: nothing tells which job this is; choose another folder") from None
    return job if isinstance(job, dict) and job.get(_MARK) == _JOB_FORMAT else None


def _write_job(directory: Path, state: str, identity: dict[str, Any], job: Mapping[str, Any] | None = None) -> None:
    value = {_MARK: _JOB_FORMAT, "state": state, **(job or {}), "identity": identity}
    write_json(directory / "job.json", value, directory / ".work" / "job.json.tmp")


def _is_delivered(directory: Path, identity: dict[str, Any]) -> bool:
    """Whether this very job is finished and no working state is left; needs no lock, and no right to write."""
    job = read_job(directory)
    finished = job is not None and job.get("state") == "finished" and job.get("identity") == identity
    return finished and not (directory / ".work").exists()


def _prepare(
    directory: Path, identity: dict[str, Any], fresh: bool, retry_errors: bool = False, reuse: bool = False
) -> State:
    """With the lock held: brings the directory into the state that it returns."""
    for name in ("deliver", "runs", "job.json.tmp"):
        remove(directory / ".work" / name)
    job = read_job(directory)
    if job is not None and job.get("state") == "taking over" and not fresh:
        _complete(directory)
        job = read_job(directory)
    remove(directory / ".work" / "next.jsonl")
    empty = job is not None and job.get("state") == "running" and not Manifest(directory / ".work/manifest.jsonl").parts
    same = job is not None and job.get("identity") == identity
    if job is None or fresh or empty or (job.get("state") == "replaced" and (same or reuse)):
        _start(directory, identity)
        return "new"
    if not same and not reuse:
        raise OutputError(
            f"output {directory} holds another job ({_differences(job.get('identity'), identity)}); "
            "choose another directory, keep the answers that are the same with --reuse, or replace it with --fresh"
        )
    if not same or (retry_errors and _has_errors(directory, job)):
        if job.get("state") == "finished":
            _clear_work(directory / ".work")  # the process died between its finished mark and this
        return "kept"
    return _resume(directory, job)


def _has_errors(directory: Path, job: dict[str, Any]) -> bool:
    finished, work = job.get("state") == "finished", directory / ".work"
    parts = [work / "parts" / name for part in Manifest(work / "manifest.jsonl").parts for name in part.files]
    results = [path for path in parts if path.name.startswith("results-")]
    name = _prefix_of(job) + "finish_reason" if finished else "finish_reason"
    return any(
        pc.any(pc.equal(pq.read_table(path, columns=[name], partitioning=None)[name], "error")).as_py()
        for path in (_delivered_files(directory, "results") if finished else results)
    )


def _delivered_files(directory: Path, kind: str) -> list[Path]:
    return sorted((directory / kind).glob("part-*.parquet"))


def _prefix_of(job: dict[str, Any]) -> str:
    """What stands before the names of its results' columns; nothing before it is finished."""
    return str(job["spec"]["output"]["prefix"]) if job.get("state") == "finished" and "spec" in job else ""


def _complete(directory: Path) -> None:
    """Lets the job that is taking over have the directory; may be killed and called again."""
    job, work = read_job(directory) or {}, directory / ".work"
    if (work / "next.jsonl").exists():
        os.replace(work / "next.jsonl", work / "manifest.jsonl")
        sync_directory(work)
    for name in _OWN_NAMES:
        remove(directory / name)
    sync_directory(directory)
    _write_job(directory, "running", job["identity"], {"started": job["started"]})


def _start(directory: Path, identity: dict[str, Any]) -> None:
    """Clears the directory of a job's files. A crash midway leaves state "replaced", from which this starts over."""
    _write_job(directory, "replaced", identity)
    for name in _OWN_NAMES:
        remove(directory / name)
    _clear_work(directory / ".work")
    sync_directory(directory / ".work")  # the manifest there is not this job's
    sync_directory(directory)
    _write_job(directory, "running", identity, {"started": datetime.now().astimezone().isoformat(timespec="seconds")})


def _resume(directory: Path, job: dict[str, Any]) -> State:
    if job.get("state") != "finished":
        return "resumed"
    _remove_work(directory / ".work")  # the process died between its finished mark and this
    return "finished"


def _clear_work(work: Path) -> None:
    for path in work.iterdir():
        if path.name != "lock":
            remove(path)


def _remove_work(work: Path) -> None:
    _clear_work(work)
    remove(work / "lock")
    if not any(work.iterdir()):  # else another process has come for the lock; it will find the job finished
        work.rmdir()


def _differences(there: Any, now: dict[str, Any]) -> str:
    old, new = flat(there if isinstance(there, dict) else {}), flat(now)
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    shown = [f"{name}: {_short(old.get(name))} there, {_short(new.get(name))} now" for name in names[:3]]
    return "; ".join(shown) + (f"; {len(names) - 3} more differ" if len(names) > 3 else "")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item})
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:36] + "…" + text[-1]


# --- the lock ---------------------------------------------------------------------------------------------------


def _acquire(work: Path) -> IO[bytes]:
    """Takes the lock file, which the system releases when the process dies, however it does."""
    while True:
        make_directory(work)
        try:
            file = open(work / "lock", "a+b")  # noqa: SIM115 - held until the checkpoint is closed
        except FileNotFoundError:  # a finishing process has just removed the directory
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(work, file) from None
        if _is_current(file, work / "lock"):
            _sign(file)
            return file
        file.close()


def _is_current(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is still the one at `path`: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sign(file: IO[bytes]) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()


def _locked(work: Path, file: IO[bytes]) -> OutputError:
    with file:
        file.seek(0)
        holder = file.read().decode(errors="replace") or "another process"
    return OutputError(f"output {work.parent} is in use by {holder}; wait for it, or choose another directory")
