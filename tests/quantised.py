"""Random blocks of ggml's quantised types, as bytes of a file and as the codes that kernels take."""

import gguf
import numpy as np
from numpy.typing import NDArray

from batchgen.io.gguf_codes import unpack
from batchgen.kernels.base import Codes

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}
"""By type, where in a block its float16 numbers lie; any other bytes are valid codes."""

OTHER_HALVES = {
    **{"TQ1_0": [52], "TQ2_0": [64]},
    **{kind: [0] for kind in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}
"""Of types that are expanded when they are loaded."""

SCALE_BYTES = {"MXFP4": ([0], 118, 130), "NVFP4": ([0, 1, 2, 3], 0x28, 0x40), "IQ1_M": ([55], 0x20, 0x30)}
"""Types whose scales are no float16 numbers: where bytes that decide their size lie, and values that keep it small."""


def random_blocks(rng: np.random.Generator, kind: str, outputs: int, inputs: int) -> NDArray[np.uint8]:
    """Stored rows (outputs, bytes of a row); scales of both signs and several magnitudes, zero among them."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (outputs * inputs // size, block_bytes), np.uint8)
    places, low, high = SCALE_BYTES.get(kind, ([], 0, 1))
    blocks[:, places] = rng.integers(low, high, (len(blocks), len(places)))
    for at in (HALVES | OTHER_HALVES).get(kind, []):
        halves = rng.standard_normal(len(blocks)) * 10.0 ** rng.integers(-3, 1, len(blocks))
        halves[::17] = 0
        blocks[:, at : at + 2] = halves.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def dequantised(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What gguf's own package makes of stored rows, (outputs, inputs)."""
    return np.array(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]), np.float32)


def random_codes(rng: np.random.Generator, kind: str, outputs: int, inputs: int) -> tuple[Codes, NDArray[np.float32]]:
    """A matrix as codes and as floats."""
    blocks = random_blocks(rng, kind, outputs, inputs)
    codes = unpack(kind, blocks)
    assert codes is not None
    return codes, dequantised(kind, blocks)
