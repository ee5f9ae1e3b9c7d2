"""Reads GGUF model files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), trusting nothing in them.

The header is parsed here, over the memory map, for two reasons: every length has to be checked before it is used,
and `gguf.GGUFReader` keeps several numpy objects per array item, which takes seconds for a vocabulary of 50,000
tokens. Block sizes and dequantisation are the `gguf` package's. Of a split model (`gguf-split`) any part may be named;
metadata are the first one's.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from batchgen.errors import ModelError
from batchgen.io.gguf_codes import unpack
from batchgen.io.mapped_file import MappedFile
from batchgen.io.model_files import TensorInfo, gguf_parts
from batchgen.kernels.base import Codes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_HEADER_BYTES = 1 << 27
_MAX_HEADER_ITEMS = 1 << 22  # keys, array items and tensors together: bounds memory, four times a large vocabulary's
_MIN_PAIR_BYTES = 13  # key length, value type, a value of one byte
_MIN_TENSOR_BYTES = 32  # name length, dimension count, one dimension, type, offset
_DEQUANTIZE_WEIGHTS = 1 << 16  # at a time: bounds what gguf's dequantize takes beside the result

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF model: `metadata` as plain Python values, `tensors` by name, weights read from the memory maps."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _files: tuple[MappedFile, ...]

    @classmethod
    def open(cls, path: str | Path) -> "GGUFFile":
        """Maps the file, or all parts of a split model, and checks whole headers, in time and memory bounded by their
        size.

        Raises ModelError, naming the file and what is wrong with it, for anything that is not a sound GGUF file.
        """
        path = Path(path)
        parts = [_read_part(part) for part in gguf_parts(path)]
        return cls(path, parts[0].metadata, _join_tensors(parts), tuple(part.file for part in parts))

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view of shape (*shape[:-1], bytes in a row)."""
        info = self._info(name)
        return self._files[info.part].bytes_at(info.offset, info.nbytes).reshape(*info.shape[:-1], -1)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor as a new float32 array of its shape, equal to what `gguf.quants.dequantize` gives."""
        info = self._info(name)
        kind = GGMLQuantizationType[info.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        step = _DEQUANTIZE_WEIGHTS // block_size
        raw, out = np.asarray(self.raw(name)).ravel(), np.empty(prod(info.shape), np.float32)
        try:
            for start in range(0, info.nbytes // block_bytes, step):
                blocks = raw[start * block_bytes : (start + step) * block_bytes]
                out[start * block_size : (start + step) * block_size] = dequantize(blocks[None], kind)[0]
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {info.type_name}, which cannot be read as float32"
            ) from None
        return out.reshape(info.shape)

    def codes(self, name: str) -> Codes | None:
        """A quantised matrix as it is stored, or None when its type is not one of `gguf_codes.UNPACKERS`."""
        return unpack(self._info(name).type_name, self.raw(name))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: the model has no tensor {name!r}")
        return self.tensors[name]


@dataclass(frozen=True, eq=False)
class _Part:
    """One file of a model."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file: MappedFile


def _read_part(path: Path) -> _Part:
    file = MappedFile(path)
    cursor = _Cursor(path, file.data[:_MAX_HEADER_BYTES])
    tensor_count, pair_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, pair_count)
    tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, metadata), len(file))
    return _Part(path, metadata, tensors, file)


def _join_tensors(parts: Sequence[_Part]) -> dict[str, TensorInfo]:
    """All tensors of the parts, each of which must be the one that its name says."""
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        _check_place(part, number, len(parts))
        twice = next(iter(tensors.keys() & part.tensors.keys()), None)
        if twice is not None:
            raise ModelError(f"{part.path}: tensor {twice!r} is in another part of the split model, too")
        tensors |= {name: replace(info, part=number) for name, info in part.tensors.items()}
    wanted = parts[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ModelError(f"{parts[0].path}: the parts have {len(tensors)} tensors together, not {wanted!r} as they say")
    return tensors


def _check_place(part: _Part, number: int, count: int) -> None:
    stated = (part.metadata.get("split.no", 0), part.metadata.get("split.count", 1))
    if count == 1 and stated in ((0, 1), (0, 0)):
        return
    if count == 1:
        raise ModelError(
            f"{part.path}: part {stated[0]!r} (from 0) of {stated[1]!r} of a split model; the others are found only if"
            f" their names end with -00001-of-NNNNN.gguf and so on"
        )
    if stated != (number, count):
        raise ModelError(
            f"{part.path}: its name says part {number} (from 0) of {count}, its metadata part {stated[0]!r} of"
            f" {stated[1]!r}"
        )


class _Cursor:
    """A position in the header; every read is checked against the bytes that are there."""

    def __init__(self, path: Path, data: NDArray[np.uint8]):
        self.path = path
        self.position = 0
        self._items_left = _MAX_HEADER_ITEMS
        self._data = memoryview(data.data)

    @property
    def bytes_left(self) -> int:
        return len(self._data) - self.position

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a sound GGUF file: {what}")

    def take(self, size: int, what: str) -> memoryview:
        if size > self.bytes_left:
            raise self.error(
                f"{what} needs {size} bytes at offset {self.position}, but {self.bytes_left} are left (truncated?)"
            )
        start, self.position = self.position, self.position + size
        return self._data[start : self.position]

    def number(self, code: str, what: str) -> int:
        value: int = struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]
        return value

    def count(self, what: str, item_bytes: int) -> int:
        """A number of items of at least `item_bytes` each, which therefore must fit what is left."""
        count = self.number("Q", f"the count of {what}")
        if count * item_bytes > self.bytes_left or count > self._items_left:
            raise self.error(f"{count} {what} cannot fit in the {self.bytes_left} bytes that are left of the header")
        self._items_left -= count
        return count

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the counts of tensors and of metadata pairs."""
    if bytes(cursor.take(4, "the magic number")) != _MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file: it does not start with {_MAGIC.decode()}")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        big_endian = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise ModelError(
            f"{cursor.path}: GGUF version {version}{big_endian} is not supported, only 2 and 3, little-endian"
        )
    return cursor.count("tensors", _MIN_TENSOR_BYTES), cursor.count("metadata pairs", _MIN_PAIR_BYTES)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.text(f"metadata key {index}")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, _value_type(cursor, key), key)
    return metadata


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.number("I", f"the type of metadata {key!r}")
    try:
        return GGUFValueType(number)
    except ValueError:
        raise cursor.error(f"metadata {key!r} has unknown value type {number}") from None


def _read_value(cursor: _Cursor, kind: GGUFValueType, key: str) -> Any:
    if kind is GGUFValueType.STRING:
        return cursor.text(f"metadata {key!r}")
    if kind is GGUFValueType.ARRAY:
        return _read_array(cursor, key)
    return _read_scalars(cursor, kind, 1, key)[0]


def _read_array(cursor: _Cursor, key: str) -> list[Any]:
    kind = _value_type(cursor, key)
    if kind is GGUFValueType.ARRAY:
        raise cursor.error(f"metadata {key!r} is an array of arrays, which no model uses")
    what = f"items of metadata {key!r}"
    if kind is not GGUFValueType.STRING:
        return _read_scalars(cursor, kind, cursor.count(what, np.dtype(_SCALARS[kind]).itemsize), key)
    item = f"an item of metadata {key!r}"
    return [cursor.text(item) for _ in range(cursor.count(what, 8))]


def _read_scalars(cursor: _Cursor, kind: GGUFValueType, count: int, key: str) -> list[Any]:
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, f"metadata {key!r}"), dtype)
    if kind is not GGUFValueType.BOOL:
        return values.tolist()
    if np.any(values > 1):
        raise cursor.error(f"metadata {key!r} holds a boolean that is neither 0 nor 1")
    return values.astype(bool).tolist()


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int, file_size: int) -> dict[str, TensorInfo]:
    """Reads and checks every tensor's entry; offsets become positions in the file."""
    entries = [_read_tensor(cursor, index) for index in range(count)]
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for place in map(partial(_place_tensor, cursor, alignment, base, file_size), entries):
        if place.name in tensors:
            raise cursor.error(f"tensor {place.name!r} occurs twice")
        tensors[place.name] = place
    _check_overlaps(cursor, tensors)
    return tensors


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One entry, its offset still relative to the data section."""
    name = cursor.text(f"the name of tensor {index}")
    what = f"the entry of tensor {name!r}"
    dims = cursor.number("I", what)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {dims} dimensions; 1 to {_MAX_DIMS} are possible")
    shape = tuple(cursor.number("Q", what) for _ in range(dims))[::-1]
    kind = _tensor_type(cursor, cursor.number("I", what), name)
    return TensorInfo(name, shape, kind.name, cursor.number("Q", what), _tensor_bytes(cursor, name, shape, kind))


def _tensor_type(cursor: _Cursor, number: int, name: str) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise cursor.error(f"tensor {name!r} has type number {number}, which the gguf package does not know") from None


def _tensor_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape:
        raise cursor.error(f"tensor {name!r} of shape {shape} is empty")
    if shape[-1] % block_size:
        raise cursor.error(
            f"tensor {name!r}: rows of {shape[-1]} values are no multiple of {kind.name}'s block of {block_size}"
        )
    return prod(shape) // block_size * block_bytes


def _place_tensor(cursor: _Cursor, alignment: int, base: int, file_size: int, entry: TensorInfo) -> TensorInfo:
    if entry.offset % alignment:
        raise cursor.error(f"tensor {entry.name!r} starts at {entry.offset}, which is not aligned to {alignment}")
    start, end = base + entry.offset, base + entry.offset + entry.nbytes
    if end > file_size:
        raise cursor.error(f"tensor {entry.name!r} ends at byte {end}, but the file has {file_size} (truncated?)")
    return replace(entry, offset=start)


def _check_overlaps(cursor: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(f"tensors {before.name!r} and {after.name!r} overlap")
