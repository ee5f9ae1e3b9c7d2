"""The list of committed parts: one line of JSON for each, behind its CRC, appended and made durable.

A part counts when its line is whole. A crash can leave a torn last line, which is cut off before the next append.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from batchgen.errors import OutputError
from batchgen.io.files import sync_directory


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part. `files` gives each file's bytes; `end_step` and `end_ns` are where steps and times go on;
    `totals` are the part's sums of countable things (rows, tokens, ...)."""

    number: int
    files: Mapping[str, int] = field(default_factory=dict)
    end_step: int = 0
    end_ns: int = 0
    totals: Mapping[str, int] = field(default_factory=dict)


class Manifest:
    """The manifest file at `path`; read once, then only appended to."""

    def __init__(self, path: Path):
        self._path = path
        self._parts, self._size = _read(path)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts)

    def append(self, part: Part) -> None:
        """Commits the part. OSError passes through and leaves it uncommitted."""
        line = _encode(part)
        new = not self._path.exists()
        with open(self._path, "ab") as file:
            file.truncate(self._size)  # what a crash or a full disk left of a line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_directory(self._path.parent)
        self._size += len(line)
        self._parts.append(part)


def _encode(part: Part) -> bytes:
    text = json.dumps(asdict(part)).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _decode(line: bytes) -> Part | None:
    """The part, or None when the line is not whole."""
    checksum, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    return Part(**json.loads(text))


def _read(path: Path) -> tuple[list[Part], int]:
    """The whole lines' parts and their size in bytes."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    parts = [_decode(line) for line in lines]
    whole = [part for part in parts if part is not None]
    if parts[: len(whole)] != whole:
        raise OutputError(f"{path} is damaged at line {parts.index(None) + 1}; --fresh starts the job anew")
    return whole, sum(map(len, lines[: len(whole)]))
