"""Files elsewhere, by URI: on fsspec's file system in memory, and on this disk."""

import json
import os

import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry

from batchgen.errors import InputError
from batchgen.io import sources
from batchgen.io.table import open_table
from tests.io.delivery import expected, run

MEMORY = "fsspec+memory://"


@pytest.fixture
def memory():
    """Files of three formats; the name of each is in its rows."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    for name in ("in/n=2/b.parquet", "in/n=10/a.parquet", "in/_hidden/c.parquet", "in/n=2/.d.parquet"):
        with files.open(f"/{name}", "wb") as file:
            pq.write_table(pa.table({"name": [name]}), file)
    files.pipe("/lines/a.jsonl", b'{"name": "lines/a.jsonl"}\n')
    files.pipe("/lines/b.csv", b"name\nlines/b.csv\n")
    yield files
    files.store.clear()


def rows_of(table):
    return [row for _, batch in table.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("uri", "rows"),
    [
        ("/in", [{"name": "in/n=10/a.parquet", "n": 10}, {"name": "in/n=2/b.parquet", "n": 2}]),
        ("/in/", [{"name": "in/n=10/a.parquet", "n": 10}, {"name": "in/n=2/b.parquet", "n": 2}]),
        ("/in/n=2", [{"name": "in/n=2/b.parquet"}]),
        ("/in/n=2/b.parquet", [{"name": "in/n=2/b.parquet"}]),
        ("/in/*/a.*", [{"name": "in/n=10/a.parquet", "n": 10}]),
        ("/**/*.jsonl", [{"name": "lines/a.jsonl"}]),
        ("/lines/[b-z].csv", [{"name": "lines/b.csv"}]),
    ],
)
def test_what_a_uri_names(memory, uri, rows):
    assert rows_of(open_table(MEMORY + uri)) == rows


def test_the_same_files_here_and_there(memory, tmp_path):
    (tmp_path / "n=2").mkdir()
    (tmp_path / "n=2" / "b.parquet").write_bytes(memory.cat("/in/n=2/b.parquet"))
    memory.rm("/in/n=10", recursive=True)
    here, there = open_table(tmp_path), open_table(f"{MEMORY}/in")
    assert rows_of(here) == rows_of(open_table(tmp_path.as_uri())) == rows_of(there)
    assert here.fingerprint() == open_table(tmp_path.as_uri()).fingerprint()
    # The memory has neither times nor hashes of content to tell, so it is the content that is hashed.
    assert there.fingerprint() == here.fingerprint()
    assert open_table(tmp_path.as_uri()).paths == (tmp_path / "n=2" / "b.parquet",) and there.paths == ()


def test_delivery_of_a_remote_table(memory, tmp_path):
    run(tmp_path / "out", open_table(f"{MEMORY}/in"), expected(range(2))).close()
    assert pq.read_table(tmp_path / "out" / "results")["n"].to_pylist() == [10, 2]


def test_a_remote_file_that_changes(memory):
    table = open_table(f"{MEMORY}/lines/a.jsonl")
    before = table.fingerprint()
    memory.pipe("/lines/a.jsonl", b'{"name": "other"}\n')
    with pytest.raises(InputError, match=r"^fsspec.memory://lines/a\.jsonl: has changed since the job started"):
        list(table.batches())
    assert open_table(f"{MEMORY}/lines/a.jsonl").fingerprint() != before


@pytest.mark.parametrize(("name", "first", "second"), [("etag", "a", "b"), ("blob_id", "a", "b"), ("mtime", 1.0, 2.0)])
def test_what_the_storage_tells_of_the_content_is_the_fingerprint(memory, monkeypatch, name, first, second):
    told = {"/lines/a.jsonl": first}
    info = memory.info
    monkeypatch.setattr(type(memory), "info", lambda self, path, **_: {**info(path), name: told.get(path)})
    table = open_table(f"{MEMORY}/lines/a.jsonl")
    before = table.fingerprint()
    memory.pipe("/lines/a.jsonl", b'{"name": "lines/b.jsonl"}\n')  # as long as before
    assert open_table(f"{MEMORY}/lines/a.jsonl").fingerprint() == before
    told["/lines/a.jsonl"] = second
    assert open_table(f"{MEMORY}/lines/a.jsonl").fingerprint() != before
    with pytest.raises(InputError, match="has changed"):
        list(table.batches())


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


class FileSystem:
    """Stands for pyarrow's, which cannot be patched."""

    def __init__(self, error):
        self.error, self.asked = error, []

    def from_uri(self, uri):
        self.asked.append(uri)
        raise self.error


@pytest.mark.parametrize(
    ("uri", "error", "words"),
    [
        ("s3://bucket/a.parquet", OSError("AWS Error NETWORK_CONNECTION: curlCode: 6\nmore"), "curlCode: 6"),
        ("gs://bucket/*.csv", OSError("Permanent error: no credentials"), "no credentials"),
        ("hf://datasets/a/b", ImportError("The 'hf://' scheme needs huggingface_hub"), "needs huggingface_hub"),
        ("ftp://a/b", None, "Unrecognized filesystem type in URI"),
        ("fsspec+nothing://a/b", None, "nothing"),
        (f"{MEMORY}/none.parquet", None, "no file of a format that is read"),
        (f"{MEMORY}/in/*.csv", None, "no file of a format that is read"),
        ("s3://key:secret@bucket/a.parquet", None, "holds a password, which job.json would repeat"),
    ],
)
def test_what_cannot_be_had_is_told_in_a_line(memory, monkeypatch, uri, error, words):
    if error is not None:
        monkeypatch.setattr(pyarrow.fs, "FileSystem", FileSystem(error))
    with pytest.raises(InputError) as caught:
        open_table(uri)
    message = str(caught.value)
    assert words in message and "\n" not in message and uri.partition("//")[0] in message
    assert "secret" not in message and "more" not in message


def test_a_connection_that_breaks_while_a_table_is_read(memory, monkeypatch):
    table = open_table(f"{MEMORY}/in")
    monkeypatch.setattr(type(memory), "_open", failing(RuntimeError("connection reset\nby peer")))
    with pytest.raises(
        InputError, match=r"^fsspec.memory://in/n=10/a.parquet: damaged or unreadable: connection reset$"
    ):
        list(table.batches())


def test_datasets_of_the_hub_are_found_by_the_hub_s_own_library(memory, monkeypatch):
    """Its file system, played by one in memory, whose paths have no slash in front either."""

    class Hub(fsspec.get_filesystem_class("memory")):
        protocol = "hf"

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("hf://").strip("/")

    monkeypatch.setitem(_registry, "hf", Hub)
    Hub().pipe("datasets/org/name@main/data/train-0.jsonl", b'{"x": 1}\n')
    Hub().pipe("datasets/org/name@main/README.md", b"")
    for uri in ("hf://datasets/org/name@main", "hf://datasets/org/name@main/data/*.jsonl"):
        assert rows_of(open_table(uri)) == [{"x": 1}]


def test_storage_that_cannot_be_reached_is_not_tried_for_long_minutes(monkeypatch):
    files = FileSystem(OSError("no"))
    monkeypatch.setattr(pyarrow.fs, "FileSystem", files)
    for uri in ("gs://bucket/a.csv", "gs://bucket/*.csv?anonymous=true", "gs://bucket/a?retry_limit_seconds=5"):
        with pytest.raises(InputError):
            open_table(uri)
    assert files.asked == [
        f"gs://bucket/a.csv?retry_limit_seconds={sources._GCS_SECONDS}",
        f"gs://bucket?anonymous=true&retry_limit_seconds={sources._GCS_SECONDS}",
        "gs://bucket/a?retry_limit_seconds=5",
    ]


def test_local_paths_need_none_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pyarrow.fs, "FileSystem", FileSystem(AssertionError()))
    monkeypatch.chdir(tmp_path)
    os.mkdir("s3:")
    for name in ("a b.jsonl", "s3:/a.jsonl", "~.jsonl", "x#y?.jsonl"):
        with open(name, "w") as file:
            json.dump({"x": name}, file)
        assert rows_of(open_table(name)) == [{"x": name}]
