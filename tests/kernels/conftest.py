from collections.abc import Callable, Iterator

import pytest

from batchgen.kernels.base import Backend
from batchgen.kernels.cpu.features import available_kernels
from tests.kernels.kernel_programs import INT8_WEIGHTS, VARIANTS, Variant
from tests.tiny_model import make_backend


def require(kernel: str) -> None:
    if kernel not in available_kernels():
        pytest.skip(f"this processor has no {kernel}")


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Every combination of GEMM kernel, weight type and KV type that this processor runs."""
    require(request.param.kernel)
    return request.param


@pytest.fixture(params=[v for v in VARIANTS if v.kv == "fp32"], ids=str)
def gemm_variant(request: pytest.FixtureRequest) -> Variant:
    """Every combination of GEMM kernel and weight type."""
    require(request.param.kernel)
    return request.param


@pytest.fixture(params=[*(v for v in VARIANTS if v.kv == "fp32"), *INT8_WEIGHTS], ids=str)
def weight_variant(request: pytest.FixtureRequest) -> Variant:
    """The same and int8 weights, whose products are not those of the floats that they were made from."""
    require(request.param.kernel)
    return request.param


@pytest.fixture(params=[*VARIANTS, *INT8_WEIGHTS], ids=str)
def model_variant(request: pytest.FixtureRequest) -> Variant:
    """What a whole model runs on: every combination of kernel, weight type and KV type, and int8 weights."""
    require(request.param.kernel)
    return request.param


@pytest.fixture
def open_backend() -> Iterator[Callable[..., Backend]]:
    """`make_backend` whose backends are closed after the test."""
    opened: list[Backend] = []

    def open_one(kernel: str, weights: str = "fp32", kv: str = "fp32", threads: int = 1) -> Backend:
        opened.append(make_backend(kernel, weights, kv, threads))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()
