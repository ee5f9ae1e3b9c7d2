"""Quantised blocks as codes, scales and minima, against gguf's own package."""

import numpy as np
import pytest

from batchgen.io.gguf_codes import UNPACKERS, unpack
from batchgen.models.matrices import split_rotary
from tests.quantised import HALVES, dequantised, random_blocks, random_codes

SHAPE = (24, 512)


@pytest.mark.parametrize("kind", UNPACKERS)
def test_codes_stand_for_exactly_what_gguf_dequantises(kind):
    blocks = random_blocks(np.random.default_rng(0), kind, *SHAPE)
    codes = unpack(kind, blocks)
    assert codes.shape == SHAPE
    assert codes.scales.dtype == np.float32
    np.testing.assert_array_equal(codes.weights(), dequantised(kind, blocks))


@pytest.mark.parametrize("kind", UNPACKERS)
def test_codes_fit_their_bits_and_products_are_exact(kind):
    """Kernels count on both: four bits hold 0 to 15, and a scale times a code needs no rounding."""
    codes, _ = random_codes(np.random.default_rng(1), kind, *SHAPE)
    values = codes.values.astype(np.float64)
    assert codes.bits in (4, 8)
    assert values.min() >= (0 if codes.bits == 4 else -128)
    assert values.max() <= (15 if codes.bits == 4 else 127)
    products = np.repeat(codes.scales, codes.group, axis=1).astype(np.float64) * values
    np.testing.assert_array_equal(products.astype(np.float32), products)


def test_every_type_that_is_unpacked_is_tested():
    assert HALVES.keys() == UNPACKERS.keys()


def test_other_types_are_not_kept_as_codes():
    assert unpack("F16", np.zeros((2, 64), np.uint8)) is None
    assert unpack("IQ3_S", np.zeros((2, 110), np.uint8)) is None


@pytest.mark.parametrize("kind", UNPACKERS)
@pytest.mark.parametrize("head_dim", [6, 8, 24])
def test_rows_of_codes_are_reordered_as_those_of_floats(kind, head_dim):
    codes, floats = random_codes(np.random.default_rng(2), kind, 24, 256)
    np.testing.assert_array_equal(split_rotary(codes, head_dim).weights(), split_rotary(floats, head_dim))
