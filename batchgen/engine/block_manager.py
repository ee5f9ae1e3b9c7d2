"""Pages of the KV cache: who holds which, and which are free."""

from collections.abc import Callable, Iterable

from batchgen.errors import BatchgenError


class BlockManager:
    """Reference-counted pages, numbered from 0.

    A page is allocated with one reference; `hold` adds one, `release` takes one, and a page without any is free.
    `on_free` is told of it while its content is still there.
    """

    def __init__(self, num_pages: int, on_free: Callable[[int], None] | None = None):
        self.num_pages, self._on_free = num_pages, on_free
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self) -> int:
        """A free page; IndexError when there is none."""
        page = self._free.pop()
        self._references[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._on_free is not None:
                    self._on_free(page)
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def num_holders(self, page: int) -> int:
        return self._references[page]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Every page is either free or held exactly as often as `holders` list it; BatchgenError otherwise."""
        counts = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counts[page] += 1
        free = set(self._free)
        for page, (count, references) in enumerate(zip(counts, self._references, strict=True)):
            if count != references or (count == 0) != (page in free):
                raise BatchgenError(f"page {page} is held {count} times, counted {references}, free: {page in free}")
        if len(free) != len(self._free):
            raise BatchgenError("a page is in the free list twice")
