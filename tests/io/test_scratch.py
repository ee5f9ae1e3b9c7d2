"""Scratch room in memory and on disk."""

import tempfile
from pathlib import Path

import pytest

from batchgen.errors import OutputError
from batchgen.io.scratch import Scratch


@pytest.mark.parametrize("memory_bytes", [0, 5, 100])
def test_what_was_appended_is_read_wherever_it_lies(tmp_path: Path, memory_bytes: int) -> None:
    with Scratch(tmp_path / "new", memory_bytes) as scratch:
        for part in (b"abc", b"", b"defg", b"h"):
            scratch.append(memoryview(part))
        assert [bytes(scratch.read(*span)) for span in ((0, 8), (2, 3), (8, 0))] == [b"abcdefgh", b"cde", b""]
        assert (tmp_path / "new").exists() == (memory_bytes < 8)  # a file was wanted
        assert not list(tmp_path.rglob("*.*")) and not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    scratch = Scratch(tmp_path, memory_bytes=2)
    scratch.append(memoryview(b"ab"))
    with pytest.raises(OutputError, match=f"^cannot write {tmp_path}: No space left on device; free some space .*$"):
        scratch.append(memoryview(b"c"))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=rf"cannot write {tmp_path}/file"):
        Scratch(tmp_path / "file", 0).append(memoryview(b"a"))


def test_what_has_gone_missing_is_noticed(tmp_path: Path) -> None:
    with Scratch(tmp_path, 0) as scratch:
        scratch.append(memoryview(b"abc"))
        with pytest.raises(OutputError, match="Input/output error"):
            scratch.read(1, 3)
