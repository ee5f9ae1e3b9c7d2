import decimal
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchgen.errors import InputError, SpecError
from batchgen.io.table import open_table

DATA = Path(__file__).parents[1] / "data" / "io"


def rows_of(table, **options):
    return [int(row) for index, _ in table.batches([], **options) for row in index]


def read(table, **options):
    return pa.Table.from_batches([batch for _, batch in table.batches(**options)])


@pytest.fixture
def numbers(tmp_path):
    """Rows 0..99 in column x, in three files of row groups of 7; y is null at every third row."""
    for number, (start, stop) in enumerate([(0, 40), (40, 40), (40, 100)]):
        x = list(range(start, stop))
        y = pa.array([None if i % 3 == 0 else f"y{i}" for i in x], pa.string())
        pq.write_table(
            pa.table({"x": pa.array(x, pa.int64()), "y": y}), tmp_path / f"{number}.parquet", row_group_size=7
        )
    return tmp_path


def test_types_are_those_of_the_file():
    table = open_table(DATA / "edge_cases.parquet")
    wanted = pq.read_table(DATA / "edge_cases.parquet")
    assert table.schema.equals(wanted.schema, check_metadata=True) and table.num_rows_upper == 43
    found = read(table)
    assert found.schema.equals(wanted.schema, check_metadata=True)
    assert repr(found.to_pylist()) == repr(wanted.to_pylist())  # repr, since nan is not equal to itself


def test_hive_folders_and_a_null_column():
    table = open_table(DATA / "edge_hive")
    assert table.schema.names == ["id", "prompt", "note", "lang"]
    assert table.schema.field("note").type == pa.string() and table.schema.field("lang").type == pa.string()
    found = read(table).to_pydict()
    assert found["lang"] == ["de"] * 6 + ["en"] * 6
    assert found["id"] == [f"{lang}-{number}" for lang in ("de", "en") for number in range(6)]
    assert found["note"][:4] == [None, None, None, "Mathematik"]


def test_globs_make_columns_of_the_folders_behind_their_fixed_part():
    assert open_table(DATA / "edge_hive" / "*" / "*.parquet").schema.names[-1] == "lang"
    table = open_table(DATA / "edge_hive" / "lang=en" / "*.parquet")
    assert "lang" not in table.schema.names and table.num_rows_upper == 6


def test_integer_folders_and_unset_values(tmp_path):
    for folder in ("n=1", "n=20", "n=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / folder / "a.parquet")
    table = open_table(tmp_path)
    assert table.schema.field("n").type == pa.int32()
    assert read(table)["n"].to_pylist() == [1, 20, None]
    pq.write_table(pa.table({"n": [1]}), tmp_path / "n=1" / "a.parquet")
    with pytest.raises(InputError, match="'n' is in the files and in the folder names"):
        open_table(tmp_path)


@pytest.mark.parametrize(
    ("folders", "types", "kind", "notes"),
    [
        (["n=1", "n=20"], {}, "int32", []),
        (["n=1", "n=x", "n=y"], {}, "string", ["folder 'n=x' is no int32 as others are, so column 'n' is text"]),
        (["n=1", "n=3000000000"], {}, "string", ["folder 'n=3000000000' is no int32"]),
        (["n=a", "n=b"], {}, "string", []),
        (["n=1", "n=x"], {"n": "string"}, "string", []),
        (["n=1", "n=3000000000"], {"n": "int64"}, "int64", []),
        (["n=1", "none"], {}, "int32", ["none/a.parquet lies in no folder 'n=…' as others do"]),
        (["n=2024-02-29"], {"n": "date32"}, "date32[day]", []),
        (["n=a%20b%2Fc", "n=d=e"], {}, "string", []),
    ],
)
def test_folders_of_other_types(tmp_path, folders, types, kind, notes):
    for folder in folders:
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / folder / "a.parquet")
    table = open_table(tmp_path, column_types=types)
    assert str(table.schema.field("n").type) == kind
    assert len(table.notes) == len(notes)
    assert all(words in note for words, note in zip(notes, table.notes, strict=True))
    if "%" in folders[0]:
        assert read(table)["n"].to_pylist() == ["a b/c", "d=e"]


def test_declared_types_of_text_formats(tmp_path):
    (tmp_path / "a.csv").write_text("id,day,x\n007,2024-02-29,1\n8,,2\n")
    table = open_table(tmp_path / "a.csv", column_types={"id": "int16", "day": "date32", "x": "string"})
    assert [str(field.type) for field in table.schema] == ["int16", "date32[day]", "string"]
    assert read(table)["id"].to_pylist() == [7, 8] and read(table)["x"].to_pylist() == ["1", "2"]
    (tmp_path / "a.jsonl").write_text('{"t": "2024-02-29T12:00:00", "f": 1}\n')
    table = open_table(tmp_path / "a.jsonl", column_types={"t": "timestamp[us]", "f": "float32"})
    assert [str(field.type) for field in table.schema] == ["timestamp[us]", "float"]
    assert read(table).num_rows == 1


def test_one_format_of_a_folder_is_chosen_by_its_name(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    (tmp_path / "data").write_text('{"x": 3}\n')
    pq.write_table(pa.table({"x": [4]}), tmp_path / "c.parquet")
    (tmp_path / "dataset_info.json").write_text("{}\n")
    for kind, x in (("csv", [1]), ("parquet", [4]), ("jsonl", [2, None])):  # the last takes *.json too
        assert read(open_table(tmp_path, format=kind))["x"].to_pylist() == x
    assert read(open_table(tmp_path / "data", format="jsonl"))["x"].to_pylist() == [3]
    (tmp_path / "a.csv").unlink()
    (tmp_path / "b.jsonl").unlink()
    assert read(open_table(tmp_path))["x"].to_pylist() == [4]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.arrow", "a.parquet"])
def test_ranges_and_conditions_in_every_format(tmp_path, name):
    rows = pa.table({"x": range(100), "y": [None if x % 3 == 0 else f"y{x}" for x in range(100)]})
    if name == "a.jsonl":
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    elif name == "a.csv":
        pa.csv.write_csv(rows, tmp_path / name)
    elif name == "a.arrow":
        with pa.ipc.new_file(tmp_path / name, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=33)
    else:
        pq.write_table(rows, tmp_path / name, row_group_size=33)
    table = open_table(tmp_path / name)
    assert table.num_rows_upper == 100 and table.schema == rows.schema
    for start, stop in ((0, 100), (0, 1), (32, 34), (60, 99), (99, 1000), (50, 50)):
        found = list(table.batches(["y", "x"], (start, stop), 10))
        assert [int(row) for index, _ in found for row in index] == list(range(start, min(stop, 100)))
        assert [row for _, batch in found for row in batch.to_pylist()] == rows.slice(start, stop - start).select(
            ["y", "x"]
        ).to_pylist()
        assert all(batch.num_rows <= 10 for _, batch in found)
    assert rows_of(open_table(tmp_path / name, where="x > 10 and y is not null", limit=3)) == [11, 13, 14]
    before = table.fingerprint()
    assert open_table(tmp_path / name).fingerprint() == before
    os.utime(tmp_path / name, ns=(1, 1))
    with pytest.raises(InputError, match="has changed since the job started"):
        list(table.batches())
    assert open_table(tmp_path / name).fingerprint() == before  # it is the content that counts


def test_wide_rows_come_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.io.formats._BATCH_BYTES", 10_000)
    wide, same = [f"{number:1000}" for number in range(100)], ["x" * 1000] * 100
    for texts in (wide, same):  # of which the second takes no room in the file
        pq.write_table(pa.table({"x": texts}), tmp_path / "a.parquet")
        sizes = [batch.num_rows for _, batch in open_table(tmp_path).batches(batch_rows=1000)]
        assert sum(sizes) == 100 and max(sizes) < 12


def test_a_condition_on_a_text_that_is_no_utf_8(tmp_path):
    pq.write_table(pa.table({"x": pa.array([b"a", b"\xff"])}), tmp_path / "a.parquet")
    raw = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"x": raw}), tmp_path / "a.parquet")
    table = open_table(tmp_path, where="x = 'a'")
    with pytest.raises(SpecError, match=r"fails on rows 0 to 1: .*[Ii]nvalid UTF8"):
        rows_of(table)


def test_directories_skip_what_is_not_data(numbers):
    (numbers / "_SUCCESS").write_bytes(b"")
    (numbers / ".hidden.parquet").write_bytes(b"x")
    (numbers / "_temporary").mkdir()
    (numbers / "_temporary" / "a.parquet").write_bytes(b"x")
    (numbers / "README.md").write_text("x")
    assert open_table(numbers).num_rows_upper == 100


def test_rows_columns_and_batches(numbers):
    table = open_table(numbers)
    assert rows_of(table) == list(range(100))
    assert rows_of(table, rows=(33, 58)) == list(range(33, 58))
    assert rows_of(table, rows=(90, 1000)) == list(range(90, 100)) and rows_of(table, rows=(5, 5)) == []
    for index, batch in table.batches(["y", "x"], rows=(3, 97), batch_rows=10):
        assert batch.schema.names == ["y", "x"] and batch.num_rows <= 10 and index.dtype == np.int64
        assert batch.column("x").to_pylist() == index.tolist()
    assert read(table, columns=["x"]).column_names == ["x"]


def test_where_and_limit(numbers):
    where = "x > 10 and y <> 'y50'"  # null where y is, which counts as false
    wanted = [x for x in range(11, 100) if x % 3 and x != 50]
    assert rows_of(open_table(numbers, where=where)) == wanted
    table = open_table(numbers, where=where, limit=20)
    assert rows_of(table) == wanted[:20] and table.num_rows_upper == 20
    assert rows_of(table, rows=(30, 1000)) == [x for x in wanted[:20] if x >= 30]
    assert read(table, columns=["y"])["y"].to_pylist() == [f"y{x}" for x in wanted[:20]]
    assert rows_of(open_table(numbers, limit=3)) == [0, 1, 2]
    assert rows_of(open_table(numbers, where="x = 99", limit=3)) == [99]
    assert rows_of(open_table(numbers, where="true", limit=0)) == []
    assert rows_of(open_table(numbers, where="1 = 1", limit=2)) == [0, 1]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("x >", ["not a condition"]),
        ("z > 1", ["'z'", "columns: x, y"]),
        ("xx > 1", ["did you mean 'x'"]),
        ("x", ["gives Int64"]),
        ("x = 'a'", ["x int64"]),
        ("x > avg(x)", ["single row"]),
        ("count(*) > 1", ["single row"]),
        ("row_number() over (order by x) < 3", ["single row"]),
        ("x in (select 1)", ["single row"]),
        ("x > 1 foo", ["single row"]),
    ],
)
def test_wrong_conditions(numbers, where, words):
    with pytest.raises(SpecError) as caught:
        open_table(numbers, where=where)
    message = str(caught.value)
    assert where in message and "\n" not in message
    assert all(word in message for word in words)


def test_conditions_on_columns_named_like_aggregates(tmp_path):
    pq.write_table(pa.table({"Len": [1, 2], "Agg": ["Len", "b"]}), tmp_path / "a.parquet")
    assert rows_of(open_table(tmp_path, where='"Len" = 1 and "Agg" = \'Len\'')) == [0]


def test_a_condition_on_a_type_that_polars_lacks(tmp_path):
    pq.write_table(pa.table({"d": pa.array([decimal.Decimal(1)], pa.decimal256(50, 2))}), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match="'d' of type decimal256"):
        open_table(tmp_path, where="d = 1")


def write_pair(tmp_path, first, second):
    pq.write_table(pa.table({"c": first}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"c": second}), tmp_path / "b.parquet")
    return open_table(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (pa.nulls(1), pa.array(["x"]), pa.string()),
        (pa.array([1], pa.int32()), pa.array([1], pa.int64()), pa.int64()),
        (pa.array([1], pa.float32()), pa.array([1], pa.float64()), pa.float64()),
        (pa.array(["x"], pa.large_string()), pa.array(["x"]), pa.large_string()),
        (pa.array([[]], pa.list_(pa.null())), pa.array([[1]], pa.list_(pa.int64())), pa.list_(pa.int64())),
        (pa.array(["x"]).dictionary_encode(), pa.nulls(1), pa.dictionary(pa.int32(), pa.string())),
        (pa.array([1], pa.timestamp("ms", "UTC")), pa.array([1], pa.timestamp("us", "UTC")), pa.timestamp("us", "UTC")),
    ],
)
def test_schemas_that_unify(tmp_path, first, second, kind):
    table = write_pair(tmp_path, first, second)
    assert table.schema.field("c").type.equals(kind)
    assert read(table)["c"].to_pylist() == first.to_pylist() + second.to_pylist()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1]), pa.array(["1"])),
        (pa.array([1]), pa.array([1.0])),
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC"))),
        (pa.array([1], pa.uint64()), pa.array([1], pa.int64())),
    ],
)
def test_schemas_that_clash(tmp_path, first, second):
    with pytest.raises(InputError) as caught:
        write_pair(tmp_path, first, second)
    for part in ("a.parquet", "b.parquet", "'c'", str(first.type), str(second.type)):
        assert part in str(caught.value)


def test_a_column_that_some_files_lack(tmp_path):
    schema = pa.schema([pa.field("c", pa.int64(), nullable=False)])
    pq.write_table(pa.table([[1]], schema=schema), tmp_path / "a.parquet")
    pq.write_table(pa.table({"d": ["x"]}), tmp_path / "b.parquet")
    table = open_table(tmp_path)
    assert table.schema.field("c").nullable
    assert read(table).to_pylist() == [{"c": 1, "d": None}, {"c": None, "d": "x"}]


def test_tables_without_rows(tmp_path):
    pq.write_table(pa.table({"c": pa.array([], pa.int8())}), tmp_path / "a.parquet")
    table = open_table(tmp_path, where="c = 1", limit=3)
    assert list(table.batches()) == [] and table.num_rows_upper == 0


def test_column_names_with_dots(tmp_path):
    pq.write_table(pa.table({"a": [{"b": 1}], "a.b": ["x"], "a.bc": [2]}), tmp_path / "a.parquet")
    table = open_table(tmp_path)
    assert read(table, columns=["a.b"]).to_pylist() == [{"a.b": "x"}]
    assert read(table, columns=["a"]).to_pylist() == [{"a": {"b": 1}}]


def damaged_page(path):
    raw = bytearray(path.read_bytes())
    raw[20:120] = b"\xff" * 100
    path.write_bytes(raw)
    os.utime(path, ns=(0, 0))


def test_unreadable_inputs(tmp_path):
    def message(path):
        with pytest.raises(InputError) as caught:
            list(open_table(path).batches())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist" in message(tmp_path / "none.parquet")
    assert "has no file of a format that is read (*.parquet, " in message(tmp_path)
    assert "matches no file" in message(tmp_path / "*.parquet")
    file = tmp_path / "a.parquet"
    file.write_bytes(b"")
    assert "a.parquet" in message(file) and "empty" in message(file)
    file.write_text("id,prompt\n1,hello\n")
    assert "not a readable Parquet file" in message(file)
    pq.write_table(pa.table({"c": [f"{i}" * 9 for i in range(999)]}), file)
    file.write_bytes(file.read_bytes()[:-9])
    assert "not a readable Parquet file" in message(file)
    pq.write_table(pa.table({"c": [f"{i}" * 9 for i in range(999)]}), file)
    damaged_page(file)
    assert "a.parquet: damaged" in message(file)


def test_a_missing_column_names_the_nearest(numbers):
    with pytest.raises(InputError, match=r"no column 'xs' \(did you mean 'x'\?\)"):
        open_table(numbers).batches(["xs"])


def test_long_and_odd_names_of_columns_stay_in_one_line(tmp_path):
    names = ["a\nb", *(f"column {number}" for number in range(1000))]
    pq.write_table(pa.table([pa.array([1])] * 1001, names=names), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"its columns: 'a\\nb', column 0, .*, column 48 and 951 more$"):
        open_table(tmp_path).batches(["x"])
    with pytest.raises(SpecError, match=r"needs column 'x'; columns: 'a\\nb', column 0, .* and 951 more$"):
        open_table(tmp_path, where="x > 1")


def test_a_file_that_changes_while_the_job_runs(numbers):
    table = open_table(numbers)
    os.utime(numbers / "0.parquet", ns=(1, 1))
    with pytest.raises(InputError, match="has changed"):
        list(table.batches())


def test_fingerprints(numbers, tmp_path_factory):
    before = open_table(numbers).fingerprint()
    moved = tmp_path_factory.mktemp("moved") / "data"
    numbers.rename(moved)
    assert open_table(moved).fingerprint() == before == open_table(moved / "*.parquet").fingerprint()
    os.utime(moved / "0.parquet", ns=(1, 1))
    assert open_table(moved).fingerprint() == before  # it is the content that counts
    pq.write_table(pq.read_table(moved / "0.parquet").slice(1), moved / "0.parquet")
    assert open_table(moved).fingerprint() != before
