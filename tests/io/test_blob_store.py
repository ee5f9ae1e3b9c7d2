"""Blobs on disk: what was saved comes back or nothing does, however files are damaged and whoever else is at work."""

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from batchgen.io import blob_store
from batchgen.io.blob_store import CHECKSUM_BYTES, BlobStore

SIZE = 1000
FILE = SIZE + CHECKSUM_BYTES
REPOSITORY = Path(__file__).parents[2]


def key(number: int) -> bytes:
    """Keys 0 to 255 lie in folders of their own."""
    return bytes([number % 256, number // 256]) + bytes(30)


def blob(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size).astype(np.uint8)


def path_of(directory: Path, number: int) -> Path:
    name = key(number).hex()
    return directory / name[:2] / f"{name}.blob"


def open_store(directory: Path, blobs: float = 1000) -> BlobStore:
    return BlobStore(directory, int(blobs * FILE))


def is_whole(store: BlobStore, number: int) -> bool:
    data = store.load(key(number), SIZE)
    assert data is None or data.tobytes() == blob(number).tobytes()
    return data is not None


def all_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def fill(directory: Path, numbers: range, seconds_ago: int = 0) -> None:
    """Blobs that a process saved one after the other."""
    store = open_store(directory)
    for i, number in enumerate(numbers):
        store.save(key(number), blob(number))
        then = time.time() - seconds_ago + i / 1000
        os.utime(path_of(directory, number), (then, then))


def test_what_is_saved_is_found_by_the_next_process(tmp_path):
    first = open_store(tmp_path / "a" / "store")
    assert key(1) not in first and first.load(key(1), SIZE) is None
    assert not (tmp_path / "a").exists()  # nothing is made before there is something to save
    assert first.save(key(1), blob(1)) and first.save(key(300), blob(300))
    assert is_whole(first, 1) and key(1) in first
    second = open_store(tmp_path / "a" / "store")
    assert key(300) in second and is_whole(second, 300) and is_whole(second, 1)
    assert key(2) not in second and second.load(key(2), SIZE) is None
    assert second.damaged == 0


def test_a_blob_is_saved_once(tmp_path):
    store = open_store(tmp_path)
    assert store.save(key(1), blob(1))
    before = path_of(tmp_path, 1).stat().st_ino
    assert store.save(key(1), blob(1)) and path_of(tmp_path, 1).stat().st_ino == before


# Damage


def flip(at):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return damage


def cut(count):
    return lambda path: path.write_bytes(path.read_bytes()[:count])


def other_blob(path: Path) -> None:
    """A blob that is whole, but another key's."""
    path.write_bytes(path_of(path.parents[1], 2).read_bytes())


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path_of(path.parents[1], 2))


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "first byte of the checksum": flip(0),
    "last byte of the checksum": flip(CHECKSUM_BYTES - 1),
    "first byte": flip(CHECKSUM_BYTES),
    "a byte in the middle": flip(FILE // 2),
    "last byte": flip(-1),
    "one byte short": cut(-1),
    "half": cut(FILE // 2),
    "the checksum alone": cut(CHECKSUM_BYTES),
    "empty": cut(0),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(FILE)),
    "another key's blob": other_blob,
    "something else": lambda path: path.write_bytes(b"hello"),
    "a link to a good blob": link,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "an empty folder": to_folder,
    "a pipe": to_pipe,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("reopened", [True, False])
def test_what_is_damaged_is_not_there_and_can_be_saved_again(tmp_path, damage, reopened):
    store = open_store(tmp_path)
    for number in (1, 2):
        store.save(key(number), blob(number))
    damage(path_of(tmp_path, 1))
    if reopened:
        store = open_store(tmp_path)
    assert store.load(key(1), SIZE) is None
    assert key(1) not in store and store.damaged == 1
    assert not os.path.lexists(path_of(tmp_path, 1))
    assert store.save(key(1), blob(1)) and is_whole(store, 1) and is_whole(store, 2)


def test_every_single_bit_counts(tmp_path):
    store, small = open_store(tmp_path), blob(1, 8)
    store.save(key(1), small)
    path = path_of(tmp_path, 1)
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert store.load(key(1), 8) is None, bit
    path.write_bytes(good)
    assert store.load(key(1), 8).tobytes() == small.tobytes()


def test_a_blob_of_another_size_is_not_what_was_asked_for(tmp_path):
    store = open_store(tmp_path)
    store.save(key(1), blob(1))
    assert store.load(key(1), SIZE - 1) is None and store.damaged == 1


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    path = path_of(tmp_path, 1)
    path.mkdir(parents=True)
    (path / "mine").write_text("x")
    store = open_store(tmp_path)
    assert key(1) not in store and store.load(key(1), SIZE) is None
    assert store.save(key(1), blob(1)) and key(1) not in store and store.damaged  # and others can be saved
    assert all_files(tmp_path) == [str((path / "mine").relative_to(tmp_path))]


# Places


def test_links_lead_nowhere(tmp_path):
    """Nothing is read from, written to or removed from a place outside, whatever lies in the store's folder."""
    outside, inside = tmp_path / "outside", tmp_path / "store"
    fill(outside, range(1, 2), seconds_ago=10**6)
    leftover = outside / "01" / f"{key(1).hex()}.{'0' * 32}.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    before = all_files(outside)
    inside.mkdir()
    (inside / "01").symlink_to(outside / "01")
    store = open_store(inside, 1)
    assert key(1) not in store and store.load(key(1), SIZE) is None
    with pytest.raises(OSError):
        store.save(key(1), blob(1))
    assert store.save(key(2), blob(2)) and not store.save(key(3), blob(3))
    assert all_files(outside) == before


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    assert open_store(tmp_path / "store").save(key(1), blob(1))
    assert is_whole(open_store(tmp_path / "real"), 1)


def test_nothing_is_written_outside_the_folder(tmp_path):
    directory = tmp_path / "store"
    store = open_store(directory, 3)
    for number in range(300):
        store.save(key(number), blob(number))
    assert sorted(os.listdir(tmp_path)) == ["store"]
    assert all_files(directory) == sorted(str(path_of(directory, n).relative_to(directory)) for n in range(3))


def test_what_is_not_ours_is_not_touched(tmp_path):
    fill(tmp_path, range(3), seconds_ago=100)
    names = ["notes.txt", "00/notes.txt", "00/" + "0" * 64, "00/" + "A" * 64 + ".blob", "01/" + "0" * 64 + ".blob"]
    for name in names:
        (tmp_path / name).write_text("x" * FILE)
        os.utime(tmp_path / name, (0, 0))
    store = open_store(tmp_path, 1)
    assert store.save(key(9), blob(9))
    assert all_files(tmp_path) == sorted([*names, str(path_of(tmp_path, 9).relative_to(tmp_path))])


# Room


def test_the_least_recently_used_go_first_across_processes(tmp_path):
    fill(tmp_path, range(4), seconds_ago=100)
    assert is_whole(open_store(tmp_path), 1)  # another job uses one of them
    store = open_store(tmp_path, 4)
    gone = []
    for number in range(10, 13):
        assert store.save(key(number), blob(number))
        gone.append([old for old in range(4) if not path_of(tmp_path, old).exists()])
    assert gone == [[0], [0, 2], [0, 2, 3]]


def test_what_another_process_uses_meanwhile_stays(tmp_path):
    fill(tmp_path, range(3), seconds_ago=100)
    store = open_store(tmp_path, 3)
    assert is_whole(open_store(tmp_path), 0)
    assert store.save(key(10), blob(10)) and store.save(key(11), blob(11))
    assert [n for n in (0, 1, 2, 10, 11) if path_of(tmp_path, n).exists()] == [0, 10, 11]


def test_what_this_process_uses_while_it_makes_room_is_counted_once(tmp_path, monkeypatch):
    fill(tmp_path, range(3), seconds_ago=100)
    store, stat = open_store(tmp_path, 3), os.stat

    def used_meanwhile(*args, **kwargs):
        monkeypatch.undo()
        assert is_whole(store, 0)
        return stat(*args, **kwargs)

    monkeypatch.setattr(blob_store.os, "stat", used_meanwhile)
    assert store.save(key(10), blob(10))
    assert (store._own_bytes, store._other_bytes) == (2 * FILE, FILE)


def test_a_job_s_own_blobs_do_not_push_each_other_out(tmp_path):
    """The first pages of a prefix would go, and the rest be of no use."""
    fill(tmp_path, range(3), seconds_ago=100)
    store = open_store(tmp_path, 3)
    assert is_whole(store, 0)
    assert [store.save(key(n), blob(n)) for n in range(10, 14)] == [True, True, False, False]
    assert all(is_whole(open_store(tmp_path), n) for n in (0, 10, 11))
    assert len(all_files(tmp_path)) == 3


def test_a_blob_that_never_fits_removes_nothing(tmp_path):
    fill(tmp_path, range(2), seconds_ago=100)
    assert not open_store(tmp_path, 2).save(key(9), blob(9, 2 * FILE))
    assert len(all_files(tmp_path)) == 2


def test_what_others_save_meanwhile_is_seen(tmp_path):
    """Not at once, but before much has been saved."""
    store = open_store(tmp_path, 40)
    fill(tmp_path, range(100, 140), seconds_ago=100)
    for number in range(12):
        assert store.save(key(number), blob(number))
    assert len(all_files(tmp_path)) <= 40 + 40 // blob_store.SCANS_PER_FILL
    assert all(path_of(tmp_path, n).exists() for n in range(12))


def test_a_blob_that_another_process_removed_is_a_miss(tmp_path):
    fill(tmp_path, range(2))
    store = open_store(tmp_path)
    path_of(tmp_path, 1).unlink()
    assert key(1) in store
    assert store.load(key(1), SIZE) is None and key(1) not in store
    assert store.damaged == 0 and is_whole(store, 0)


@pytest.mark.parametrize(("age", "stays"), [(60, True), (2 * blob_store.LEFTOVER_SECONDS, False)])
def test_leftovers_of_processes_that_died_are_removed(tmp_path, age, stays):
    fill(tmp_path, range(1))
    leftover = tmp_path / "00" / f"{key(0).hex()}.{'a' * 32}.tmp"
    leftover.write_bytes(bytes(500))
    os.utime(leftover, (time.time() - age,) * 2)
    open_store(tmp_path)
    assert leftover.exists() == stays and path_of(tmp_path, 0).exists()


def test_many_files_are_listed_in_no_time(tmp_path):
    for number in range(256):
        (tmp_path / f"{number:02x}").mkdir()
    for number in range(5000):
        path_of(tmp_path, number).touch()
    start = time.process_time()
    store = open_store(tmp_path)
    assert time.process_time() - start < 1  # a million: minutes at the very most
    assert key(4999) in store and key(5000) not in store


# Others at work


WRITER = """
import sys
import numpy as np
from pathlib import Path
from tests.io.test_blob_store import SIZE, blob, is_whole, key, open_store

store = open_store(Path(sys.argv[1]), 30)
rng = np.random.default_rng(int(sys.argv[2]))
for number in rng.integers(0, 20, 400).tolist():
    if rng.random() < 0.5:
        assert store.save(key(number), blob(number))
    else:
        is_whole(store, number)
    if rng.random() < 0.1:
        store = open_store(Path(sys.argv[1]), 30)
assert store.damaged == 0
"""


def test_two_processes_at_once(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)], cwd=REPOSITORY) for seed in range(2)
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    store = open_store(tmp_path)
    assert all(is_whole(store, number) for number in range(20))
    assert len(all_files(tmp_path)) == 20


def test_threads_at_once(tmp_path):
    store, problems = open_store(tmp_path, 8), []
    fill(tmp_path, range(8), seconds_ago=100)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in rng.integers(0, 16, 200).tolist():
                store.save(key(number), blob(number)) if seed else is_whole(store, number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and store.damaged == 0


def test_a_writer_that_dies_leaves_no_half_blob(tmp_path):
    """Killed after every written byte count in turn, by the limit on file sizes turned into a signal."""
    script = """
import os, resource, signal, sys
from pathlib import Path
from tests.io.test_blob_store import blob, key, open_store

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for limit in range(0, 1032, 100):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        open_store(Path(sys.argv[1])).save(key(1), blob(1))
        os._exit(0)
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGXFSZ
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, check=True)
    store = open_store(tmp_path)
    assert key(1) not in store and store.load(key(1), SIZE) is None
    assert len(all_files(tmp_path)) == 11  # leftovers, to be removed in an hour
    assert store.save(key(1), blob(1)) and is_whole(store, 1)


# Disks


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path):
    fill(tmp_path, range(1))
    store, limits = open_store(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE // 2, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            store.save(key(1), blob(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert key(1) not in store and is_whole(store, 0)
    assert len(all_files(tmp_path)) == 1
    assert store.save(key(1), blob(1)) and is_whole(store, 1)


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path, monkeypatch):
    """As on a disk that is mounted for reading only (file modes do not stop every user)."""
    fill(tmp_path, range(1))
    original = os.open

    def open_to_read(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *args, **kwargs)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", open_to_read)
    for name in ("utime", "mkdir", "unlink", "rmdir", "replace"):
        monkeypatch.setattr(os, name, refuse)
    store = open_store(tmp_path)
    assert is_whole(store, 0)
    with pytest.raises(OSError):
        store.save(key(1), blob(1))
    path_of(tmp_path, 0).write_bytes(b"x")
    assert store.load(key(0), SIZE) is None and store.damaged == 1


@pytest.mark.parametrize("below", ["", "store"])
def test_a_file_in_the_folder_s_place_is_an_error_of_saving_alone(tmp_path, below):
    (tmp_path / "file").write_text("x")
    store = open_store(tmp_path / "file" / below)
    assert store.load(key(1), SIZE) is None
    with pytest.raises(OSError):
        store.save(key(1), blob(1))
    assert (tmp_path / "file").read_text() == "x"
