"""Reads the weights of a Hugging Face model directory (https://huggingface.co/docs/safetensors), trusting nothing.

The header is parsed here since the `safetensors` package gives bfloat16 to torch only. Its checks are those of the
package, and more: every byte of the data belongs to exactly one tensor.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.io.mapped_file import MappedFile
from batchgen.io.model_files import TensorInfo, parse_json, safetensors_files, safetensors_index

_MAX_HEADER_BYTES = 1 << 25
_MAX_DIMS = 8
_ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    **{"U16": 2, "I16": 2, "F16": 2, "BF16": 2},
    **{"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8},
}
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_INTEGERS = {"I8": "<i1", "U8": "<u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def _e4m3() -> NDArray[np.float32]:
    """Every 8-bit number of the OCP's E4M3: bias 7, no infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    sizes[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -sizes, sizes).astype(np.float32)


_EIGHT_BITS = {
    "F8_E4M3": _e4m3(),
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}
"""Values by stored byte."""


@dataclass(frozen=True, eq=False)
class SafetensorsModel:
    """The tensors of a directory by name, read from memory maps."""

    path: Path
    tensors: dict[str, TensorInfo]
    _files: tuple[MappedFile, ...]

    @classmethod
    def open(cls, directory: Path) -> "SafetensorsModel":
        """Maps all files and checks their whole headers.

        Raises ModelError, naming the file and what is wrong with it, for anything that is not sound.
        """
        files = tuple(MappedFile(path) for path in safetensors_files(directory))
        tensors: dict[str, TensorInfo] = {}
        for number, file in enumerate(files):
            found = {name: replace(info, part=number) for name, info in _read_header(file).items()}
            twice = next(iter(tensors.keys() & found.keys()), None)
            if twice is not None:
                raise ModelError(f"{file.path}: tensor {twice!r} is in another file of the model, too")
            tensors |= found
        _check_index(directory, [file.path for file in files], tensors)
        return cls(directory, tensors, files)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: the model has no tensor {name!r}")
        return self.tensors[name]

    def floats(self, name: str) -> NDArray[np.float32]:
        """The tensor as a new float32 array of its shape."""
        info, raw = self.info(name), self._raw(name)
        if info.type_name == "BF16":
            out = np.empty(prod(info.shape), np.uint32)
            np.left_shift(raw.view("<u2"), 16, out=out, dtype=np.uint32)
            return out.view(np.float32).reshape(info.shape)
        if info.type_name in _EIGHT_BITS:
            return _EIGHT_BITS[info.type_name][raw].reshape(info.shape)
        if info.type_name not in _FLOATS:
            raise ModelError(f"{self.path}: tensor {name!r} has type {info.type_name}, where numbers are expected")
        return raw.view(_FLOATS[info.type_name]).astype(np.float32).reshape(info.shape)

    def integers(self, name: str) -> NDArray[Any]:
        """The tensor as it is stored, a read-only view."""
        info = self.info(name)
        if info.type_name not in _INTEGERS:
            raise ModelError(f"{self.path}: tensor {name!r} has type {info.type_name}, where integers are expected")
        return self._raw(name).view(_INTEGERS[info.type_name]).reshape(info.shape)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        info = self.info(name)
        return self._files[info.part].bytes_at(info.offset, info.nbytes)


def _error(path: Path, what: str) -> ModelError:
    return ModelError(f"{path}: not a sound safetensors file: {what}")


def _read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """All tensors by name, in the order of the file."""
    path, data = file.path, file.data
    if len(data) < 8:
        raise _error(path, "it has no header (truncated?)")
    length = struct.unpack("<Q", data[:8].tobytes())[0]
    if length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise _error(path, f"a header of {length} bytes in a file of {len(data)} (truncated?)")
    header = parse_json(path, data[8 : 8 + length].tobytes(), unique=True)
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = [_read_entry(path, name, entry, begin) for name, entry in header.items()]
    tensors.sort(key=lambda info: (info.offset, info.nbytes))
    _check_cover(path, tensors, begin, len(data))
    return {info.name: info for info in tensors}


def _read_entry(path: Path, name: str, entry: Any, begin: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _error(path, f"the entry of tensor {name!r} is not dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _ITEM_BYTES:
        raise _error(path, f"tensor {name!r} has unknown type {kind!r}")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMS or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _error(path, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    nbytes = prod(shape) * _ITEM_BYTES[kind]
    if offsets[1] - offsets[0] != nbytes:
        raise _error(path, f"tensor {name!r} has {offsets[1] - offsets[0]} bytes; {kind} of {shape} takes {nbytes}")
    return TensorInfo(name, tuple(shape), kind, begin + offsets[0], nbytes)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(path: Path, tensors: list[TensorInfo], begin: int, size: int) -> None:
    """Each tensor starts where the one before ends, the last ends with the file."""
    place, before = begin, "the header"
    for info in tensors:
        if info.offset != place:
            what = "overlaps" if info.offset < place else "does not follow"
            raise _error(path, f"tensor {info.name!r} {what} {before}")
        place, before = info.offset + info.nbytes, f"tensor {info.name!r}"
    if place > size:
        raise _error(path, f"{before} ends at byte {place}, but the file has {size} (truncated?)")
    if place < size:
        raise _error(path, f"{size - place} bytes after {before} belong to no tensor")


def _check_index(directory: Path, files: list[Path], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in safetensors_index(directory).items():
        if name not in tensors or files[tensors[name].part].name != file:
            raise ModelError(f"{directory / file}: lacks tensor {name!r}, which the index says it has")
