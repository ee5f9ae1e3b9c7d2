"""The files of an input: found on this disk or, by a URI, wherever pyarrow and fsspec read; and what opens them.

A path, a glob or a directory names them. Of a directory all files below it count whose names end as a format's do;
names that start with `.` or `_` are skipped, as pyarrow and Spark do. The order is that of the paths' parts.
"""

import glob
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from batchgen.errors import InputError
from batchgen.io.model_source import file_sha256

READ_ERRORS = (pa.ArrowException, OSError, ValueError, RecursionError)

_COPY_BYTES = 1 << 20
_LINE_BYTES = 400  # of an error message
_GCS_SECONDS = 30
# What fsspec's file systems call the name of a file's content.
_CONTENT_NAMES = ("etag", "ETag", "e_tag", "blob_id", "md5Hash", "content_hash", "generation")

IsData = Callable[[str], bool]


@dataclass(frozen=True, slots=True, eq=False)
class SourceFile:
    """A file as it was when the input was opened.

    `path` is how `filesystem` knows it, `shown` how messages name it, `name` is relative to the input's base, with
    slashes. `stamp` is what else its storage tells of its content: a hash or the time it was changed; "" if nothing.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    shown: str
    name: str
    size: int
    stamp: str

    @property
    def local_path(self) -> Path | None:
        """The path on this disk, if it is one."""
        return Path(self.path) if isinstance(self.filesystem, pyarrow.fs.LocalFileSystem) else None

    def open(self) -> pa.NativeFile:
        """The file, to be read anywhere. Not mapped: a file cut short would kill the process."""
        self.check_unchanged()
        return self.filesystem.open_input_file(self.path)

    def open_stream(self) -> io.BufferedReader:
        """The bytes in order; unpacked when the name ends in .gz, .zst, .bz2 or .lz4."""
        self.check_unchanged()
        return io.BufferedReader(self.filesystem.open_input_stream(self.path), _COPY_BYTES)

    def check_unchanged(self) -> None:
        """Raise InputError when the file is another one by now."""
        found = _look(self.filesystem, self.path)
        if found != (self.size, self.stamp):
            raise InputError(f"{self.shown}: has changed since the job started; run the job again")

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turns what a reader raises into an InputError: the file, `what`, and the reason in one line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            if self.local_path and not isinstance(error, READ_ERRORS):  # clients of remote storage have their own
                raise
            raise InputError(f"{self.shown}: {what}: {first_line(error)}") from error

    def fingerprint(self) -> str:
        """What tells the content from another: of a local file its SHA-256, of a remote one its size and stamp.

        A remote file whose storage tells neither a hash nor a time is read and hashed.
        """
        if self.local_path:
            return file_sha256(self.local_path)
        if self.stamp:
            return f"{self.size} {self.stamp}"
        digest = hashlib.sha256()
        with self.errors("cannot be read"), self.filesystem.open_input_file(self.path) as file:
            while block := file.read(_COPY_BYTES):
                digest.update(block)
        return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of the error's text, cut where it is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _LINE_BYTES else text[:_LINE_BYTES] + "…"


def is_uri(path: str) -> bool:
    return re.match(r"[a-zA-Z][\w.+-]+://", path) is not None


def find_files(path: str, is_data: IsData, what: str) -> list[SourceFile]:
    """The files that a path, glob, directory or URI names, in order; never none.

    `is_data` says by a file's name whether it counts in a directory, `what` says that in words. Raises InputError.
    """
    if is_uri(path):
        return _find_remote(path, is_data, what)
    base, paths = _find_local(os.path.expanduser(path), is_data, what)
    local = pyarrow.fs.LocalFileSystem()
    # Absolute: pyarrow takes a relative "a:/b" for a URI.
    return [_source(local, str(path.absolute()), str(path), path.relative_to(base).as_posix()) for path in paths]


def _source(filesystem: pyarrow.fs.FileSystem, path: str, shown: str, name: str) -> SourceFile:
    try:
        size, stamp = _look(filesystem, path)
    except READ_ERRORS as error:
        raise InputError(f"{shown}: cannot be read: {first_line(error)}") from error
    return SourceFile(filesystem, path, shown, name, size, stamp)


def _look(filesystem: pyarrow.fs.FileSystem, path: str) -> tuple[int, str]:
    """Size and stamp of a file now."""
    if isinstance(filesystem, pyarrow.fs.PyFileSystem):  # one of fsspec's, which knows more than pyarrow asks for
        known = filesystem.handler.fs.info(path)
        stamps = [f"{name} {known[name]}" for name in _CONTENT_NAMES if known.get(name)]
        return known["size"], stamps[0] if stamps else str(known.get("mtime") or "")
    found = filesystem.get_file_info(path)
    if found.type != pyarrow.fs.FileType.File:
        raise FileNotFoundError(f"{path} is not there")
    return found.size, str(found.mtime_ns or "")


def _in_order(paths: Sequence[Any], message: str) -> list[Any]:
    if not paths:
        raise InputError(message)
    return sorted(paths, key=lambda path: path.parts)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


# --- on this disk -----------------------------------------------------------------------------------------------


def _find_local(path: str, is_data: IsData, what: str) -> tuple[Path, list[Path]]:
    """The base that names are relative to, and the files in order."""
    if os.path.isfile(path):
        return Path(path).parent, [Path(path)]
    if os.path.isdir(path):
        return Path(path), _in_order(_below(Path(path), is_data), f"input {path!r} has no {what} below it")
    if not glob.has_magic(path):
        raise InputError(f"input {path!r} does not exist")
    matches = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    return Path(*_fixed_parts(Path(path))), _in_order(matches, f"input {path!r} matches no file")


def _below(directory: Path, is_data: IsData) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        found += [Path(folder, name) for name in names if not _is_hidden(name) and is_data(name)]
    return found


def _fixed_parts(pattern: PurePosixPath | Path) -> tuple[str, ...]:
    """The parts of a glob before the first that is a pattern."""
    parts = pattern.parts
    return parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))]


# --- elsewhere --------------------------------------------------------------------------------------------------


def _find_remote(uri: str, is_data: IsData, what: str) -> list[SourceFile]:
    _check_uri(uri)
    try:
        filesystem, base, paths = _list_remote(uri, is_data)
        scheme = uri.partition("://")[0]
        found = _in_order([PurePosixPath(path) for path in paths], f"input {uri!r}: no {what} there")
        names = [str(path).removeprefix(base).lstrip("/") for path in found]
        return [
            _source(filesystem, str(path), f"{scheme}://{str(path).lstrip('/')}", name)
            for path, name in zip(found, names, strict=True)
        ]
    except InputError:
        raise
    except Exception as error:  # every storage's client raises its own
        raise InputError(f"input {uri!r} cannot be read: {first_line(error)}") from error


def _check_uri(uri: str) -> None:
    if "@" in uri and urlsplit(uri).password is not None:
        scheme = uri.partition("://")[0]
        raise InputError(
            f"input {scheme}://… holds a password, which job.json would repeat; "
            "give it in the environment or the configuration files of that storage"
        )


def _list_remote(uri: str, is_data: IsData) -> tuple[pyarrow.fs.FileSystem, str, list[str]]:
    """The file system, the base that names are relative to, and the files' paths."""
    address, _, options = uri.partition("?")
    fixed, pattern = _split_pattern(address)
    if address.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in options:
        options = "&".join(filter(None, [options, f"retry_limit_seconds={_GCS_SECONDS}"]))  # it tries for long minutes
    filesystem, base = pyarrow.fs.FileSystem.from_uri(f"{fixed}?{options}" if options else fixed)
    files, base = _as_fsspec(filesystem), base.rstrip("/")
    kind = filesystem.get_file_info(base).type if base else None  # raises what fsspec's `find` and `glob` keep quiet
    if pattern:
        matches = files.glob(f"{base}/{pattern}", detail=True)
        return filesystem, base, [path for path, info in matches.items() if info["type"] == "file"]
    if kind == pyarrow.fs.FileType.File:
        return filesystem, base.rpartition("/")[0], [base]
    visible = [path for path in files.find(base) if not any(map(_is_hidden, path.removeprefix(base).split("/")))]
    return filesystem, base, [path for path in visible if is_data(path.rpartition("/")[2])]


def _split_pattern(address: str) -> tuple[str, str]:
    """ "s3://b/x/*/y" as ("s3://b/x", "*/y"); without a pattern the second is empty."""
    parts = address.split("/")
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return "/".join(parts[:fixed]), "/".join(parts[fixed:])


def _as_fsspec(filesystem: pyarrow.fs.FileSystem) -> Any:
    """fsspec's view of the file system, which can glob."""
    if isinstance(filesystem, pyarrow.fs.PyFileSystem):
        return filesystem.handler.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem)
