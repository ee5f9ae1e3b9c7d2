"""Answers that a job takes over from what its output directory holds, where they answer the same request."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen.errors import OutputError
from batchgen.io.checkpoint import Checkpoint, result_keys, split_keys
from batchgen.io.files import output_errors
from batchgen.io.schemas import SCHEMAS
from batchgen.io.writer import part_end, results_totals, steps_totals

BATCH_ROWS = 1 << 16
"""Results read, moved and committed at a time."""

ASKED = {"row_index": pl.Int64, "sample_index": pl.Int32, "request_hash": pl.String, "truncated_tokens": pl.Int32}
"""The columns of what a job asks for: a row for each result it wants that is no failure from the start."""


def take_over(checkpoint: Checkpoint, asked: pl.DataFrame) -> tuple[int, int]:
    """Makes the job that is open in state "kept" go on from the answers that it `asked` (columns `ASKED`) for.

    Errors are not taken over. An answer stays in its place where it still belongs there; one that several results ask
    for goes to each of them. Steps and the tokens' timings come along. Returns how many were taken, of how many there.
    Raises OutputError when there is nothing to take from another job, or what is there cannot be read or written.
    """
    with output_errors(checkpoint.directory):
        there = _answers(checkpoint)
        places = _places(there, asked)
        if not len(places.new) and not checkpoint.kept_same:
            raise OutputError(
                f"output {checkpoint.directory} holds no answer that this job could take over; "
                "choose another directory, or replace it with --fresh"
            )
        _commit(checkpoint, places)
        checkpoint.take_over()
        return len(places.new), there.height


class _Places:
    """Where answers go: of the place `old[i]` to `new[i]` (keys as of `result_keys`), ascending by `old`."""

    def __init__(self, old: NDArray[np.int64], new: NDArray[np.int64], truncated: NDArray[np.int32]):
        order = np.lexsort((new, old))
        self._old, self.new, self._truncated = old[order], new[order], truncated[order]

    def move(self, table: pa.Table) -> pa.Table:
        """The table's rows (results, or tokens of them) at their new places; those that have none are left out."""
        keys = result_keys(table["row_index"].to_numpy(), table["sample_index"].to_numpy())
        begins, ends = np.searchsorted(self._old, keys, "left"), np.searchsorted(self._old, keys, "right")
        counts = ends - begins
        first = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(begins - first, counts)
        table = table.take(pa.array(np.repeat(np.arange(len(keys)), counts)))
        rows, samples = split_keys(self.new[at])
        values = {"row_index": rows, "sample_index": samples, "truncated_tokens": self._truncated[at]}
        for number, field in enumerate(table.schema):
            if field.name in values:
                table = table.set_column(number, field, pa.array(values[field.name], field.type))
        return table


def _places(there: pl.DataFrame, asked: pl.DataFrame) -> _Places:
    place, here = ["row_index", "sample_index"], ["row", "sample"]
    there = there.rename(dict(zip(place, here, strict=True)))
    stay = asked.join(there, left_on=[*place, "request_hash"], right_on=[*here, "request_hash"], coalesce=False)
    others = asked.join(stay, on=place, how="anti")
    moved = others.join(there.unique("request_hash", keep="first", maintain_order=True), on="request_hash")
    both = pl.concat([frame.select(*here, *place, "truncated_tokens") for frame in (stay, moved)])
    old, new = (result_keys(both[row].to_numpy(), both[sample].to_numpy()) for row, sample in (here, place))
    return _Places(old, new, both["truncated_tokens"].to_numpy())


def _answers(checkpoint: Checkpoint) -> pl.DataFrame:
    """row_index, sample_index and request_hash of all answers that are there."""
    names = ["row_index", "sample_index", "request_hash", "finish_reason"]
    tables = [pl.DataFrame(batch) for batch in _batches(checkpoint, "results", names)]
    frame = pl.concat([pl.DataFrame(schema={**ASKED, "finish_reason": pl.String}).select(names), *tables])
    good = pl.col("finish_reason").is_in(["error", "abort"]).not_() & pl.col("request_hash").is_not_null()
    return frame.filter(good).drop("finish_reason")


def _commit(checkpoint: Checkpoint, places: _Places) -> None:
    """Results with what they count, then timings, then steps."""
    for table in _batches(checkpoint, "results"):
        results = places.move(table)
        checkpoint.commit({"results": results}, totals=results_totals(results))
    none = SCHEMAS["steps"].empty_table()
    for table in _batches(checkpoint, "timings"):
        _, end_ns = part_end(table, none)
        checkpoint.commit({"timings": places.move(table)}, end_ns=end_ns)
    none = SCHEMAS["timings"].empty_table()
    for table in _batches(checkpoint, "steps"):
        end_step, end_ns = part_end(none, table)
        checkpoint.commit({"steps": table}, end_step=end_step, end_ns=end_ns, totals=steps_totals(table))
    checkpoint.commit({}, totals={"reused_results": len(places.new)})


def _batches(checkpoint: Checkpoint, kind: str, names: list[str] | None = None) -> Iterator[pa.Table]:
    """What is there, under the names of `SCHEMAS`."""
    schema = SCHEMAS[kind] if names is None else pa.schema([SCHEMAS[kind].field(name) for name in names])
    prefix = checkpoint.kept_prefix if kind == "results" else ""
    columns = [prefix + name for name in schema.names]
    for path in checkpoint.kept_files(kind):
        with _reading(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield pa.Table.from_batches([batch]).select(columns).rename_columns(schema.names).cast(schema)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, KeyError) as error:
        raise OutputError(
            f"{path} cannot be read: {str(error).splitlines()[0]}; --fresh starts the job anew"
        ) from error
