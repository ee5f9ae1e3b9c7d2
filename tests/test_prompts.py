"""Rows into prompts: every row a prompt or a failure, whatever its values are and wherever its tokens are kept."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from batchgen import prompt_sources, prompts
from batchgen.engine.planner import Admission, plan_prefixes
from batchgen.engine.prompt_table import MemoryStore, PromptTableBuilder, TokenStore
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import plan_order
from batchgen.engine.types import SamplingParams
from batchgen.errors import InputError, RowError
from batchgen.io.scratch import Scratch
from batchgen.io.table import open_table
from batchgen.prompts import JobPrompts, PromptReader
from batchgen.spec import JobSpec, load_spec
from batchgen.text.chat_template import ChatTemplate
from batchgen.yaml_text import write_yaml

ADMISSION = Admission(context_length=12, vocab_size=2**31 - 1, kv_tokens=100)
CHAT = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}", None, None)


class Characters:
    """A tokenizer whose tokens are code points; lone surrogates cannot be encoded."""

    add_bos, bos_token = True, "^"

    def __init__(self, on_encode: Callable[[Sequence[str]], None] = lambda texts: None):
        self._on_encode = on_encode

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[NDArray[np.int32]]:
        self._on_encode(texts)
        if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
            raise RowError("encode_error", "not valid Unicode")
        return [np.array([ord(c) for c in text], np.int32) for text in texts]

    encode_rendered_batch = encode_batch

    def protect(self, value: Any) -> Any:
        return value


def make_spec(folder: Path, given: dict[str, Any], sampling: dict[str, Any] | None = None) -> JobSpec:
    spec = {"model": {"source": "none.gguf"}, "input": {"path": str(folder / "rows.parquet"), **given}}
    (folder / "job.yaml").write_text(write_yaml({**spec, "sampling": sampling or {}}), encoding="utf-8")
    return load_spec(folder / "job.yaml", [])


def read(
    folder: Path,
    rows: pa.Table,
    given: dict[str, Any],
    sampling: dict[str, Any] | None = None,
    tokenizer: Any = None,
    store: TokenStore | None = None,
    **options: Any,
) -> JobPrompts:
    pq.write_table(rows, folder / "rows.parquet")
    spec = make_spec(folder, given, sampling)
    table = open_table(spec.input.path, where=spec.input.where, limit=spec.input.limit)
    reader = PromptReader(spec, tokenizer or Characters(), CHAT, ADMISSION.context_length)
    reader.check(table)
    return reader.read(table, ADMISSION, store or MemoryStore(), **options)


def found(result: JobPrompts) -> dict[int, Any]:
    """What became of each row: its tokens, or the failure's code and message."""
    failed = {row.row_index: (row.failure.code, row.failure.message) for row in result.failures}
    rows = result.table.row_index.tolist()
    made = {row: result.table.prompt(i).tolist() for i, row in enumerate(rows)}
    assert not failed.keys() & made.keys() and rows == sorted(rows)
    assert sorted(failed.keys() | made.keys()) == result.row_index.tolist()
    return failed | made


# Token ids

MISSING = ("prompt_missing", "column 'ids' is null")
HOLES = ("encode_error", "column 'ids' does not hold a list of whole numbers")
OUTSIDE = ("encode_error", "column 'ids' has a token id outside 0..2147483647")
EMPTY = ("prompt_missing", "the prompt has no tokens")
UNKNOWN = ("encode_error", "the prompt has a token id outside 0..2147483646")
LONG = ("prompt_too_long", "the prompt has 13 tokens; the model's context holds 12")


def one_by_one(ids: list[Any] | None) -> Any:
    """What becomes of a value, decided in Python."""
    if ids is None:
        return MISSING
    if None in ids:
        return HOLES
    if any(not 0 <= i < 2**31 for i in ids):
        return OUTSIDE
    if not ids:
        return EMPTY
    return UNKNOWN if 2**31 - 1 in ids else LONG if len(ids) == 13 else ids


UGLY: list[list[Any] | None] = [
    None, [1, 2], [], [None], [3], [None, -1], [-1], [0], [5, None, 6], [2**31], [2**31 - 1], [7] * 12, [7] * 13,
    [2**40, 1], None, [2**63 - 1], [-(2**63)], [2**31 - 2], [1, 2], [], [9],
]  # fmt: skip


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_every_list_of_ids_is_taken_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, batch_rows: int
) -> None:
    monkeypatch.setattr(prompts, "BATCH_ROWS", batch_rows)
    table = pa.table({"ids": pa.array(UGLY, kind(pa.int64()))})
    result = read(tmp_path, table, {"token_ids": "ids"})
    assert found(result) == {row: one_by_one(ids) for row, ids in enumerate(UGLY)}
    assert result.samples.tolist() == [1] * len(UGLY)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ids_of_any_width(tmp_path: Path, name: str) -> None:
    limits = np.iinfo(name)
    rows = [[1, 2], [limits.max], None, [limits.min], [3, None], []]
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.type_for_alias(name)))})
    assert found(read(tmp_path, table, {"token_ids": "ids"})) == {i: one_by_one(ids) for i, ids in enumerate(rows)}


def test_lists_of_a_fixed_size_with_nulls(tmp_path: Path) -> None:
    rows = [[1, 2], None, [3, None], [-1, 4], [5, 6]]
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32(), 2))})
    assert found(read(tmp_path, table, {"token_ids": "ids"})) == {i: one_by_one(ids) for i, ids in enumerate(rows)}


def test_a_column_of_nothing_but_nulls(tmp_path: Path) -> None:
    table = pa.table({"ids": pa.nulls(3)})
    assert found(read(tmp_path, table, {"token_ids": "ids"})) == dict.fromkeys(range(3), MISSING)


def test_filtered_and_limited_lists(tmp_path: Path) -> None:
    rows = [[i] * (i % 4) if i % 5 else None for i in range(40)]
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32())), "use": [i % 3 != 0 for i in range(40)]})
    result = read(tmp_path, table, {"token_ids": "ids", "where": "use", "limit": 20})
    kept = [i for i in range(40) if i % 3][:20]
    assert found(result) == {i: one_by_one(rows[i]) for i in kept}


# Texts


def texts(*values: str | None) -> pa.Table:
    return pa.table({"q": pa.array(values, pa.string()), "id": [f"r{i}" for i in range(len(values))]})


FEW = {"prompt": "{{ q }}", "chat": False, "id": "id"}


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
@pytest.mark.parametrize("characters", [1, 5, 1000])
def test_failures_stay_with_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int, characters: int
) -> None:
    monkeypatch.setattr(prompts, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(prompt_sources, "ENCODE_CHARACTERS", characters)
    values = ["ab", "", None, "abc", "x" * 13, "b", "boom", "c"]
    given = {**FEW, "prompt": "{{ q }}{% if q == 'boom' %}{{ raise_exception('no') }}{% endif %}"}
    result = read(tmp_path, texts(*values), given)
    rows = found(result)
    assert {row: value for row, value in rows.items() if isinstance(value, list)} == {
        i: [ord(c) for c in value] for i, value in enumerate(values) if value in ("ab", "abc", "b", "c")
    }
    codes = {row.name: row.failure.code for row in result.failures}
    assert codes == {
        "r1": "prompt_missing", "r2": "prompt_missing", "r4": "prompt_too_long", "r6": "template_error",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [["\ud800"], ["a", "b\udfff", "c"]])
def test_texts_that_cannot_be_encoded_fail_alone(bad: list[str]) -> None:
    source = prompt_sources.TextSource(frozenset(), str, Characters().encode_batch, None)
    encoded = source.encode(bad)
    assert {place: failure.code for place, failure in encoded.failures.items()} == {
        place: "encode_error" for place, text in enumerate(bad) if len(text.encode("utf-8", "ignore")) < len(text)
    }
    assert encoded.tokens.tolist() == [ord(c) for text in bad for c in text if c.isascii() and len(text) == 1]


def test_chats_and_bos(tmp_path: Path) -> None:
    chat = [[{"role": "user", "content": "a"}], [{"role": "system", "content": None}], [], None]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    rows = found(read(tmp_path, pa.table({"m": pa.array(chat, kind)}), {"messages": "m"}))
    assert rows[0] == [ord(c) for c in "u:a;"]
    assert [rows[row][0] for row in (1, 2, 3)] == ["schema_error", "prompt_missing", "prompt_missing"]
    table = pa.table({"q": ["^a", "b", "^"], "id": ["1", "2", "3"]})
    assert read(tmp_path, table, {**FEW, "parse_special": True}).bos_in_text == 2


# What is asked


def test_wishes_are_kept_once_and_seeds_apart(tmp_path: Path) -> None:
    rows = pa.table({"q": list("abcdef"), "n": [1, 2, 1, 2, 1, 0], "seed": [5, 6, 7, 8, 9, 10]})
    sampling = {"n": "{{ n }}", "seed": "{{ seed }}", "temperature": 0.5, "max_tokens": 3}
    result = read(tmp_path, rows, {"prompt": "{{ q }}", "chat": False}, sampling)
    assert len(result.wishes.distinct) <= 3
    assert [result.wishes[i] for i in range(5)] == [
        RowWish(SamplingParams(max_tokens=3, temperature=0.5, seed=5 + i), 1 + i % 2, True) for i in range(5)
    ]
    assert result.wishes.n.tolist() == [1, 2, 1, 2, 1] and result.wishes.max_tokens.tolist() == [3] * 5
    (failed,) = result.failures
    assert (failed.row_index, failed.failure.code, failed.samples) == (5, "schema_error", 1)
    assert result.samples.tolist() == [1, 2, 1, 2, 1, 1]


def test_refusals_look_at_each_rows_own_parameters(tmp_path: Path) -> None:
    rows = pa.table({"ids": [[1] * 10] * 3, "most": [1, 5, 200]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    spec = make_spec(tmp_path, {"token_ids": "ids"}, {"max_tokens": "{{ most }}", "n": 2})
    reader = PromptReader(spec, Characters(), None, ADMISSION.context_length)  # type: ignore[arg-type]
    result = reader.read(open_table(spec.input.path), Admission(100, 50, 14), MemoryStore())
    assert found(result)[2] == (
        "resource_error",
        "the prompt's 10 tokens and its answer need 100 tokens of KV memory; engine.kv_memory holds 14",
    )
    assert result.kv_shortage(32, 1000) == (
        "engine.kv_memory is too small for 1 row: the longest needs 100 tokens of keys and values; "
        "4000 (bytes) or more would suffice"
    )
    roomy = Admission(100, 50, 4 * 32)
    assert reader.read(open_table(spec.input.path), roomy, MemoryStore()).kv_shortage(32, 1000) is None
    assert result.table.row_index.tolist() == [0, 1] and result.failures[0].samples == 2


def test_a_template_that_needs_no_column_is_asked_for_every_row(tmp_path: Path) -> None:
    result = read(tmp_path, texts("a", "b"), FEW, {"max_tokens": "{{ 1 - 2 }}"})
    assert [row.failure.code for row in result.failures] == ["schema_error"] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7, "{{ t }}"])
@pytest.mark.parametrize("seed", [None, "{{ s }}"])
def test_computed_answers_are_counted_as_requests_have_them(
    tmp_path: Path, temperature: float | str, seed: str | None
) -> None:
    rng = np.random.default_rng(7)
    columns = {name: rng.integers(0, 2, 60) for name in ("q", "m", "n", "s", "t")}
    rows = pa.table({**columns, "q": ["ab"[q] * 3 for q in columns["q"]], "t": columns["t"] / 2})
    sampling = {"temperature": temperature, "max_tokens": "{{ m + 1 }}", "n": "{{ n + 1 }}"}
    given = {"prompt": "{{ q }}", "chat": False}
    result = read(tmp_path, rows, given, sampling | ({"seed": seed} if seed else {}))
    plan = plan_prefixes(result.table)
    requests = make_requests(result.table, plan, plan_order(plan), result.wishes.__getitem__)
    most = sum(len(request.samples) for request in requests)
    computed = int(result.wishes.computed(plan).sum())
    assert computed == most if seed is None else most <= computed < 120


# Where tokens are kept, and what runs beside what


def test_a_table_on_disk_is_the_table_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = [("head " + "ab"[a] * b)[:12] for a, b in rng.integers(0, [2, 9], (300, 2))]
    memory = read(tmp_path, texts(*rows), FEW)
    monkeypatch.setattr(prompts, "BATCH_ROWS", 7)
    monkeypatch.setattr(prompts, "PromptTableBuilder", partial(PromptTableBuilder, window_tokens=50))
    with Scratch(tmp_path, memory_bytes=100) as scratch:
        disk = read(tmp_path, texts(*rows), FEW, store=scratch)
        assert len(disk.table.runs) > 10 and found(disk) == found(memory)
        one, other = plan_prefixes(memory.table), plan_prefixes(disk.table, 60)
        assert one.order.tolist() == other.order.tolist() and one.shared.tolist() == other.shared.tolist()


def test_the_next_batch_is_rendered_while_one_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "BATCH_ROWS", 1)
    second = threading.Event()

    def wait(encoded: Sequence[str]) -> None:
        assert encoded != ["a"] or second.wait(20), "nothing is rendered meanwhile"

    rendered = prompt_sources.TextSource.render

    def render(self: Any, batch: pa.RecordBatch, rows: Any) -> Any:
        if batch["q"].to_pylist() == ["b"]:
            second.set()
        return rendered(self, batch, rows)

    monkeypatch.setattr(prompt_sources.TextSource, "render", render)
    result = read(tmp_path, texts(*"abc"), FEW, tokenizer=Characters(wait))
    assert found(result) == {i: [97 + i] for i in range(3)}


def test_progress_and_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "BATCH_ROWS", 2)
    told: list[tuple[int, int]] = []
    result = read(tmp_path, texts("ab", "c", "x" * 13, "d", "e"), FEW, on_rows=lambda *done: told.append(done))
    assert told == [(2, 3), (4, 17), (5, 18)]
    assert result.encoded_tokens == 18 and result.tokenize_seconds > 0
    assert result.tokens_per_second == 18 / result.tokenize_seconds


def fail_at(text: str, error: BaseException) -> Callable[[Sequence[str]], None]:
    def check(encoded: Sequence[str]) -> None:
        if text in encoded:
            raise error

    return check


@pytest.mark.parametrize("error", [MemoryError("no"), KeyboardInterrupt()])
def test_an_error_while_encoding_ends_reading_and_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(prompts, "BATCH_ROWS", 2)
    before = threading.enumerate()
    with pytest.raises(type(error)):
        read(tmp_path, texts(*"abcdefgh"), FEW, tokenizer=Characters(fail_at("e", error)))
    assert threading.enumerate() == before


def test_an_input_that_is_damaged_further_on_ends_reading_and_its_thread(tmp_path: Path) -> None:
    pq.write_table(texts(*["abcdefgh"] * 5000), tmp_path / "rows.parquet", row_group_size=1000, compression="none")
    spec = make_spec(tmp_path, FEW)
    table = open_table(spec.input.path)
    data = bytearray((tmp_path / "rows.parquet").read_bytes())
    stat = (tmp_path / "rows.parquet").stat()
    group = pq.ParquetFile(tmp_path / "rows.parquet").metadata.row_group(3).column(0)
    data[group.dictionary_page_offset : group.dictionary_page_offset + 20] = b"\xff" * 20
    (tmp_path / "rows.parquet").write_bytes(data)
    os.utime(tmp_path / "rows.parquet", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = threading.enumerate()
    with pytest.raises(InputError, match="damaged"):
        PromptReader(spec, Characters(), None, ADMISSION.context_length).read(table, ADMISSION, MemoryStore())  # type: ignore[arg-type]
    assert threading.enumerate() == before
