"""JSON lines: one object per line, in UTF-8; blank lines count for nothing.

Parsed with Python's json: pyarrow's reader dies of deep nesting and of a bare null, and guesses timestamps. Types are
those that all lines of all files need: bool, int64, double (with or without whole numbers), string, list, struct, and
null where nothing else was seen.
"""

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyarrow as pa

from batchgen.errors import InputError
from batchgen.io.sources import SourceFile, first_line

_MAX_LINE = 64 << 20
_BLOCK_BYTES = 8 << 20
_MAX_DEPTH = 64  # Parquet readers give up a little later
_MAX_NODES = 10_000
_EXACT = 2**53  # the largest whole number up to which float64 holds all

Row = dict[str, Any]
_KINDS = {bool: "bool", int: "int64", float: "double", str: "string", list: "list", dict: "struct"}
_PLAIN = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64(), "string": pa.string(), "": pa.null()}


def read_objects(source: SourceFile) -> Iterator[tuple[int, Row, int]]:
    """Yields (line number from 1, object, bytes). Raises InputError with the line for anything else."""
    with source.open_stream() as stream:
        number = 0
        while line := stream.readline(_MAX_LINE + 1):
            number += 1
            if len(line) > _MAX_LINE:
                raise _line_error(source, number, f"is longer than {_MAX_LINE >> 20} MiB")
            if line.strip():
                yield number, _parse(source, number, line), len(line)


def read_blocks(source: SourceFile, rows: int) -> Iterator[list[Row]]:
    """The objects, at most `rows` of them and some megabytes of text at a time. Raises as `read_objects` does."""
    block: list[Row] = []
    held = 0
    for _, row, size in read_objects(source):
        block.append(row)
        held += size
        if len(block) >= rows or held >= _BLOCK_BYTES:
            yield block
            block, held = [], 0
    if block:
        yield block


def _parse(source: SourceFile, number: int, line: bytes) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _line_error(source, number, f"is not JSON in UTF-8: {_reason(error)}") from None
    if isinstance(value, dict):
        return value
    hint = "; one object per line is needed, not an array of all" if isinstance(value, list) or number == 1 else ""
    raise _line_error(source, number, f"is not a JSON object{hint}")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _line_error(source: SourceFile, number: int, what: str) -> InputError:
    return InputError(f"{source.shown}: line {number} {what}")


# --- types ------------------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """A value that its column cannot hold."""


@dataclass(slots=True)
class _Shape:
    """The values seen at one place of the objects: their kind, and what is inside."""

    kind: str = ""
    is_wide: bool = False  # holds whole numbers that float64 does not
    fields: dict[str, "_Shape"] = field(default_factory=dict)
    item: "_Shape | None" = None

    def type(self) -> pa.DataType:
        if self.kind == "struct":
            return pa.struct([(name, shape.type()) for name, shape in self.fields.items()])
        if self.kind == "list":
            return pa.list_(pa.null() if self.item is None else self.item.type())
        return _PLAIN[self.kind]


class JsonTypes:
    """The types that hold all objects added so far."""

    def __init__(self) -> None:
        self._root = _Shape("struct")
        self._nodes = 0

    def add(self, row: Row) -> None:
        """Raises _Misfit for a value that does not go with those before it."""
        self._add(self._root, row, "", 0)

    def schema(self) -> pa.Schema:
        return pa.schema([(name, shape.type()) for name, shape in self._root.fields.items()])

    def _add(self, shape: _Shape, value: Any, path: str, depth: int) -> None:
        if value is None:
            return
        self._widen(shape, value, path)
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in shape.fields:
                    if not is_unicode(name):
                        raise _Misfit(f"{path!r} has a key with half a surrogate pair, which is no character")
                    shape.fields[name] = self._new_shape(path, depth)
                self._add(shape.fields[name], inner, f"{path}.{name}" if path else name, depth + 1)
        elif isinstance(value, list):
            shape.item = shape.item or self._new_shape(path, depth)
            for inner in value:
                self._add(shape.item, inner, path + "[]", depth + 1)

    def _new_shape(self, path: str, depth: int) -> _Shape:
        self._nodes += 1
        if depth >= _MAX_DEPTH:
            raise _Misfit(f"{path!r} is nested deeper than {_MAX_DEPTH} levels")
        if self._nodes > _MAX_NODES:
            raise _Misfit(f"has the last of over {_MAX_NODES:,} different keys")
        return _Shape()

    def _widen(self, shape: _Shape, value: Any, path: str) -> None:
        kind = _KINDS[type(value)]
        if kind == "string" and not is_unicode(value):
            raise _Misfit(f"{path!r} holds half a surrogate pair, which is no character")
        if shape.kind != kind:
            if shape.kind and {shape.kind, kind} != {"int64", "double"}:
                raise _Misfit(f"{path!r} is {kind}, but {shape.kind} before")
            shape.kind = "double" if shape.kind else kind
        if kind == "int64" and not -_EXACT <= value <= _EXACT:
            if not -(2**63) <= value < 2**63:
                raise _Misfit(f"{path!r} is a whole number beyond 64 bits; write it as text")
            shape.is_wide = True
        if shape.is_wide and shape.kind == "double":
            raise _Misfit(f"{path!r} mixes fractions with whole numbers beyond 2^53, which they would round")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON's escapes can spell half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


# --- files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class JsonReader:
    """Rows of one file; `schema` holds those of all files."""

    _source: SourceFile
    schema: pa.Schema
    num_rows: int

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        position = 0
        for block in read_blocks(self._source, rows):
            yield position, _to_batch(block, schema)
            position += len(block)


def _to_batch(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    """The objects as a batch; keys that the schema lacks are left out."""
    if not schema.names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
    return pa.RecordBatch.from_pylist(rows, schema)


def open_json_lines(files: Sequence[SourceFile], as_text: Container[str]) -> Sequence[JsonReader]:
    """Reads all lines for their types. `as_text` has no meaning here: values have types."""
    found = JsonTypes()
    counts = [_scan(source, found) for source in files]
    schema = found.schema()
    return [JsonReader(source, schema, count) for source, count in zip(files, counts, strict=True)]


def _scan(source: SourceFile, types: JsonTypes) -> int:
    count = 0
    with source.errors("cannot be read"):
        for number, row, _ in read_objects(source):
            try:
                types.add(row)
                count += 1
            except _Misfit as error:
                raise InputError(f"{source.shown}: line {number}: {first_line(error)}") from None
    return count
