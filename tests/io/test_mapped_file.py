import re
from pathlib import Path

import pytest

from batchgen.errors import ModelError
from batchgen.io import mapped_file
from batchgen.io.mapped_file import MappedFile

MIB = 1 << 20


def resident_files() -> int:
    """Bytes of files that count as this process's memory."""
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_only_what_was_read_last_is_resident(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "RESIDENT_BYTES", 8 * MIB)
    path = tmp_path / "large"
    path.write_bytes(bytes(64 * MIB))
    file, before, most = MappedFile(path), resident_files(), 0
    for start in range(0, 64 * MIB, 4 * MIB):
        assert file.bytes_at(start, 4 * MIB).sum() == 0
        most = max(most, resident_files() - before)
    assert 4 * MIB <= most <= 20 * MIB


@pytest.mark.parametrize("content", [None, b""])
def test_files_that_are_missing_or_empty(tmp_path, content):
    path = tmp_path / "m"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="the file is empty" if content == b"" else "no such model file"):
        MappedFile(path)
