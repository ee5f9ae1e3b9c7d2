"""Quantised matrices of Hugging Face directories, each made of several tensors:

- GPTQ (https://github.com/ModelCloud/GPTQModel, `qweight` packed along the inputs) of 4 or 8 bits;
- AWQ (https://github.com/casper-hansen/AutoAWQ, `qweight` packed along the outputs, in an order of its own) of 4 bits;
- compressed-tensors (https://github.com/vllm-project/compressed-tensors): `weight_packed` of 4 or 8 bits, int8;
- fp8 with a scale for all, for each output or for blocks (`weight_scale`, `weight_scale_inv`).

Integers become codes, with groups of 32 inputs, where their groups are multiples of that and lie in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.io.model_files import TensorInfo
from batchgen.io.safetensors_file import SafetensorsModel
from batchgen.kernels.base import Codes, Matrix

GROUP = 32
CODE_FORMATS = {"INT4": (4, GROUP, True), "INT8": (8, GROUP, True)}
"""Bits, group and whether there are minima, by the type's name here."""
_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # which output the i-th four bits are


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """`info`: of the matrix that the tensors `parts` (by what follows the module's name) stand for."""

    info: TensorInfo
    parts: frozenset[str]
    read: Callable[[], Matrix]


@dataclass(frozen=True, eq=False)
class _Module:
    """The tensors of one linear layer."""

    model: SafetensorsModel
    name: str
    config: Mapping[str, Any]

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.model.tensors

    def shape(self, part: str, dims: int = 2) -> tuple[int, ...]:
        shape = self.model.info(f"{self.name}.{part}").shape
        if len(shape) != dims or 0 in shape:
            raise self.error(f"{part} has shape {shape}")
        return shape

    def integers(self, part: str, *shape: int) -> NDArray[Any]:
        return self._checked(part, self.model.integers(f"{self.name}.{part}"), shape)

    def floats(self, part: str, *shape: int) -> NDArray[np.float32]:
        return self._checked(part, self.model.floats(f"{self.name}.{part}"), shape)

    def _checked(self, part: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        if values.shape != shape:
            raise self.error(f"{part} has shape {values.shape}, not {shape}")
        return values

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.model.path}: quantised matrix {self.name!r}: {what}")

    def matrix(self, kind: str, outputs: int, inputs: int, read: Callable[[], Matrix], *parts: str) -> QuantisedMatrix:
        nbytes = sum(self.model.info(f"{self.name}.{part}").nbytes for part in parts if self.has(part))
        info = TensorInfo(f"{self.name}.weight", (outputs, inputs), kind, 0, nbytes)
        return QuantisedMatrix(info, frozenset(f"{self.name}.{part}" for part in parts), read)


def quantised_matrices(model: SafetensorsModel, config: Mapping[str, Any] | None) -> dict[str, QuantisedMatrix]:
    """All of a directory, by the name that the matrix would have (`….weight`). `config`: its `quantization_config`."""
    if not config:
        return {}
    method = config.get("quant_method")
    if method not in _METHODS:
        raise ModelError(f"quant_method {method!r} is not supported (those that are: {', '.join(_METHODS)})")
    modules = dict.fromkeys(name.rpartition(".")[0] for name in model.tensors)
    found = (_describe(_Module(model, name, config)) for name in modules)
    return {matrix.info.name: matrix for matrix in found if matrix is not None}


def _describe(module: _Module) -> QuantisedMatrix | None:
    """None for what is not quantised."""
    if module.has("qweight"):
        return _describe_awq(module) if module.config["quant_method"] == "awq" else _describe_gptq(module)
    if module.has("weight_packed"):
        return _describe_packed(module)
    scale = next((part for part in ("weight_scale", "weight_scale_inv") if module.has(part)), None)
    if scale is None or not module.has("weight"):
        return None
    outputs, inputs = module.shape("weight")
    kind = module.model.info(f"{module.name}.weight").type_name
    return module.matrix(kind, outputs, inputs, partial(_scaled, module, scale), "weight", scale, "input_scale")


# --- integers ---------------------------------------------------------------------------------------------------


def _describe_gptq(module: _Module) -> QuantisedMatrix:
    bits = module.config.get("bits")
    if bits not in (4, 8):
        raise module.error(f"GPTQ of {bits!r} bits is not supported (4 and 8 are)")
    rows, outputs = module.shape("qweight")
    inputs = rows * 32 // bits
    size = _group_size(module, inputs)
    group_of = _groups_of(module, inputs, size)
    in_order = size % GROUP == 0 and np.array_equal(group_of, np.arange(inputs) // size)
    kind = f"INT{bits}" if in_order else f"INT{bits}-reordered"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    read = partial(_read_gptq, module, bits, (outputs, inputs), None if in_order else group_of)
    return module.matrix(kind, outputs, inputs, read, *parts)


def _group_size(module: _Module, inputs: int) -> int:
    groups = module.shape("scales")[0]
    if inputs % groups:
        raise module.error(f"{inputs} inputs in {groups} groups")
    return inputs // groups


def _groups_of(module: _Module, inputs: int, size: int) -> NDArray[Any]:
    """Which group each input is of."""
    if not module.has("g_idx"):
        return np.arange(inputs) // size
    group_of = module.integers("g_idx", inputs)
    if group_of.min() < 0 or group_of.max() >= inputs // size:
        raise module.error(f"g_idx names groups from {group_of.min()} to {group_of.max()} of {inputs // size}")
    return group_of


def _read_gptq(module: _Module, bits: int, shape: tuple[int, int], group_of: NDArray[Any] | None) -> Matrix:
    """Zero points are stored less one, but in version 2. `group_of`: of each input, where they are not in order."""
    (outputs, inputs), groups = shape, module.shape("scales")[0]
    per_word = 32 // bits
    codes = _unpack(module.integers("qweight", inputs // per_word, outputs).T, bits).reshape(outputs, inputs)
    stored = _unpack(module.integers("qzeros", groups, -(-outputs // per_word)), bits).reshape(groups, -1)[:, :outputs]
    less = 0 if module.config.get("checkpoint_format") == "gptq_v2" else 1
    zeros = (stored.T.astype(np.int32) + less & (1 << bits) - 1).astype(np.float32)
    scales = module.floats("scales", groups, outputs).T
    if group_of is None:
        return _codes(codes, bits, scales, zeros)
    return (codes.astype(np.float32) - zeros[:, group_of]) * scales[:, group_of]


def _describe_awq(module: _Module) -> QuantisedMatrix:
    bits, version = module.config.get("bits"), str(module.config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise module.error(f"AWQ of {bits!r} bits, version {version!r}, is not supported (4 bits, 'gemm')")
    inputs, words = module.shape("qweight")
    if _group_size(module, inputs) % GROUP:
        raise module.error(
            f"AWQ groups of {_group_size(module, inputs)} inputs are not supported (multiples of {GROUP})"
        )
    read = partial(_read_awq, module, words * 8, inputs)
    return module.matrix("INT4", words * 8, inputs, read, "qweight", "qzeros", "scales")


def _read_awq(module: _Module, outputs: int, inputs: int) -> Codes:
    groups, order = module.shape("scales")[0], np.argsort(_AWQ_ORDER)
    codes = _unpack(module.integers("qweight", inputs, outputs // 8), 4)[..., order].reshape(inputs, outputs)
    zeros = _unpack(module.integers("qzeros", groups, outputs // 8), 4)[..., order].reshape(groups, outputs)
    scales = module.floats("scales", groups, outputs)
    return _codes(np.ascontiguousarray(codes.T), 4, scales.T, zeros.T.astype(np.float32))


def _describe_packed(module: _Module) -> QuantisedMatrix:
    rows, words = module.shape("weight_packed")
    outputs, inputs = (int(size) for size in module.integers("weight_shape", 2))
    bits = words * 32 // inputs if inputs > 0 else 0
    if outputs != rows or bits not in (4, 8) or inputs * bits != words * 32:
        raise module.error(
            f"weight_packed of shape {(rows, words)} holds no {outputs} x {inputs} weights of 4 or 8 bits"
        )
    size = inputs // module.shape("weight_scale")[1]
    if module.has("weight_g_idx") or size % GROUP:
        raise module.error(f"groups of {size} inputs or reordered ones are not supported (multiples of {GROUP} are)")
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
    return module.matrix(f"INT{bits}", outputs, inputs, partial(_read_packed, module, bits, outputs, inputs), *parts)


def _read_packed(module: _Module, bits: int, outputs: int, inputs: int) -> Codes:
    groups, half = module.shape("weight_scale")[1], 1 << (bits - 1)
    codes = _unpack(module.integers("weight_packed", outputs, inputs * bits // 32), bits).reshape(outputs, inputs)
    scales = module.floats("weight_scale", outputs, groups)
    zeros = np.full((outputs, groups), half, np.float32)
    if module.has("weight_zero_point"):
        words = module.integers("weight_zero_point", -(-outputs * bits // 32), groups)
        zeros = _unpack(words.T, bits).reshape(groups, -1)[:, :outputs].T.astype(np.float32)
    return _codes(codes, bits, scales, zeros)


def _unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unsigned numbers of `bits` bits, the lowest first, (*shape of the words, 32 / bits)."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*words.shape, 8)


def _codes(codes: NDArray[np.uint8], bits: int, scales: NDArray[np.float32], zeros: NDArray[np.float32]) -> Codes:
    """(codes - zeros) * scales; scales and zeros (outputs, groups)."""
    repeats = codes.shape[1] // scales.shape[1] // GROUP
    minima = -(scales * (zeros - np.float32(128 if bits == 8 else 0)))
    values = (codes ^ 128).view(np.int8) if bits == 8 else codes
    return Codes(values, bits, np.repeat(scales, repeats, axis=1), np.repeat(minima, repeats, axis=1))


# --- numbers with a scale ---------------------------------------------------------------------------------------


def _scaled(module: _Module, part: str) -> NDArray[np.float32]:
    """Each weight times the scale of all, of its output or of its block."""
    name = f"{module.name}.weight"
    outputs, inputs = module.shape("weight")
    is_integer = module.model.info(name).type_name == "I8"
    weights = module.model.integers(name).astype(np.float32) if is_integer else module.model.floats(name)
    scale = module.model.floats(f"{module.name}.{part}")
    if scale.size == 1:
        return weights * scale.ravel()
    if scale.shape in ((outputs, 1), (outputs,)):
        return weights * scale.reshape(outputs, 1)
    high, wide = _block_size(module, scale.shape, outputs, inputs)
    for i, row in enumerate(scale):  # a band of blocks at a time
        weights[i * high : (i + 1) * high] *= np.repeat(row, wide)[:inputs]
    return weights


def _block_size(module: _Module, scales: tuple[int, ...], outputs: int, inputs: int) -> tuple[int, int]:
    size = module.config.get("weight_block_size") or [128, 128]
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise module.error(f"weight_block_size is {size!r}")
    if scales != (-(-outputs // size[0]), -(-inputs // size[1])):
        raise module.error(f"has scales of shape {scales} for {outputs} x {inputs} weights in blocks of {size}")
    return size[0], size[1]
