"""Tensors of a model file by the parts of a decoder, presence and shapes checked."""

import re
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.kernels.base import Codes, Matrix
from batchgen.models.config import ModelConfig

_NOT_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$")
"""Buffers that old Hugging Face files hold: what follows from the configuration."""


class TensorSource(Protocol):
    """A model file: shapes are (outputs, inputs), values float32 whatever they are stored as."""

    def names(self) -> frozenset[str]: ...
    def shape_of(self, name: str) -> tuple[int, ...] | None: ...
    def dequantize(self, name: str) -> NDArray[np.float32]: ...
    def codes(self, name: str) -> Codes | None: ...


class Tensors:
    """`values(part, shape, layer)`, `matrix(...)`, by the architecture's names. Knows what has not been asked for."""

    def __init__(self, source: TensorSource, config: ModelConfig, wants_codes: bool):
        self._source, self._architecture, self._naming = source, config.architecture, config.naming
        self._wants_codes = wants_codes
        self._unused = {name for name in source.names() if config.naming == "gguf" or not _NOT_WEIGHTS.search(name)}
        self._prefix = self._unwanted_prefix()
        if config.tied:
            self.ignore("output")
        if config.shape.num_layers > len(self._unused):
            have = len(self._unused)
            raise ModelError(f"the metadata asks for {config.shape.num_layers} layers; the file has {have} tensors")

    def _unwanted_prefix(self) -> str:
        """What names lack in a file that was saved without its output head: `transformer.`, `model.` and the like."""
        embedding = self._name("embedding")
        prefix, _, rest = embedding.partition(".")
        missing = self._source.shape_of(embedding) is None and self._source.shape_of(rest) is not None
        return f"{prefix}." if missing and self._naming == "hf" else ""

    def _name(self, part: str, layer: int | None = None, suffix: str = "weight", number: int = 0) -> str:
        stem = self._architecture.stem(part, self._naming)
        return f"{(stem or part).format(layer, number=number)}.{suffix}"

    def name(self, part: str, layer: int | None = None, suffix: str = "weight", number: int = 0) -> str:
        return self._name(part, layer, suffix, number).removeprefix(self._prefix)

    def has(self, part: str, layer: int | None = None, suffix: str = "weight", number: int = 0) -> bool:
        return self._source.shape_of(self.name(part, layer, suffix, number)) is not None

    def ignore(self, part: str) -> None:
        self._unused.discard(self.name(part))

    def values(
        self, part: str, shape: tuple[int, ...], layer: int | None = None, suffix: str = "weight", number: int = 0
    ) -> NDArray[np.float32]:
        name = self.name(part, layer, suffix, number)
        self._check(name, shape)
        return self._source.dequantize(name)

    def matrix(self, part: str, shape: tuple[int, int], layer: int | None = None, number: int = 0) -> Matrix:
        """(outputs, inputs), as codes where that is wanted and possible."""
        name = self.name(part, layer, number=number)
        if self._naming in self._architecture.transposed and layer is not None:
            self._check(name, shape[::-1])
            return np.ascontiguousarray(self._source.dequantize(name).T)
        self._check(name, shape)
        codes = self._source.codes(name) if self._wants_codes else None
        return self._source.dequantize(name) if codes is None else codes

    def experts(self, part: str, shape: tuple[int, int, int], layer: int) -> list[Matrix]:
        """A matrix per expert: of tensors of their own, or one that holds all, (experts, outputs, inputs)."""
        count, outputs, inputs = shape
        if "{number}" in (self._architecture.stem(part, self._naming) or ""):
            return [self.matrix(part, (outputs, inputs), layer, e) for e in range(count)]
        name = self.name(part, layer)
        self._check(name, shape)
        codes = self._source.codes(name) if self._wants_codes else None
        return list(self._source.dequantize(name)) if codes is None else split_codes(codes, shape)

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        self._unused.discard(name)
        found = self._source.shape_of(name)
        if found is None:
            raise ModelError(f"the model file lacks the tensor '{name}'")
        if found != expected:
            raise ModelError(f"tensor '{name}' has shape {found}; the metadata asks for {expected}")

    def refuse_unused(self) -> None:
        """Ignoring a tensor would mean to compute something else than the model says."""
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"the model has tensors that are not used for {self._architecture.name} here: "
                f"{', '.join(names[:3])}{more}"
            )


def split_codes(codes: Codes, shape: tuple[int, int, int]) -> list[Matrix]:
    """Codes of a tensor (experts, outputs, inputs), which a file gives as (experts, outputs * inputs), one by one."""
    count, outputs, inputs = shape
    values = codes.values.reshape(count, outputs, inputs)
    scales = codes.scales.reshape(count, outputs, -1)
    minima = None if codes.minima is None else codes.minima.reshape(count, outputs, -1)
    return [Codes(values[e], codes.bits, scales[e], None if minima is None else minima[e]) for e in range(count)]
