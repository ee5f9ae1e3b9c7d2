"""What kernels are called when they lie on disk."""

import gc
from collections import Counter

from numba.core.dispatcher import Dispatcher

from batchgen.kernels.cpu import program


def test_no_two_kernels_have_the_same_name():
    """Compiled by different processes, one would be taken for the other."""
    assert isinstance(program.run, Dispatcher)
    functions = [o.py_func for o in gc.get_objects() if isinstance(o, Dispatcher)]
    ours = [
        f for f in functions if f.__module__.startswith("batchgen.kernels.cpu") and "<lambda>" not in f.__qualname__
    ]
    names = Counter((f.__module__, f.__qualname__) for f in ours)
    assert len(ours) > 50
    assert not [name for name, count in names.items() if count > 1]
