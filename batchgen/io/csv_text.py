"""CSV and TSV: a header line, then rows with as many fields; quoted fields may hold newlines.

Fields have no types, so each column takes the first that holds all its fields: bool, int64, double, else string.
Leading zeros, plus signs, blanks and numbers that would be rounded to a neighbour make a column text. An empty field
that is not quoted is null; everything else ("NA", "null") is text.
"""

import io
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from batchgen.errors import InputError
from batchgen.io.sources import SourceFile

_BLOCK_BYTES = 16 << 20  # holds any row
_MAX_COLUMNS = 10_000
_MAX_HEADER = 1 << 20
_TAIL_BYTES = 1 << 10
_EXACT = 2.0**53  # below it float64 holds all whole numbers
_WHOLE = "^(0|-?[1-9][0-9]{0,18})$"
_PATTERNS = {
    pa.bool_(): "^(true|false|True|False|TRUE|FALSE)$",
    pa.int64(): _WHOLE,
    pa.float64(): r"^-?(0|[1-9][0-9]{0,18})(\.[0-9]+)?([eE][-+]?[0-9]+)?$",
}
_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]


@dataclass(slots=True)
class _ColumnTypes:
    """The types that hold all fields of a column seen so far, the narrowest first."""

    is_text: bool
    left: list[pa.DataType] = field(default_factory=lambda: list(_PATTERNS))
    is_empty: bool = True

    def add(self, texts: pa.Array) -> None:
        texts = texts.drop_null()
        if len(texts) and not self.is_text:
            self.is_empty = False
            self.left = [kind for kind in self.left if _holds(kind, texts)]

    @property
    def type(self) -> pa.DataType:
        if self.is_text or not (self.left or self.is_empty):
            return pa.string()
        return pa.null() if self.is_empty else self.left[0]


def _holds(kind: pa.DataType, texts: pa.Array) -> bool:
    if not pc.all(pc.match_substring_regex(texts, _PATTERNS[kind])).as_py():
        return False
    try:
        values = texts.cast(kind)
    except pa.ArrowInvalid:  # beyond 64 bits
        return False
    return not pa.types.is_floating(kind) or _is_exact(texts, values)


def _is_exact(texts: pa.Array, values: pa.Array) -> bool:
    """Whether float64 holds the numbers: it rounds large whole ones."""
    is_whole = pc.match_substring_regex(texts, _WHOLE)
    return bool(pc.all(pc.less(pc.abs(values), pc.if_else(is_whole, _EXACT, math.inf))).as_py())


@dataclass(frozen=True, slots=True, eq=False)
class CsvReader:
    """Rows of one file, its columns in the types of all files."""

    _source: SourceFile
    _delimiter: str
    schema: pa.Schema
    num_rows: int

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        position = 0
        with self._source.open_stream() as stream:
            for batch in _read(stream, self._delimiter, self.schema, columns):
                for offset in range(0, batch.num_rows, rows):
                    part = batch.slice(offset, rows)
                    yield position + offset, part if columns else part.select([])
                position += batch.num_rows


def _read(
    stream: "io.BufferedReader | _Watched", delimiter: str, schema: pa.Schema, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Batches of some 16 MiB with these columns; with none given, with all."""
    convert = pyarrow.csv.ConvertOptions(
        column_types=schema,
        include_columns=columns or None,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        true_values=_TRUE,
        false_values=_FALSE,
    )
    read = pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        yield from pyarrow.csv.open_csv(stream, read, parse, convert)
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        raise ValueError(f"a row is longer than {_BLOCK_BYTES >> 20} MiB, or a quote has no end") from error


class _Watched:
    """A stream of which the last bytes are remembered."""

    closed = False

    def __init__(self, stream: io.BufferedReader):
        self._stream = stream
        self._tail = b""

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if data else self._tail
        return data

    @property
    def ends_with_quote(self) -> bool:
        return self._tail.rstrip(b"\r\n").endswith(b'"')


def open_csv(files: Sequence[SourceFile], as_text: Container[str], delimiter: str = ",") -> Sequence[CsvReader]:
    """Reads all rows for their types; the columns `as_text` stay what they are."""
    types: dict[str, _ColumnTypes] = {}
    found = [_scan(source, delimiter, types, as_text) for source in files]
    return [
        CsvReader(source, delimiter, pa.schema([(name, types[name].type) for name in names]), count)
        for source, (names, count) in zip(files, found, strict=True)
    ]


open_tsv = partial(open_csv, delimiter="\t")


def _scan(
    source: SourceFile, delimiter: str, types: dict[str, _ColumnTypes], as_text: Container[str]
) -> tuple[list[str], int]:
    """The columns' names and the number of rows; adds to the columns' types."""
    with source.errors("not readable as CSV"):
        names, is_all = _header(source, delimiter)
        for name in names:
            types.setdefault(name, _ColumnTypes(name in as_text))
        count = 0 if is_all else _scan_rows(source, delimiter, names, types)
    return names, count


def _scan_rows(source: SourceFile, delimiter: str, names: list[str], types: dict[str, _ColumnTypes]) -> int:
    texts = pa.schema([(name, pa.string()) for name in names])
    count, last = 0, ""
    with source.open_stream() as stream:
        watched = _Watched(stream)
        for batch in _read(watched, delimiter, texts, ()):
            for name, column in zip(names, batch.columns, strict=True):
                types[name].add(column)
            if batch.num_rows:
                count, last = count + batch.num_rows, batch.columns[-1][-1].as_py() or ""
    if "\n" in last and not watched.ends_with_quote:  # pyarrow takes the rest of the file for a field
        raise InputError(f"{source.shown}: row {count + 1}: a quote has no end")
    return count


def _header(source: SourceFile, delimiter: str) -> tuple[list[str], bool]:
    """The columns' names, and whether the file holds nothing else."""
    with source.open_stream() as stream:
        head = line = stream.readline(_MAX_HEADER)
        while line and (not head.strip() or head.count(b'"') % 2) and len(head) < _MAX_HEADER:
            line = stream.readline(_MAX_HEADER)
            head += line
        is_all = not stream.peek(1)
    if len(head) >= _MAX_HEADER or head.count(delimiter.encode()) > _MAX_COLUMNS:
        raise InputError(f"{source.shown}: its header has over {_MAX_COLUMNS:,} columns or {_MAX_HEADER >> 20} MiB")
    options = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with pyarrow.csv.open_csv(pa.BufferReader(head.rstrip(b"\r\n") + b"\n"), parse_options=options) as reader:
        names = reader.schema.names
    return names, is_all and b"\r" not in head.strip()
