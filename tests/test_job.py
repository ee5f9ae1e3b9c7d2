"""Whole jobs on the real model: every row once, nothing changed on its way through, the same bits whatever happens."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import cli, feed, job_plan, runner
from batchgen.engine import run_order
from batchgen.engine.scheduler import LengthEstimate, Scheduler
from batchgen.errors import InputError, OutputError, SpecError, TooManyErrors
from batchgen.io.scratch import Scratch
from batchgen.job_plan import plan_job
from batchgen.progress import Progress, SilentProgress
from tests.conftest import DATA, ROOT
from tests.torture.kills import Moment, kill_and_resume

ANSWER = ["text", "token_ids", "finish_reason", "stop_reason", "num_generated_tokens", "cumulative_logprob", "error"]


def results(spec: Any) -> pl.DataFrame:
    return pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")


def job(spec: Any) -> dict[str, Any]:
    return json.loads((Path(spec.output.path) / "job.json").read_text())


def answers(spec: Any, key: str = "row_index") -> list[tuple[Any, ...]]:
    """What a row got, floats by their bits, ordered by the row's key."""
    frame = results(spec).sort(key, "sample_index")
    bits = frame["cumulative_logprob"].to_numpy().view(np.int64)
    columns = [frame[name].to_list() for name in (key, "sample_index", *ANSWER) if name != "cumulative_logprob"]
    return list(zip(*columns, bits.tolist(), strict=True))


def test_annotate_computes_what_the_plan_says(make_spec, run) -> None:
    spec = make_spec(
        input={"path": str(ROOT / "jobs/data/annotate.parquet"), "messages": "messages"},
        sampling={"max_tokens": 4},
        output={"timings": "token"},
    )
    planned, summary = plan_job(spec, SilentProgress()).figures, run(spec)
    assert (summary.rows, summary.failed_rows) == (60, 0)
    assert planned.generate_seconds is None  # nothing is known of this machine
    totals = job(spec)["totals"]
    assert totals["computed_prompt_tokens"] == planned.distinct_prompt_tokens < planned.prompt_tokens
    assert totals["prompt_tokens"] == planned.prompt_tokens == results(spec)["num_prompt_tokens"].sum()
    assert planned.prompt_tokens - results(spec)["num_cached_tokens"].sum() == planned.distinct_prompt_tokens
    assert 0 < totals["tokenize_seconds"] <= totals["plan_seconds"] and totals["tokenize_tokens_per_second"] > 0
    check_timings(spec, totals)
    check_steps(spec)
    seconds = plan_job(spec, SilentProgress()).figures.generate_seconds  # the run has told
    assert seconds is not None and 0 < seconds[0] < totals["generate_seconds"] * 1.5 and seconds[0] < seconds[1]


PLANS: dict[str, dict[str, Any]] = {
    "all is well": {},
    "without sharing": {"engine": {"prefix_sharing": False}},
    "several answers": {"sampling": {"n": 3, "temperature": 1.0}},
    "several answers without sharing": {"sampling": {"n": 2}, "engine": {"prefix_sharing": False}},
    "in the table's order": {"sampling": {"max_tokens": "{{ most }}"}, "engine": {"schedule": "fifo"}},
    "prompts first": {"sampling": {"n": 2, "temperature": 1.0}, "engine": {"schedule": "prefill_first"}},
    "some rows ask for nothing": {"sampling": {"max_tokens": "{{ most }}"}},
    "the first of equal rows asks for nothing": {"sampling": {"max_tokens": "{{ 2 - most }}"}},
    "the same, in the table's order": {
        "sampling": {"max_tokens": "{{ 2 - most }}"},
        "engine": {"schedule": "fifo"},
    },
    "some rows ask for nothing, without sharing": {
        "sampling": {"max_tokens": "{{ most }}"},
        "engine": {"prefix_sharing": False},
    },
}


@pytest.mark.parametrize("sections", PLANS.values(), ids=PLANS)
def test_plan_and_job_json_and_totals_agree(make_spec, run, tmp_path: Path, sections: dict[str, Any]) -> None:
    """Rows that are too long, null and equal are among them, and rows that ask for no tokens between others."""
    texts = ["one two", "one two three four", None, "one two three", "one two", "x" * 40_000, "seven eight", "one two"]
    frame = pl.DataFrame({"q": texts, "most": [2, 2, 2, 0, 0, 1, 0, 2]})
    frame.write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False}
    engine = {"kv_memory": "128MiB", **sections.get("engine", {})}  # auto depends on what is free just now
    spec = make_spec(input=given, **{"sampling": {"max_tokens": 2}, **sections, "engine": engine})
    plan = plan_job(spec, SilentProgress()).values()
    run(spec)
    recorded, totals = job(spec)["plan"], job(spec)["totals"]
    assert {name: plan[name] for name in recorded} == recorded
    same = ("rows", "failed_rows", "prompt_tokens", "computed_prompt_tokens")
    assert [recorded[name] for name in same] == [totals[name] for name in same]
    assert recorded["answers"] == results(spec).height
    assert recorded["failures"] == {"prompt_missing": 1, "prompt_too_long": 1}
    assert len(plan["failing_rows"]) == 2
    assert recorded["duplicate_rows"] == 2
    assert 0 < totals["generated_tokens"] <= recorded["max_new_tokens"]
    assert recorded["distinct_prompt_tokens"] <= recorded["computed_prompt_tokens"]


def check_timings(spec: Any, totals: dict[str, Any]) -> None:
    timings = pl.read_parquet(Path(spec.output.path) / "timings" / "*.parquet")
    answers = results(spec)
    assert timings.height == totals["generated_tokens"] == answers["num_generated_tokens"].sum()
    rows = timings.sort("row_index", "token_index").group_by("row_index", maintain_order=True).agg("token_id")
    assert rows["token_id"].to_list() == answers["token_ids"].to_list()
    by_row = timings.group_by("row_index").agg(pl.col("logprob").cast(pl.Float64).sum()).sort("row_index")
    np.testing.assert_allclose(by_row["logprob"], answers["cumulative_logprob"], rtol=1e-12)
    assert (timings.sort("row_index", "token_index").group_by("row_index").agg(
        pl.col("t_ns").diff().drop_nulls().min())["t_ns"] > 0).all()  # fmt: skip
    assert timings.filter(pl.col("phase") == "prefill").height == answers.height


def check_steps(spec: Any) -> None:
    steps = pl.read_parquet(Path(spec.output.path) / "steps" / "*.parquet").sort("step")
    parts = steps.select(pl.sum_horizontal("schedule_ns", "forward_ns", "sample_ns", "write_ns")).to_series()
    assert (parts == steps["duration_ns"]).all()
    ends = steps["start_ns"] + steps["duration_ns"]
    assert (steps["start_ns"][1:] >= ends[:-1]).all()
    assert steps["step"].to_list() == list(range(steps.height))
    covered = steps["duration_ns"].sum() / (ends[-1] - steps["start_ns"][0])
    assert covered > 0.95  # between steps there is next to nothing


def test_edge_cases_give_one_result_each_and_pass_through_unchanged(make_spec, run) -> None:
    path = DATA / "io" / "edge_cases.parquet"
    spec = make_spec(input={"path": str(path), "prompt": "{{ prompt }}", "chat": False}, sampling={"max_tokens": 2})
    summary = run(spec)
    source, found = pq.read_table(path), pq.read_table(Path(spec.output.path) / "results")
    assert found.num_rows == source.num_rows == 43
    for name in source.schema.names:
        assert found.schema.field(name).equals(source.schema.field(name), check_metadata=True), name
        assert chunks(found[name]).equals(chunks(source[name])) or name.startswith("score"), name
    for name in ("score", "score32"):
        assert chunks(found[name]).to_numpy(False).tobytes() == chunks(source[name]).to_numpy(False).tobytes()
    errors = {row["case"]: row["error"] for row in results(spec).iter_rows(named=True) if row["error"]}
    assert errors["null_prompt"]["code"] == "prompt_missing" and "prompt is null" in errors["null_prompt"]["message"]
    assert errors["empty_prompt"]["code"] == "prompt_missing"
    assert len(errors) == summary.failed_rows
    equal = (
        results(spec).filter(pl.col("finish_reason") != "error").group_by("prompt").agg(pl.col("token_ids").n_unique())
    )
    assert (equal["token_ids"] == 1).all()


def chunks(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([c.dictionary_decode() if isinstance(c, pa.DictionaryArray) else c for c in column.chunks])


def test_an_openai_batch_is_answered_as_one(make_spec, run, tmp_path: Path) -> None:
    asks = [f"What is {number} plus 1?" for number in range(3)]
    bodies = [{"model": "gpt-4o", "messages": [{"role": "user", "content": ask}], "max_tokens": 4} for ask in asks]
    bodies[1] |= {"n": 2, "temperature": 0.5, "seed": 3}
    bodies[2]["tools"] = [{"type": "function"}]
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": b} for i, b in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = make_spec(input={"path": str(tmp_path / "in.jsonl"), "format": "openai_batch"})
    assert (run(spec).rows, job(spec)["totals"]["failed_rows"]) == (3, 1)
    lines = [json.loads(line) for line in (Path(spec.output.path) / "batch_output.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["r0", "r1", "r2"]
    texts = [[c["message"]["content"] for c in line["response"]["body"]["choices"]] for line in lines[:2]]
    frame = results(spec)
    assert [texts[0][0], *texts[1]] == frame["text"].to_list()[:3] and frame["sample_index"].to_list() == [0, 0, 1, 0]
    assert lines[2]["error"] == {"code": "schema_error", "message": "body.tools is not supported"}

    # The same questions as a table give the same bits.
    (tmp_path / "in.csv").write_text("".join(["ask\n", *(ask + "\n" for ask in asks)]))
    table = make_spec(
        "table", input={"path": str(tmp_path / "in.csv"), "prompt": "{{ ask }}"}, sampling={"max_tokens": 4}
    )
    run(table)
    first, again = (answers(s)[0] for s in (spec, table))
    assert first == again


def test_what_might_surprise_in_the_files_is_told(make_spec, tmp_path: Path) -> None:
    told: list[str] = []

    class Listener(SilentProgress):
        def message(self, text: str) -> None:
            told.append(text)

    for folder in ("n=1", "n=x"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in" / folder / "a.parquet")
    spec = make_spec(input={"path": str(tmp_path / "in"), "prompt": "{{ prompt }}"}, sampling={"max_tokens": 1})
    (note,) = plan_job(spec, SilentProgress()).notes
    assert note.startswith("folder 'n=x' is no int32 as others are")
    runner.run_job(spec, fresh=False, progress=Listener(), stop=lambda: False)
    assert note in told


def test_hive_folders_and_null_typed_columns(make_spec, run) -> None:
    spec = make_spec(
        input={"path": str(DATA / "io" / "edge_hive"), "prompt": "{{ lang }}: {{ prompt }}"}, sampling={"max_tokens": 1}
    )
    run(spec)
    assert results(spec)["lang"].to_list() == ["de"] * 6 + ["en"] * 6
    assert results(spec)["row_index"].to_list() == list(range(12))


def test_prompts_that_do_not_fit_are_errors_that_say_so(make_spec, run) -> None:
    spec = make_spec(input={"path": str(DATA / "job" / "overlong.parquet"), "prompt": "{{ prompt }}"})
    summary = run(spec)
    assert (summary.rows, summary.failed_rows) == (6, 6)
    assert set(results(spec)["error"].struct.field("code")) == {"prompt_too_long"}
    assert all("the model's context holds 8192" in text for text in results(spec)["error"].struct.field("message"))


def test_a_run_ends_with_its_report(make_spec, tmp_path: Path, capsys) -> None:
    table = {"path": str(ROOT / "jobs/data/humaneval.parquet"), "id": "task_id", "prompt": "{{ prompt }}", "limit": 3}
    spec = make_spec(input=table, sampling={"max_tokens": 3})
    assert cli.main(["run", str(tmp_path / "job.yaml")]) == 0
    path = Path(spec.output.path) / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {path}"
    page = path.read_text("utf-8")
    assert "HumanEval/2" in page and "has_close_elements" in page
    path.unlink()
    assert cli.main(["report", spec.output.path]) == 0
    assert path.read_text("utf-8") == page
    assert cli.main(["compare", spec.output.path, spec.output.path]) == 0
    assert "texts that differ: 0 (0.0%)" in capsys.readouterr().out


def small_table(tmp_path: Path, count: int = 18) -> Path:
    """Chat rows that share prefixes, some twice, with a key of their own; greedy or not, for one answer or two."""
    frame = pl.read_parquet(ROOT / "jobs/data/annotate.parquet")
    frame = frame.filter(
        pl.col("messages").list.eval(pl.element().struct.field("content").str.len_chars()).list.sum() < 600
    )
    place = pl.int_range(pl.len())
    frame = frame.with_columns(heat=pl.when(place % 3 == 0).then(0.0).otherwise(0.8), answers=1 + place % 2)
    frame = pl.concat([frame.head(count - 3), frame.head(3)]).with_columns(key=place)
    frame.write_parquet(tmp_path / "small.parquet")
    return tmp_path / "small.parquet"


SETTINGS: dict[str, dict[str, Any]] = {
    "one sequence at a time": {"max_num_seqs": 1},
    "seven sequences": {"max_num_seqs": 7},
    "small chunks": {"max_batch_tokens": 50},
    "no sharing": {"prefix_sharing": False},
    "one thread": {"threads": 1},
    "three threads": {"threads": 3},
    "little memory": {"kv_memory": "11MiB"},
    "set back": {"kv_memory": "11MiB"},
    "large pages": {"page_size": 64},
    "in the table's order": {"schedule": "fifo", "max_num_seqs": 5},
    "prompts before answers": {"schedule": "prefill_first", "max_batch_tokens": 100},
    "from both ends": {"max_num_seqs": 5},
    "interrupted and resumed": {"max_num_seqs": 6},
    "prefixes saved on disk": {"cache": {"disk_path": "kv", "write": "through"}},
    "prefixes found on disk": {"cache": {"disk_path": "kv", "prefetch": True}, "kv_memory": "11MiB"},
}


@pytest.fixture
def mixed_spec(make_spec, tmp_path: Path) -> Callable[..., Any]:
    """A job over `small_table`, greedy and sampled rows with penalties among them."""
    table = small_table(tmp_path)
    sampling = {
        "max_tokens": 32,
        "seed": 3,
        "temperature": "{{ heat }}",
        "n": "{{ answers }}",
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }

    def make(name: str, path: Path = table, **engine: Any) -> Any:
        given = {"path": str(path), "messages": "messages"}
        return make_spec(name, input=given, sampling=sampling, engine=engine)

    return make


@pytest.mark.parametrize("part", [slice(0, 8), slice(8, None)], ids=["first", "second"])  # side by side
def test_the_same_bits_whatever_the_batch(
    mixed_spec, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: slice
) -> None:
    monkeypatch.chdir(tmp_path)
    base = mixed_spec("base")
    run(base)
    wanted = answers(base)
    assert len(wanted) == 15 + 7 + 3 + 1
    for number, (title, engine) in enumerate(list(SETTINGS.items())[part]):
        other = mixed_spec(f"other-{number}", **engine)
        with monkeypatch.context() as patch:
            if title == "set back":  # jobs this small admit nobody in the hope of a short answer
                patch.setattr(Scheduler, "_may_risk", lambda self, sequence: not sequence.set_back)
                patch.setattr(LengthEstimate, "tokens", lambda self, room: 1)
            if title == "from both ends":  # its rows are too much alike
                patch.setattr(run_order, "LEAST_DIFFERENCE", -2)
            if title == "interrupted and resumed":
                assert [run(other, stop=after(steps)).interrupted for steps in (15, 30)] == [True, True]
            run(other)
        assert answers(other) == wanted, title
        assert (job(other)["totals"]["restored_prompt_tokens"] > 0) == (title == "prefixes found on disk")
        assert (job(other)["preemptions"] > 0) == (title == "set back"), title


def test_the_same_bits_of_shuffled_rows(mixed_spec, run, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.parquet"
    unique = pl.read_parquet(tmp_path / "small.parquet").head(15)
    unique.sample(fraction=1, shuffle=True, seed=1).write_parquet(shuffled)
    unique.write_parquet(tmp_path / "unique.parquet")
    first, second = mixed_spec("unique", tmp_path / "unique.parquet"), mixed_spec("shuffled", shuffled)
    run(first), run(second)
    assert answers(first, "key") == answers(second, "key")


def after(steps: int) -> Callable[[], bool]:
    """Whether to stop, asked before every step."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps


def test_killed_and_resumed_gives_the_same_bits(make_spec, run, tmp_path: Path) -> None:
    table = small_table(tmp_path)
    sections: dict[str, Any] = {
        "input": {"path": str(table), "messages": "messages"},
        "sampling": {"max_tokens": 24},
        "engine": {"max_num_seqs": 2},
    }
    whole = make_spec("whole", **{**sections, "engine": {}})
    run(whole)
    spec = make_spec("killed", **sections, output={"path": str(tmp_path / "killed"), "part_rows": 2})
    moments = [Moment("generating"), Moment("generating"), Moment("delivering")]
    outcome = kill_and_resume(tmp_path / "killed.yaml", Path(spec.output.path), moments)
    assert len(outcome.kills) >= 2
    assert answers(spec) == answers(whole)
    assert job(spec)["totals"]["rows"] == 18
    assert (Path(spec.output.path) / "report.html").is_file()
    steps = pl.read_parquet(Path(spec.output.path) / "steps" / "*.parquet")
    assert steps["step"].is_unique().all()


def test_interrupted_keeps_what_is_finished_and_goes_on(make_spec, run, tmp_path: Path) -> None:
    spec = make_spec(
        input={"path": str(small_table(tmp_path)), "messages": "messages"},
        sampling={"max_tokens": 4},
        engine={"max_num_seqs": 4},
    )
    first = run(spec, stop=after(9))
    assert first.interrupted and 0 < first.rows < 18
    second = run(spec)
    assert not second.interrupted and second.rows == 18
    third = run(spec)
    assert third.already_done and third.rows == 18 and third.ignored == ()
    engine = spec.engine.model_copy(update={"max_num_seqs": 9, "schedule": "fifo"})
    fourth = run(spec.model_copy(update={"engine": engine}))
    assert fourth.already_done and fourth.ignored == ("engine.max_num_seqs", "engine.schedule")


class Told(SilentProgress):
    """What a job says, and its phases as they begin."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, progress: Progress) -> None:
        if progress.phase not in self.lines[-1:]:
            self.lines.append(progress.phase)

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_phases_are_told_as_they_begin_and_a_shortage_once(make_spec, tmp_path: Path) -> None:
    """A page holds 32 tokens: enough for two of the rows. The third is left out, and what it needs is said."""
    pl.DataFrame({"q": ["a", "word " * 60, "b"]}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False},
        sampling={"max_tokens": 2},
        engine={"kv_memory": 800_000, "cache": {"disk_path": str(tmp_path / "kv")}},
    )
    told = Told()
    summary = runner.run_job(spec, fresh=False, progress=told, stop=lambda: False)
    assert summary.failures == {"resource_error": 1}
    shortage, cache = plan_job(spec, SilentProgress()).notes
    phases = ["opening the table and the model", "tokenizing", "loading", "generating", "writing results"]
    said = [line for line in told.lines if not line.startswith("compiling")]
    assert said == [*phases[:3], shortage, *phases[3:]]
    assert shortage.startswith("engine.kv_memory is too small for 1 row: the longest needs ")
    assert cache == "engine.cache: what a run finds there is counted here as computed"
    enough = int(shortage.split("; ")[1].split()[0])
    for size, failures in ((enough, {}), (enough - 1, {"resource_error": 1})):
        engine = spec.engine.model_copy(update={"kv_memory": size})
        assert plan_job(spec.model_copy(update={"engine": engine}), SilentProgress()).figures.failures == failures


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
def test_rows_that_cannot_be_answered_are_written_once(
    make_spec, run, tmp_path: Path, monkeypatch, at_a_time: int
) -> None:
    monkeypatch.setattr(feed, "CHUNK", at_a_time)
    pl.DataFrame({"q": ["one", None, "two", "", "three", None, "two"]}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False},
        sampling={"max_tokens": 2, "n": 2},
        engine={"max_num_seqs": 2},
        output={"part_rows": 1},
    )
    calls = iter(range(10**6))
    assert run(spec, stop=lambda: next(calls) > 2).interrupted
    assert run(spec).rows == 7
    found = results(spec)["row_index", "finish_reason"].rows()
    assert found == [(row, "error" if row in (1, 3, 5) else "length") for row in range(7) for _ in range(2)]


def test_tokens_on_disk_give_the_same_bits_and_leave_no_file(make_spec, run, tmp_path: Path, monkeypatch) -> None:
    sections: dict[str, Any] = {
        "input": {"path": str(small_table(tmp_path)), "messages": "messages"},
        "sampling": {"max_tokens": 4},
    }
    memory, disk = make_spec("memory", **sections), make_spec("disk", **sections)
    run(memory)
    for module in (runner, job_plan):
        monkeypatch.setattr(module, "Scratch", partial(Scratch, memory_bytes=0))
    run(disk)
    assert answers(disk) == answers(memory)
    plan = plan_job(disk, SilentProgress())
    assert plan.figures.distinct_prompt_tokens == job(memory)["plan"]["distinct_prompt_tokens"]
    assert plan.prefixes.text.startswith("<|im_start|>system")
    output = Path(disk.output.path)
    assert sorted(path.name for path in output.iterdir()) == ["job.json", "results", "steps", "timings"]


def test_an_empty_table_gives_an_empty_result(make_spec, run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    spec = make_spec(input={"path": str(tmp_path / "none.parquet"), "prompt": "{{ prompt }}"})
    assert run(spec).rows == 0
    assert results(spec).height == 0


def test_per_row_parameters_and_stop_strings(make_spec, run, tmp_path: Path) -> None:
    frame = pl.DataFrame({"q": ["1, 2, 3, 4,"] * 4, "most": [3, 0, 8, -1], "end": ["zzz", "zzz", "6", "zzz"]})
    frame.write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False},
        sampling={"max_tokens": "{{ most }}", "stop": "{{ end }}", "ignore_eos": True},
    )
    summary = run(spec)
    rows = results(spec).sort("row_index").to_dicts()
    assert [row["num_generated_tokens"] for row in rows[:2]] == [3, 0]
    assert rows[2]["finish_reason"] == "stop" and rows[2]["stop_reason"] == "6" and "6" not in rows[2]["text"]
    assert rows[2]["text"].startswith(rows[0]["text"])
    assert rows[3]["error"]["code"] == "schema_error" and "'most'" in rows[3]["error"]["message"]
    assert summary.failed_rows == 1


def test_a_resumed_job_writes_the_date_it_was_started_on(make_spec, run, tmp_path: Path, monkeypatch) -> None:
    """A template may print today's date; the rows answered tomorrow must get the same prompt."""
    import batchgen.loading as loading

    clocks = []
    original = loading.ChatTemplate
    monkeypatch.setattr(loading, "ChatTemplate", lambda t, b, e, now: clocks.append(now) or original(t, b, e, now))
    spec = make_spec(
        input={"path": str(small_table(tmp_path)), "messages": "messages"},
        sampling={"max_tokens": 4},
        engine={"max_num_seqs": 4},
    )
    assert run(spec, stop=after(9)).rows > 0
    time.sleep(1.1)
    run(spec)
    assert clocks[0]() == clocks[1]()


def test_equal_rows_share_all_of_their_prompt(make_spec, run, tmp_path: Path) -> None:
    pl.DataFrame({"q": ["The capital of France is"] * 3}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False},
        sampling={"max_tokens": 3, "n": 2},
    )
    run(spec)
    rows = results(spec)
    assert rows["token_ids"].n_unique() == 1
    assert sorted(rows["num_cached_tokens"].to_list()) == [0, *[rows["num_prompt_tokens"][0]] * 5]
    assert job(spec)["totals"]["computed_prompt_tokens"] == rows["num_prompt_tokens"][0]


def test_a_wrong_column_neither_claims_the_output_nor_replaces_what_is_there(make_spec, run, tmp_path: Path) -> None:
    pl.DataFrame({"q": ["a", "b"]}).write_parquet(tmp_path / "rows.parquet")
    good = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}"}
    run(make_spec(input=good, sampling={"max_tokens": 1}))
    wrong = make_spec(input={**good, "prompt": "{{ qq }}"}, sampling={"max_tokens": 1})
    for fresh in (False, True):
        with pytest.raises(InputError, match="no column 'qq'"):
            run(wrong, fresh=fresh)
    spec = make_spec(input=good, sampling={"max_tokens": 1})
    assert results(spec).height == 2 and run(spec).already_done


def test_output_and_input_must_not_lie_within_each_other(make_spec, run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pl.DataFrame({"q": ["a"]}).write_parquet(tmp_path / "data" / "rows.parquet")
    for given, output in (("data/rows.parquet", "data"), ("data", "data/out"), ("data", "data")):
        spec = make_spec(
            input={"path": str(tmp_path / given), "prompt": "{{ q }}"}, output={"path": str(tmp_path / output)}
        )
        with pytest.raises(OutputError, match="lie within each other"):
            run(spec, fresh=True)
    assert (tmp_path / "data" / "rows.parquet").exists()


def test_columns_of_the_wrong_type_are_told_once(make_spec, run, tmp_path: Path) -> None:
    pl.DataFrame({"q": ["a"], "x": [1.5]}).write_parquet(tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    for prompt in ({"messages": "q"}, {"token_ids": "x"}):
        with pytest.raises(SpecError, match=r"has type .*; a list of"):
            run(make_spec(input={"path": path, **prompt}))


def test_values_that_python_cannot_hold_fail_their_rows_alone(make_spec, run, tmp_path: Path) -> None:
    times = pa.array([0, 2**58, None], pa.timestamp("us"))
    pq.write_table(pa.table({"t": times, "n": [2, 2, 2]}), tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ t or 'never' }}", "chat": False},
        sampling={"max_tokens": 1, "n": 2},
    )
    assert run(spec).failures == {"schema_error": 1}
    assert results(spec)["finish_reason"].to_list() == ["length"] * 2 + ["error"] * 2 + ["length"] * 2


def test_damaged_compiled_kernels_are_made_anew(make_spec, run, tmp_path: Path, monkeypatch) -> None:
    import batchgen.loading as loading

    calls = []

    def once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise UnpicklingError("pickle data was truncated")
        return load(*args)

    load = loading._load
    monkeypatch.setattr(loading, "_load", once)
    monkeypatch.setenv("BATCHGEN_CACHE_DIR", str(tmp_path / "cache"))
    pl.DataFrame({"q": ["a"]}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}"}, sampling={"max_tokens": 1})
    assert run(spec).rows == 1 and len(calls) == 2


def test_samples_of_a_prompt_find_their_pages_planned(make_spec, run, tmp_path: Path) -> None:
    pl.DataFrame({"q": ["Name an animal."]}).write_parquet(tmp_path / "rows.parquet")
    spec = make_spec(
        input={"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False},
        sampling={"max_tokens": 3, "n": 64, "temperature": 1.0},
    )
    run(spec)
    assert job(spec)["preemptions"] == 0
    assert job(spec)["totals"]["computed_prompt_tokens"] == results(spec)["num_prompt_tokens"][0]


@pytest.mark.parametrize(("most", "done"), [(0, False), (1, False), (2, True), (None, True)])
def test_a_job_stops_when_too_many_rows_fail(make_spec, run, tmp_path: Path, most: int | None, done: bool) -> None:
    pl.DataFrame({"q": ["a", None, "b", None, "c"]}).write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False}

    def spec(most: int | None) -> Any:
        return make_spec(input=given, sampling={"max_tokens": 1}, output={"max_errors": most})

    if done:
        assert run(spec(most)).failed_rows == 2
        return
    message = rf"2 rows have failed, more than .* allows \({most}\); row 3: prompt_missing"
    with pytest.raises(TooManyErrors, match=message):
        run(spec(most))
    with pytest.raises(TooManyErrors, match="2 rows have failed"):  # again, if nothing is changed
        run(spec(most))
    assert run(spec(None)).failed_rows == 2  # the same job goes on
    assert results(spec(None)).height == 5
