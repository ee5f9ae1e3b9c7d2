"""What kernels are called when they lie on disk."""

import gc
import importlib
import os
from collections import Counter

from numba.core.dispatcher import Dispatcher

from batchgen.kernels.cpu import program
from batchgen.kernels.cpu.compiling import compiled, is_compiled


def test_no_two_kernels_have_the_same_name():
    """Compiled by different processes, one would be taken for the other."""
    assert isinstance(program.run, Dispatcher)
    functions = [o.py_func for o in gc.get_objects() if issubclass(type(o), Dispatcher)]  # a dead proxy has no class
    ours = [
        f for f in functions if f.__module__.startswith("batchgen.kernels.cpu") and "<lambda>" not in f.__qualname__
    ]
    names = Counter((f.__module__, f.__qualname__) for f in ours)
    assert len(ours) > 50
    assert not [name for name, count in names.items() if count > 1]


def test_a_function_is_compiled_when_it_is_kept_and_newer_than_its_source(tmp_path, monkeypatch):
    """What another checkout has compiled is of no use here, and to compile takes half a minute: that must be told."""
    monkeypatch.setenv("BATCHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "one_kernel.py"
    source.write_text("def add(a, b):\n    return a + b\n")
    function = compiled(importlib.import_module("one_kernel").add)
    assert not is_compiled(function)
    assert function(1, 2) == 3
    assert is_compiled(function)
    os.utime(source, (2e9, 2e9))
    assert not is_compiled(function)
