"""The command line: what it prints, and the exit codes. The runner is a stand-in."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from batchgen import __version__, cli, job_plan
from batchgen.advice import Advice
from batchgen.engine.types import RowFailure
from batchgen.errors import InputError, ModelError
from batchgen.job_plan import JobPlan, PrefixText
from batchgen.models.architectures import BY_MODEL_TYPE
from batchgen.planned import Planned
from batchgen.prompts import FailedRow
from batchgen.spec import load_spec

# The subprocesses run in other folders, where a package that is not installed would not be found.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
SPEC = "model: {source: m.gguf}\ninput: {path: d.parquet, prompt: x}\n"


@dataclass
class Summary:
    rows: int = 10
    failed_rows: int = 0
    totals: dict = field(default_factory=lambda: {"rows": 10, "prompt_tokens": 1234, "wall_seconds": 1.5})
    output_dir: Path = Path("out")
    failures: dict = field(default_factory=dict)
    interrupted: bool = False
    already_done: bool = False
    ignored: tuple = ()


@dataclass
class Written:
    path: Path
    headline: list = field(default_factory=lambda: [("rows/s", "2.00", ""), ("time per token", "3 ms", "p99 4 ms")])


FIGURES = Planned(
    rows=30,
    answers=60,
    failed_rows=0,
    failures={},
    duplicate_rows=3,
    bos_in_text=0,
    prompt_tokens=1000,
    distinct_prompt_tokens=250,
    computed_prompt_tokens=250,
    max_new_tokens=2560,
    scored_tokens=0,
    longest_prompt=77,
    context_length=8192,
    kv_pages_needed=96,
    kv_pages=96,
    kv_bytes_needed=3 << 20,
    load_seconds=None,
    generate_seconds=None,
)
ONE_TASK = PrefixText(10, 60, 56, 504, "\tAn\x1b task" + " with long instructions" * 8, ())
PLAN = JobPlan(FIGURES, [], 750, PrefixText(30, 4, 4, 116, "<|im_start|>user\n", (ONE_TASK,)), [], 1.5, 800.0)


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(SPEC)
    return "job.yaml"


@pytest.fixture
def runner(monkeypatch):
    """A stand-in for batchgen.runner, whose functions a test may replace; `calls` are those of run_job.

    So is its `reporter`, for batchgen.report.page.
    """
    module = types.ModuleType("batchgen.runner")
    module.calls, module.summary = [], Summary()

    def run_job(job, *, progress, stop, **how):
        module.calls.append((job, how))
        return module.summary

    monkeypatch.setitem(sys.modules, "batchgen.report.page", reporter := types.ModuleType("batchgen.report.page"))
    reporter.write_report = lambda directory, output=None: Written(output or directory / "report.html")
    module.reporter = reporter
    module.run_job = run_job
    module.show_model = lambda source: {"architecture": "llama", "tied_output": True, "types": {"Q4_1": 3}}
    module.warmup = lambda progress: 12.34
    monkeypatch.setitem(sys.modules, "batchgen.runner", module)
    return module


def test_run_hands_the_options_on(spec, runner, capsys):
    arguments = ["run", spec, "--set", "sampling.max_tokens=7", "--limit", "3", "--output", "a: b", "--fresh"]
    assert cli.main(arguments) == 0
    ((job, how),) = runner.calls
    assert (job.sampling.max_tokens, job.input.limit, job.output.path) == (7, 3, str(Path.cwd() / "a: b"))
    assert how == {"fresh": True, "retry_errors": False, "reuse": False}
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "rows: 10",
        "failed rows: 0",
        "prompt tokens: 1,234",
        "wall seconds: 1.50",
        "rows/s: 2.00",
        "time per token: 3 ms (p99 4 ms)",
        "output: out",
        "report: out/report.html",
    ]


def test_quiet_prints_nothing(spec, runner, capsys):
    assert cli.main(["run", spec, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error", [InputError("disk full"), RuntimeError("two\nlines"), MemoryError(), KeyboardInterrupt()]
)
def test_a_report_that_fails_is_a_warning_and_the_job_stays_done(spec, runner, capsys, error):
    def write_report(directory):
        raise error

    runner.reporter.write_report = write_report
    assert cli.main(["run", spec]) == 0
    out, warning = capsys.readouterr()
    assert out.splitlines()[-1] == "output: out"
    reason = " ".join(str(error).split()) or type(error).__name__
    told = f"warning: the job is finished, but not its report: {reason}; to write it: batchgen report out\n"
    assert warning == told


@pytest.mark.parametrize("summary", [Summary(interrupted=True), Summary(already_done=True)])
def test_only_a_job_that_has_just_finished_is_reported(spec, runner, summary):
    runner.summary = summary
    runner.reporter.write_report = lambda directory: pytest.fail("a report")
    cli.main(["run", spec])


def test_report(runner, capsys):
    assert cli.main(["report", "out", "-o", "x.html"]) == 0
    assert capsys.readouterr().out.splitlines() == ["rows/s: 2.00", "time per token: 3 ms (p99 4 ms)", "report: x.html"]
    assert cli.main(["report"]) == 2


def test_failed_rows_are_exit_code_3(spec, runner):
    runner.summary = Summary(failed_rows=2)
    assert cli.main(["run", spec]) == 3


def test_a_finished_job_is_exit_code_0(spec, runner, capsys):
    runner.summary = Summary(failed_rows=2, already_done=True)
    assert cli.main(["run", spec]) == 0
    told = "nothing to do: out holds the finished job"
    assert capsys.readouterr().out == f"{told} (--fresh runs it again)\n"
    runner.summary = Summary(already_done=True, ignored=("engine.schedule", "engine.threads"))
    assert cli.main(["run", spec]) == 0
    what = "; what is set now of engine.schedule, engine.threads was not used"
    assert capsys.readouterr().out == f"{told}{what} (--fresh runs it again)\n"


def test_an_interrupted_job_says_how_to_go_on(spec, runner, capsys):
    runner.summary = Summary(interrupted=True, failed_rows=1)
    assert cli.main(["run", spec, "--fresh", "--set", "input.prompt='a b'", "--limit", "3", "-o", "x y"]) == 130
    expected = "batchgen run job.yaml --set 'input.prompt='\"'\"'a b'\"'\"'' --limit 3 --output 'x y'"
    assert f"rows under way start over; to go on, run: {expected}\n" in capsys.readouterr().err


def test_what_keeps_answers_is_handed_on_and_goes_on(spec, runner, capsys):
    runner.summary = Summary(interrupted=True)
    assert cli.main(["run", spec, "--reuse", "--retry-errors"]) == 130
    assert runner.calls[0][1] == {"fresh": False, "retry_errors": True, "reuse": True}
    assert "to go on, run: batchgen run job.yaml --reuse --retry-errors\n" in capsys.readouterr().err


def test_an_error_is_one_line_and_its_exit_code(spec, runner, capsys):
    def run_job(job, **options):
        raise InputError("d.parquet: no such file \x1b[2J\nerror: made up\r")

    runner.run_job = run_job
    assert cli.main(["run", spec]) == 1
    assert capsys.readouterr().err == "error: d.parquet: no such file \\x1b[2J\\nerror: made up\\r\n"


def test_an_error_of_the_system_is_one_line(spec, runner, capsys):
    def run_job(job, **options):
        raise PermissionError(13, "Permission denied", "/x")

    runner.run_job = run_job
    assert cli.main(["run", spec]) == 1
    assert capsys.readouterr().err == "error: /x: Permission denied\n"


def test_a_wrong_spec_is_exit_code_2_and_runs_nothing(spec, runner, capsys):
    assert cli.main(["run", spec, "--set", "sampling.top_p=0", "--set", "sampling.n=0"]) == 2
    assert runner.calls == []
    assert capsys.readouterr().err.splitlines() == [
        "error: --set sampling.top_p=0: sampling.top_p: 0 is not allowed: must be > 0 and <= 1",
        "error: --set sampling.n=0: sampling.n: 0 is not allowed: must be >= 1 and <= 1,000,000",
    ]


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "job.yaml", "--limit", "-1"], ["run", "job.yaml", "--nope"], ["nope"], ["run", "none"]],
)
def test_wrong_usage_is_exit_code_2(spec, runner, arguments):
    assert cli.main(arguments) == 2
    assert runner.calls == []


def test_the_first_signal_asks_and_the_second_stops_at_once(spec, runner, capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def run_job(job, *, stop, **options):
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the second signal did not stop the job")

    runner.run_job = run_job
    assert cli.main(["run", spec]) == 130
    error = capfd.readouterr().err
    assert "keeping the rows that are finished; once more (Ctrl-C) stops at once" in error
    assert "stopped at once; what was written is kept. To go on, run: batchgen run job.yaml" in error
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


FAKE_RUNNER = """
import sys, time, types
sys.path.insert(0, {tests!r})
from test_cli import Summary
module = types.ModuleType("batchgen.runner")
def run_job(job, *, progress, stop, **how):
    stop()
    print("running", flush=True)
    deadline = time.monotonic() + 20
    while not stop() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Summary(interrupted=stop())
module.run_job = run_job
sys.modules["batchgen.runner"] = module
from batchgen.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_ends_in_order(spec, number):
    code = FAKE_RUNNER.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", spec],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "keeping the rows that are finished" in error
    assert "to go on, run: batchgen run job.yaml" in error
    assert "Traceback" not in error
    assert "rows: 10" in out


def test_validate(spec, capsys):
    assert cli.main(["validate", spec]) == 0
    assert capsys.readouterr().out == "job.yaml: valid\n"
    assert cli.main(["validate", spec, "--resolved", "--set", "sampling.seed=5"]) == 0
    Path("resolved.yaml").write_text(capsys.readouterr().out)
    assert load_spec(Path("resolved.yaml")) == load_spec(Path(spec), ["sampling.seed=5"])


@pytest.fixture
def plan(monkeypatch, spec, capsys):
    """`plan(job_plan, *arguments)`: what `batchgen plan` prints of it."""

    def printed(result, *arguments):
        monkeypatch.setattr(job_plan, "plan_job", lambda job, progress: result)
        assert cli.main(["plan", spec, *arguments]) == 0
        return capsys.readouterr().out

    return printed


def test_plan(plan):
    assert plan(PLAN).splitlines() == [
        "rows: 30",
        "answers: 60",
        "rows that are too long: 0",
        "rows that fail otherwise: 0",
        "rows equal to another: 3",
        "prompt tokens: 1,000",
        "distinct prompt tokens: 250, the fewest that can be computed",
        "prompt tokens to compute: 250 (75.0% saved by sharing)",
        "new tokens at most: 2,560",
        "longest prompt: 77 of 8,192 tokens",
        "KV memory at the peak: 3.0 MiB (96 pages)",
        "tokenised in: 1.5 s (800 tokens/s)",
        "time: not known on this machine yet; any run of this model tells, or: batchgen bench job.yaml",
        "largest shared prefixes (83% of what sharing saves):",
        "  30 rows x 4 tokens, 116 saved: <|im_start|>user\\n",
        ("    10 rows x 56 tokens, 504 saved: \\tAn\\x1b task" + " with long instructions" * 8)[:119] + "…",
    ]


def test_plan_says_what_will_fail_and_why(plan):
    failures = [FailedRow(i, None, 1, RowFailure("prompt_missing", "null")) for i in range(24)]
    failures += [FailedRow(24, "e05", 1, RowFailure("prompt_too_long", "9 tokens"))]
    figures = replace(FIGURES, failures={"prompt_missing": 24, "prompt_too_long": 1}, bos_in_text=2)
    lines = plan(replace(PLAN, figures=figures, failing_rows=failures)).splitlines()
    assert "rows that are too long: 1" in lines
    assert "rows that fail otherwise: 24 (24 prompt_missing)" in lines
    assert "BOS in the template, not doubled: 2 rows" in lines
    assert "row 19 will fail: prompt_missing: null" in lines
    assert lines[-1] == "... and 5 more (--json lists all)"


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            {"generate_seconds": (4.21, 127.4), "load_seconds": 0.55},
            "time: 4.2 s (if answers are short) to 2:07 min (if all take max_tokens), after 0.6 s of loading",
        ),
        (
            {"generate_seconds": (59.6, 7325.0)},
            "time: 1:00 min (if answers are short) to 2:02:05 h (if all take max_tokens)",
        ),
        ({"kv_pages_needed": 0, "kv_bytes_needed": 0}, "KV memory at the peak: none, as no row runs"),
        ({"kv_pages_needed": 1}, "KV memory at the peak: 3.0 MiB (1 page)"),
        ({"kv_pages": 40}, "KV memory at the peak: 3.0 MiB (96 pages; there are 40, so fewer rows run at once)"),
        ({"computed_prompt_tokens": 2000}, "prompt tokens to compute: 2,000 (0.0% saved by sharing)"),
        ({"prompt_tokens": 0, "computed_prompt_tokens": 0}, "prompt tokens to compute: 0 (no prompts)"),
    ],
)
def test_figures_of_a_plan(plan, figures, line):
    assert line in plan(replace(PLAN, figures=replace(FIGURES, **figures))).splitlines()


def test_a_plan_without_sharing_has_no_tree(plan):
    nothing = replace(PLAN, shared_tokens=0, prefixes=PrefixText(30, 0, 0, 0, "", ()))
    assert "shared prefixes" not in plan(nothing)


@pytest.mark.parametrize(
    ("idle", "computed", "line"),
    [
        (1000, 0, "prompt tokens to compute: 0 (no row asks for an answer)"),
        (500, 250, "prompt tokens to compute: 250 (50.0% saved by sharing)"),
    ],
)
def test_what_nobody_asks_for_is_not_saved(plan, idle, computed, line):
    figures = replace(FIGURES, computed_prompt_tokens=computed)
    lines = plan(replace(PLAN, figures=figures, idle_prompt_tokens=idle)).splitlines()
    assert line in lines
    assert any("largest shared prefixes" in text for text in lines) == (computed > 0)


def test_notes_stand_for_the_rows_that_they_are_about(plan):
    failing = [FailedRow(row, None, 1, RowFailure("resource_error", "too little")) for row in range(30)]
    failing += [FailedRow(30, "\x1b[2J\n", 1, RowFailure("template_error", "no\r\x07"))]
    printed = plan(replace(PLAN, failing_rows=failing, notes=("engine.kv_memory is too small for 30 rows",)))
    assert printed.splitlines()[-2:] == [
        "engine.kv_memory is too small for 30 rows",
        "row 30 (\\x1b[2J\\n) will fail: template_error: no\\r\\x07",
    ]
    values = json.loads(plan(replace(PLAN, failing_rows=failing, notes=("a",)), "--json"))
    assert values["notes"] == ["a"] and len(values["failing_rows"]) == 31


def test_plan_gives_advice(plan):
    advice = Advice("input.prompt", ("passage", "question"), (1, 1200), ("question", "passage"), 4000, 0.38)
    assert plan(replace(PLAN, advice=[advice])).splitlines()[-1] == (
        "advice: in input.prompt, {{ passage }} (1 value) comes after {{ question }} (1,200 values); "
        "with passage first about 38% fewer prompt tokens would be computed"
    )


def test_plan_as_json(plan):
    failing = [FailedRow(4, "e05", 1, RowFailure("prompt_too_long", "é"))]
    advice = Advice("input.prompt", ("a", "b"), (1, 2), ("b", "a"), 4000, 0.38)
    values = json.loads(plan(replace(PLAN, failing_rows=failing, advice=[advice]), "--json"))
    assert values["failing_rows"] == [{"row_index": 4, "id": "e05", "code": "prompt_too_long", "message": "é"}]
    assert {name: values[name] for name in asdict(FIGURES)} == asdict(FIGURES)
    assert values["shared_prefixes"]["children"][0]["text"] == ONE_TASK.text
    assert values["advice"][0]["order"] == ["a", "b"] and values["advice"][0]["text"].startswith("in input.prompt")


def test_models_show(runner, capsys):
    assert cli.main(["models", "show", "m.gguf"]) == 0
    assert capsys.readouterr().out.splitlines() == ["architecture: llama", "tied output: yes", 'types: {"Q4_1": 3}']

    def show_model(source):
        raise ModelError(f"{source}: no such file")

    runner.show_model = show_model
    assert cli.main(["models", "show", "m.gguf"]) == 1
    assert capsys.readouterr().err == "error: m.gguf: no such file\n"


def test_models_list(capsys):
    assert cli.main(["models", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gpt_neox", "gptneox", "LayerNorm"] in [line[:3] for line in lines]
    assert {row.model_type for row in BY_MODEL_TYPE.values()} <= {line[0] for line in lines if line}


def test_warmup(runner, capsys):
    assert cli.main(["warmup"]) == 0
    assert capsys.readouterr().out == "the kernels are ready; this took 12.3 s\n"


def test_schema(capsys):
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "batchgen job spec"


def test_help_and_version_list_commands_and_exit_codes():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for text in (
        "run",
        "validate",
        "plan",
        "models",
        "warmup",
        "schema",
        "init",
        "report",
        "compare",
        "0 =",
        "1 =",
        "2 =",
        "3 =",
        "130 =",
    ):
        assert text in result.output
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"batchgen {__version__}\n"


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        (
            {"task_id": pa.string(), "text": pa.string(), "prompt": pa.string()},
            {"id": "task_id", "prompt": "{{ prompt }}"},
        ),
        ({"a": pa.int64(), "b": pa.large_string()}, {"id": None, "prompt": "{{ b }}"}),
        ({"a": pa.int64()}, {"prompt": "{{ a }}"}),
        ({"my text": pa.string(), "not": pa.string(), "a b": pa.string(), "b": pa.int64()}, {"prompt": "{{ b }}"}),
        ({"prompt": pa.string(), "chat": MESSAGES, "id": pa.int32()}, {"id": "id", "messages": "chat"}),
        ({"no": pa.large_list(pa.int32()), "s": pa.string()}, {"token_ids": None, "prompt": "{{ s }}"}),
        ({"input_ids": pa.large_list(pa.int32()), "s": pa.string()}, {"token_ids": "input_ids"}),
        ({"null": MESSAGES}, {"messages": "null"}),
        ({"a": pa.list_(pa.string()), "id": pa.float64(), "q: 'x'\n": pa.list_(MESSAGES.value_type)}, {"id": None}),
    ],
)
def test_init_makes_a_valid_spec(tmp_path, capsys, monkeypatch, columns, keys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({name: pa.array([], kind) for name, kind in columns.items()}), "data/my table.parquet")
    assert cli.main(["init", "data/my table.parquet", "--output", "jobs.yaml"]) == 0
    job = load_spec(Path("jobs.yaml"))
    assert job.input.path == str(tmp_path / "data" / "my table.parquet")
    assert (job.name, job.output.path) == ("my-table", str(tmp_path / "runs" / "my-table"))
    assert {name: getattr(job.input, name) for name in keys} == keys
    assert cli.main(["init", "data/my table.parquet"]) == 0
    assert capsys.readouterr().out.endswith(Path("jobs.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.jsonl", '{"id": 7, "question": "why?"}', 'prompt: "{{ question }}"'),
        ("a.ndjson", '{"messages": [{"role": "user", "content": "hi"}]}', "messages: messages"),
        ("a.jsonl.gz", '{"input_ids": [1, 2]}', "token_ids: input_ids"),
        ("a.csv", "n,long text,text\n1,a,b", 'prompt: "{{ text }}"'),
        ("a.tsv", "n\ttext\n1\ta", 'prompt: "{{ text }}"'),
        ("a.jsonl", '{"custom_id": "x", "method": "POST", "url": "", "body": {}}', "format: openai_batch"),
    ],
)
def test_init_reads_every_format(tmp_path, capsys, monkeypatch, name, text, line):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(gzip.compress(text.encode() + b"\n") if name.endswith(".gz") else text.encode() + b"\n")
    assert cli.main(["init", name, "-o", "job.yaml"]) == 0
    assert f"  {line}" in Path("job.yaml").read_text()
    load_spec(Path("job.yaml"))


def test_init_writes_a_path_from_the_folder_of_the_spec(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("jobs", "data/x=1", "data/x=2"):
        (tmp_path / folder).mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["a"]}), "data/x=2/a.parquet")
    assert cli.main(["init", "data", "-o", "jobs/a.yaml"]) == 0
    assert Path(load_spec(Path("jobs/a.yaml")).input.path).resolve() == tmp_path / "data"
    capsys.readouterr()
    assert cli.main(["init", "data/*/*.parquet", "-o", "jobs/a.yaml"]) == 1
    assert capsys.readouterr().err == "error: jobs/a.yaml: exists already; choose another name\n"
    assert cli.main(["init", "data", "-o", "no/a.yaml"]) == 1
    assert capsys.readouterr().err == (
        "error: cannot write no/a.yaml: there is no folder no; make it and run the same command again\n"
    )


def test_init_refuses_what_is_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_text("no")
    pq.write_table(pa.table({}), "b.parquet")
    pq.write_table(pa.table({"my text": ["a"]}), "d.parquet")
    messages = {
        "a.parquet": "a.parquet: not a readable Parquet file: ",
        "b.parquet": "b.parquet: has no columns\n",
        "c.parquet": "input 'c.parquet' does not exist\n",
        "d.parquet": "d.parquet: no column has a name that a template can hold (my text); rename one\n",
    }
    for name, message in messages.items():
        assert cli.main(["init", name]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1


PASSAGES = [f"{i // 4} " + "A long passage. " * 5 for i in range(20)]
QUESTIONS = [f"What is said of number {i} in this passage?" for i in range(20)]
LINKS = [f"x/{i}" for i in range(20)]


@pytest.mark.parametrize(
    ("columns", "prompt", "id"),
    [
        ({"question": QUESTIONS, "passage": PASSAGES, "label": ["a", "b"] * 10}, "{{ passage }}\n{{ question }}", None),
        ({"query": QUESTIONS, "source": PASSAGES, "url": LINKS}, "{{ source }}\n{{ query }}", "url"),
        ({"instruction": QUESTIONS, "input": LINKS}, "{{ instruction }}\n{{ input }}", None),
        ({"prompt": QUESTIONS, "passage": PASSAGES, "user_id": [1] * 20}, "{{ prompt }}", "user_id"),
        ({"user_id": [1, 2] * 10, "doc_id": LINKS, "text": QUESTIONS}, "{{ text }}", "doc_id"),
        (
            {"n": range(20), "question": QUESTIONS, "choices": [["a", "b"]] * 20},
            "{{ question }}\n{% for each in choices %}- {{ each }}\n{% endfor %}",
            "n",
        ),
        ({"passage": QUESTIONS, "question": ["What?"] * 20}, "{{ question }}\n{{ passage }}", None),
        ({"question": ["q"], "n": [1]}, "{{ question }}", None),
    ],
)
def test_init_takes_what_belongs_to_the_prompt_and_an_id(tmp_path, monkeypatch, columns, prompt, id):
    """What rows share comes first."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), "rows.parquet")
    assert cli.main(["init", "rows.parquet", "-o", "job.yaml"]) == 0
    found = load_spec(Path("job.yaml")).input
    assert (found.prompt, found.id) == (prompt, id)


def test_init_sees_the_folders_of_a_table_as_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t/lang=de").mkdir(parents=True)
    pq.write_table(pa.table({"\x1b[2J\x7f": pa.array(["a"]), "prompt": ["b"]}), "t/lang=de/a.parquet")
    assert cli.main(["init", "t"]) == 0
    out = capsys.readouterr().out
    assert "#   lang: string\n" in out
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "job.yaml"]])
def test_help_and_validate_load_nothing_heavy(spec, arguments):
    code = (
        "import sys; from batchgen.cli import main; code = main(); "
        "print('loaded', *{'numba', 'polars', 'pyarrow', 'tokenizers'} & set(sys.modules)); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "loaded"
