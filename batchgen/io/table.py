"""The input table: files read as one table, in a fixed row order, a few hundred rows at a time.

Which files, and in which order: sources.py. What is in them: formats.py. A row's index is its position in all of them,
before any filter. Folders named `key=value` below the directory, or below the fixed part of the glob, become columns
(partitions.py).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.errors import InputError, SpecError
from batchgen.io.formats import FileReader, choose_format, describe, is_data
from batchgen.io.partitions import read_partitions
from batchgen.io.sources import SourceFile, find_files, first_line
from batchgen.io.where import Where, listed, nearest

_BATCH_ROWS = 1024

Batch = tuple[NDArray[np.int64], pa.RecordBatch]


@dataclass(frozen=True, slots=True, eq=False)
class _InputFile:
    """A file, its reader, and the values of the columns that its folders make."""

    source: SourceFile
    reader: FileReader
    partition: Mapping[str, pa.Scalar]

    @property
    def num_rows(self) -> int:
        return self.reader.num_rows


@dataclass(frozen=True, eq=False)
class InputTable:
    """Files as one table; see `open_table`. Nothing is kept in memory but the files' schemas and sizes.

    `notes` is what the user should hear of the files, a line each.
    """

    schema: pa.Schema
    notes: tuple[str, ...]
    _files: tuple[_InputFile, ...]
    _where: Where | None
    _limit: int | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files on this disk."""
        return tuple(path for file in self._files if (path := file.source.local_path))

    @property
    def is_filtered(self) -> bool:
        """Whether there is a `where`."""
        return self._where is not None

    @property
    def num_rows_upper(self) -> int:
        """The number of rows when there is no `where`, else the most that it can leave."""
        return self._total_rows if self._limit is None else min(self._total_rows, self._limit)

    def batches(
        self, columns: Sequence[str] | None = None, rows: tuple[int, int] | None = None, batch_rows: int = _BATCH_ROWS
    ) -> Iterator[Batch]:
        """Yields (row_index int64, record batch) in row order, at most `batch_rows` rows each, no empty ones.

        `columns` are read and returned in the order given (default all; with none asked for, only `row_index` tells
        the number of rows). `rows` is a half-open range of row indices. Raises InputError for an unknown column, for
        damaged data, and for a file that has changed since the table was opened.
        """
        names = list(self.schema.names) if columns is None else list(columns)
        for name in names:
            check_column(name, self.schema.names)
        start, stop = rows or (0, self._end)
        return self._selected(names, max(start, 0), min(stop, self._end), batch_rows)

    def fingerprint(self) -> str:
        """A hex digest of the files' relative names and contents, and of the schema.

        Reads the files; their hashes are remembered in the cache while size and modification time stay. Of remote
        files see `SourceFile.fingerprint`.
        """
        files = [(file.source.name, file.source.fingerprint()) for file in self._files]
        fields = [(field.name, str(field.type), field.nullable) for field in self.schema]
        return hashlib.sha256(json.dumps([files, fields]).encode()).hexdigest()

    @cached_property
    def _total_rows(self) -> int:
        return sum(file.num_rows for file in self._files)

    @cached_property
    def _end(self) -> int:
        """The row index behind the last row that `limit` lets through."""
        if self._limit is None or self._where is None:
            return self.num_rows_upper
        left = self._limit
        for index, _ in self._selected([], 0, self._total_rows if left else 0, _BATCH_ROWS):
            if left <= len(index):
                return int(index[left - 1]) + 1
            left -= len(index)
        return self._total_rows if left else 0

    def _selected(self, names: list[str], start: int, stop: int, batch_rows: int) -> Iterator[Batch]:
        needed = names if self._where is None else list(dict.fromkeys([*names, *self._where.columns]))
        for index, batch in self._read(needed, start, stop, batch_rows):
            if self._where is not None:
                mask = self._where.mask(index, batch)
                index, batch = index[mask], take_rows(batch.select(names), np.flatnonzero(mask))
            if len(index):
                yield index, batch

    def _read(self, names: list[str], start: int, stop: int, batch_rows: int) -> Iterator[Batch]:
        """Rows start..stop in batches, each column brought to the table's type."""
        schema = pa.schema([self.schema.field(name) for name in names], self.schema.metadata)
        base = 0
        for file in self._files:
            low, high = max(start - base, 0), min(stop - base, file.num_rows)
            if low < high:
                for position, batch in _read_file(file, names, low, high, batch_rows):
                    rows = np.arange(position, position + batch.num_rows)
                    yield rows + base, _conform(file, batch, schema, position)
            base += file.num_rows


def open_table(
    path: str | Path,
    *,
    where: str | None = None,
    limit: int | None = None,
    format: str = "auto",
    column_types: Mapping[str, str] | None = None,
) -> InputTable:
    """Opens the file, glob, directory or URI `path`. Of Parquet only the footers are read, other formats once through.

    `format` is a key of `FORMATS`, or "auto": the files' names tell. Schemas of several files are unified: a column may
    be missing, all null, or narrower in some of them (int32 beside int64); other differences are errors.
    `column_types` are pyarrow's names of types for columns that have none of their own: those of folders, CSV and JSON
    lines. `where` is a polars SQL condition on one row (null counts as false), `limit` the number of rows kept after
    it. Raises InputError for what is not a readable table, SpecError for a wrong `where` or type.
    """
    types = {name: _type(name, text) for name, text in (column_types or {}).items()}
    sources = find_files(str(path), is_data(format), describe(format))
    partitions = read_partitions(sources, types)
    kind = choose_format(format, sources)
    readers = kind.open(sources, types)
    files = tuple(_InputFile(*parts) for parts in zip(sources, readers, partitions.values, strict=True))
    stored = _declare(_unify(files), types, kind.typed, partitions.schema)
    schema = _with_partitions(stored, partitions.schema, files)
    table = InputTable(schema, partitions.notes, files, None, None)
    if declared := [name for name in types if name in stored.names]:
        for _ in table.batches(declared):
            pass  # a value that is not of its declared type is better found now than when the answers are delivered
    return replace(table, _where=None if where is None else Where(where, schema), _limit=limit)


def _type(name: str, text: str) -> pa.DataType:
    try:
        return pa.type_for_alias(text)
    except ValueError:
        raise SpecError(
            f"input.column_types.{name}: {text!r} is no type; "
            "some are int32, float64, bool, string, date32, timestamp[us]"
        ) from None


def _declare(stored: pa.Schema, types: Mapping[str, pa.DataType], typed: bool, partitions: pa.Schema) -> pa.Schema:
    """The files' schema with the declared types."""
    for name in types:
        if name in stored.names and typed:
            found = stored.field(name).type
            raise InputError(f"input.column_types: column {name!r} has a type in the files, {found}, which stays")
        check_column(name, [*stored.names, *partitions.names])
    fields = [field.with_type(types.get(field.name, field.type)) for field in stored]
    return pa.schema(fields, stored.metadata)


def check_column(name: str, names: Sequence[str]) -> None:
    """Raises InputError, with the nearest name, when the table has no column `name`."""
    if name not in names:
        raise InputError(f"the input has no column {name!r}{nearest(name, names)}; its columns: {listed(names)}")


def take_rows(batch: pa.RecordBatch, rows: NDArray[np.int64]) -> pa.RecordBatch:
    """The batch's rows at the given positions, for columns of any type."""
    arrays = [_take(column, rows) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema) if arrays else batch


def _take(array: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    try:
        return array.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # views, for one
        return pa.concat_arrays([array.slice(0, 0), *(array.slice(row, 1) for row in rows.tolist())])


# --- one schema -------------------------------------------------------------------------------------------------


def _unify(files: tuple[_InputFile, ...]) -> pa.Schema:
    """One schema for all files: columns by first occurrence, metadata of the first file."""
    for file in files:
        _check_names(file)
    first = files[0].reader.schema
    if all(file.reader.schema.equals(first) for file in files[1:]):
        return first
    fields: dict[str, tuple[pa.Field, _InputFile]] = {}
    for file in files:
        for field in file.reader.schema:
            known = fields.get(field.name)
            fields[field.name] = (field, file) if known is None else (_merge(*known, field, file), known[1])
    everywhere = set.intersection(*(set(file.reader.schema.names) for file in files))
    merged = [field if field.name in everywhere else field.with_nullable(True) for field, _ in fields.values()]
    return pa.schema(merged, first.metadata)


def _check_names(file: _InputFile) -> None:
    names = file.reader.schema.names
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{file.source.shown}: column {twice!r} occurs twice")


def _merge(known: pa.Field, known_file: _InputFile, field: pa.Field, file: _InputFile) -> pa.Field:
    merged = _merged_type(known.type, field.type)
    if merged is None:
        raise InputError(
            f"{file.source.shown}: column {field.name!r} has type {field.type}, "
            f"but {known.type} in {known_file.source.shown}; make them equal or read the files one by one"
        )
    return pa.field(field.name, merged, known.nullable or field.nullable, known.metadata or field.metadata)


def _merged_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both without loss: nulls (nested ones too) take the other's type, narrow takes wide."""
    promote = "permissive" if _same_kind(first, second) else "default"
    pair = [pa.schema([pa.field("", kind)]) for kind in (first, second)]
    try:
        return pa.unify_schemas(pair, promote_options=promote).field(0).type
    except pa.ArrowException:
        return None


def _same_kind(first: pa.DataType, second: pa.DataType) -> bool:
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return bool(first.tz == second.tz)
    kinds = (_is_text, _is_bytes, pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating)
    return any(kind(first) and kind(second) for kind in (*kinds, pa.types.is_decimal, _is_text_dictionary))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text_dictionary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) and _is_text(kind.value_type))


def _with_partitions(schema: pa.Schema, partitions: pa.Schema, files: tuple[_InputFile, ...]) -> pa.Schema:
    for field in partitions:
        if field.name in schema.names:
            raise InputError(
                f"{files[0].source.shown}: column {field.name!r} is in the files and in the folder names; rename one"
            )
        schema = schema.append(field)
    return schema


# --- reading ----------------------------------------------------------------------------------------------------


def _read_file(
    file: _InputFile, names: list[str], low: int, high: int, rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields (position in the file, batch) for its rows low..high; of `names` only those that the file has."""
    stored = [name for name in names if name in file.reader.schema.names]
    end = low
    with file.source.errors("damaged or unreadable"):
        for position, batch in file.reader.batches(stored, low, rows):
            first, end = max(low - position, 0), min(position + batch.num_rows, high)
            if position + first < end:
                yield position + first, batch.slice(first, end - position - first)
            if end == high:
                return
    raise InputError(f"{file.source.shown}: damaged: it holds {end} rows, not {file.num_rows} as it says")


def _conform(file: _InputFile, batch: pa.RecordBatch, schema: pa.Schema, position: int) -> pa.RecordBatch:
    """The batch, which starts at this row of the file, with exactly the columns of `schema`, in its types."""
    arrays = [_column(file, batch, field, position) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else batch.select([])


def _column(file: _InputFile, batch: pa.RecordBatch, field: pa.Field, position: int) -> pa.Array:
    number = batch.schema.get_field_index(field.name)
    if number < 0:
        return pa.repeat(file.partition.get(field.name, pa.scalar(None, field.type)), batch.num_rows)
    column = batch.column(number)
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InputError(
            f"{file.source.shown}: row {position + _first_misfit(column, field.type)}: column {field.name!r} cannot be "
            f"read as {field.type}: {first_line(error)}"
        ) from error


def _first_misfit(column: pa.Array, kind: pa.DataType) -> int:
    """The first row whose value cannot be cast."""
    for row in range(len(column)):
        try:
            column.slice(row, 1).cast(kind)
        except pa.ArrowException:
            return row
    return 0
