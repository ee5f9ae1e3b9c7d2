"""Compiled kernels on disk, in the user's cache directory (BATCHGEN_CACHE_DIR names another).

Numba keys its cache by processor and by the file of the entry function alone, so the folder's name carries a hash of
all kernel sources: after an edit anywhere nothing stale is found.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import platformdirs


def cache_directory() -> Path:
    """Where this version of the kernels is kept once compiled."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("BATCHGEN_CACHE_DIR") or platformdirs.user_cache_dir("batchgen")
    return Path(root) / "kernels" / digest.hexdigest()[:16]


def is_compiled(function: Any) -> bool:
    """Whether a `compiled` function is on disk, and newer than its source: from another checkout it is of no use."""
    source = Path(function.py_func.__code__.co_filename)
    kept = Path(function.stats.cache_path).glob(f"{source.stem}.{function.py_func.__name__}-*.nbc")
    return any(file.stat().st_mtime > source.stat().st_mtime for file in kept)


def compiled(function: Callable[..., Any]) -> Any:
    """`numba.njit` without the interpreter lock, kept on disk. For the functions that Python calls.

    Kernels divide as numpy does: an exception in one thread would leave the others waiting at a barrier.
    """
    with _own_cache():
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)


def compiled_callback(function: Callable[..., Any], signature: Any) -> Any:
    """`numba.cfunc`, kept on disk: compiled at once, for functions that compiled ones call by their address."""
    with _own_cache():
        options: dict[str, Any] = {"nopython": True, "error_model": "numpy", "cache": True}
        return numba.cfunc(signature, **options)(function)


@contextmanager
def _own_cache() -> Iterator[None]:
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or str(cache_directory())
    try:
        yield
    finally:
        config.CACHE_DIR = before


_INSIDE: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled functions call. Each is compiled once by itself and again in every caller."""


_definitions: Counter[tuple[str, str]] = Counter()


def named_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Number the closures that one `def` makes, in the order in which their module makes them.

    Numba names machine code by the function's qualified name and a count of what a process compiled before. Two entry
    points that different processes put on disk, loaded together, would call each other's closures of the same name.
    """
    key = function.__module__, function.__qualname__
    _definitions[key] += 1
    if _definitions[key] > 1:
        function.__qualname__ += f"_{_definitions[key]}"
    return function


def helper(function: Callable[..., Any]) -> Any:
    """`numba.njit` for the functions that compiled functions call."""
    return numba.njit(**_INSIDE)(named_apart(function))


def inlined(function: Callable[..., Any]) -> Any:
    """`helper` for the smallest of them, whose call would cost as much as they do: always put in the caller's place."""
    return numba.njit(**_INSIDE, forceinline=True)(named_apart(function))


def spliced(function: Callable[..., Any]) -> Any:
    """`helper` for layers that only hand on: part of the caller from the start, which saves half the compilation."""
    return numba.njit(**_INSIDE, inline="always")(named_apart(function))
