"""Tiers of the KV cache below the device: prefixes that outlive their pages there, and the process.

A full page of a prompt has a key that names all that decides its bits: the model, its kernels and number types
(`prefix_root`) and every token from the prompt's start to the page's end (`KeyChain`). So what is kept under a key is
what would be computed. A store may forget a page at any time; then it is computed again.

Where the device has memory of its own, pages go to `HostMemory` first, and from there to disk; they come back the same
way. On the CPU the device's memory is the host's, and the disk is the only tier.
"""

import hashlib
import json
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.scheduler import common_prefix

Payload = NDArray[np.uint8]
"""What `Backend.read_page` gives."""

SAVING_BYTES, AHEAD_BYTES = 64 << 20, 256 << 20
"""The most memory that pages take on their way to a store, and that pages take which are read ahead; one always may."""


class Store(Protocol):
    """Where pages are kept under 32-byte keys; may be used by several threads at once.

    `load` gives exactly what was saved, or None. `save` keeps a page once; False says that there is no room for more of
    this job, OSError that it failed. `place` is for messages; `damaged` counts pages that were there and not intact.
    """

    place: str
    damaged: int

    def __contains__(self, key: bytes) -> bool: ...
    def load(self, key: bytes, size: int) -> Payload | None: ...
    def save(self, key: bytes, data: Payload) -> bool: ...


class HostMemory:
    """A `Store` of at most `max_bytes` in this process's memory; the page used least recently makes room."""

    place = "host memory"
    damaged = 0

    def __init__(self, max_bytes: int):
        self._pages: OrderedDict[bytes, Payload] = OrderedDict()
        self._max_bytes, self._bytes = max_bytes, 0
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def load(self, key: bytes, size: int) -> Payload | None:
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)
            return self._pages.get(key)

    def save(self, key: bytes, data: Payload) -> bool:
        with self._lock:
            if key not in self._pages:
                self._pages[key] = data
                self._bytes += len(data)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._pages.popitem(last=False)[1])
            return key in self._pages


class Stores:
    """Several stores, the fastest first: all are saved to, and what a slower one has is given to the faster ones.

    One that fails or is full is not saved to any more; `problems` then says why.
    """

    def __init__(self, stores: Sequence[Store]):
        self._stores = tuple(stores)
        self._saved_to = list(stores)
        self.problems: list[str] = []

    @property
    def damaged(self) -> int:
        return sum(store.damaged for store in self._stores)

    def __contains__(self, key: bytes) -> bool:
        return any(key in store for store in self._stores)

    def lacks(self, key: bytes) -> bool:
        """Whether saving would help."""
        return any(key not in store for store in self._saved_to)

    def load(self, key: bytes, size: int) -> Payload | None:
        for depth, store in enumerate(self._stores):
            data = store.load(key, size) if key in store else None
            if data is not None:
                for faster in self._stores[:depth]:
                    faster.save(key, data)
                return data
        return None

    def save(self, key: bytes, data: Payload) -> bool:
        """Whether anyone has it now."""
        saved = [self._save_to(store, key, data) for store in list(self._saved_to)]
        return any(saved)

    def _save_to(self, store: Store, key: bytes, data: Payload) -> bool:
        try:
            if store.save(key, data):
                return True
            problem = f"{store.place} has no room beside what this job keeps there"
        except OSError as error:
            problem = f"prefixes cannot be saved in {store.place}: {error.strerror or error}"
        self._saved_to.remove(store)
        self.problems.append(f"{problem}; the job goes on and saves no more there")
        return False


def prefix_root(parts: Mapping[str, str | int | bool]) -> bytes:
    """The key before a prompt's first page: a hash of all that decides a page's bits besides its tokens."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


class KeyChain:
    """Keys of a prompt's full pages: each is a hash of the key before it and of the page's tokens.

    Those of the last prompt are remembered, since its neighbours share most of them.
    """

    def __init__(self, root: bytes, page_size: int):
        self._root, self._page_size = root, page_size
        self._prompt = np.zeros(0, np.int32)
        self._keys: list[bytes] = []

    def key(self, prompt: NDArray[np.int32], page: int) -> bytes:
        """Of page number `page` of a prompt, all of whose slots the prompt fills."""
        if prompt is not self._prompt:
            known = common_prefix(prompt, self._prompt) // self._page_size
            self._prompt, self._keys = prompt, self._keys[:known]
        for first in range(len(self._keys) * self._page_size, (page + 1) * self._page_size, self._page_size):
            tokens = prompt[first : first + self._page_size].astype("<i4").tobytes()
            above = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.blake2b(tokens, key=above, digest_size=32).digest())
        return self._keys[page]

    def keys(self, prompt: NDArray[np.int32], first_page: int, end_page: int) -> Iterator[bytes]:
        """Found one by one, as they are asked for."""
        return (self.key(prompt, page) for page in range(first_page, end_page))

    def full_pages(self, prompt: NDArray[np.int32]) -> int:
        return len(prompt) // self._page_size


class Saver:
    """Saves pages one after the other: in a thread of its own, or at once.

    Who has more to save than `SAVING_BYTES` waits: a prefix with a page missing would be of no use from there on.
    """

    def __init__(self, stores: Stores, page_bytes: int, background: bool):
        self._stores, self.saved = stores, 0
        self._most = max(1, SAVING_BYTES // page_bytes) if background else 0
        self._pool = ThreadPoolExecutor(1, "save-prefixes")
        self._under_way: deque[Future[None]] = deque()

    def save(self, key: bytes, data: Payload) -> None:
        self._under_way.append(self._pool.submit(self._save, key, data))
        self._wait(self._most)

    def _save(self, key: bytes, data: Payload) -> None:
        self.saved += self._stores.save(key, data)

    def _wait(self, most: int) -> None:
        while len(self._under_way) > most:
            self._under_way.popleft().result()

    def wait(self) -> None:
        """Until all is saved."""
        self._wait(0)

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Reader:
    """Loads pages when they are asked for, or ahead of that in a thread of its own."""

    def __init__(self, stores: Stores, page_bytes: int, wait_s: float):
        self._stores, self._page_bytes, self._wait_s = stores, page_bytes, wait_s
        self._most = max(1, AHEAD_BYTES // page_bytes)
        self._pool = ThreadPoolExecutor(1, "read-prefixes")
        self._ahead: dict[bytes, Future[Payload | None]] = {}

    def begin(self, key: bytes) -> bool:
        """Read a page ahead, unless that is under way; False when it is not there, or enough is under way."""
        if key in self._ahead:
            return True
        if key not in self._stores or len(self._ahead) >= self._most:
            return False
        self._ahead[key] = self._pool.submit(self._stores.load, key, self._page_bytes)
        return True

    def load(self, keys: Iterable[bytes]) -> list[Payload]:
        """Pages up to the first that is not there, or not read `wait_s` after this call although it was begun."""
        pages: list[Payload] = []
        deadline = time.monotonic() + self._wait_s
        for key in keys:
            data = self._finish(key, deadline)
            if data is None:
                break
            pages.append(data)
        return pages

    def _finish(self, key: bytes, deadline: float) -> Payload | None:
        future = self._ahead.pop(key, None)
        if future is None:
            return self._stores.load(key, self._page_bytes)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            future.cancel()
            return None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Nobody will ask for these."""
        for key in keys if self._ahead else ():
            future = self._ahead.pop(key, None)
            if future is not None:
                future.cancel()

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """`write`: "through" saves a page when it is computed, "back" when the device lets go of it, "off" never.

    `prefetch` reads pages ahead for requests that wait; whose turn it is waits `restore_wait_s` for such a read.
    `async_backup` saves in the background.
    """

    write: Literal["back", "through", "off"] = "back"
    prefetch: bool = False
    async_backup: bool = True
    restore_wait_s: float = 0.2


class CacheTiers:
    """What the scheduler and the engine ask of the tiers below the device. One thread calls.

    `read_page` as in `Backend`; `on_message` is told once of each store that cannot be saved to any more.
    """

    def __init__(
        self,
        stores: Stores,
        chain: KeyChain,
        page_bytes: int,
        read_page: Callable[[int], Payload],
        policy: TierPolicy,
        on_message: Callable[[str], None],
    ):
        self._stores, self._chain, self._read_page, self._policy = stores, chain, read_page, policy
        self._on_message = on_message
        self._saver = Saver(stores, page_bytes, policy.async_backup)
        self._reader = Reader(stores, page_bytes, policy.restore_wait_s)
        self._on_device: dict[int, bytes] = {}  # by page
        self._copies: Counter[bytes] = Counter()  # pages of the device by key
        self._restored = self._missed = 0

    @property
    def counts(self) -> dict[str, int]:
        """Pages, since the start; all that were saved are counted after `close` only."""
        return {
            "restored_pages": self._restored,
            "missed_pages": self._missed,
            "damaged_pages": self._stores.damaged,
            "saved_pages": self._saver.saved,
        }

    def expect(self, prompt: NDArray[np.int32]) -> None:
        """A request is waiting, to be admitted after those that were expected before it: read its prefix ahead.

        What the device holds by now it will not ask for.
        """
        if self._policy.prefetch:
            for key in self._chain.keys(prompt, 0, self._chain.full_pages(prompt)):
                if key not in self._copies and not self._reader.begin(key):
                    break

    def restorable(self, prompt: NDArray[np.int32], first_page: int, most_pages: int) -> list[Payload]:
        """What belongs in pages `first_page` and up of a request that is admitted, as far as it is known."""
        pages = self._reader.load(self._chain.keys(prompt, first_page, first_page + most_pages))
        self._reader.forget(self._chain.keys(prompt, 0, self._chain.full_pages(prompt)))
        self._restored += len(pages)
        self._missed += most_pages - len(pages)
        return pages

    def hold(self, prompt: NDArray[np.int32], first_page: int, device_pages: Sequence[int]) -> None:
        """These pages of the device have been given what `restorable` found."""
        keys = self._chain.keys(prompt, first_page, first_page + len(device_pages))
        for page, key in zip(device_pages, keys, strict=True):
            self._on_device[page] = key
            self._copies[key] += 1

    def computed(self, prompt: NDArray[np.int32], first_page: int, device_pages: Sequence[int]) -> None:
        """These pages of the device have been computed, and are worth saving; a prompt's pages come in order."""
        self.hold(prompt, first_page, device_pages)
        if self._policy.write == "through":
            for page in device_pages:
                self._save(page)

    def let_go(self, page: int) -> None:
        """The device may overwrite a page from the next step on."""
        if page in self._on_device:
            if self._policy.write == "back":
                self._save(page)
            key = self._on_device.pop(page)
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key]

    def close(self) -> None:
        """Save what the device still holds, as far as that is wanted; wait until all is saved."""
        for page in list(self._on_device):
            self.let_go(page)
        self._saver.wait()
        self._tell()
        self.stop()

    def stop(self) -> None:
        """End at once: what is not saved is not saved."""
        self._saver.stop()
        self._reader.stop()

    def _save(self, page: int) -> None:
        key = self._on_device[page]
        if self._stores.lacks(key):
            self._saver.save(key, self._read_page(page))
        self._tell()

    def _tell(self) -> None:
        while self._stores.problems:
            self._on_message(self._stores.problems.pop(0))
