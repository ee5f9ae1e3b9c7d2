"""Odd and hostile input files of every format: the rows that they hold, or the one line that says what is wrong."""

import bz2
import gzip
import io
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchgen.errors import BatchgenError
from batchgen.io.table import open_table

SECONDS = 10  # that any of these may take on a busy machine


def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def arrow(table, new=pa.ipc.new_file):
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def with_bytes(data, place, new):
    place %= len(data)
    return data[:place] + new + data[place + len(new) :]


def said_twice(row):
    return [row, row]


WORDS = pa.table({"x": [f"word {i}" for i in range(99)]})
PARQUET, FILE, STREAM = parquet(WORDS), arrow(WORDS), arrow(WORDS, pa.ipc.new_stream)
PLAIN = parquet(WORDS, compression="none", use_dictionary=False, write_page_checksum=True)
LYING = parquet(pa.table({"x": [1, 2, 3]}), store_schema=False, write_statistics=False)
DUPLICATE = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"])


def strings(count, offsets, data):
    """A column of strings made of raw buffers, right or wrong."""
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(data)]
    return pa.table({"x": pa.Array.from_buffers(pa.string(), count, buffers)})


BAD_TEXT = strings(1, [0, 2], b"\xff\xfe")
BAD_OFFSETS = strings(2, [0, 2**31 - 1, 2], b"ab")
LONG = 65 << 20

ROWS = [
    # what, name, bytes, rows
    ("utf-8 with a mark", "a.jsonl", b'\xef\xbb\xbf{"x": 1}\n', [{"x": 1}]),
    ("no newline at the end", "a.jsonl", b'{"x": 1}\n{"x": 2}', [{"x": 1}, {"x": 2}]),
    ("carriage returns and blank lines", "a.jsonl", b'\n{"x": 1}\r\n \t\r\n\r\n{"x": 2}\r\n', [{"x": 1}, {"x": 2}]),
    ("no bytes", "a.jsonl", b"", []),
    (
        "keys that come late",
        "a.jsonl",
        b'{"x": 1}\n{}\n{"y": "z"}\n',
        [{"x": 1, "y": None}, {"x": None, "y": None}, {"x": None, "y": "z"}],
    ),
    ("a fraction that comes late", "a.jsonl", b'{"x": 1}\n{"x": 2.5}\n', [{"x": 1.0}, {"x": 2.5}]),
    ("a key that is empty, one with a dot", "a.jsonl", b'{"": 1, "a.b": {"c": 2}}\n', [{"": 1, "a.b": {"c": 2}}]),
    ("characters of control and of other planes", "a.jsonl", b'{"x": "\\u0000\\ud83d\\ude00"}\n', [{"x": "\0😀"}]),
    ("a key said twice: the last counts", "a.jsonl", b'{"x": 1, "x": 2}\n', [{"x": 2}]),
    (
        "objects of lists of objects",
        "a.ndjson",
        b'{"m": [{"r": "a"}, {"c": null}]}\n',
        [{"m": [{"r": "a", "c": None}, {"r": None, "c": None}]}],
    ),
    (
        "gzip in two members",
        "a.jsonl.gz",
        b"".join(map(gzip.compress, said_twice(b'{"x": 1}\n'))),
        said_twice({"x": 1}),
    ),
    ("bzip2", "a.csv.bz2", bz2.compress(b"x\n1\n"), [{"x": 1}]),
    ("zstandard", "a.json.zst", pa.compress(b'{"x": 1}\n', "zstd", asbytes=True), [{"x": 1}]),
    ("only a header", "a.csv", b"x,y\n", []),
    ("only a header, without a newline", "a.csv", b"x,y", []),
    ("utf-8 with a mark", "b.csv", b"\xef\xbb\xbfx\n1\n", [{"x": 1}]),
    ("carriage returns", "c.csv", b"x,y\r\n1,2\r\n", [{"x": 1, "y": 2}]),
    ("old carriage returns", "d.csv", b"x,y\r1,2\r", [{"x": 1, "y": 2}]),
    ("blank lines", "e.csv", b"\n\nx,y\n\n1,2\n\n", [{"x": 1, "y": 2}]),
    ("newlines and quotes inside fields", "f.csv", b'x,"y\nz"\n"a""\n\nb",2\n', [{"x": 'a"\n\nb', "y\nz": 2}]),
    ("a column without a name", "g.csv", b"x,\n1,2\n", [{"x": 1, "": 2}]),
    ("tabs", "a.tsv", b"x\ty\n1,5\t2\n", [{"x": "1,5", "y": 2}]),
    ("a stream", "a.arrow", arrow(pa.table({"x": [1]}), pa.ipc.new_stream), [{"x": 1}]),
    ("a stream without its end", "b.arrow", arrow(pa.table({"x": [1]}), pa.ipc.new_stream)[:-8], [{"x": 1}]),
    ("no rows", "c.arrow", arrow(pa.table({"x": pa.array([], pa.int8())})), []),
    ("no rows", "a.parquet", parquet(pa.table({"x": pa.array([], pa.int8())})), []),
    ("no columns", "b.parquet", parquet(pa.table({})), []),
    ("capitals", "C.PARQUET", parquet(pa.table({"x": [1]})), [{"x": 1}]),
]

ERRORS = [
    # what, name, bytes, what the message holds beside the file's name
    ("half a line", "a.jsonl", b'{"x": 1}\n{"x": ', "line 2 is not JSON in UTF-8: Expecting value (column 7)"),
    ("no quotes", "b.jsonl", b"{x: 1}\n", "line 1 is not JSON in UTF-8: Expecting property name"),
    ("two objects on a line", "c.jsonl", b'{"x": 1}{"x": 2}\n', "line 1 is not JSON in UTF-8: Extra data (column 9)"),
    ("an object on two lines", "d.jsonl", b'{"x":\n1}\n', "line 1 is not JSON"),
    (
        "an array of all",
        "a.json",
        b'[{"x": 1}]',
        "line 1 is not a JSON object; one object per line is needed, not an array",
    ),
    ("a bare null", "e.jsonl", b'{"x": 1}\nnull\n', "line 2 is not a JSON object"),
    ("not a number", "f.jsonl", b'{"x": NaN}\n', "line 1 is not JSON in UTF-8: NaN is no JSON number"),
    ("not UTF-8", "g.jsonl", b'{"x": "\xff"}\n', "line 1 is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xff"),
    ("UTF-16", "h.jsonl", '{"x": 1}\n'.encode("utf-16"), "line 1 is not JSON in UTF-8"),
    ("half a surrogate pair", "i.jsonl", b'{"x": "\\ud800"}\n', "line 1: 'x' holds half a surrogate pair"),
    (
        "half a surrogate pair in a key",
        "j.jsonl",
        b'{"a": {"\\ud800": 1}}\n',
        "line 1: 'a' has a key with half a surrogate",
    ),
    ("a text after numbers", "k.jsonl", b'{"x": 1}\n{"x": "1"}\n', "line 2: 'x' is string, but int64 before"),
    (
        "a list after an object",
        "l.jsonl",
        b'{"a": {"b": {}}}\n\n{"a": {"b": []}}\n',
        "line 3: 'a.b' is list, but struct before",
    ),
    ("kinds mixed in a list", "m.jsonl", b'{"a": [1, true]}\n', "line 1: 'a[]' is bool, but int64 before"),
    (
        "a whole number beyond 64 bits",
        "n.jsonl",
        b'{"x": 9223372036854775808}\n',
        "line 1: 'x' is a whole number beyond 64 bits",
    ),
    (
        "one of 5,000 digits",
        "o.jsonl",
        b'{"x": ' + b"9" * 5000 + b"}\n",
        "line 1 is not JSON in UTF-8: Exceeds the limit",
    ),
    (
        "whole numbers that a fraction would round",
        "p.jsonl",
        b'{"x": 9007199254740993}\n{"x": 0.5}\n',
        "line 2: 'x' mixes fractions with whole numbers beyond 2^53",
    ),
    ("a key with a newline", "w.jsonl", b'{"a\\nb": 1}\n{"a\\nb": ""}\n', r"line 2: 'a\nb' is string"),
    ("a key of a megabyte", "x.jsonl", b'{"%s": [1, ""]}\n' % (b"k" * 10**6), "line 1: 'kkkkk"),
    ("a million brackets", "q.jsonl", b"[" * 10**6 + b"\n", "line 1 is not JSON in UTF-8: it is nested too deeply"),
    ("nested 500 deep", "r.jsonl", b'{"a":' * 500 + b"1" + b"}" * 500, "is nested deeper than 64 levels"),
    (
        "20,000 keys",
        "s.jsonl",
        b"".join(b'{"k%d": 1}\n' % i for i in range(20_000)),
        "line 10001: has the last of over 10,000",
    ),
    ("a line of 65 MiB in 64 kB", "t.jsonl.gz", gzip.compress(b" " * LONG), "line 1 is longer than 64 MiB"),
    ("gzip cut short", "u.jsonl.gz", gzip.compress(b'{"x": 1}\n' * 99)[:-9], "Truncated compressed stream"),
    ("no gzip", "v.jsonl.gz", b'{"x": 1}\n', "zlib inflate failed"),
    ("a field too many", "a.csv", b"x,y\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3: 1,2,3"),
    (
        "a field too few, far below",
        "b.csv",
        b"x,y\n" + b"1,2\n" * 9999 + b"1\n",
        "Row #10001: Expected 2 columns, got 1",
    ),
    ("no bytes", "c.csv", b"", "Empty CSV file"),
    ("only blank lines", "d.csv", b"\n\n", "Empty CSV file"),
    ("a name twice", "e.csv", b"x,x\n1,2\n", "column 'x' occurs twice"),
    (
        "a quote without its end",
        "f.csv.gz",
        gzip.compress(b'x\n"' + b"a\n" * (20 << 20)),
        "a row is longer than 16 MiB, or a quote has no end",
    ),
    ("one near the end", "m.csv", b'x,y\n1,2\n3,"4\n5,6\n', "row 3: a quote has no end"),
    ("not UTF-8", "g.csv", b"x,y\n1,2\n1,\xff\n", "Row #3: CSV conversion error to string: invalid UTF8 data"),
    ("no UTF-8 in the header", "h.csv", b"\xff\n1\n", "can't decode byte 0xff"),
    ("UTF-16", "i.csv", "x,y\n1,2\n".encode("utf-16"), "i.csv"),
    ("a million columns", "j.csv", b"," * 10**6 + b"\n", "its header has over 10,000 columns"),
    ("a header of 2 MiB", "k.csv", b"x" * (2 << 20) + b"\n", "its header has over 10,000 columns or 1 MiB"),
    ("a Parquet file by another name", "l.csv", PARQUET, "l.csv"),
    ("no bytes", "a.parquet", b"", "not a Parquet file: it is empty (0 bytes)"),
    ("a text", "b.parquet", b"x,y\n1,2\n", "not a readable Parquet file: Parquet magic bytes not found"),
    ("an Arrow file", "c.parquet", FILE, "not a readable Parquet file"),
    ("without its end", "d.parquet", PARQUET[:-9], "not a readable Parquet file"),
    ("without its beginning", "e.parquet", PARQUET[40:], "damaged or unreadable"),
    (
        "a footer larger than the file",
        "f.parquet",
        with_bytes(PARQUET, -8, b"\xff\xff\xff\x7f"),
        "not a readable Parquet file",
    ),
    (
        "a damaged page",
        "g.parquet",
        with_bytes(PLAIN, 200, b"\0" * 20),
        "damaged or unreadable: could not verify page integrity",
    ),
    ("a name twice", "h.parquet", parquet(DUPLICATE), "column 'x' occurs twice"),
    ("packed as a whole", "i.parquet.gz", gzip.compress(PARQUET), "its name does not tell its format"),
    ("no bytes", "a.arrow", b"", "not a readable Arrow IPC file"),
    ("a text", "b.arrow", b"hello, world", "not a readable Arrow IPC file"),
    (
        "the first Feather format",
        "c.feather",
        b"FEA1" + b"\0" * 99 + b"FEA1",
        "not a readable Arrow IPC file: it is Feather V1",
    ),
    ("a file cut short", "d.arrow", FILE[:-20], "not a readable Arrow IPC file"),
    ("a stream cut short", "e.arrow", STREAM[:-300], "not a readable Arrow IPC file"),
    ("text that is no UTF-8", "f.arrow", arrow(BAD_TEXT), "Invalid UTF8 sequence at string index 0"),
    ("offsets beyond the data", "g.arrow", arrow(BAD_OFFSETS), "not a readable Arrow IPC file"),
    ("a name that is no UTF-8", "i.arrow", FILE.replace(b"x\0\0\0", b"\xff\0\0\0"), "can't decode byte 0xff"),
    ("a name twice", "h.arrow", arrow(DUPLICATE), "column 'x' occurs twice"),
    ("a format that is not read", "a.xlsx", b"PK", "its name does not tell its format (.parquet, .pq, .jsonl, "),
    ("no ending", "data", b"x\n1\n", "its name does not tell its format"),
]


@pytest.mark.parametrize(("what", "name", "data", "rows"), ROWS, ids=[f"{name}: {what}" for what, name, *_ in ROWS])
def test_rows(tmp_path, what, name, data, rows):
    (tmp_path / name).write_bytes(data)
    table = open_table(tmp_path / name)
    assert table.num_rows_upper == len(rows)
    assert [row for _, batch in table.batches(batch_rows=2) for row in batch.to_pylist()] == rows
    assert [int(row) for index, _ in table.batches([]) for row in index] == list(range(len(rows)))


@pytest.mark.parametrize(
    ("what", "name", "data", "words"), ERRORS, ids=[f"{name}: {what}" for what, name, *_ in ERRORS]
)
def test_errors(tmp_path, what, name, data, words):
    (tmp_path / name).write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(BatchgenError) as caught:
        list(open_table(tmp_path / name).batches())
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: ") and words in message
    assert "\n" not in message and len(message) < 600 + len(str(tmp_path))
    assert time.perf_counter() - started < SECONDS
    assert [path.name for path in tmp_path.iterdir()] == [name]


FOLDERS = [
    # files, options, what the message holds
    ({"a.parquet": PARQUET, "b.jsonl": b'{"x": "y"}\n'}, {}, "b.jsonl is jsonl, but "),
    ({"a.csv": b"x\n1\n", "b.tsv": b"x\n1\n"}, {}, "b.tsv is tsv, but "),
    ({"a.jsonl": b'{"x": 1}\n', "b.jsonl": b'{"x": "1"}\n'}, {}, "b.jsonl: line 1: 'x' is string, but int64 before"),
    ({"a.txt": b"x"}, {}, "has no file of a format that is read (*.parquet, "),
    ({"a.parquet": PARQUET}, {"format": "csv"}, "has no *.csv file below it"),
    ({"y=1/a.parquet": PARQUET}, {"column_types": {"yy": "int8"}}, "no column 'yy' (did you mean 'y'?)"),
    (
        {"y=1/a.parquet": PARQUET},
        {"column_types": {"x": "int8"}},
        "column 'x' has a type in the files, string, which stays",
    ),
    ({"y=1/a.parquet": PARQUET}, {"column_types": {"y": "int33"}}, "input.column_types.y: 'int33' is no type"),
    (
        {"y=1/a.parquet": PARQUET, "y=x/a.parquet": PARQUET},
        {"column_types": {"y": "int32"}},
        "folder 'y=x' cannot be read as int32",
    ),
    (
        {"y=300/a.parquet": PARQUET},
        {"column_types": {"y": "int8"}},
        "y=300/a.parquet: folder 'y=300' cannot be read as int8",
    ),
    ({"x=1/a.parquet": PARQUET}, {}, "column 'x' is in the files and in the folder names"),
    (
        {"a.csv": b"x\n1\n", "b.csv": b"x\n2\n2024-99-01\n"},
        {"column_types": {"x": "date32"}},
        "a.csv: row 0: column 'x' cannot be read as date32",
    ),
    (
        {"a.jsonl": b'{"x": 1}\n{"x": 300}\n'},
        {"column_types": {"x": "int8"}},
        "a.jsonl: row 1: column 'x' cannot be read as int8",
    ),
]


@pytest.mark.parametrize(("files", "options", "words"), FOLDERS)
def test_folders(tmp_path, files, options, words):
    for name, data in files.items():
        path = Path(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    with pytest.raises(BatchgenError) as caught:
        open_table(tmp_path, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
