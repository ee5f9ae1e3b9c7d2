"""Every kind of column through a whole delivery: the type, the metadata and every value come out as they went in."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchgen.errors import OutputError
from batchgen.io.deliver import check_columns
from batchgen.io.table import open_table
from tests.io.delivery import expected, run

D = decimal.Decimal


def column(kind, *values):
    """One or two values, then nulls."""
    return pa.array([*values, None, None][:3], kind)


def made(array, kind):
    return pa.ExtensionArray.from_storage(kind, array)


DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

COLUMNS = {
    "null": pa.nulls(3),
    "bool": column(pa.bool_(), True, False),
    **{f"{kind}": column(kind, 0, 100) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{f"{kind}": column(kind, 0, 200) for kind in (pa.uint8(), pa.uint16(), pa.uint32())},
    "uint64": column(pa.uint64(), 0, 2**64 - 1),
    "half": pa.array(np.array([1, -0.0, 65504], np.float16)),
    "float": column(pa.float32(), 0.1, float("inf")),
    "double": column(pa.float64(), -0.0, 5e-324),
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
    "enum": pa.DictionaryArray.from_arrays(
        pa.array([1, 0, None], pa.uint32()), pa.array(["x", "y"], pa.large_string())
    ),
    "numbers": pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.int32()), pa.array([10, 20])),
    "list": column(pa.list_(pa.int16()), [], [1, None, 3]),
    "named list": column(pa.list_(pa.field("token", pa.int32(), nullable=False)), [], [1]),
    "large_list": column(pa.large_list(pa.string()), [], ["a", None]),
    "fixed_list": column(pa.list_(pa.float32(), 2), [1.0, None], [0.0, 0.5]),
    "list_view": column(pa.list_view(pa.int8()), [], [1, None]),
    "null list": column(pa.list_(pa.null()), [], [None]),
    "struct": column(pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": None}, {"a": None, "b": "x"}),
    "deep": column(
        pa.list_(pa.struct([("k", pa.large_list(pa.struct([("v", pa.decimal128(5, 1))])))])),
        [{"k": [{"v": D("1.5")}]}],
        [None],
    ),
    "map": column(pa.map_(pa.string(), pa.int32()), [], [("a", 1), ("b", None)]),
    "uuid": made(column(pa.binary(16), b"0" * 16), pa.uuid()),
    "json": made(column(pa.string(), '{"a": 1}'), pa.json_()),
    "bool8": made(column(pa.int8(), 1, 0), pa.bool8()),
    "tensor": made(column(pa.list_(pa.float32(), 4), [1, 2, 3, 4]), pa.fixed_shape_tensor(pa.float32(), [2, 2])),
    "opaque": made(column(pa.binary(), b"x"), pa.opaque(pa.binary(), "geometry", "postgis")),
}


# What Parquet as pyarrow writes it has no form for: the values stay, the types are the nearest that there are.
CHANGED = {
    "date64": pa.date32(),
    "time s": pa.time32("ms"),
    "timestamp s": pa.timestamp("ms"),
    "enum": pa.dictionary(pa.uint32(), pa.string()),
    "numbers": pa.int64(),
}
METADATA = {"huggingface": '{"info": {"features": {}}}', "pandas": '{"columns": []}', "mine": "\x00"}


def all_kinds():
    fields = [pa.field(name, values.type, metadata={"note": name}) for name, values in COLUMNS.items()]
    fields.append(pa.field("required", pa.int64(), nullable=False))
    return pa.table([*COLUMNS.values(), pa.array([1, 2, 3])], schema=pa.schema(fields, METADATA))


def write_parquet(path, table):
    pq.write_table(table, path, use_compliant_nested_type=False)


def write_file(path, table):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_stream(path, table):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def delivered(tmp_path, table, samples=1, part_rows=1000):
    """What comes out beside the answers."""
    run(tmp_path / "out", table, expected(range(table.num_rows_upper), samples), part_rows=part_rows).close()
    found = pq.read_table(tmp_path / "out" / "results")
    assert found["row_index"].to_pylist() == [row for row in range(table.num_rows_upper) for _ in range(samples)]
    return found.select(table.schema.names)


def assert_equal(found, wanted):
    """Names, types, nullability, metadata, values."""
    for name in wanted.schema.names:
        is_map = name == "map"  # Parquet calls the entries of a map something else
        assert found.schema.field(name).equals(wanted.schema.field(name), check_metadata=not is_map), name
        same = found[name].equals(wanted[name])  # but for dictionaries in another order
        assert same or found[name].to_pylist() == wanted[name].to_pylist(), name
    assert found.schema.names == wanted.schema.names
    assert wanted.schema.metadata.items() <= found.schema.metadata.items()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("write", [write_parquet, write_file, write_stream])
def test_every_kind_of_column(tmp_path, write, samples):
    file = tmp_path / ("in.parquet" if write is write_parquet else "in.arrow")
    write(file, all_kinds())
    wanted = pq.read_table(file) if write is write_parquet else all_kinds()
    table = open_table(file)
    assert table.schema.equals(wanted.schema, check_metadata=True)
    found = delivered(tmp_path, table, samples)
    if write is not write_parquet:
        wanted = as_parquet_has_it(wanted)
    assert_equal(found, pa.concat_tables([wanted.slice(row, 1) for row in range(3) for _ in range(samples)]))


def as_parquet_has_it(table):
    for name, kind in CHANGED.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name).with_type(kind), table[name].cast(kind))
    return table


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.struct([]), "struct<>"),
        (pa.list_(pa.struct([])), "list<item: struct<>>"),
        (pa.month_day_nano_interval(), "month_day_nano_interval"),
        (pa.dense_union([pa.field("a", pa.int8())]), "dense_union<a: int8=0>"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "run_end_encoded"),
        (pa.binary(0), "fixed_size_binary[0]"),
    ],
)
def test_what_parquet_cannot_hold_is_refused_beforehand(tmp_path, kind, words):
    schema = pa.schema([("x", kind), ("y", pa.int8())])
    pa.ipc.new_file(tmp_path / "a.arrow", schema).close()
    table = open_table(tmp_path / "a.arrow")
    with pytest.raises(OutputError) as caught:
        check_columns(table.schema, "all", "")
    message = str(caught.value)
    assert message.startswith(f"column 'x' of type {words}") and "leave it out of output.columns" in message
    assert "\n" not in message
    assert check_columns(table.schema, ["y"], "").names[0] == "y"


def test_dictionaries_that_differ_from_file_to_file_and_from_group_to_group(tmp_path):
    for number, letters in enumerate(("ab", "bc", "d")):
        words = pa.array([letter * 3 for letter in letters * 20]).dictionary_encode()
        pq.write_table(pa.table({"d": words}), tmp_path / f"{number}.parquet", row_group_size=7)
    table = open_table(tmp_path)
    assert table.schema.field("d").type == pa.dictionary(pa.int32(), pa.string())
    found = delivered(tmp_path, table, samples=2)
    assert found["d"].type == pa.dictionary(pa.int32(), pa.string())
    rows = [letter * 3 for letters in ("ab", "bc", "d") for letter in letters * 20]
    assert found["d"].to_pylist() == [word for word in rows for _ in range(2)]


def test_a_first_file_of_nulls_and_one_without_rows(tmp_path):
    nested = pa.list_(pa.struct([("a", pa.large_string())]))
    pq.write_table(pa.table({"x": pa.nulls(2), "y": pa.nulls(2)}), tmp_path / "0.parquet")
    pq.write_table(pa.schema([("x", nested), ("y", pa.timestamp("ns", "UTC"))]).empty_table(), tmp_path / "1.parquet")
    rows = pa.table({"x": pa.array([[{"a": "b"}], None], nested), "y": pa.array([1, 2], pa.timestamp("ns", "UTC"))})
    pq.write_table(rows, tmp_path / "2.parquet", use_compliant_nested_type=False)
    found = delivered(tmp_path, open_table(tmp_path))
    assert found.schema.field("x").type.equals(nested) and found.schema.field("y").type == rows.schema.field("y").type
    assert found["x"].to_pylist() == [None, None, [{"a": "b"}], None]


def write_json(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def write_csv(path, table):
    pyarrow.csv.write_csv(table, path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", write_parquet),
        ("a.arrow", write_file),
        ("a.feather", write_stream),
        ("a.csv", write_csv),
        ("a.jsonl", write_json),
    ],
)
def test_tables_without_rows(tmp_path, name, write):
    empty = pa.schema(
        [("x", pa.int8()), ("y", pa.list_(pa.string()) if name[-1] in "tw" else pa.string())]
    ).empty_table()
    write(tmp_path / name, empty)
    table = open_table(tmp_path / name)
    found = delivered(tmp_path, table)
    assert found.num_rows == 0 and (tmp_path / "out" / "results" / "part-00000.parquet").is_file()
    assert found.schema.names == ([] if name == "a.jsonl" else ["x", "y"])  # no line, no key
    if name[-1] in "tw":
        assert found.schema.equals(empty.schema)


def test_types_of_text_formats(tmp_path):
    rows = [
        {"i": 1, "f": 1, "s": "né", "b": True, "l": [], "o": {"a": None}, "n": None, "t": "2024-01-01T00:00:00Z"},
        {"i": -(2**63), "f": 0.1, "s": "", "b": None, "l": [1], "o": {"b": [{"c": 1.5}]}, "n": None, "late": "x"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = delivered(tmp_path, open_table(tmp_path / "a.jsonl"))
    inner = pa.struct([("a", pa.null()), ("b", pa.list_(pa.struct([("c", pa.float64())])))])
    kinds = [pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.list_(pa.int64()), inner, pa.null(), pa.string()]
    assert found.schema.equals(pa.schema(list(zip([*rows[0], "late"], [*kinds, pa.string()], strict=True))))
    assert found.to_pylist()[1]["o"] == {"a": None, "b": [{"c": 1.5}]} and found["f"].to_pylist() == [1.0, 0.1]


CSV = {  # what two fields of a column become
    "i": (("1", "-2"), pa.int64(), [1, -2]),
    "f": (("1", "2.5e3"), pa.float64(), [1.0, 2500.0]),
    "z": (("007", "8"), pa.string(), ["007", "8"]),
    "plus": (("+1", "2"), pa.string(), ["+1", "2"]),
    "blank": ((" 1", "2"), pa.string(), [" 1", "2"]),
    "s": (("né", ""), pa.string(), ["né", None]),
    "b": (("true", "False"), pa.bool_(), [True, False]),
    "mixed": (("true", "1"), pa.string(), ["true", "1"]),
    "n": (("", ""), pa.null(), [None, None]),
    "q": (('""', '"a,""b""\n"'), pa.string(), ["", 'a,"b"\n']),
    "na": (("NA", "null"), pa.string(), ["NA", "null"]),
    "id": (("9223372036854775807", "1"), pa.int64(), [2**63 - 1, 1]),
    "wide": (("9223372036854775808", "1"), pa.string(), ["9223372036854775808", "1"]),
    "rounded": (("9007199254740993", "0.5"), pa.string(), ["9007199254740993", "0.5"]),
    "huge": (("1e400", "2"), pa.string(), ["1e400", "2"]),
    "day": (("2024-02-29", "2024-03-01"), pa.string(), ["2024-02-29", "2024-03-01"]),
}


def test_types_of_csv(tmp_path):
    lines = [CSV, *zip(*(fields for fields, _, _ in CSV.values()), strict=True)]
    (tmp_path / "a.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    found = delivered(tmp_path, open_table(tmp_path / "a.csv"))
    for name, (_, kind, values) in CSV.items():
        assert found[name].to_pylist() == values and found.schema.field(name).type == kind, name


def test_types_of_folders(tmp_path):
    for folder in ("day=2024-02-29/n=007", "day=2023-01-01/n=8"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1]}), tmp_path / "in" / folder / "a.parquet")
    found = delivered(tmp_path, open_table(tmp_path / "in", column_types={"day": "date32", "n": "string"}))
    assert found.schema.field("day").type == pa.date32() and found.schema.field("n").type == pa.string()
    assert found.select(["day", "n"]).to_pylist() == [
        {"day": datetime.date(2023, 1, 1), "n": "8"},
        {"day": DAY, "n": "007"},
    ]
