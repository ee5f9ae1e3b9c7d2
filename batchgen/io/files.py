"""Writing files so that a crash leaves either the old state or the new one, never something between."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import platformdirs
import pyarrow as pa

from batchgen.errors import OutputError

_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_root() -> Path:
    """What jobs share on this machine: `BATCHGEN_CACHE_DIR`, or the platform's user cache directory."""
    return Path(os.environ.get("BATCHGEN_CACHE_DIR") or platformdirs.user_cache_dir("batchgen", appauthor=False))


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turns a failed write below `path` (disk full, read-only, I/O error) into an OutputError of one line."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code else str(error).splitlines()[0]
        remedy = "free some space" if code in _SPACE else "repair that"
        place = Path(getattr(error, "filename", None) or path)
        if code == errno.ENOENT and not place.parent.exists():
            reason, remedy = f"there is no folder {place.parent}", "make it"
        raise OutputError(f"cannot write {place}: {reason}; {remedy} and run the same command again") from error


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory and those above it that are not there, durably."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_atomically(path: Path, write: Callable[[IO[bytes]], None], temporary: Path | None = None) -> None:
    """Lets `write` fill a temporary file, makes it durable and renames it to `path`, which may exist.

    `temporary` must be on the same file system; it is removed when writing fails. OSError passes through, and names
    `path`.
    """
    temporary = temporary or path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def write_to(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Atomically where there is a file or nothing; a device or a pipe is written to, a link followed."""
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            write(file)
    else:
        write_atomically(path.resolve(), write)


def write_json(path: Path, value: Any, temporary: Path | None = None) -> None:
    """Writes `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2) + "\n"

    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    write_atomically(path, write, temporary)


def remove(path: Path) -> None:
    """Removes a file or a whole directory; a symbolic link is removed, never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
