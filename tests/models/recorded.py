"""Tiny models whose logits `transformers` computed (record_models.py), with weights that a seed makes.

A file of tests/data/models holds `config` (config.json), `shapes` of the tensors that `save_pretrained` writes,
`tokens`, and the float32 `logits` at the positions `at`.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent.parent / "data" / "models"


@dataclass(frozen=True)
class Recorded:
    """A model and what it was found to compute."""

    name: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    tokens: NDArray[np.int64]
    at: NDArray[np.int64]
    logits: NDArray[np.float32]

    def weights(self) -> dict[str, NDArray[np.float32]]:
        return seeded_weights(self.shapes, self.config["model_type"].startswith("gemma"))


def load(name: str) -> Recorded:
    with np.load(FOLDER / f"{name}.npz") as file:
        config, shapes = (json.loads(str(file[key])) for key in ("config", "shapes"))
        shapes = {tensor: tuple(shape) for tensor, shape in shapes.items()}
        return Recorded(name, config, shapes, file["tokens"], file["at"], file["logits"])


def seeded_weights(shapes: Mapping[str, tuple[int, ...]], zero_centred: bool) -> dict[str, NDArray[np.float32]]:
    """Random weights by the names of tensors; norms are near 1, or near 0 where the model adds 1."""
    return {name: _seeded(name, shape, zero_centred) for name, shape in shapes.items()}


def _seeded(name: str, shape: tuple[int, ...], zero_centred: bool) -> NDArray[np.float32]:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("bias"):
        return (values / 5).astype(np.float32)
    if len(shape) == 1 or "norm" in name:
        return (values / 5 + (0 if zero_centred else 1)).astype(np.float32)
    return (values * 1.5 / np.sqrt(shape[-1])).astype(np.float32)
