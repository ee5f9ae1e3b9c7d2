import decimal
import os
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchgen.errors import InputError, OutputError
from batchgen.io.deliver import check_columns, deliver
from batchgen.io.schemas import RESULTS, SCHEMAS
from batchgen.io.table import open_table
from tests.io.delivery import expected, run

DATA = Path(__file__).parents[1] / "data" / "io"


def rich_table():
    """A column of every kind that might lose its type, with the metadata that pandas and datasets leave."""
    values = {
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.int8()), ["a", "b"]),
        "ordered": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.int16()), ["lo", "hi"], ordered=True),
        "large": pa.array(["x", None, ""], pa.large_string()),
        "view": pa.array(["x", None, ""], pa.string_view()),
        "decimal": pa.array([decimal.Decimal("1.2300"), None, decimal.Decimal("-4.5000")], pa.decimal128(18, 4)),
        "wide": pa.array([decimal.Decimal(10) ** 45, None, decimal.Decimal(1)], pa.decimal256(50, 2)),
        "zoned": pa.array([1, None, 3], pa.timestamp("us", "Europe/Berlin")),
        "nanos": pa.array([1000, None, 3000], pa.timestamp("ns")),
        "duration": pa.array([1, None, 3], pa.duration("s")),
        "date": pa.array([1, None, 3], pa.date32()),
        "time": pa.array([1, None, 3], pa.time32("ms")),
        "half": pa.array(np.array([1, 2, 3], np.float16)),
        "small": pa.array([1, None, 255], pa.uint8()),
        "nested": pa.array([[{"k": [1]}], [], None], pa.large_list(pa.struct([("k", pa.list_(pa.int16()))]))),
        "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
        "nothing": pa.nulls(3),
        "binary": pa.array([b"\xff\x00", None, b""]),
    }
    fields = [pa.field(name, value.type, metadata={"note": name}) for name, value in values.items()]
    fields.append(pa.field("required", pa.int64(), nullable=False))
    metadata = {"pandas": '{"index_columns": [], "columns": []}', "huggingface": '{"info": {"features": {}}}'}
    return pa.table([*values.values(), pa.array([1, 2, 3])], schema=pa.schema(fields, metadata))


def test_input_columns_come_through_unchanged(tmp_path):
    pq.write_table(rich_table(), tmp_path / "in.parquet", use_compliant_nested_type=False)
    given = pq.read_table(tmp_path / "in.parquet")
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected(range(3))).close()
    found = pq.read_table(tmp_path / "out" / "results" / "part-00000.parquet")
    for number, field in enumerate(given.schema):
        assert found.schema.field(number).equals(field, check_metadata=True), field
    assert found.schema.metadata[b"pandas"] == given.schema.metadata[b"pandas"]
    assert found.schema.metadata[b"huggingface"] == given.schema.metadata[b"huggingface"]
    assert repr(found.select(given.column_names).to_pylist()) == repr(given.to_pylist())
    assert found.schema.names[-len(RESULTS) :] == RESULTS.names
    assert [found.schema.field(name).type for name in RESULTS.names] == RESULTS.types


def test_samples_repeat_every_kind_of_column(tmp_path):
    pq.write_table(rich_table(), tmp_path / "in.parquet")
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected(range(3), 2)).close()
    given, found = rich_table(), pq.read_table(tmp_path / "out" / "results" / "part-00000.parquet")
    twice = [row for row in given.to_pylist() for _ in range(2)]
    assert repr(found.select(given.column_names).to_pylist()) == repr(twice)


@pytest.mark.parametrize("name", ["edge_cases.parquet", "edge_hive"])
def test_edge_tables(tmp_path, name):
    table = open_table(DATA / name)
    run(tmp_path / "out", table, expected(range(table.num_rows_upper))).close()
    given = pa.Table.from_batches([batch for _, batch in table.batches()])
    found = ds.dataset(tmp_path / "out" / "results").to_table()
    assert found.schema.equals(check_columns(table.schema, "all", ""), check_metadata=True)
    assert repr(found.select(given.column_names).to_pylist()) == repr(given.to_pylist())
    assert found["row_index"].to_pylist() == list(range(given.num_rows))
    assert pl.read_parquet(tmp_path / "out" / "results")["row_index"].to_list() == list(range(given.num_rows))


@pytest.mark.parametrize("run_bytes", [1 << 30, 500, 1])
@pytest.mark.parametrize(("samples", "where"), [(1, None), (3, None), (1, "x % 3 = 1"), (2, "x > 90")])
def test_results_are_in_input_order(tmp_path, run_bytes, samples, where):
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "in.parquet", row_group_size=30)
    table = open_table(tmp_path / "in.parquet", where=where)
    rows = [int(row) for index, _ in table.batches([]) for row in index]
    checkpoint = run(tmp_path / "out", table, expected(rows, samples), run_bytes=run_bytes)
    found = pl.read_parquet(tmp_path / "out" / "results")
    pairs = [(row, sample) for row in rows for sample in range(samples)]
    assert found.select("row_index", "sample_index").rows() == pairs
    assert found["x"].to_list() == found["row_index"].to_list()
    assert found["text"].to_list() == [f"{row}/{sample}" for row, sample in pairs]
    sizes = [pq.ParquetFile(path).metadata.num_rows for path in sorted((tmp_path / "out" / "results").iterdir())]
    assert all(size == 16 for size in sizes[:-1]) and 0 < sizes[-1] <= 16
    assert len(pl.read_parquet(tmp_path / "out" / "timings")) == sum(row % 4 for row, _ in pairs)
    assert pl.read_parquet(tmp_path / "out" / "steps")["step"].to_list() == list(range(len(pairs)))
    checkpoint.finish({})
    assert sorted(os.listdir(tmp_path / "out")) == ["job.json", "results", "steps", "timings"]


def test_many_input_windows_and_row_groups(tmp_path):
    pq.write_table(pa.table({"x": range(9000)}), tmp_path / "in.parquet")
    options = {"part_rows": 5000, "run_bytes": 100_000, "spool_rows": 999}
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected(range(9000)), **options).close()
    found = pl.read_parquet(tmp_path / "out" / "results")
    assert found["row_index"].to_list() == found["x"].to_list() == list(range(9000))


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_rows_repeated_beside_their_answers_in_portions(tmp_path, monkeypatch, size):
    monkeypatch.setattr("batchgen.io.deliver._TAKE_BYTES", size)
    texts = ["x" * (number * 37 % 200) for number in range(40)]
    pq.write_table(pa.table({"x": texts}), tmp_path / "in.parquet")
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected(range(40), 3)).close()
    found = pl.read_parquet(tmp_path / "out" / "results")
    assert found["x"].to_list() == [text for text in texts for _ in range(3)]
    assert found["text"].to_list() == [f"{row}/{sample}" for row in range(40) for sample in range(3)]


def test_a_table_without_rows(tmp_path):
    pq.write_table(pa.table({"x": pa.array([], pa.int8())}), tmp_path / "in.parquet")
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected([])).close()
    for kind in ("results", "timings", "steps"):
        (path,) = (tmp_path / "out" / kind).iterdir()
        schema = pq.read_schema(path)
        assert schema.names == (["x"] if kind == "results" else []) + SCHEMAS[kind].names
    assert pl.read_parquet(tmp_path / "out" / "results").shape == (0, 1 + len(RESULTS))


def test_chosen_columns_and_prefix(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"], "y": [1, 2]}), tmp_path / "in.parquet")
    table = open_table(tmp_path / "in.parquet")
    run(tmp_path / "out", table, expected([0, 1]), columns=["text"], prefix="out_").close()
    found = pl.read_parquet(tmp_path / "out" / "results")
    assert found.columns == ["text", *(f"out_{name}" for name in RESULTS.names)]
    assert found.select("text", "out_text").rows() == [("a", "0/0"), ("b", "1/0")]
    run(tmp_path / "none", table, expected([0, 1]), columns=[]).close()
    assert pl.read_parquet(tmp_path / "none" / "results").columns == RESULTS.names


def test_clashes_and_unknown_columns_are_found_beforehand():
    schema = pa.schema([("text", pa.string()), ("y", pa.int8())])
    with pytest.raises(OutputError, match=r"'text' would hide .* output.prefix"):
        check_columns(schema, "all", "")
    assert check_columns(schema, ["y"], "").names == ["y", *RESULTS.names]
    with pytest.raises(InputError, match="no column 'yy'"):
        check_columns(schema, ["yy"], "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"skip": [(2, 1), (4, 0)]}, "row 2, sample 1 is missing"),
        ({"twice": [(3, 1)]}, "row 3, sample 1 is there more than once"),
        ({"twice": [(5, 0)]}, "row 5, sample 0 was not asked for"),
    ],
)
def test_incomplete_jobs_are_not_delivered(tmp_path, change, words):
    pq.write_table(pa.table({"x": range(5)}), tmp_path / "in.parquet")
    with pytest.raises(OutputError, match=words):
        run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected(range(5), 2), **change)
    assert not (tmp_path / "out" / "results").exists()


def test_a_failed_delivery_can_be_repeated(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    pq.write_table(pa.table({"x": range(5)}), tmp_path / "in.parquet")
    table = open_table(tmp_path / "in.parquet")
    checkpoint = run(tmp_path / "out", table, expected(range(5)))
    monkeypatch.setattr(os, "rename", full)
    again = {"expected": expected(range(5)), "columns": "all", "prefix": "", "part_rows": 3}
    with pytest.raises(OutputError, match="No space left on device; free some space and run the same command again"):
        deliver(checkpoint, table, **again)
    monkeypatch.undo()
    deliver(checkpoint, table, **again)
    assert pl.read_parquet(tmp_path / "out" / "results")["x"].to_list() == list(range(5))


def test_an_input_of_other_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"x": range(5)}), tmp_path / "in.parquet")
    for number, where in enumerate(("x <> 2", "x < 4")):
        table = open_table(tmp_path / "in.parquet", where=where)
        with pytest.raises(OutputError, match="input has changed"):
            run(tmp_path / f"out{number}", table, expected(range(5)))


def test_without_timings(tmp_path):
    pq.write_table(pa.table({"x": [0]}), tmp_path / "in.parquet")
    run(tmp_path / "out", open_table(tmp_path / "in.parquet"), expected([0]), timings=False).close()
    assert sorted(os.listdir(tmp_path / "out")) == [".work", "job.json", "results", "steps"]
