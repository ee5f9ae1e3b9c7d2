"""An edited job takes over the answers that it would compute again; bitwise, and no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchgen import cli, runner
from batchgen.errors import OutputError
from batchgen.kernels.cpu.backend import CpuBackend
from batchgen.runner import run_job
from tests.test_job import after, answers, job, results

ROWS = ["one two", "three four", "five six seven", "one two", "eight nine", None, "ten"]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "n": 2}


class Notes:
    """A progress listener that keeps messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def update(self, progress: Any) -> None: ...
    def close(self) -> None: ...
    def message(self, text: str) -> None:
        self.texts.append(text)


Make = Callable[..., Any]


@pytest.fixture
def make(make_spec, tmp_path: Path) -> Make:
    """`make(name, texts, **sampling)`: a job on a table of these prompts."""

    def make(name: str, texts: list[str | None], **sampling: Any) -> Any:
        pl.DataFrame({"q": texts}, schema={"q": pl.String}).write_parquet(tmp_path / f"{name}.parquet")
        given = {"path": str(tmp_path / f"{name}.parquet"), "prompt": "{{ q }}", "chat": False}
        output = {"path": str(tmp_path / name), "part_rows": 2}
        return make_spec(name, input=given, sampling={"max_tokens": 3, **sampling}, output=output)

    return make


def edited(make: Make, name: str, texts: list[str | None], **sampling: Any) -> Any:
    """Another job with the output directory of job `name`."""
    spec = make("edited", texts, **sampling)
    path = str(Path(spec.output.path).with_name(name))
    return spec.model_copy(update={"output": spec.output.model_copy(update={"path": path})})


# title: the sampling of both jobs, the second job's rows, results that are taken over of those that it has
EDITS: dict[str, tuple[dict[str, Any], list[str | None], int, int]] = {
    "one row edited": ({}, [*ROWS[:2], "another", *ROWS[3:]], 5, 7),
    "rows moved, dropped and added": ({}, ["ten", "new", *ROWS[:3]], 4, 5),
    "a row that could not be answered is mended": ({}, [*ROWS[:5], "mended", "ten"], 6, 7),
    "an answer for more rows than before": ({}, ["one two"] * 4, 4, 4),
    "several answers": (SAMPLED, [*ROWS[:4], "nine eight", "ten"], 10, 12),
    "fewer equal rows": (SAMPLED, ["ten", "one two"], 4, 4),
    "more equal rows than before": (SAMPLED, ["one two"] * 3, 4, 6),
}


@pytest.mark.parametrize(("sampling", "texts", "reused", "wanted"), EDITS.values(), ids=EDITS)
def test_what_is_equal_is_taken_over(
    make: Make, run, sampling: dict[str, Any], texts: list[str | None], reused: int, wanted: int
) -> None:
    first = make("first", ROWS, **sampling)
    run(first)
    before = results(first)
    second = edited(make, "first", texts, **sampling)
    with pytest.raises(OutputError, match=r"holds another job .* --reuse"):
        run(second)
    assert results(second).equals(before)
    notes = Notes()
    run_job(second, fresh=False, progress=notes, stop=lambda: False, reuse=True)
    assert any(text.startswith(f"reused {reused} of {wanted} results") for text in notes.texts), notes.texts
    assert job(second)["totals"]["reused_results"] == reused
    fresh = make("fresh", texts, **sampling)
    run(fresh)
    assert answers(second) == answers(fresh)
    assert run(second).already_done
    check_timings(second)


def check_timings(spec: Any) -> None:
    """Every token has its time, and every time its step."""
    timings = pl.read_parquet(Path(spec.output.path) / "timings" / "*.parquet").sort(
        "row_index", "sample_index", "step"
    )
    rows = timings.group_by("row_index", "sample_index", maintain_order=True).agg("token_id")
    answered = results(spec).filter(pl.col("num_generated_tokens") > 0)
    assert rows["token_id"].to_list() == answered["token_ids"].to_list()
    steps = pl.read_parquet(Path(spec.output.path) / "steps" / "*.parquet")["step"]
    assert steps.is_unique().all() and timings["step"].is_in(steps.implode()).all()


def test_an_answer_stays_as_it_is_where_it_stays_in_place(make: Make, run) -> None:
    first = make("first", ROWS)
    run(first)
    before = results(first)
    second = edited(make, "first", [*ROWS[:6], "changed"])
    run(second, reuse=True)
    assert results(second).head(5).equals(before.head(5))


def test_an_unfinished_job_is_taken_over(make: Make, run) -> None:
    texts: list[str | None] = [f"number {i}" for i in range(12)]
    first = make("first", texts)
    first = first.model_copy(update={"engine": first.engine.model_copy(update={"max_num_seqs": 3})})
    assert run(first, stop=after(7)).interrupted
    second = edited(make, "first", [*texts[:-1], "the last"])
    assert run(second, reuse=True, stop=after(1)).interrupted
    run(second)  # it is this job's directory by now
    fresh = make("fresh", [*texts[:-1], "the last"])
    run(fresh)
    assert answers(second) == answers(fresh)
    assert 3 <= job(second)["totals"]["reused_results"] < 12


@pytest.mark.parametrize("sampling", [{"max_tokens": 2}, {"temperature": 1.0}, {"stop": ["x"]}])
def test_nothing_equal_is_refused_and_nothing_lost(make: Make, run, sampling: dict[str, Any]) -> None:
    first = make("first", ROWS)
    run(first)
    before = answers(first)
    with pytest.raises(OutputError, match="holds no answer that this job could take over"):
        run(edited(make, "first", ROWS, **sampling), reuse=True)
    assert run(first).already_done and answers(first) == before


def test_reuse_changes_nothing_where_nothing_has_changed(make: Make, run) -> None:
    first = make("first", ROWS)
    assert run(first, reuse=True).rows == 7
    assert run(first, reuse=True).already_done


def test_unreadable_results_are_told(make: Make, run) -> None:
    first = make("first", ROWS)
    run(first)
    part = Path(first.output.path) / "results" / "part-00001.parquet"
    pl.read_parquet(part).drop("request_hash").write_parquet(part)
    with pytest.raises(OutputError, match=r"part-00001\.parquet cannot be read: .*; --fresh starts"):
        run(edited(make, "first", ["ten"]), reuse=True)


def test_fresh_goes_with_neither(make: Make, tmp_path: Path, capsys) -> None:
    make("first", ROWS)
    for option in ("--reuse", "--retry-errors"):
        assert cli.main(["run", str(tmp_path / "first.yaml"), "--fresh", option]) == 2
        assert "--fresh replaces everything" in capsys.readouterr().err


@pytest.mark.parametrize("finished", [True, False])
def test_errors_are_computed_again_and_nothing_else(
    make: Make, run, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """A row whose step fails in the backend, beside one that can never be answered."""
    spec, sound = make("first", ROWS, n=2), make("sound", ROWS, n=2)
    run(sound)
    evil = results(sound)["token_ids"][4][0]  # the first token that row 2 is answered with
    compute = CpuBackend.run

    def broken(self: CpuBackend, batch: Any) -> Any:
        if (batch.input_ids == evil).any():
            raise ValueError("unlucky")
        return compute(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "run", broken)
        if finished:
            assert run(spec).failures == {"prompt_missing": 1, "internal_error": 1}
        else:
            patch.setattr(runner, "deliver", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(spec)
    before = results(spec) if finished else None
    assert run(spec, retry_errors=True).failures == {"prompt_missing": 1}
    assert answers(spec) == answers(sound)
    assert job(spec)["totals"]["reused_results"] == 10
    check_timings(spec)
    if before is not None:
        assert before["error"].struct.field("code").to_list()[4:6] == ["internal_error"] * 2
        others = pl.col("row_index") != 2
        assert results(spec).filter(others).equals(before.filter(others))


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_retrying_where_there_are_no_errors_does_nothing(make: Make, run) -> None:
    spec = make("first", ["one", "two"])
    run(spec)
    part = Path(spec.output.path) / "results" / "part-00000.parquet"
    before = part.stat()
    assert run(spec, retry_errors=True).already_done
    assert part.stat() == before


def test_retrying_is_for_the_same_job(make: Make, run) -> None:
    run(make("first", ROWS))
    with pytest.raises(OutputError, match="holds another job"):
        run(edited(make, "first", ROWS[:2]), retry_errors=True)
