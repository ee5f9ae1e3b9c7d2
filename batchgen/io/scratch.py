"""Room on disk for what does not fit in memory."""

import errno
import os
import tempfile
from pathlib import Path
from typing import IO, Any

from batchgen.io.files import output_errors

MEMORY_BYTES = 128 << 20


class Scratch:
    """Bytes that are appended first and then read: in memory, or in a file once they are more than `memory_bytes`.

    The file lies in `directory`, without a name, so that nothing is left of it however the process ends. It is read
    without being mapped, so that its pages never count as the process's. OutputError when the disk is full or fails.
    """

    def __init__(self, directory: Path, memory_bytes: int = MEMORY_BYTES):
        self._directory, self._memory_bytes = directory, memory_bytes
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, data: memoryview) -> None:
        if self._file is None and len(self._memory) + len(data) <= self._memory_bytes:
            self._memory += data
            return
        with output_errors(self._directory):
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed with this
                self._file.write(self._memory)
                self._memory = bytearray()
            self._file.write(data)
            self._file.flush()

    def read(self, start: int, size: int) -> Any:
        """The `size` bytes (less than 2 GiB) from `start` on."""
        if self._file is None:
            return memoryview(self._memory)[start : start + size]
        with output_errors(self._directory):
            data = os.pread(self._file.fileno(), size, start)
            if len(data) < size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data
