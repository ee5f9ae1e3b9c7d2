"""What makes a job the same job, and what job.json says of the machine and the versions that ran it."""

import os
import platform
from typing import Any

import numpy as np

from batchgen import __version__
from batchgen.loading import Numerics
from batchgen.prepare import OpenedJob


def job_identity(opened: OpenedJob) -> dict[str, Any]:
    """What must be equal for two runs to be the same job."""
    return {
        "spec": opened.spec.result_values(),
        "input": opened.table.fingerprint(),
        "model": opened.sha256,
        "batchgen": __version__,
        **numeric_bits(opened.numerics),
    }


def numeric_bits(numerics: Numerics) -> dict[str, str | bool]:
    """What of the numerics decides the bits of a result."""
    return {
        "kernel": numerics.kernel,
        "fused_multiply_add": has_fma(),
        "weights": "bf16 or native" if numerics.weights in ("bf16", "native") else numerics.weights,  # the same bits
        "kv_dtype": numerics.kv_dtype,
    }


def has_fma() -> bool:
    """Whether the portable kernel fuses multiplications and additions here, which shows in the last bit."""
    from batchgen.kernels.cpu.features import HAS_FMA

    return HAS_FMA


def versions() -> dict[str, str]:
    import numba
    import pyarrow

    return {
        "batchgen": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "pyarrow": pyarrow.__version__,
    }


def cpu() -> dict[str, Any]:
    from batchgen.kernels.cpu.features import cpu_features

    return {"machine": platform.machine(), "count": os.cpu_count(), "features": sorted(cpu_features())}
