"""The first rows of a large table are answered while the others are still being read.

To read and encode a million rows takes minutes, and only then is the order known in which nothing is computed twice. So
the first rows are planned by themselves and run meanwhile. What they share with the others may be computed again: that
is less than their own tokens, and they are at most one row in `LEAST_TIMES`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from batchgen.io.table import InputTable
from batchgen.prompts import OnRows
from batchgen.spec import EngineSpec

T = TypeVar("T")

HEAD_ROWS = 1000
LEAST_TIMES = 50


def head_rows(engine: EngineSpec, table: InputTable) -> int:
    """The row index up to which rows are run before the others are known; 0 where all are read first.

    So it is where a condition might leave few of them.
    """
    large = table.num_rows_upper >= LEAST_TIMES * HEAD_ROWS and not table.is_filtered
    return HEAD_ROWS if large and engine.prefix_sharing and engine.schedule != "fifo" else 0


class Reading(Generic[T]):
    """Something made of all rows by another thread: `read`, which is told how to tell of its progress.

    To be left (it is a context manager) only when the result is there or not wanted any more: then reading stops.
    """

    def __init__(self, read: Callable[[OnRows], T]):
        self._unwanted = threading.Event()
        self._pool = ThreadPoolExecutor(1, "read")
        self._result = self._pool.submit(read, self._on_rows)

    def __enter__(self) -> "Reading[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._unwanted.set()
        self._pool.shutdown()

    def _on_rows(self, rows: int, tokens: int) -> None:
        if self._unwanted.is_set():
            raise CancelledError

    def is_ready(self, wait_s: float) -> bool:
        """Whether it is there, or has failed, after `wait_s` at most."""
        return bool(wait([self._result], wait_s).done)

    def result(self) -> T:
        """Raises what reading has raised."""
        return self._result.result()
