"""A model file in memory, of which only what has been read last counts."""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError

RESIDENT_BYTES = 256 << 20
"""About the most of a file that is kept in the process's own memory."""


class MappedFile:
    """A file's bytes, read-only. Pages that were read are handed back to the system now and then; it keeps them as long
    as it has room, so views of them stay valid.

    Raises ModelError when the file cannot be read or is empty.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            if not path.is_file():
                raise ModelError(f"{path}: no such model file")
            if path.stat().st_size == 0:
                raise ModelError(f"{path}: the file is empty")
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._read = 0

    def __len__(self) -> int:
        return len(self.data)

    def bytes_at(self, offset: int, count: int) -> NDArray[np.uint8]:
        """A view of `count` bytes that are about to be read."""
        self._read += count  # threads may miss one of another; it is a rough measure
        if self._read > RESIDENT_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = count
        return self.data[offset : offset + count]
