"""Files damaged by number: `python -m tests.io.fuzz_input FOLDER FIRST LAST` reads each and prints what became of it.

A process of its own, since a reader in C may die of a damaged file, and with little memory, since a damaged length may
ask for a lot. A line `number ...` comes before a file is read, `number outcome` after it, and `peak MiB` at the end.
"""

import contextlib
import decimal
import io
import json
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from batchgen.errors import InputError, SpecError
from batchgen.io.table import open_table
from batchgen.prompt_sources import python_rows

MEMORY_BYTES = 4 << 30
SECONDS = 10
EDGES = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\0\0\0\x80", b"\xff" * 8, b"\x01")
PIECES = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\n", b"\r", b"\t", b"null", b"true", b"1e999", b"-", b"NaN"),
    *(b"\\ud800", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b'""', b"9" * 30, b"0.1", b'{"s":', b"[[[[", b'"x": {}'),
]


def table(rows: int = 30) -> pa.Table:
    number = decimal.Decimal("1.20")
    return pa.table(
        {
            "i": pa.array([1, None, 3] * (rows // 3)),
            "s": pa.array(["x", "y\nz", None] * (rows // 3)),
            "d": pa.array(["a", "b", None] * (rows // 3)).dictionary_encode(),
            "l": pa.array([[1], [2, None], None] * (rows // 3)),
            "o": pa.array([{"a": 1, "b": "z"}, None, {"a": 2, "b": "q"}] * (rows // 3)),
            "m": pa.array([[("a", 1)], [], None] * (rows // 3), pa.map_(pa.string(), pa.int32())),
            "n": pa.array([number, None, number] * (rows // 3)),
            "v": pa.array(["x", "longer than twelve", None] * (rows // 3), pa.string_view()),
            "t": pa.array([1, None, 2**40] * (rows // 3), pa.timestamp("ns", "Europe/Berlin")),
        }
    )


def parquet(draw: random.Random) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table(),
        sink,
        compression=draw.choice(["none", "snappy", "zstd", "gzip", "lz4", "brotli"]),
        use_dictionary=draw.random() < 0.5,
        row_group_size=12,
        data_page_version=draw.choice(["1.0", "2.0"]),
        write_page_checksum=draw.random() < 0.3,
        store_schema=draw.random() < 0.7,
    )
    return sink.getvalue()


def arrow(draw: random.Random) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=draw.choice([None, "lz4", "zstd"]))
    with draw.choice([pa.ipc.new_file, pa.ipc.new_stream])(sink, table().schema, options=options) as writer:
        writer.write_table(table(), max_chunksize=12)
    return sink.getvalue()


def csv(draw: random.Random) -> bytes:
    sink = io.BytesIO()
    pyarrow.csv.write_csv(table().select(["i", "s", "n"]), sink)
    return sink.getvalue()


def json_lines(draw: random.Random) -> bytes:
    rows = table().select(["i", "s", "l", "o"]).to_pylist()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def batch(draw: random.Random) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stop": ["x"]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return (json.dumps(row) + "\n").encode() * 5


KINDS: dict[str, tuple[Callable[[random.Random], bytes], dict[str, Any]]] = {
    "a.parquet": (parquet, {}),
    "a.arrow": (arrow, {}),
    "a.csv": (csv, {}),
    "a.jsonl": (json_lines, {}),
    "b.jsonl": (batch, {"format": "openai_batch"}),
}


def damage(data: bytes, draw: random.Random, is_text: bool) -> bytes:
    """The bytes with one or some changes; footers are at the end, so a quarter of them are made there."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        place = draw.randrange(len(changed) + 1)
        if draw.random() < 0.25:
            place = max(0, len(changed) - draw.randrange(900))
        length = draw.choice([0, 1, 1, 1, 4, 20])
        new = draw.choice([b"", bytes([draw.randrange(256)]), draw.choice(PIECES if is_text else EDGES)])
        if draw.random() < 0.1:  # a part of itself
            start = draw.randrange(len(changed) + 1)
            new = bytes(changed[start : start + draw.randrange(200)])
        changed[place : place + length] = new
    return bytes(changed)


def read(path: Path, options: dict[str, Any], draw: random.Random) -> str:
    """What a job does with its input: the number of rows, or the error's text."""
    if draw.random() < 0.3:
        options = {**options, "where": draw.choice(["s is not null", "i > 1", "custom_id <> 'b'"])}
    try:
        given = open_table(path, **options)
        given.fingerprint()
        rows = 0
        for _, part in given.batches(batch_rows=draw.choice([1, 7, 1000])):
            python_rows(part)
            write(part)
            rows += part.num_rows
        return f"{rows} rows"
    except (InputError, SpecError) as error:
        text = str(error)
        return f"error {text!r}" if "\n" not in text and len(text) < 2000 else f"NOT ONE LINE: {text!r}"


def write(part: pa.RecordBatch) -> None:
    with contextlib.suppress(pa.ArrowException, OSError):  # which delivery would tell
        pq.write_table(pa.Table.from_batches([part]), pa.BufferOutputStream())


def outcome(folder: Path, number: int) -> str:
    draw = random.Random(number)
    name = draw.choice(list(KINDS))
    make, options = KINDS[name]
    path = folder / name
    path.write_bytes(damage(make(draw), draw, make in (csv, json_lines, batch)))
    signal.alarm(SECONDS)
    try:
        return f"{name} {read(path, options, draw)}"
    except Exception:
        return f"{name} RAISED {traceback.format_exc()!r}"
    finally:
        signal.alarm(0)


def main(folder: str, first: str, last: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    pa.set_cpu_count(1)
    for number in range(int(first), int(last)):
        print(number, "...", flush=True)
        print(number, outcome(Path(folder), number), flush=True)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


if __name__ == "__main__":
    main(*sys.argv[1:])
