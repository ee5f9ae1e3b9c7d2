"""The input table: Parquet files read as one table, in a fixed row order, a few thousand rows at a time.

The files are those of a path, a glob or a directory (all `*.parquet` below it; names that start with `.` or `_` are
skipped, as pyarrow and Spark do), in the order of their paths' parts. A row's index is its position in all of them,
before any filter. Folders named `key=value` below the directory, or below the fixed part of the glob, become columns;
their types are those that pyarrow's dataset discovery infers: int32 when every value reads as one, string otherwise.
"""

import difflib
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen.errors import InputError, SpecError
from batchgen.io.model_source import file_sha256

_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 4096
_KEEP = "__batchgen_keep__"
_READ_ERRORS = (pa.ArrowException, OSError, ValueError)

Batch = tuple[NDArray[np.int64], pa.RecordBatch]


@dataclass(frozen=True, slots=True, eq=False)
class _InputFile:
    """One Parquet file as its footer described it when the table was opened. `name` is relative to the table's base."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    group_rows: tuple[int, ...]
    schema: pa.Schema
    partition: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)


@dataclass(frozen=True, eq=False)
class InputTable:
    """Parquet files as one table; see `open_table`. Nothing is kept in memory but the footers' figures."""

    schema: pa.Schema
    _files: tuple[_InputFile, ...]
    _where: "_Where | None"
    _limit: int | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(file.path for file in self._files)

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

        Reads the files; their hashes are remembered in the cache while size and modification time stay.
        """
        files = [(file.name, file_sha256(file.path)) for file in self._files]
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
                    yield np.arange(position, position + batch.num_rows) + base, _conform(file, batch, schema)
            base += file.num_rows


def open_table(path: str | Path, *, where: str | None = None, limit: int | None = None) -> InputTable:
    """Opens the Parquet file, glob or directory `path`, of which only the footers are read.

    Schemas of several files are unified: a column may be missing, all null, or narrower in some of them (int32 beside
    int64); other differences are errors. `where` is a polars SQL condition on one row (null counts as false), `limit`
    the number of rows kept after it. Raises InputError for what is not a readable table, SpecError for a wrong `where`.
    """
    base, paths = _find_files(os.path.expanduser(path))
    partition_schema, partitions = _partitions(base, paths)
    files = tuple(_open_file(file, base, keys) for file, keys in zip(paths, partitions, strict=True))
    schema = _with_partitions(_unify(files), partition_schema, files)
    return InputTable(schema, files, None if where is None else _Where(where, schema), limit)


def check_column(name: str, names: Sequence[str]) -> None:
    """Raises InputError, with the nearest name, when the table has no column `name`."""
    if name not in names:
        raise InputError(f"the input has no column {name!r}{_nearest(name, names)}; its columns: {', '.join(names)}")


def take_rows(batch: pa.RecordBatch, rows: NDArray[np.int64]) -> pa.RecordBatch:
    """The batch's rows at the given positions, for columns of any type."""
    arrays = [_take(column, rows) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema) if arrays else batch


def _take(array: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    try:
        return array.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # views, for one
        return pa.concat_arrays([array.slice(0, 0), *(array.slice(row, 1) for row in rows.tolist())])


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# --- finding the files ------------------------------------------------------------------------------------------


def _find_files(path: str) -> tuple[Path, list[Path]]:
    """The base that names are relative to, and the files in order."""
    if os.path.isfile(path):
        return Path(path).parent, [Path(path)]
    if os.path.isdir(path):
        return Path(path), _nonempty(_below(Path(path)), f"input {path!r} has no *.parquet file below it")
    if not glob.has_magic(path):
        raise InputError(f"input {path!r} does not exist")
    matches = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    return _glob_base(path), _nonempty(matches, f"input {path!r} matches no file")


def _nonempty(paths: list[Path], message: str) -> list[Path]:
    if not paths:
        raise InputError(message)
    return sorted(paths, key=lambda path: path.parts)


def _below(directory: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        visible = [name for name in names if not name.startswith((".", "_"))]
        found += [Path(folder, name) for name in visible if name.lower().endswith(_SUFFIXES)]
    return found


def _glob_base(pattern: str) -> Path:
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:fixed])


def _partitions(base: Path, paths: list[Path]) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """The columns that `key=value` folders below `base` make, and each file's values."""
    if not any("=" in part for path in paths for part in path.relative_to(base).parent.parts):
        return pa.schema([]), [{}] * len(paths)
    options = ds.FileSystemFactoryOptions(
        partition_base_dir=base.absolute().as_posix(), partitioning=ds.HivePartitioning.discover()
    )
    names = [path.absolute().as_posix() for path in paths]
    try:
        factory = ds.FileSystemDatasetFactory(pyarrow.fs.LocalFileSystem(), names, ds.ParquetFileFormat(), options)
        schema = factory.inspect(fragments=0)
        fragments = {fragment.path: fragment for fragment in factory.finish(schema).get_fragments()}
    except _READ_ERRORS as error:
        raise InputError(f"input {str(base)!r}: its key=value folders cannot be read: {_first_line(error)}") from error
    return schema, [ds.get_partition_keys(fragments[name].partition_expression) for name in names]


# --- opening and unifying ---------------------------------------------------------------------------------------


def _open_file(path: Path, base: Path, partition: dict[str, Any]) -> _InputFile:
    try:
        found = path.stat()
        if found.st_size == 0:
            raise InputError(f"{path}: not a Parquet file: it is empty (0 bytes)")
        with pq.ParquetFile(path) as file:
            meta, schema = file.metadata, file.schema_arrow
    except _READ_ERRORS as error:
        raise InputError(f"{path}: not a readable Parquet file: {_first_line(error)}") from error
    group_rows = tuple(meta.row_group(number).num_rows for number in range(meta.num_row_groups))
    _check_names(path, schema)
    name = path.relative_to(base).as_posix()
    return _InputFile(path, name, found.st_size, found.st_mtime_ns, group_rows, schema, partition)


def _check_names(path: Path, schema: pa.Schema) -> None:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]!r} occurs twice")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unify(files: tuple[_InputFile, ...]) -> pa.Schema:
    """One schema for all files: columns by first occurrence, metadata of the first file."""
    first = files[0].schema
    if all(file.schema.equals(first) for file in files[1:]):
        return first
    fields: dict[str, tuple[pa.Field, _InputFile]] = {}
    for file in files:
        for field in file.schema:
            known = fields.get(field.name)
            fields[field.name] = (field, file) if known is None else (_merge(*known, field, file), known[1])
    everywhere = set.intersection(*(set(file.schema.names) for file in files))
    merged = [field if field.name in everywhere else field.with_nullable(True) for field, _ in fields.values()]
    return pa.schema(merged, first.metadata)


def _merge(known: pa.Field, known_file: _InputFile, field: pa.Field, file: _InputFile) -> pa.Field:
    merged = _merged_type(known.type, field.type)
    if merged is None:
        raise InputError(
            f"{file.path}: column {field.name!r} has type {field.type}, but {known.type} in {known_file.path}; "
            "make them equal or read the files one by one"
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
                f"{files[0].path}: column {field.name!r} is in the files and in the folder names; rename one"
            )
        schema = schema.append(field)
    return schema


# --- reading ----------------------------------------------------------------------------------------------------


def _read_file(
    file: _InputFile, names: list[str], low: int, high: int, rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields (position in the file, batch) for its rows low..high; of `names` only those that the file has."""
    ends = list(accumulate(file.group_rows))
    groups = [number for number, end in enumerate(ends) if end > low and end - file.group_rows[number] < high]
    position = ends[groups[0]] - file.group_rows[groups[0]]
    stored = [name for name in names if name in file.schema.names]
    for batch in _stored_batches(file, stored, groups, rows):
        first, last = max(low - position, 0), min(high - position, batch.num_rows)
        if first < last:
            yield position + first, batch.slice(first, last - first)
        position += batch.num_rows


def _stored_batches(file: _InputFile, names: list[str], groups: list[int], rows: int) -> Iterator[pa.RecordBatch]:
    try:
        found = file.path.stat()
        if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
            raise InputError(f"{file.path}: has changed since the job started; run the job again")
        # Neither mapped (a file cut short would kill the process) nor buffered ahead (a row group may be huge).
        with pq.ParquetFile(file.path, memory_map=False, pre_buffer=False, page_checksum_verification=True) as parquet:
            yield from parquet.iter_batches(rows, row_groups=groups, columns=names)
    except _READ_ERRORS as error:
        raise InputError(f"{file.path}: damaged or unreadable: {_first_line(error)}") from error


def _conform(file: _InputFile, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the columns of `schema`, in its types."""
    arrays = [_column(file, batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else batch.select([])


def _column(file: _InputFile, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    number = batch.schema.get_field_index(field.name)
    if number < 0:
        return pa.repeat(pa.scalar(file.partition.get(field.name), field.type), batch.num_rows)
    column = batch.column(number)
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InputError(
            f"{file.path}: column {field.name!r} cannot be read as {field.type}: {_first_line(error)}"
        ) from error


# --- where ------------------------------------------------------------------------------------------------------


class _Where:
    """A condition on one row, written in polars' SQL. `columns` are those it needs."""

    def __init__(self, text: str, schema: pa.Schema):
        self._text = text
        self._expression = self._parse()
        self.columns = list(dict.fromkeys(self._expression.meta.root_names()))
        self._check(schema)

    def mask(self, index: NDArray[np.int64], batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows of the batch satisfy the condition; null does not."""
        try:
            keep = self._evaluate(pa.Table.from_batches([batch.select(self.columns)]), len(index))
        except pl.exceptions.PolarsError as error:
            raise self._error(f"fails on rows {index[0]} to {index[-1]}: {_first_line(error)}") from error
        return keep.fill_null(False).to_numpy().astype(bool)

    def _evaluate(self, table: pa.Table, rows: int) -> pl.Series:
        frame = (
            pl.DataFrame(pl.from_arrow(table)) if self.columns else pl.DataFrame({"": pl.repeat(0, rows, eager=True)})
        )
        return frame.with_columns(self._expression.alias(_KEEP))[_KEEP]

    def _error(self, what: str) -> SpecError:
        return SpecError(f"input.where {self._text!r} {what}")

    def _parse(self) -> pl.Expr:
        try:
            expression = pl.sql_expr(self._text)
        except pl.exceptions.PolarsError as error:
            raise self._error(f"is not a condition in polars SQL: {_first_line(error)}") from error
        tree = json.loads(expression.meta.serialize(format="json"))
        if "Alias" in tree or _looks_at_other_rows(tree):
            raise self._error("must be one condition on a single row (no aggregate, window, subquery or alias)")
        return expression

    def _check(self, schema: pa.Schema) -> None:
        for name in self.columns:
            if name not in schema.names:
                raise self._error(
                    f"needs column {name!r}{_nearest(name, schema.names)}; columns: {', '.join(schema.names)}"
                )
            if pa.types.is_decimal256(schema.field(name).type):  # polars panics on it
                raise self._error(f"cannot use column {name!r} of type {schema.field(name).type}")
        empty = schema.empty_table().select(self.columns)
        try:
            kind = self._evaluate(empty, 0).dtype
        except pl.exceptions.PolarsError as error:
            raise self._error(
                f"does not fit the columns: {_first_line(error)}; {_columns_with_types(schema)}"
            ) from error
        if kind not in (pl.Boolean, pl.Null):
            raise self._error(f"gives {kind}, not true or false")


def _columns_with_types(schema: pa.Schema) -> str:
    return "columns: " + ", ".join(f"{field.name} {field.type}" for field in schema)


def _looks_at_other_rows(node: Any) -> bool:
    """Whether polars' serialised expression holds a node whose value at a row depends on other rows."""
    if isinstance(node, list):
        return any(map(_looks_at_other_rows, node))
    if not isinstance(node, dict):
        return bool(node == "Len")
    if node.keys() & {"Agg", "Over", "Window", "Rolling", "SubPlan"}:
        return True
    return any(
        _looks_at_other_rows(value) for key, value in node.items() if key not in ("Column", "Literal", "function")
    )
