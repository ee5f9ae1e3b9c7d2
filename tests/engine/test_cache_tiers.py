"""Tiers below a device that is a dictionary of pages: what is saved when, what comes back, what failures do."""

import threading
import time
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from batchgen.engine import cache_tiers
from batchgen.engine.cache_tiers import CacheTiers, HostMemory, KeyChain, Stores, TierPolicy, prefix_root

PAGE, BYTES = 4, 16
ROOT = prefix_root({"model": "m", "page_size": PAGE})


class Disk:
    """A store in memory, with a log, that can be told to fail, to be full, or to wait."""

    place = "the disk"

    def __init__(self):
        self.pages: dict[bytes, np.ndarray] = {}
        self.loads: list[bytes] = []
        self.saves = 0
        self.damaged = 0
        self.error: OSError | None = None
        self.room = 1000
        self.may_load, self.may_save = threading.Event(), threading.Event()
        self.may_load.set(), self.may_save.set()

    def __contains__(self, key):
        return key in self.pages

    def load(self, key, size):
        assert self.may_load.wait(10)
        self.loads.append(key)
        data = self.pages.get(key)
        if data is not None and len(data) != size:
            self.damaged += 1
            del self.pages[key]
            return None
        return data

    def save(self, key, data):
        assert self.may_save.wait(10)
        self.saves += 1
        if self.error:
            raise self.error
        if len(self.pages) >= self.room:
            return False
        self.pages[key] = data
        return True


class Rig:
    """Tiers on a device whose page `n` holds what `fill` put there."""

    def __init__(self, stores: Sequence, chain: KeyChain | None = None, **policy):
        self.device: dict[int, np.ndarray] = {}
        self.reads: list[int] = []
        self.messages: list[str] = []
        self.chain = chain or KeyChain(ROOT, PAGE)
        self.tiers = CacheTiers(
            Stores(stores), self.chain, BYTES, self.read, TierPolicy(**policy), self.messages.append
        )

    def read(self, page: int) -> np.ndarray:
        self.reads.append(page)
        return self.device[page].copy()

    def compute(self, prompt: np.ndarray, pages: Sequence[int], first: int = 0) -> None:
        for number, page in enumerate(pages, first):
            self.device[page] = content(prompt, number)
        self.tiers.computed(prompt, first, pages)

    def restore(self, prompt: np.ndarray, first: int = 0, most: int | None = None) -> int:
        """How many pages come back; they are what was computed."""
        most = len(prompt) // PAGE - first if most is None else most
        found = self.tiers.restorable(prompt, first, most)
        assert len(found) <= most
        for number, data in enumerate(found, first):
            assert data.tobytes() == content(prompt, number).tobytes()
        return len(found)


def saved(*prompts: np.ndarray) -> Disk:
    disk = Disk()
    rig = Rig([disk], write="through")
    for prompt in prompts:
        rig.compute(prompt, range(len(prompt) // PAGE))
    rig.tiers.close()
    return disk


def prompt_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def content(prompt: np.ndarray, page: int) -> np.ndarray:
    """Bytes that depend on all tokens up to the page's end."""
    seed = [int(t) for t in prompt[: (page + 1) * PAGE]]
    return np.random.default_rng(seed).integers(0, 256, BYTES).astype(np.uint8)


LONG = np.arange(18, dtype=np.int32)  # four full pages and two tokens
FORK = np.concatenate([LONG[:9], LONG[9:] + 100])  # two pages in common


# Keys


def test_every_part_of_the_root_counts():
    parts = {"model": "abc", "kernel": "portable", "weights": "fp32", "fma": True, "page_size": 32, "code": "1"}
    others = [
        parts | change
        for change in ({"model": "abd"}, {"kernel": "amx"}, {"weights": "bf16"}, {"fma": False}, {"page_size": 64})
    ]
    roots = [prefix_root(p) for p in [parts, *others, parts | {"code": "2"}, parts | {"more": 1}]]
    assert len(set(roots)) == len(roots)
    assert prefix_root(dict(reversed(parts.items()))) == roots[0]


def test_keys_name_every_token_up_to_the_page_s_end_and_no_other():
    keys = [KeyChain(ROOT, PAGE).key(LONG, page) for page in range(4)]
    assert len(set(keys)) == 4 and {len(key) for key in keys} == {32}
    for position in range(len(LONG)):
        other = LONG.copy()
        other[position] += 1
        same = [KeyChain(ROOT, PAGE).key(other, page) == keys[page] for page in range(4)]
        assert same == [(page + 1) * PAGE <= position for page in range(4)], position
    assert KeyChain(prefix_root({}), PAGE).key(LONG, 0) != keys[0]
    # Not the same tokens cut otherwise, nor the same page elsewhere.
    assert KeyChain(ROOT, 2).key(LONG, 1) != keys[0]
    assert KeyChain(ROOT, PAGE).key(np.tile(LONG[:PAGE], 2), 1) != keys[0]


def test_keys_do_not_depend_on_what_was_asked_before():
    chain, rng = KeyChain(ROOT, PAGE), np.random.default_rng(0)
    prompts = [rng.integers(0, 2, rng.integers(4, 30)).astype(np.int32) for _ in range(60)]
    for prompt in prompts:
        page = int(rng.integers(0, len(prompt) // PAGE))
        assert chain.key(prompt, page) == KeyChain(ROOT, PAGE).key(prompt, page)
    assert chain.key(LONG.astype(">i4"), 3) == chain.key(LONG, 3)


# Saving


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("write", ["through", "back", "off"])
def test_pages_are_saved_when_they_are_computed_or_when_they_are_let_go(write, background):
    disk = Disk()
    rig = Rig([disk], write=write, async_backup=background)
    rig.compute(LONG, [7, 3, 5, 1])
    rig.tiers.let_go(9)  # of an answer: nothing that was said to be computed
    assert len(rig.reads) == (4 if write == "through" else 0)
    rig.tiers.let_go(3)
    assert rig.reads == {"through": [7, 3, 5, 1], "back": [3], "off": []}[write]
    rig.device[3][:] = 0  # whatever comes into the page now
    rig.tiers.let_go(3)  # and leaves it
    rig.tiers.close()
    assert rig.tiers.counts["saved_pages"] == len(disk.pages) == (0 if write == "off" else 4)
    assert Rig([disk]).restore(LONG) == (0 if write == "off" else 4)


def test_what_is_there_is_not_saved_again():
    disk = saved(LONG)
    for write in ("through", "back"):
        rig = Rig([disk], write=write)
        rig.compute(FORK, range(4))
        rig.tiers.close()
        assert rig.reads == ([2, 3] if write == "through" else [])


def test_what_was_restored_is_not_saved():
    rig = Rig([saved(LONG)], write="back")
    assert rig.restore(LONG) == 4
    rig.tiers.hold(LONG, 0, [4, 5, 6, 7])
    rig.tiers.close()
    assert rig.reads == []


def test_a_full_queue_waits_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(cache_tiers, "SAVING_BYTES", 3 * BYTES)
    disk = Disk()
    rig = Rig([disk], write="through")
    disk.may_save.clear()
    prompt = np.arange(20 * PAGE, dtype=np.int32)
    threading.Timer(0.2, disk.may_save.set).start()
    start = time.monotonic()
    rig.compute(prompt, range(3))
    assert time.monotonic() - start < 0.15  # there is room for three
    rig.compute(prompt, range(3, 20), first=3)
    assert time.monotonic() - start > 0.15
    rig.tiers.close()
    assert rig.tiers.counts["saved_pages"] == 20 and Rig([disk]).restore(prompt) == 20


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"error": OSError(28, "No space left on device")}, "cannot be saved in the disk: No space left on device"),
        ({"room": 1}, "the disk has no room beside what this job keeps there"),
    ],
)
def test_a_store_that_fails_is_told_of_once_and_read_on(broken, text, background):
    disk = Disk()
    rig = Rig([disk], write="through", async_backup=background)
    rig.compute(prompt_of(9, 9, 9, 9), [9])
    rig.tiers.close()
    vars(disk).update(broken)
    rig = Rig([disk], write="through", async_backup=background)
    rig.compute(LONG, range(4))
    rig.tiers.close()
    rig = Rig([disk], write="through", async_backup=background)
    for page in range(4):
        rig.compute(LONG, [page], first=page)
        time.sleep(0.02 * background)
    saves = disk.saves
    rig.compute(FORK, range(4))
    rig.tiers.close()
    assert disk.saves == saves and len(rig.messages) == 1 and text in rig.messages[0]
    assert rig.messages[0].endswith("the job goes on and saves no more there")
    assert rig.tiers.counts["saved_pages"] == 0
    assert rig.restore(prompt_of(9, 9, 9, 9)) == 1


def test_a_mistake_in_a_store_is_not_hidden():
    disk = Disk()
    disk.save = lambda key, data: 1 / 0
    rig = Rig([disk], write="through")
    rig.compute(LONG, range(4))
    with pytest.raises(ZeroDivisionError):
        rig.tiers.close()


# Restoring


def test_consecutive_pages_from_the_first_that_is_wanted():
    disk = saved(LONG)
    for first, most in [(0, 4), (0, 2), (2, 2), (1, 1), (3, 1), (2, 0), (4, 0)]:
        assert Rig([disk]).restore(LONG, first, most) == most
    rig = Rig([disk])
    assert rig.restore(FORK) == 2 and rig.restore(FORK, 2) == 0 and rig.restore(FORK, 1) == 1
    assert rig.tiers.counts == {"restored_pages": 3, "missed_pages": 2 + 2 + 2, "damaged_pages": 0, "saved_pages": 0}


def test_a_miss_loads_nothing():
    disk = saved(LONG)
    assert Rig([disk]).restore(LONG + 1) == 0
    assert disk.loads == []


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("gap", range(4))
def test_a_page_that_is_gone_ends_what_is_restored(gap, prefetch):
    disk = saved(LONG)
    key = KeyChain(ROOT, PAGE).key(LONG, gap)
    disk.pages[key] = disk.pages[key][:-1]  # of the wrong size: this store calls that damaged
    rig = Rig([disk], prefetch=prefetch, write="through")
    rig.tiers.expect(LONG)
    assert rig.restore(LONG) == gap
    assert rig.tiers.counts["damaged_pages"] == 1
    rig.compute(LONG, range(gap, 4), first=gap)
    rig.tiers.close()
    assert rig.tiers.counts["saved_pages"] == 1 and Rig([disk]).restore(LONG) == 4


def test_roots_keep_their_pages_apart():
    disk = saved(LONG)
    assert Rig([disk], KeyChain(prefix_root({"model": "n", "page_size": PAGE}), PAGE)).restore(LONG) == 0


# Reading ahead


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_reads_ahead_are_taken_and_not_repeated():
    disk = saved(LONG, FORK)
    rig = Rig([disk], prefetch=True)
    rig.tiers.expect(LONG), rig.tiers.expect(FORK), rig.tiers.expect(LONG)
    wait_for(lambda: len(disk.loads) == 6)
    assert rig.restore(LONG) == 4
    rig.tiers.hold(LONG, 0, [0, 1, 2, 3])
    assert rig.restore(FORK, first=2) == 2
    rig.tiers.expect(LONG)  # the device has it
    time.sleep(0.02)
    rig.tiers.close()
    assert len(disk.loads) == 6


def test_what_the_device_let_go_is_read_again():
    disk = saved(LONG)
    rig = Rig([disk], prefetch=True)
    for _ in range(2):
        rig.tiers.expect(LONG)
        assert rig.restore(LONG) == 4
        rig.tiers.hold(LONG, 0, [0, 1, 2, 3])
        for page in range(4):
            rig.tiers.let_go(page)
    assert len(disk.loads) == 8


def test_without_prefetch_nothing_is_read_ahead():
    disk = saved(LONG)
    rig = Rig([disk])
    rig.tiers.expect(LONG)
    time.sleep(0.05)
    assert disk.loads == []


@pytest.mark.parametrize(("wait", "late", "expected"), [(0.0, 0.5, 0), (0.1, 0.5, 0), (5.0, 0.2, 4)])
def test_admission_waits_so_long_and_no_longer(wait, late, expected):
    disk = saved(LONG)
    disk.may_load.clear()
    rig = Rig([disk], prefetch=True, restore_wait_s=wait)
    rig.tiers.expect(LONG)
    timer = threading.Timer(late, disk.may_load.set)
    start = time.monotonic()
    timer.start()
    assert rig.restore(LONG) == expected
    assert min(wait, late) <= time.monotonic() - start < min(wait, late) + 0.2
    timer.join()
    rig.tiers.close()


def test_what_is_read_ahead_is_bounded_and_given_up_when_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(cache_tiers, "AHEAD_BYTES", 3 * BYTES)
    prompts = [np.full(2 * PAGE, i, np.int32) for i in range(5)]
    disk = saved(*prompts)
    rig = Rig([disk], prefetch=True)
    for prompt in prompts:
        rig.tiers.expect(prompt)
    wait_for(lambda: len(disk.loads) == 3)
    time.sleep(0.02)
    assert len(disk.loads) == 3
    assert rig.restore(prompts[0], first=2) == 0  # found on the device
    rig.tiers.expect(prompts[2])
    wait_for(lambda: len(disk.loads) == 5)
    assert all(rig.restore(prompt) == 2 for prompt in prompts[1:])
    rig.tiers.close()


# The host tier, between a device with memory of its own and the disk


def test_host_memory_keeps_the_pages_used_last():
    memory = HostMemory(3 * BYTES)
    pages = {bytes([n]): np.full(BYTES, n, np.uint8) for n in range(6)}
    for n in range(3):
        assert memory.save(bytes([n]), pages[bytes([n])])
    assert memory.load(bytes([0]), BYTES) is pages[bytes([0])]
    assert memory.save(bytes([3]), pages[bytes([3])])
    assert [bytes([n]) in memory for n in range(4)] == [True, False, True, True]
    assert memory.load(bytes([1]), BYTES) is None
    assert memory.save(bytes([3]), pages[bytes([3])])  # twice is once
    assert [bytes([n]) in memory for n in range(4)] == [True, False, True, True]
    assert not HostMemory(BYTES - 1).save(b"x", pages[bytes([0])])


def test_the_host_tier_is_asked_first_and_fed_from_the_disk():
    disk = saved(LONG)
    host = HostMemory(100 * BYTES)
    rig = Rig([host, disk])
    assert rig.restore(LONG) == 4 and len(disk.loads) == 4
    assert rig.restore(LONG) == 4 and len(disk.loads) == 4
    rig.compute(FORK, range(10, 14))
    rig.tiers.close()
    assert rig.reads == [12, 13]
    assert len(disk.pages) == 6 and Rig([host]).restore(FORK) == 4


def test_a_small_host_tier_spills_nothing_that_the_disk_lacks():
    host, disk = HostMemory(2 * BYTES), Disk()
    rig = Rig([host, disk])
    rig.compute(LONG, range(4))
    rig.tiers.close()
    assert Rig([host, disk]).restore(LONG) == 4 and Rig([host]).restore(LONG) == 0


def test_a_disk_that_fails_leaves_the_host_tier():
    host, disk = HostMemory(100 * BYTES), Disk()
    disk.error = OSError(30, "Read-only file system")
    rig = Rig([host, disk], write="through")
    rig.compute(LONG, range(4))
    rig.tiers.close()
    assert len(rig.messages) == 1 and "the disk: Read-only" in rig.messages[0]
    assert rig.tiers.counts["saved_pages"] == 4 and rig.restore(LONG) == 4


def test_stores_together_have_what_any_of_them_has():
    one, two = saved(LONG), saved(FORK)
    for stores in combinations([one, two, saved()], 2):
        keys = {key for store in stores for key in store.pages}
        assert all(key in Stores(stores) for key in keys)
        assert b"?" * 32 not in Stores(stores) and Stores(stores).load(b"?" * 32, BYTES) is None
