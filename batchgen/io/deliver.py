"""Turns a job's committed parts into what is delivered: results in input order beside their input columns."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen.errors import OutputError
from batchgen.io.checkpoint import Checkpoint, result_keys, split_key
from batchgen.io.files import output_errors, remove, sync_directory
from batchgen.io.schemas import RESULTS, SCHEMAS
from batchgen.io.table import InputTable, check_column, take_rows

Columns = Literal["all"] | Sequence[str]

# Compliant nested types would lose the names that the input's list items have.
_WRITE: dict[str, Any] = {"compression": "zstd", "use_compliant_nested_type": False}
_WINDOW_ROWS = 4096  # results joined with their input rows at a time
_TAKE_BYTES = 64 << 20  # of input rows repeated beside their results
_RUN_BYTES = 128 << 20  # results sorted in memory at a time
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20
_GROUP_BATCHES = 1024
_LOG_PART_ROWS = 1 << 22  # rows in a part of timings or steps


@dataclass(frozen=True, eq=False)
class Expected:
    """The results that a job must have: `samples[i]` of them (numbered from 0) for row `row_index[i]`, ascending."""

    row_index: NDArray[np.int64]
    samples: NDArray[np.int32]

    def keys(self) -> NDArray[np.int64]:
        starts = np.cumsum(self.samples) - self.samples
        numbers = np.arange(self.samples.sum()) - np.repeat(starts, self.samples)
        return result_keys(np.repeat(self.row_index, self.samples), numbers)


class ResultForm(Protocol):
    """How committed results, of the schema `parts`, become those that are delivered, of the schema `delivered`.

    `columns`: the input's that this needs. `one_per_row`: there is one result for each input row in the end.
    """

    parts: pa.Schema
    delivered: pa.Schema
    columns: frozenset[str]
    one_per_row: bool

    def finish(self, batch: pa.RecordBatch, samples: NDArray[np.int32], results: pa.Table) -> pa.Table:
        """Of some input rows, `samples` results for each, in order; `batch` holds the `columns` of these rows."""
        ...


class Answers:
    """Generated answers are delivered as they are."""

    parts = delivered = RESULTS
    columns = frozenset[str]()
    one_per_row = False

    def finish(self, batch: pa.RecordBatch, samples: NDArray[np.int32], results: pa.Table) -> pa.Table:
        return results


ANSWERS = Answers()


def check_columns(schema: pa.Schema, columns: Columns, prefix: str, results: pa.Schema = RESULTS) -> pa.Schema:
    """The schema of what is delivered: the input's `columns`, then those of `results` behind `prefix`.

    Call it before a job runs. Raises InputError for a column that the input does not have, OutputError for a clash and
    for a type that Parquet cannot hold.
    """
    names = schema.names if columns == "all" else list(dict.fromkeys(columns))
    for name in names:
        check_column(name, schema.names)
    for name in names:
        _check_type(schema.field(name))
    own = [field.with_name(prefix + field.name) for field in results]
    clash = [field.name for field in own if field.name in names]
    if clash:
        way_out = 'set output.prefix, for instance to "out_", or leave it out of output.columns'
        raise OutputError(f"result column {clash[0]!r} would hide the input column of that name; {way_out}")
    return pa.schema([*(schema.field(name) for name in names), *own], schema.metadata)


def _check_type(field: pa.Field) -> None:
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field]), **_WRITE).close()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise OutputError(
            f"column {field.name!r} of type {field.type} cannot be written to Parquet ({reason}); "
            "leave it out of output.columns"
        ) from error


def deliver(
    checkpoint: Checkpoint,
    table: InputTable,
    *,
    expected: Expected,
    columns: Columns,
    prefix: str,
    part_rows: int,
    timings: bool = True,
    form: ResultForm = ANSWERS,
    run_bytes: int = _RUN_BYTES,
) -> None:
    """Writes results/, steps/ and (unless `timings` is false) timings/ from the committed parts.

    Results come in (row_index, sample_index) order, `part_rows` to a file, input columns with types and metadata as
    they are. Memory is bounded by `run_bytes`, a window of input rows and a part's row group. May be killed and
    called again at any time; `Checkpoint.finish` must follow. Raises OutputError when a result is missing or double,
    when the input is not the one that was answered, or when writing fails.
    """
    schema = check_columns(table.schema, columns, prefix, form.delivered)
    _check_complete(checkpoint, expected)
    remove(checkpoint.work / "deliver")
    with output_errors(checkpoint.directory):
        joined = _join(table, schema, expected, _open_runs(checkpoint, run_bytes, form.parts), form)
        _deliver_directory(checkpoint, "results", joined, schema, part_rows)
        for kind in ("timings", "steps") if timings else ("steps",):
            batches = _part_batches(checkpoint.part_files(kind))
            _deliver_directory(checkpoint, kind, batches, SCHEMAS[kind], _LOG_PART_ROWS)


def _check_complete(checkpoint: Checkpoint, expected: Expected) -> None:
    found, wanted = checkpoint.committed_keys(), expected.keys()
    if np.array_equal(found, wanted):
        return
    missing, extra = np.setdiff1d(wanted, found), np.setdiff1d(found, wanted)
    twice = found[1:][found[1:] == found[:-1]]
    for keys, what in ((missing, "is missing"), (twice, "is there more than once"), (extra, "was not asked for")):
        if len(keys):
            row, sample = split_key(keys[0])
            raise OutputError(f"internal error: the result of row {row}, sample {sample} {what}; please report this")


def _deliver_directory(
    checkpoint: Checkpoint, kind: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema, part_rows: int
) -> None:
    """Fills a directory out of sight and puts it in its place by a rename."""
    hidden, target = checkpoint.work / "deliver" / kind, checkpoint.directory / kind
    hidden.mkdir(parents=True)
    with _PartFiles(hidden, schema, part_rows) as parts:
        for batch in batches:
            parts.write(batch)
    sync_directory(hidden)
    remove(target)
    os.rename(hidden, target)
    sync_directory(checkpoint.directory)


# --- results in order -------------------------------------------------------------------------------------------


class _Run:
    """Results in (row, sample) order, read forward."""

    def __init__(self, batches: Iterator[pa.RecordBatch]):
        self._batches = batches
        self._next: pa.RecordBatch | None = next(batches, None)

    def take_below(self, row: int) -> Iterator[pa.RecordBatch]:
        """The results not yet taken whose row_index is below `row`."""
        while self._next is not None:
            batch = self._next
            cut = int(np.searchsorted(batch.column("row_index").to_numpy(), row))
            if cut:
                yield batch.slice(0, cut)
            if cut < batch.num_rows:
                self._next = batch.slice(cut)
                return
            self._next = next(self._batches, None)


def _open_runs(checkpoint: Checkpoint, run_bytes: int, schema: pa.Schema) -> list[_Run]:
    """All results as a few sorted runs: kept in memory when one holds them all, else in files."""
    directory = checkpoint.work / "runs"
    remove(directory)
    chunks = _chunks(checkpoint.part_files("results"), run_bytes)
    first = next(chunks, schema.empty_table())
    second = next(chunks, None)
    if second is None:
        return [_Run(iter(_sorted(first).to_batches(_WINDOW_ROWS)))]
    directory.mkdir()
    paths = [_store_run(directory / "0.arrow", first), _store_run(directory / "1.arrow", second)]
    paths += [_store_run(directory / f"{number}.arrow", chunk) for number, chunk in enumerate(chunks, 2)]
    return [_Run(_stored_run(path)) for path in paths]


def _chunks(paths: list[Path], size: int) -> Iterator[pa.Table]:
    """The parts' rows in tables of about `size` bytes."""
    tables: list[pa.Table] = []
    held = 0
    for path in paths:
        tables.append(_read_part(path))
        held += tables[-1].nbytes
        if held >= size:
            yield pa.concat_tables(tables)
            tables, held = [], 0
    if tables:
        yield pa.concat_tables(tables)


def _read_part(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read()


def _sorted(results: pa.Table) -> pa.Table:
    keys = result_keys(results["row_index"].to_numpy(), results["sample_index"].to_numpy())
    return results.take(np.argsort(keys, kind="stable")).combine_chunks()


def _store_run(path: Path, results: pa.Table) -> Path:
    """Sorts the results into a file, which a crash need not outlive."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, results.schema) as writer:
        writer.write_table(_sorted(results), max_chunksize=_WINDOW_ROWS)
    return path


def _stored_run(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _join(
    table: InputTable, schema: pa.Schema, expected: Expected, runs: list[_Run], form: ResultForm
) -> Iterator[pa.RecordBatch]:
    """The delivered rows, window by window of the input."""
    names = schema.names[: -len(form.delivered)]
    read = list(dict.fromkeys([*names, *sorted(form.columns)]))
    most = int(expected.samples.max(initial=1))
    position = 0
    for row_index, batch in table.batches(read, batch_rows=max(1, _WINDOW_ROWS // most)):
        end = position + len(row_index)
        if not np.array_equal(row_index, expected.row_index[position:end]):
            raise OutputError("the input has changed since the job started; run it again with --fresh")
        results = _sorted(pa.Table.from_batches(_window(runs, int(row_index[-1]) + 1), form.parts))
        samples = expected.samples[position:end]
        rows = np.repeat(np.arange(len(row_index)), 1 if form.one_per_row else samples)
        results = form.finish(batch.select(sorted(form.columns)), samples, results)
        beside, done = batch.select(names), 0
        for part in _parts(beside, rows):
            yield _beside(schema, beside, part, results.slice(done, len(part)))
            done += len(part)
        position = end
    if position != len(expected.row_index):
        raise OutputError("the input has changed since the job started; run it again with --fresh")


def _window(runs: list[_Run], row: int) -> list[pa.RecordBatch]:
    return [batch for run in runs for batch in run.take_below(row)]


def _parts(batch: pa.RecordBatch, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows to take in portions of some `_TAKE_BYTES`: a string array holds 2 GB at most."""
    if len(rows) == batch.num_rows or batch.nbytes * np.bincount(rows).max(initial=0) <= _TAKE_BYTES:
        return [rows]
    sizes = np.array([batch.slice(row, 1).nbytes for row in range(batch.num_rows)])[rows]
    return np.split(rows, np.flatnonzero(np.diff(np.cumsum(sizes) // _TAKE_BYTES)) + 1)


def _beside(schema: pa.Schema, batch: pa.RecordBatch, rows: NDArray[np.int64], results: pa.Table) -> pa.RecordBatch:
    """Each result behind its input row."""
    if batch.num_columns and not np.array_equal(rows, np.arange(batch.num_rows)):
        batch = take_rows(batch, rows)
    arrays = [*batch.columns, *(column.combine_chunks() for column in results.columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _part_batches(paths: list[Path]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from _read_part(path).to_batches()


# --- files ------------------------------------------------------------------------------------------------------


class _PartFiles:
    """Writes batches as part-00000.parquet, part-00001.parquet, ... of exactly `part_rows` rows but the last.

    There is always at least one file, so that an empty table keeps its schema.
    """

    def __init__(self, directory: Path, schema: pa.Schema, part_rows: int):
        self._directory = directory
        self._schema = schema
        self._part_rows = part_rows
        self._count = 0
        self._rows = 0  # in the open part, waiting ones included
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> "_PartFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (self._rows or not self._count):
            self._end_part()
        if self._writer is not None and self._file is not None:
            with suppress(Exception):  # the error that brought us here is the one to tell
                self._writer.close()
            with suppress(OSError):
                self._file.close()

    def write(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            head = batch.slice(0, self._part_rows - self._rows)
            batch = batch.slice(head.num_rows)
            self._waiting.append(head)
            self._waiting_bytes += head.nbytes
            self._rows += head.num_rows
            if self._rows == self._part_rows:
                self._end_part()
            elif len(self._waiting) >= _GROUP_BATCHES or self._waiting_bytes >= _GROUP_BYTES:
                self._write_group()

    def _write_group(self) -> None:
        if self._writer is None:
            self._file = open(self._directory / f"part-{self._count:05d}.parquet", "wb")  # noqa: SIM115 - see _end_part
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                **_WRITE,
            )
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema), row_group_size=_GROUP_ROWS)
        self._waiting, self._waiting_bytes = [], 0

    def _end_part(self) -> None:
        self._write_group()
        assert self._writer is not None and self._file is not None
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = self._writer = None
        self._rows, self._count = 0, self._count + 1
