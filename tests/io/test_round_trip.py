"""Every kind of column through a whole delivery: the type, the metadata and every value come out as they went in."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchgen.io.table import open_table
from tests.io.delivery import expected, run

D = decimal.Decimal


def column(kind, *values):
    """The values and a null."""
    return pa.array([*values, None], kind)


def made(array, kind):
    return pa.ExtensionArray.from_storage(kind, array)


DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

COLUMNS = {
    "null": pa.nulls(3),
    "bool": column(pa.bool_(), True, False),
    **{f"{kind}": column(kind, 0, 100) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{f"u{kind}": column(kind, 0, 200) for kind in (pa.uint8(), pa.uint16(), pa.uint32())},
    "uint64": column(pa.uint64(), 0, 2**64 - 1),
    "half": pa.array(np.array([1, -0.0, 65504], np.float16)),
    "float": column(pa.float32(), 0.1, float("inf")),
    "double": column(pa.float64(), 0.1, -0.0, 5e-324),
    "string": column(pa.string(), "", "né\x00"),
    "large_string": column(pa.large_string(), "", "x" * 1000),
    "string_view": column(pa.string_view(), "", "longer than twelve"),
    "binary": column(pa.binary(), b"", b"\xff\x00"),
    "large_binary": column(pa.large_binary(), b"", b"\xff"),
    "binary_view": column(pa.binary_view(), b"", b"longer than twelve"),
    "fixed_binary": column(pa.binary(3), b"abc", b"\x00\x00\x00"),
    "decimal32": column(pa.decimal32(7, 2), D("1.20"), D("-99999.99")),
    "decimal64": column(pa.decimal64(18, 4), D("1.2000"), D("-5.0000")),
    "decimal128": column(pa.decimal128(38, 10), D("1.2"), D(10) ** 27),
    "decimal256": column(pa.decimal256(76, 0), D(10) ** 75, D(-1)),
    "date32": column(pa.date32(), DAY, datetime.date(1, 1, 1)),
    "date64": column(pa.date64(), DAY, datetime.date(1969, 12, 31)),
    **{f"time {unit}": column(pa.time32(unit), 0, 86399) for unit in ("s", "ms")},
    **{f"time {unit}": column(pa.time64(unit), 0, 86399) for unit in ("us", "ns")},
    **{f"timestamp {unit}": column(pa.timestamp(unit), -1, 1709209815) for unit in ("s", "ms", "us", "ns")},
    **{
        f"zone {zone}": column(pa.timestamp("us", zone), NOON)
        for zone in ("UTC", "Europe/Berlin", "America/New_York", "+05:30")
    },
    **{f"duration {unit}": column(pa.duration(unit), -1, 10**9) for unit in ("s", "ms", "us", "ns")},
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.int8()), ["a", "b", "unused"]),
    "ordered": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.int16()), ["lo", "hi"], ordered=True),
    "enum": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.uint32()), pa.array(["x", "y"], pa.large_string())),
    "numbers": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.int32()), pa.array([10, 20])),
    "list": column(pa.list_(pa.int16()), [], [1, None, 3]),
    "named list": column(pa.list_(pa.field("token", pa.int32(), nullable=False)), [], [1]),
    "large_list": column(pa.large_list(pa.string()), [], ["a", None]),
    "fixed_list": column(pa.list_(pa.float32(), 2), [1.0, None], [0.0, 0.5]),
    "list_view": column(pa.list_view(pa.int8()), [], [1, None]),
    "null list": column(pa.list_(pa.null()), [], [None]),
    "struct": column(pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": None}, {"a": None, "b": "x"}),
    "deep": column(pa.list_(pa.struct([("k", pa.large_list(pa.struct([("v", pa.decimal128(5, 1))])))])), [{"k": [{"v": D("1.5")}]}], [None]),
    "map": column(pa.map_(pa.string(), pa.int32()), [], [("a", 1), ("b", None)]),
    "uuid": made(column(pa.binary(16), b"0" * 16), pa.uuid()),
    "json": made(column(pa.string(), '{"a": 1}'), pa.json_()),
    "bool8": made(column(pa.int8(), 1, 0), pa.bool8()),
    "tensor": made(column(pa.list_(pa.float32(), 4), [1, 2, 3, 4]), pa.fixed_shape_tensor(pa.float32(), [2, 2])),
    "opaque": made(column(pa.binary(), b"x"), pa.opaque(pa.binary(), "geometry", "postgis")),
}


def write_parquet(path, table):
    pq.write_table(table, path, use_compliant_nested_type=False)


def write_file(path, table):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_stream(path, table):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {"a.parquet": write_parquet, "a.arrow": write_file, "s.arrow": write_stream}


def delivered(tmp_path, path, samples=1):
    """The table as it is read, and what comes out beside the answers."""
    table = open_table(path)
    given = pa.Table.from_batches([batch for _, batch in table.batches()], table.schema)
    run(tmp_path / "out", table, expected(range(given.num_rows), samples)).close()
    return given, pq.read_table(tmp_path / "out" / "results").select(given.schema.names)


def assert_equal(found, wanted):
    assert found.schema.remove_metadata().equals(wanted.schema.remove_metadata(), check_metadata=True)
    assert found.schema.metadata == wanted.schema.metadata or wanted.schema.metadata.items() <= found.schema.metadata.items()
    assert found.equals(wanted) or repr(found.to_pylist()) == repr(wanted.to_pylist())


@pytest.mark.parametrize("file", WRITERS)
@pytest.mark.parametrize("name", COLUMNS)
def test_every_kind_of_column(tmp_path, name, file):
    values = COLUMNS[name]
    field = pa.field(name, values.type, metadata={"note": name})
    table = pa.table([values], schema=pa.schema([field], {"huggingface": "{}", "pandas": '{"columns": []}'}))
    WRITERS[file](tmp_path / file, table)
    given, found = delivered(tmp_path, tmp_path / file)
    assert given.schema.equals(table.schema, check_metadata=True)
    assert_equal(found, table)
