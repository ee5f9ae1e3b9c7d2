"""Blocks of ggml's quantised types as codes, scales and minima: weight = scale * code + minimum.

The block layouts are those of ggml-common.h (https://github.com/ggml-org/ggml); values equal `gguf.quants.dequantize`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Codes

Bytes = NDArray[np.uint8]


def _half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of every block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Low halves of `width` bytes, then their high halves, and so on."""
    groups = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(packed), -1)


def _q4_0(blocks: Bytes) -> Codes:
    scale = _half(blocks, 0)
    return Codes(_nibbles(blocks[:, 2:18], 16), 4, scale, scale * np.float32(-8))


def _q4_1(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 4:20], 16), 4, _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    bits = np.ascontiguousarray(blocks[:, at : at + 4]).view(np.uint32) >> np.arange(32, dtype=np.uint32)
    return np.left_shift((bits & 1).astype(np.uint8), 4, dtype=np.uint8)


def _q5_0(blocks: Bytes) -> Codes:
    codes = (_nibbles(blocks[:, 6:22], 16) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return Codes(codes, 8, _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> Codes:
    codes = (_nibbles(blocks[:, 8:24], 16) | _fifth_bits(blocks, 4)).view(np.int8)
    return Codes(codes, 8, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(blocks[:, 2:34].view(np.int8), 8, _half(blocks, 0), None)


def _pairs(packed: Bytes, width: int) -> Bytes:
    """The lowest two bits of `width` bytes, then the next two of them, and so on."""
    groups = packed.reshape(len(packed), -1, 1, width) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    return groups.reshape(len(packed), -1).astype(np.uint8, copy=False)


def _q2_k(blocks: Bytes) -> Codes:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    parts = _half(blocks, 80) * scales.astype(np.float32), -(_half(blocks, 82) * minima.astype(np.float32))
    return Codes(_pairs(blocks[:, 16:80], 32), 4, *parts)


def _q3_k(blocks: Bytes) -> Codes:
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = (_pairs(blocks[:, 32:96], 32) | third.reshape(len(blocks), 256) << 2).view(np.int8) - np.int8(4)
    scales = (_nibbles(blocks[:, 96:104], 8) | _pairs(blocks[:, 104:108], 4) << 4).view(np.int8) - np.int8(32)
    return Codes(codes, 8, _half(blocks, 108) * scales.astype(np.float32), None)


_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled


def _iq4_nl(blocks: Bytes) -> Codes:
    return Codes(_NONLINEAR[_nibbles(blocks[:, 2:18], 16)], 8, _half(blocks, 0), None)


def _iq4_xs(blocks: Bytes) -> Codes:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(len(blocks), 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    return Codes(_NONLINEAR[_nibbles(blocks[:, 8:136], 16)], 8, _half(blocks, 0) * scales.astype(np.float32), None)


def _mxfp4(blocks: Bytes) -> Codes:
    scales = np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127)
    return Codes(_E2M1[_nibbles(blocks[:, 1:17], 16)], 8, scales, None)


def _k_scales(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minima of the eight groups of a block of Q4_K or Q5_K, six bits each in bytes 4 to 15."""
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 16:144], 32), 4, *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Codes:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(blocks[:, 48:176], 32) | fifth.reshape(len(blocks), 256) << 4
    return Codes(codes.view(np.int8), 8, *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Codes:
    low = _nibbles(blocks[:, :128], 64)
    codes = (low | _pairs(blocks[:, 128:192], 32) << 4).view(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Codes(codes, 8, scales, None)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantised type: bytes of a block, what makes codes (blocks, weights of a block) of it, and their format."""

    nbytes: int
    unpack: Callable[[Bytes], Codes]
    bits: int
    group: int
    minima: bool


UNPACKERS = {
    "Q4_0": BlockType(18, _q4_0, 4, 32, True),
    "Q4_1": BlockType(20, _q4_1, 4, 32, True),
    "Q5_0": BlockType(22, _q5_0, 8, 32, False),
    "Q5_1": BlockType(24, _q5_1, 8, 32, True),
    "Q8_0": BlockType(34, _q8_0, 8, 32, False),
    "Q2_K": BlockType(84, _q2_k, 4, 16, True),
    "Q3_K": BlockType(110, _q3_k, 8, 16, False),
    "Q4_K": BlockType(144, _q4_k, 4, 32, True),
    "Q5_K": BlockType(176, _q5_k, 8, 32, True),
    "Q6_K": BlockType(210, _q6_k, 8, 16, False),
    "IQ4_NL": BlockType(18, _iq4_nl, 8, 32, False),
    "IQ4_XS": BlockType(136, _iq4_xs, 8, 32, False),
    "MXFP4": BlockType(17, _mxfp4, 8, 32, False),
}
"""By ggml's name."""


def unpack(type_name: str, raw: Bytes) -> Codes | None:
    """Codes of the stored rows (outputs, bytes of a row) of a matrix; None for types that are not kept as codes."""
    if type_name not in UNPACKERS:
        return None
    block = UNPACKERS[type_name]
    codes = block.unpack(np.ascontiguousarray(raw).reshape(-1, block.nbytes))
    rows = len(raw)
    minima = None if codes.minima is None else codes.minima.reshape(rows, -1)
    return Codes(codes.values.reshape(rows, -1), codes.bits, codes.scales.reshape(rows, -1), minima)
