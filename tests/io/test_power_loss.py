"""A job whose machine loses power after each fsync in turn, and with it all that was not made durable.

The disk of this test keeps as little as a file system may: a file's bytes as they were at its last fsync (none, if it
had none), a directory's names as they were at the directory's. So a rename, a new file or a removal is undone unless
its directory was synced afterwards.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.io.checkpoint import read_job
from batchgen.io.manifest import Manifest, Part
from tests.io.small_job import NEW, OLD, ROWS, check, run, write_input


class PowerCut(BaseException):
    pass


class Disk:
    """What is durable below `root`, which is so itself; by inode, which are kept from being used again.

    After `syncs` more calls of fsync the power is off: nothing is durable any more, and whoever asks for it is stopped.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self._root, self._lock, self._fsync = root, threading.Lock(), os.fsync
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: dict[int, int] = {}
        self.syncs = 10**6
        for folder, _, files in [*os.walk(root)]:
            self._keep(Path(folder))
            for name in files:
                self._keep(Path(folder) / name)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            if self.syncs == 0:
                raise PowerCut
            self.syncs -= 1
            self._keep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def _keep(self, path: Path) -> None:
        inode = self._inode(path)
        if path.is_dir():
            self._names[inode] = {p.name: (self._inode(p), p.is_dir()) for p in path.iterdir()}
        else:
            self._bytes[inode] = path.read_bytes()

    def _inode(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY)
        return inode

    def restore(self, target: Path) -> None:
        """Copies what is durable into a new directory."""
        self._restore(self._root.stat().st_ino, target)
        for descriptor in self._open.values():
            os.close(descriptor)

    def _restore(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_directory) in self._names.get(inode, {}).items():
            if is_directory:
                self._restore(child, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(child, b""))


def committed(directory: Path) -> int:
    """Results that count, or all when the job is finished."""
    job = read_job(directory)
    if job is None:
        return 0
    if job["state"] == "finished":
        return ROWS
    return sum(part.totals.get("results", 0) for part in Manifest(directory / ".work" / "manifest.jsonl").parts)


def noting(promised: list[int]) -> Callable[[Manifest, Part], None]:
    """`Manifest.append` that notes how many results have been promised to be kept."""
    append = Manifest.append

    def noted(manifest: Manifest, part: Part) -> None:
        append(manifest, part)
        if manifest._path.name == "manifest.jsonl":
            promised.append(part.totals["results"])

    return noted


def run_until_the_power_is_off(base: Path, how: dict[str, bool]) -> bool:
    """Whether it was on to the end."""
    try:
        run(base, base / "deep" / "out", NEW, **how)
        return True
    except PowerCut:
        return False


# what is there before; what happens is that the new job runs
BEFORE = {
    "empty": {},
    "replaced": {"fresh": True},
    "replaced unfinished": {"fresh": True},
    "kept": {"reuse": True},
    "kept unfinished": {"reuse": True},
}


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["often", "anywhere"])
@pytest.mark.parametrize(("before", "how"), BEFORE.items(), ids=BEFORE)
def test_without_power_anywhere_and_finished_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, how: dict[str, bool], stride: int
) -> None:
    for syncs in range(0, 10**6, stride):
        base, after = tmp_path / f"before-{syncs}", tmp_path / f"after-{syncs}"
        base.mkdir()
        write_input(base)
        if before != "empty":
            run(base, base / "deep" / "out", OLD, delivers="unfinished" not in before)
        promised: list[int] = []
        with monkeypatch.context() as patch:
            disk = Disk(base, patch)
            disk.syncs = syncs
            patch.setattr(Manifest, "append", noting(promised))
            done = run_until_the_power_is_off(base, how)
        disk.restore(after)
        output = after / "deep" / "out"
        job = read_job(output) or {"state": "none", "identity": None}
        begun = job["identity"] == NEW and job["state"] != "replaced"
        assert committed(output) >= sum(promised) if begun else not promised
        if before == "kept" and not begun:
            run(after, output, OLD)
            check(output, OLD)
        run(after, output, NEW, **({} if begun else how))
        check(output, NEW, OLD if before.startswith("kept") else None)
        assert not (output / ".work").exists()
        if done:
            assert syncs >= 30
            return
