"""Weights kept as the codes of their file, expanded to bfloat16 panels a pair at a time when they are multiplied.

A weight is `scale * code + minimum`, scale and minimum (float32) being those of a group of consecutive inputs of one
output: what ggml's Q4_0, Q4_1, Q5_*, Q8_0 and its K-quants come to (https://github.com/ggml-org/ggml). Where there is a
minimum, products of a scale and a code have at most 24 significant bits, so they are exact and the sum is rounded once:
expanded weights have the bits that they would have if they had been expanded when the model was loaded.

Layout: for each panel of 16 outputs and each 32 inputs, scales (32 / group, 16), then minima (32 / group, 16) if any,
then codes of input pairs (16, 16): four bits each, the even input's in the low half of a byte; or two int8 each.
"""

from batchgen.kernels.cpu import simd
from batchgen.kernels.cpu.compiling import helper, inlined


def block_bytes(bits: int, group: int, minima: bool) -> int:
    """Bytes of 16 outputs of 32 inputs."""
    return 32 // group * 64 * (2 if minima else 1) + 64 * bits


@inlined
def expand_half(at, room, bits, scale, minimum):
    """Sixteen inputs with their scales and minima in vectors."""
    for pair in range(8):
        if bits == 4:
            even, odd = simd.load_nibbles(at + pair * 16)
        else:
            even, odd = simd.load_byte_pairs(at + pair * 32)
        simd.store_pairs_ties_even(room + pair * 64, simd.fma(even, scale, minimum), simd.fma(odd, scale, minimum))


@helper
def expand_panels(address, k, bits, group, minima, room):
    """Two panels of `k` inputs to (2, k/2, 16, 2) bfloat16 at `room`."""
    parts = 32 // group
    at, zero = address, simd.zero()
    size = parts * 64 * (2 if minima else 1) + bits * 64
    ahead = address + k // 16 * size  # the pair that follows
    for target in range(room, room + k * 64, 1024):
        for line in range(0, size, 64):
            simd.prefetch(ahead + line)
        ahead += size
        first = simd.load(at)
        second = simd.load(at + 64) if parts == 2 else first
        at += parts * 64
        low, high = zero, zero
        if minima:
            low = simd.load(at)
            high = simd.load(at + 64) if parts == 2 else low
            at += parts * 64
        if bits == 4:
            expand_half(at, target, 4, first, low)
            expand_half(at + 128, target + 512, 4, second, high)
        else:
            expand_half(at, target, 8, first, low)
            expand_half(at + 256, target + 512, 8, second, high)
        at += bits * 64
