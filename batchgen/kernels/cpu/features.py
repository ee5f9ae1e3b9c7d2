"""What this processor can do, and permission to use it."""

import ctypes
import platform
import sys

from llvmlite import binding

KERNELS = ("amx_bf16", "avx512_bf16", "portable")
"""GEMM kernels from the most to the least demanding; `portable` runs everywhere."""


def cpu_features() -> frozenset[str]:
    """LLVM's names of the host's instruction set extensions, e.g. `amx-bf16`, `avx512f`, `fma`, `neon`."""
    return frozenset(name for name, on in binding.get_host_cpu_features().items() if on)


HOST = cpu_features()
HAS_AVX512 = "avx512f" in HOST
HAS_AVX512_BF16 = HAS_AVX512 and "avx512bf16" in HOST
HAS_AMX = HAS_AVX512_BF16 and {"amx-tile", "amx-bf16", "amx-int8"} <= HOST and sys.platform == "linux"
HAS_FMA = "fma" in HOST or platform.machine() in ("aarch64", "arm64")


def request_tiles() -> bool:
    """Ask Linux for AMX tile state, once per process and before any thread uses tiles; False when refused."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def available_kernels() -> tuple[str, ...]:
    """The kernels of `KERNELS` that run here, best first."""
    able = {"amx_bf16": HAS_AMX and request_tiles(), "avx512_bf16": HAS_AVX512_BF16, "portable": True}
    return tuple(name for name in KERNELS if able[name])
