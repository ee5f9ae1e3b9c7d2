"""The first rows are answered while the others are read: the same answers, and as many tokens as the plan says."""

import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchgen import head_start, prompts
from batchgen.errors import InputError
from batchgen.job_plan import plan_job
from batchgen.progress import SilentProgress
from tests.test_job import after, answers, job, small_table


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "HEAD_ROWS", 7)
    monkeypatch.setattr(head_start, "LEAST_TIMES", 2)


def spec_of(make_spec: Any, name: str, path: Path, **sampling: Any) -> Any:
    given = {"path": str(path), "messages": "messages"}
    return make_spec(
        name, input=given, sampling={"max_tokens": 6, **sampling}, engine={"max_num_seqs": 4, "kv_memory": "128MiB"}
    )


SAMPLED = {"temperature": 0.8, "n": 2}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_answers_and_the_planned_tokens(
    make_spec, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """Three rows of the rest are equal to rows of the head; sampled ones draw on from them."""
    table = small_table(tmp_path)
    whole = spec_of(make_spec, "whole", table, **sampling)
    run(whole)
    monkeypatch.setattr(head_start, "HEAD_ROWS", 7)
    monkeypatch.setattr(head_start, "LEAST_TIMES", 2)
    spec = spec_of(make_spec, "head", table, **sampling)
    plan = plan_job(spec, SilentProgress()).values()
    run(spec)
    assert answers(spec) == answers(whole)
    recorded, totals = job(spec)["plan"], job(spec)["totals"]
    assert all(plan[name] == recorded[name] for name in recorded if not name.endswith("_seconds"))
    found = recorded["computed_prompt_tokens"] - totals["computed_prompt_tokens"]  # at the head's last row
    assert 0 <= found < recorded["longest_prompt"]
    assert totals["computed_prompt_tokens"] > recorded["distinct_prompt_tokens"]  # what the head costs
    assert totals["rows"] == recorded["rows"] == 18


@pytest.mark.usefixtures("small_heads")
def test_scores_of_a_head_and_of_the_rest(make_spec, run, tmp_path: Path) -> None:
    """Rows 3 to 20 are equal to earlier ones or share most with them."""
    frame = pl.DataFrame({"q": [f"Count to {i % 9}:" for i in range(21)]})
    frame.write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False}
    spec = make_spec("scores", input=given, task={"kind": "choose", "choices": [" one", " one two", " two"]})
    assert run(spec).rows == 21
    found = pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")
    by_text: dict[str, Any] = {}
    for row in found.iter_rows(named=True):
        assert by_text.setdefault(row["q"], row["choice_scores"]) == row["choice_scores"]
    recorded, totals = job(spec)["plan"], job(spec)["totals"]
    assert 0 <= recorded["computed_prompt_tokens"] - totals["computed_prompt_tokens"] < recorded["longest_prompt"]
    assert recorded["scored_tokens"] == totals["scored_tokens"] == 21 * 4


@pytest.mark.usefixtures("small_heads")
def test_the_head_is_answered_before_the_last_row_is_read(
    make_spec, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(make_spec, "slow", small_table(tmp_path))
    parts = Path(spec.output.path) / ".work" / "manifest.jsonl"
    read, seen = prompts.PromptReader.read, []

    def slow(*args: Any) -> Any:
        if args[-1] is None:  # all rows
            deadline = time.monotonic() + 60
            while not (parts.exists() and parts.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            seen.append(parts.exists() and parts.stat().st_size > 0)
        return read(*args)

    monkeypatch.setattr(prompts.PromptReader, "read", slow)
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"part_seconds": 0.1})})
    assert run(spec).rows == 18
    assert seen == [True]


@pytest.mark.usefixtures("small_heads")
def test_stopped_while_reading_and_resumed(make_spec, run, tmp_path: Path) -> None:
    table = small_table(tmp_path)
    spec, whole = spec_of(make_spec, "stopped", table), spec_of(make_spec, "whole", table)
    assert run(spec, stop=after(4)).interrupted
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]
    run(spec), run(whole)
    assert answers(spec) == answers(whole)


@pytest.mark.usefixtures("small_heads")
def test_what_goes_wrong_while_reading_ends_the_job(
    make_spec, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = prompts.PromptReader.read

    def broken(*args: Any) -> Any:
        if args[-1] is None:
            raise InputError("the table is damaged at row 12")
        return read(*args)

    monkeypatch.setattr(prompts.PromptReader, "read", broken)
    with pytest.raises(InputError, match="row 12"):
        run(spec_of(make_spec, "broken", small_table(tmp_path)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize(
    ("rows", "engine", "head"),
    [
        (13, {}, 0),
        (14, {}, 7),
        (14, {"schedule": "fifo"}, 0),
        (14, {"schedule": "prefill_first"}, 7),
        (14, {"prefix_sharing": False}, 0),
    ],
)
def test_which_tables_have_a_head(make_spec, tmp_path: Path, rows: int, engine: dict[str, Any], head: int) -> None:
    from batchgen.io.table import open_table

    pl.DataFrame({"q": ["a"] * rows}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}"}, engine=engine)
    assert head_start.head_rows(spec.engine, open_table(spec.input.path)) == head
    assert head_start.head_rows(spec.engine, open_table(spec.input.path, where="q = 'a'")) == 0  # may leave few
