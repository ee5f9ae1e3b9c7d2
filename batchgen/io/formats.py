"""The formats of input files, by the ends of their names, and the readers of each.

A reader knows a file's schema and number of rows from the start, and gives its rows in order, a few at a time. Parquet
tells both in its footer; the other formats are read through once for them, which also finds what is damaged.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import PurePosixPath
from typing import Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from batchgen.errors import InputError
from batchgen.io.csv_text import open_csv, open_tsv
from batchgen.io.json_lines import open_json_lines
from batchgen.io.openai_batch import open_openai_batch
from batchgen.io.sources import SourceFile
from batchgen.io.where import inner_types

_BATCH_BYTES = 64 << 20
_PEEK = 16  # rows, to see how wide they are
_PACKED = (".gz", ".zst", ".bz2", ".lz4")

Position = tuple[int, pa.RecordBatch]


class FileReader(Protocol):
    """The rows of one file."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def num_rows(self) -> int: ...

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[Position]:
        """Yields (position of the first row, batch) with the file's `columns`, in order, from a batch on that holds row
        `start` or comes before it; about `rows` rows each. Raises what its library raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """Files of one kind. `open` reads their schemas; told so, CSV leaves columns as text."""

    open: Callable[[Sequence[SourceFile], Container[str]], Sequence[FileReader]]
    suffixes: tuple[str, ...]
    in_folders: tuple[str, ...]  # suffixes that make a file of a folder data
    packed: bool  # may be compressed as a whole
    typed: bool  # the files say their columns' types


def choose_format(name: str, files: Sequence[SourceFile]) -> Format:
    """The format called `name`, or for "auto" the one that the files' names have in common. Raises InputError."""
    if name != "auto":
        return FORMATS[name]
    first = _format_of(files[0])
    for file in files[1:]:
        if (other := _format_of(file)) is not first:
            raise InputError(
                f"{file.shown} is {_name(other)}, but {files[0].shown} is {_name(first)}; name files of one format "
                "with a glob, or set input.format"
            )
    return first


def is_data(name: str) -> Callable[[str], bool]:
    """Whether a file of a folder counts, by its name, for the format called `name`."""
    if name == "auto":
        return lambda file: any(_ends_as(file, kind, kind.in_folders) for kind in FORMATS.values())
    return lambda file: _ends_as(file, FORMATS[name], FORMATS[name].suffixes)


def describe(name: str) -> str:
    """The files that count in a folder, in words."""
    if name == "auto":
        suffixes = dict.fromkeys(suffix for kind in FORMATS.values() for suffix in kind.in_folders)
        return f"file of a format that is read ({', '.join('*' + suffix for suffix in suffixes)})"
    return f"{' or '.join('*' + suffix for suffix in FORMATS[name].suffixes)} file"


def _ends_as(file: str, kind: Format, suffixes: tuple[str, ...]) -> bool:
    file = file.lower()
    return file.endswith(suffixes) or (kind.packed and PurePosixPath(file).stem.endswith(suffixes) and _is_packed(file))


def _is_packed(file: str) -> bool:
    return file.endswith(_PACKED)


def _format_of(file: SourceFile) -> Format:
    name = PurePosixPath(file.path).name
    for kind in FORMATS.values():
        if _ends_as(name, kind, kind.suffixes):
            return kind
    known = ", ".join(suffix for kind in FORMATS.values() for suffix in kind.suffixes)
    raise InputError(f"{file.shown}: its name does not tell its format ({known}); set input.format")


def _name(kind: Format) -> str:
    return next(name for name, other in FORMATS.items() if other is kind)


def _checked(schema: pa.Schema) -> pa.Schema:
    """The schema, if all its names can be read: pyarrow has not looked whether they are UTF-8. Raises ValueError."""
    kinds = [pa.struct(list(schema))]
    while kinds:
        kind = kinds.pop()
        if pa.types.is_struct(kind) or pa.types.is_union(kind):
            _ = [field.name for field in kind]
        kinds += inner_types(kind)
    return schema


# --- Parquet ----------------------------------------------------------------------------------------------------


class _ParquetReader:
    def __init__(self, source: SourceFile):
        self._source = source
        with source.errors("not a readable Parquet file"):
            if source.size == 0:
                raise InputError(f"{source.shown}: not a Parquet file: it is empty (0 bytes)")
            with self._open() as file:
                meta, self.schema = file.metadata, _checked(file.schema_arrow)
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        self._group_ends = list(accumulate((group.num_rows for group in groups), initial=0))
        # Without what a dictionary in the file saves.
        self._row_bytes = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        if any(group.num_rows < 0 for group in groups):
            raise InputError(f"{source.shown}: not a readable Parquet file: a negative number of rows")

    @property
    def num_rows(self) -> int:
        return self._group_ends[-1]

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[Position]:
        first = next(number for number, end in enumerate(self._group_ends[1:]) if end > start)
        position = self._group_ends[first]
        groups = list(range(first, len(self._group_ends) - 1))
        with self._open() as file:
            read = partial(file.iter_batches, row_groups=groups, columns=list(columns))
            wide = max([self._row_bytes, *(batch.nbytes // max(batch.num_rows, 1) for batch in islice(read(_PEEK), 1))])
            for batch in read(max(1, min(rows, _BATCH_BYTES // max(wide, 1)))):
                yield position, batch
                position += batch.num_rows

    def _open(self) -> pq.ParquetFile:
        # Nothing is buffered ahead: a row group may be huge.
        return pq.ParquetFile(self._source.open(), pre_buffer=False, page_checksum_verification=True)


def _open_parquet(files: Sequence[SourceFile], as_text: Container[str]) -> Sequence[FileReader]:
    return [_ParquetReader(file) for file in files]


# --- Arrow IPC --------------------------------------------------------------------------------------------------


class _ArrowReader:
    """An Arrow IPC file or stream (Feather V2 is the file). Every batch is validated: its offsets are trusted later."""

    def __init__(self, source: SourceFile):
        self._source = source
        with source.errors("not a readable Arrow IPC file"):
            with source.open() as file:
                mark = file.read(6)
            if mark.startswith(b"FEA1"):
                raise InputError(f"{source.shown}: not a readable Arrow IPC file: it is Feather V1; write it as V2")
            self._is_file = mark == b"ARROW1"
            self.schema, self.num_rows = self._scan()

    def _scan(self) -> tuple[pa.Schema, int]:
        with self._source.open() as file:
            schema = _checked(self._reader(file, None).schema)
        return schema, sum(batch.num_rows for _, batch in self._read([]))

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[Position]:
        for position, batch in self._read([self.schema.get_field_index(name) for name in columns]):
            for offset in range(0, batch.num_rows, rows):
                yield position + offset, batch.slice(offset, rows).select(list(columns))

    def _read(self, fields: list[int]) -> Iterator[Position]:
        """Whole batches with the fields of these numbers; with none given all of them are read, and checked."""
        position = 0
        with self._source.open() as file:
            for batch in self._stored(self._reader(file, fields)):
                batch.validate(full=True)
                yield position, batch
                position += batch.num_rows

    def _reader(self, file: pa.NativeFile, fields: list[int] | None) -> pa.RecordBatchReader:
        options = pyarrow.ipc.IpcReadOptions(included_fields=fields or [])
        return (pyarrow.ipc.open_file if self._is_file else pyarrow.ipc.open_stream)(file, options=options)

    def _stored(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        if not self._is_file:
            yield from reader
            return
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _open_arrow(files: Sequence[SourceFile], as_text: Container[str]) -> Sequence[FileReader]:
    return [_ArrowReader(file) for file in files]


_PARQUET, _ARROW, _JSON = (".parquet", ".pq"), (".arrow", ".feather", ".ipc"), (".jsonl", ".ndjson")

FORMATS: Mapping[str, Format] = {
    "parquet": Format(_open_parquet, _PARQUET, _PARQUET, packed=False, typed=True),
    # A folder of other data often holds a .json that describes it.
    "jsonl": Format(open_json_lines, (*_JSON, ".json"), _JSON, packed=True, typed=False),
    "csv": Format(open_csv, (".csv",), (".csv",), packed=True, typed=False),
    "tsv": Format(open_tsv, (".tsv",), (".tsv",), packed=True, typed=False),
    "arrow": Format(_open_arrow, _ARROW, _ARROW, packed=False, typed=True),
    "openai_batch": Format(open_openai_batch, (*_JSON, ".json"), (), packed=True, typed=True),
}
