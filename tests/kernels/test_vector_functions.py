"""The sixteen-lane functions that all kernels are built of."""

import numpy as np
import pytest

from batchgen.kernels.cpu import pack, simd
from batchgen.kernels.cpu.compiling import compiled
from batchgen.kernels.reference import round_bf16


@compiled
def exp2_all(x, out):
    for i in range(0, len(x), 16):
        simd.store(out.ctypes.data + i * 4, simd.exp2(simd.load(x.ctypes.data + i * 4)))


@compiled
def add_lanes(x):
    return simd.reduce_add(simd.load(x.ctypes.data))


@compiled
def max_lane(x):
    return simd.reduce_max(simd.load(x.ctypes.data))


@compiled
def find_lane(x, wanted):
    return simd.first_lane_equal(simd.load(x.ctypes.data), wanted)


@compiled
def keep(x, count, fill, out):
    simd.store(out.ctypes.data, simd.keep_below(simd.load(x.ctypes.data), count, fill))


@compiled
def through_bf16(x, narrow, out):
    for i in range(0, len(x), 16):
        simd.store_bf16(narrow.ctypes.data + i * 2, simd.load(x.ctypes.data + i * 4))
        simd.store(out.ctypes.data + i * 4, simd.load_bf16(narrow.ctypes.data + i * 2))


def test_exp2_is_accurate_to_three_units_in_the_last_place():
    x = np.concatenate([np.linspace(-126, 127, 32000), np.linspace(-1, 1, 32000)]).astype(np.float32)
    out = np.zeros_like(x)
    exp2_all(x, out)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.spacing(exact.astype(np.float32))) < 3


def test_exp2_of_integers_is_exact_and_its_ends_are_clamped():
    x = np.arange(-126, 130, dtype=np.float32)
    x[-2:] = -np.inf, -1e30
    out = np.zeros_like(x)
    exp2_all(x, out)
    np.testing.assert_array_equal(out, np.exp2(np.clip(x, -126, 127).astype(np.float64)))


def test_lanes_are_added_in_a_fixed_tree():
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = (rng.standard_normal(16) * 10.0 ** rng.integers(-3, 4, 16)).astype(np.float32)
        expected = x
        while len(expected) > 1:
            expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
        assert add_lanes(x) == expected[0]
        assert max_lane(x) == x.max()


def test_first_lane_equal_finds_the_lowest():
    x = np.arange(16, dtype=np.float32)
    assert [find_lane(x, np.float32(i)) for i in range(16)] == list(range(16))
    x[5:] = 7
    assert find_lane(x, np.float32(7)) == 5
    assert find_lane(x, np.float32(99)) == 16
    assert find_lane(x, np.float32(np.nan)) == 16


@pytest.mark.parametrize("count", [-40, -1, 0, 1, 15, 16, 17, 1000])
def test_keep_below(count):
    x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    keep(x, count, np.float32(-5), out)
    np.testing.assert_array_equal(out, np.where(np.arange(16) < count, x, -5))


def bf16_cases():
    """Every kind of rounding: exact, below, at and above the middle, for even and odd neighbours, overflow to inf."""
    rng = np.random.default_rng(1)
    upper = rng.integers(0x0080, 0x7F80, 4000).astype(np.uint32) << 16
    lower = np.tile(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 667)[:4000]
    values = (upper | lower).view(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    return np.concatenate([values, -values, np.resize(special, 16)])


def definition_of_bf16(x):
    """Nearest of the two neighbouring bfloat16 by value; on a tie the one with an even last bit."""
    down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    up = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    ulp = np.exp2(np.floor(np.log2(np.abs(down.astype(np.float64)))) - 7)
    offset = np.abs(x.astype(np.float64) - down) / ulp
    odd = (down.view(np.uint32) >> 16) & 1 == 1
    return np.where((offset > 0.5) | ((offset == 0.5) & odd), up, down)


def test_rounding_to_bf16_is_to_nearest_even_everywhere():
    x = bf16_cases()
    finite = x[np.isfinite(x) & (x != 0)]
    np.testing.assert_array_equal(round_bf16(finite), definition_of_bf16(finite))
    narrow, out = np.zeros(len(x), np.uint16), np.zeros_like(x)
    through_bf16(x, narrow, out)
    np.testing.assert_array_equal(out, round_bf16(x))
    packed = np.zeros((1, len(x)), np.uint16)
    pack.rows_to_bf16(x[None], packed)
    np.testing.assert_array_equal((packed[0].astype(np.uint32) << 16).view(np.float32), round_bf16(x))
    np.testing.assert_array_equal(packed[0], narrow)
