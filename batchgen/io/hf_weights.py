"""The weights of a Hugging Face directory by name, whatever they are stored as."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.io.hf_quantised import CODE_FORMATS, QuantisedMatrix, quantised_matrices
from batchgen.io.model_files import TensorInfo
from batchgen.io.safetensors_file import SafetensorsModel
from batchgen.kernels.base import Codes


@dataclass(frozen=True, eq=False)
class HfWeights:
    """A `WeightsFile`."""

    path: Path
    tensors: dict[str, TensorInfo]
    _model: SafetensorsModel
    _quantised: Mapping[str, QuantisedMatrix]

    @classmethod
    def open(cls, directory: Path, quantisation: Mapping[str, Any] | None) -> "HfWeights":
        """quantisation: `quantization_config` of the settings. Raises ModelError for what is not sound or supported."""
        model = SafetensorsModel.open(directory)
        quantised = quantised_matrices(model, quantisation)
        parts = frozenset[str]().union(*(matrix.parts for matrix in quantised.values()))
        tensors = {name: info for name, info in model.tensors.items() if name not in parts}
        return cls(directory, tensors | {name: m.info for name, m in quantised.items()}, model, quantised)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor as a new float32 array of its shape."""
        if name not in self._quantised:
            return self._model.floats(name)
        matrix = self._quantised[name].read()
        return matrix.weights() if isinstance(matrix, Codes) else matrix

    def codes(self, name: str) -> Codes | None:
        """A quantised matrix as its codes, where it has such; else None."""
        if name not in self._quantised or self.tensors[name].type_name not in CODE_FORMATS:
            return None
        matrix = self._quantised[name].read()
        return matrix if isinstance(matrix, Codes) else None
