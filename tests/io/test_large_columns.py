"""Columns of more than 2 GB, which one string array cannot hold, through reading and delivery, with little memory."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
MEGABYTE = "0123456789abcdef" * (1 << 16)
ROWS = 2200
PEAK_MIB = 1024

# In a process of its own, for the sake of its peak.
DRIVER = """
import resource, sys
from pathlib import Path
from batchgen.io.table import open_table
from tests.io.delivery import expected, run

folder, name, samples = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
table = open_table(folder / name)
run(folder / "out", table, expected(range(table.num_rows_upper), samples), part_rows=500).close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def deliver(folder: Path, name: str, samples: int = 1) -> int:
    """The peak of memory, MiB."""
    command = [sys.executable, "-c", DRIVER, str(folder), name, str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def check(folder: Path, rows: int, kind: pa.DataType) -> None:
    total = 0
    for number, path in enumerate(sorted((folder / "out" / "results").iterdir())):
        with pq.ParquetFile(path) as file:
            assert file.schema_arrow.field("x").type == kind
            for batch in file.iter_batches(50, columns=["x", "row_index"]):
                assert all(text == MEGABYTE for text in batch.column("x").unique().to_pylist()), number
                total += batch.num_rows
    assert total == rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_one_row_group_of_parquet(tmp_path, kind):
    chunk = pa.array([MEGABYTE] * 100).cast(kind)
    table = pa.table({"x": pa.chunked_array([chunk] * (ROWS // 100))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS, compression="zstd")
    del table, chunk
    peak = deliver(tmp_path, "a.parquet")
    check(tmp_path, ROWS, kind)
    assert peak < PEAK_MIB


@pytest.mark.slow
def test_lines_of_json(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(ROWS):
            file.write(json.dumps({"x": MEGABYTE}).encode() + b"\n")
    peak = deliver(tmp_path, "a.jsonl.gz")
    check(tmp_path, ROWS, pa.string())
    assert peak < PEAK_MIB


@pytest.mark.slow
def test_a_row_repeated_beside_many_answers(tmp_path):
    pq.write_table(pa.table({"x": [MEGABYTE] * 2}), tmp_path / "a.parquet")
    peak = deliver(tmp_path, "a.parquet", ROWS)
    check(tmp_path, 2 * ROWS, pa.string())
    assert peak < PEAK_MIB
