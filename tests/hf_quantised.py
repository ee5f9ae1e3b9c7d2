"""Quantised matrices as Hugging Face directories hold them, beside the numbers that they stand for.

    tensors, expected = SCHEMES["gptq"].make(rng, 64, 256)

`tensors`: what follows the module's name → (type, shape, bytes); `expected`: (outputs, inputs) float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
Made = tuple[Stored, NDArray[np.float32]]
KINDS = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Scheme:
    """`config`: `quantization_config`; `kept`: whether the weights stay codes."""

    config: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], Made]
    kept: bool


def stored(values: NDArray[Any], kind: str | None = None) -> tuple[str, tuple[int, ...], bytes]:
    return kind or KINDS[values.dtype.name], values.shape, values.tobytes()


def pack(values: NDArray[Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """As many as fit of an axis into a 32-bit word, the first (or the one that `order` says) in the lowest bits."""
    count = 32 // bits
    moved = np.moveaxis(values.astype(np.uint64), axis, -1)
    if moved.shape[-1] % count:
        moved = np.concatenate([moved, np.zeros((*moved.shape[:-1], -moved.shape[-1] % count), np.uint64)], axis=-1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // count), np.uint64)
    for place, which in enumerate(order or range(count)):
        words |= moved[..., which::count] << np.uint64(bits * place)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def parts(rng: np.random.Generator, bits: int, outputs: int, inputs: int, group: int) -> tuple[Any, Any, Any]:
    """Codes (outputs, inputs), zero points and float16 scales (outputs, groups)."""
    groups = inputs // group
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros = rng.integers(0, 1 << bits, (outputs, groups))
    return codes, zeros, (rng.standard_normal((outputs, groups)) / (8 << bits)).astype(np.float16)


def expected(codes: Any, zeros: Any, scales: Any, group_of: Any) -> NDArray[np.float32]:
    return ((codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]).astype(np.float32)


def gptq(bits: int = 4, group: int = 128, less: int = 1, shuffled: bool = False) -> Callable[..., Made]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Made:
        codes, zeros, scales = parts(rng, bits, outputs, inputs, group)
        group_of = np.arange(inputs) // group
        if shuffled:
            group_of = rng.permutation(group_of)
        tensors = {
            "qweight": stored(pack(codes.T, bits, 0)),
            "qzeros": stored(pack((zeros.T - less) % (1 << bits), bits, 1)),
            "scales": stored(np.ascontiguousarray(scales.T)),
            "g_idx": stored(group_of.astype(np.int32)),
        }
        return tensors, expected(codes, zeros, scales, group_of)

    return make


def awq(rng: np.random.Generator, outputs: int, inputs: int) -> Made:
    codes, zeros, scales = parts(rng, 4, outputs, inputs, 64)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": stored(pack(codes.T, 4, 1, order)),
        "qzeros": stored(pack(zeros.T, 4, 1, order)),
        "scales": stored(np.ascontiguousarray(scales.T)),
    }
    return tensors, expected(codes, zeros, scales, np.arange(inputs) // 64)


def packed(bits: int, symmetric: bool) -> Callable[..., Made]:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Made:
        codes, zeros, scales = parts(rng, bits, outputs, inputs, 32)
        zeros = np.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
        tensors = {
            "weight_packed": stored(pack(codes, bits, 1)),
            "weight_scale": stored(scales),
            "weight_shape": stored(np.array([outputs, inputs], np.int64)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = stored(pack(zeros, bits, 0))
        return tensors, expected(codes, zeros, scales, np.arange(inputs) // 32)

    return make


def e4m3(byte: int) -> float:
    """The definition: sign, four bits of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8(scale: str) -> Callable[..., Made]:
    """With a scale for all ("tensor"), each output ("channel") or blocks of 128 x 128 ("block")."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Made:
        raw = (rng.integers(0, 120, (outputs, inputs)) + rng.choice([0, 128], (outputs, inputs))).astype(np.uint8)
        values = np.array([e4m3(byte) for byte in range(256)], np.float32)[raw]
        shapes = {"tensor": (1,), "channel": (outputs, 1), "block": (-(-outputs // 128), -(-inputs // 128))}
        scales = (rng.random(shapes[scale]) / 5000).astype(np.float32)
        whole = np.kron(scales, np.ones((128, 128), np.float32))[:outputs, :inputs] if scale == "block" else scales
        name = "weight_scale_inv" if scale == "block" else "weight_scale"
        tensors = {"weight": stored(raw, "F8_E4M3"), name: stored(scales)}
        return tensors, (values * whole).astype(np.float32)

    return make


def int8(rng: np.random.Generator, outputs: int, inputs: int) -> Made:
    raw = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = (rng.standard_normal((outputs, 1)) / 1000).astype(np.float32)
    tensors = {"weight": stored(raw), "weight_scale": stored(scales), "input_scale": stored(scales[:1, 0])}
    return tensors, raw.astype(np.float32) * scales


GPTQ, CT = {"quant_method": "gptq", "bits": 4}, {"quant_method": "compressed-tensors"}
SCHEMES = {
    "gptq": Scheme(GPTQ, gptq(), True),
    "gptq, version 2": Scheme({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(less=0), True),
    "gptq of 8 bits": Scheme({**GPTQ, "bits": 8}, gptq(8), True),
    "gptq, reordered": Scheme({**GPTQ, "desc_act": True}, gptq(shuffled=True), False),
    "gptq, small groups": Scheme(GPTQ, gptq(group=16), False),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, True),
    "packed": Scheme(CT, packed(4, True), True),
    "packed, zero points": Scheme(CT, packed(4, False), True),
    "packed, 8 bits": Scheme(CT, packed(8, False), True),
    "int8": Scheme(CT, int8, False),
    "fp8, one scale": Scheme(CT, fp8("tensor"), False),
    "fp8, a scale per output": Scheme({"quant_method": "fbgemm_fp8"}, fp8("channel"), False),
    "fp8, blocks": Scheme({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8("block"), False),
}
