"""Pieces of bytes on disk under keys, which jobs and processes share: a cache, never the only copy of anything.

A blob is a file of its own, `ab/abcd….blob`, that begins with a checksum of key and content. It appears whole, under a
rename. Whatever is not exactly what was saved (cut, changed, another key's, no plain file) counts as damaged and is
removed. Links are not followed below the store's folder. Nothing is synced: what a crash of the system leaves is either
intact or found to be damaged.
"""

import errno
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CHECKSUM_BYTES = 32
LEFTOVER_SECONDS = 3600
"""A temporary file that nobody has written to for so long is left from a process that died."""
SCANS_PER_FILL = 8
"""The folder is read anew whenever this part of `max_bytes` has been saved, since others save there, too."""

_BLOB = re.compile(r"[0-9a-f]{64}\.blob")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_FOLDERS = [f"{i:02x}" for i in range(256)]
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # so that a pipe's writer is not waited for
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobStore:
    """Blobs below `directory`, together at most `max_bytes` and what others add meanwhile; keys are 32 bytes.

    What was saved or loaded longest ago, by whichever process, makes room for what is new. But what this process itself
    has saved or loaded stays: of pieces that are useful only together none would be left if they pushed each other out.
    The folder is made by the first `save`. May be used by several threads.
    """

    def __init__(self, directory: Path, max_bytes: int):
        self._directory, self._max_bytes = directory, max_bytes
        self.place = str(directory)
        self._lock = threading.Lock()  # of what follows
        self._own: dict[bytes, int] = {}  # bytes of the files that this process has saved or loaded
        self._others: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # bytes and time of use, the oldest first
        self._own_bytes = self._other_bytes = 0
        self._unscanned = 0  # bytes saved since the folder was read
        self.damaged = 0
        self._scan()

    def __contains__(self, key: bytes) -> bool:
        """Whether it was there when last looked; another process may have removed it."""
        return key in self._own or key in self._others

    def load(self, key: bytes, size: int) -> NDArray[np.uint8] | None:
        """The blob of `size` bytes that was saved under `key`; None when there is none that is intact."""
        try:
            with self._folder(key) as folder:
                data = self._read(folder, key, size)
        except OSError:
            data = None
        with self._lock:
            self._other_bytes -= self._others.pop(key, (0, 0))[0]
            self._set_own(key, 0 if data is None else CHECKSUM_BYTES + size)
        return data

    def save(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Keep a blob; False when there is no room beside what this process uses. OSError when it cannot be written.

        A folder in its place that holds something is left alone: then it is not kept, and counts as damaged.
        """
        size = CHECKSUM_BYTES + len(data)
        if key in self:
            return True
        if not self._make_room(size):
            return False
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with self._folder(key, make=True) as folder:
                self._write(folder, key, data)
        except IsADirectoryError:
            self.damaged += 1
            return True
        with self._lock:
            self._set_own(key, size)
            self._unscanned += size
        return True

    # What is there

    def _set_own(self, key: bytes, size: int) -> None:
        """0: it is not there."""
        self._own_bytes += size - self._own.pop(key, 0)
        if size:
            self._own[key] = size

    def _scan(self) -> None:
        """Read the folder."""
        found = sorted(self._files(), key=lambda file: file[2])
        with self._lock:
            own = {key: size for key, size, _ in found if key in self._own}
            self._others = OrderedDict((key, (size, used)) for key, size, used in found if key not in own)
            self._own, self._own_bytes = own, sum(own.values())
            self._other_bytes = sum(size for size, _ in self._others.values())
            self._unscanned = 0

    def _files(self) -> Iterator[tuple[bytes, int, int]]:
        """Key, bytes and time of last use (nanoseconds) of every file that looks like a blob; leftovers are removed."""
        oldest = time.time() - LEFTOVER_SECONDS
        for name in _FOLDERS:
            with suppress(OSError), self._opened_folder(name) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if _BLOB.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) and entry.name[:2] == name:
                            yield bytes.fromhex(entry.name[:64]), status.st_size, status.st_mtime_ns
                        elif _TEMPORARY.fullmatch(entry.name) and status.st_mtime < oldest:
                            os.unlink(entry.name, dir_fd=folder)

    def _make_room(self, size: int) -> bool:
        """Remove the oldest files of others until there is room; False when that would not do."""
        if self._unscanned > self._max_bytes // SCANS_PER_FILL or self._own_bytes + size > self._max_bytes:
            self._scan()
        if self._own_bytes + size > self._max_bytes:
            return False
        while self._others and self._own_bytes + self._other_bytes + size > self._max_bytes:
            self._evict()
        return True

    def _evict(self) -> None:
        """Remove the oldest file of others, unless it has been used meanwhile."""
        with self._lock:
            if not self._others:  # they have been loaded, and are this process's own now
                return
            key, (size, used) = self._others.popitem(last=False)
            self._other_bytes -= size
        with suppress(OSError), self._folder(key) as folder:
            now = os.stat(_name(key), dir_fd=folder, follow_symlinks=False).st_mtime_ns
            if now == used:
                os.unlink(_name(key), dir_fd=folder)
            else:
                self._keep_other(key, size, now)

    def _keep_other(self, key: bytes, size: int, used: int) -> None:
        """It has been used since the folder was read; perhaps by this process."""
        with self._lock:
            if key not in self._own:
                self._others[key] = (size, used)
                self._other_bytes += size

    # Files

    @contextmanager
    def _folder(self, key: bytes, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder that a key's file belongs in."""
        with self._opened_folder(_name(key)[:2], make) as folder:
            yield folder

    @contextmanager
    def _opened_folder(self, name: str, make: bool = False) -> Iterator[int]:
        with _opened(self._directory, _FOLDER_FLAGS) as root:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=root)
            with _opened(name, _FOLDER_FLAGS | os.O_NOFOLLOW, root) as folder:
                yield folder

    def _read(self, folder: int, key: bytes, size: int) -> NDArray[np.uint8] | None:
        try:
            with _opened(_name(key), _READ_FLAGS, folder) as file:
                data = _content(file, key, size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:  # what a link gives
                raise
            data = None
        if data is None:
            self.damaged += 1
            _remove(_name(key), folder)
        return data

    def _write(self, folder: int, key: bytes, data: NDArray[np.uint8]) -> None:
        temporary = f"{key.hex()}.{uuid.uuid4().hex}.tmp"
        try:
            with _opened(temporary, _WRITE_FLAGS, folder) as descriptor, open(descriptor, "wb", closefd=False) as file:
                file.write(_checksum(key, data))
                file.write(data.data)
            os.replace(temporary, _name(key), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def _name(key: bytes) -> str:
    return f"{key.hex()}.blob"


def _checksum(key: bytes, data: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(data.data, key=key, digest_size=CHECKSUM_BYTES).digest()


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(file: int, key: bytes, size: int) -> NDArray[np.uint8] | None:
    """What an open file holds after its checksum, None unless that is right; if it is, the file counts as used now."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size != CHECKSUM_BYTES + size:
        return None
    whole = np.empty(CHECKSUM_BYTES + size, np.uint8)
    with open(file, "rb", closefd=False) as reader:
        if reader.readinto(whole.data) != len(whole):
            return None
    data = whole[CHECKSUM_BYTES:]
    if whole[:CHECKSUM_BYTES].tobytes() != _checksum(key, data):
        return None
    with suppress(OSError):  # a file of somebody else's, or on a disk that is read-only
        os.utime(file)
    return data


def _remove(name: str, folder: int) -> None:
    """A file, a link itself, or a folder if it is empty."""
    with suppress(OSError):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=folder)
