"""The benchmark's tables are what benchmarks/data/README.md says, and its arithmetic is right."""

import argparse
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import polars as pl
import pytest

from benchmarks import compare, large_model, scale, targets, workloads

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("workload", workloads.WORKLOADS, ids=lambda workload: workload.name)
def test_tables_have_the_documented_shapes(workload: workloads.Workload) -> None:
    frame = workloads.load(workload.name)
    assert frame.schema == {"prompt_token_ids": pl.List(pl.Int32), "max_new_tokens": pl.Int32}
    tokens = frame["prompt_token_ids"]
    assert frame.height == workload.rows
    assert tokens.list.len().sum() == workload.prompt_tokens
    assert frame["max_new_tokens"].unique().to_list() == [workload.max_new_tokens]
    ids = tokens.explode()
    assert ids.null_count() == 0
    assert ids.min() >= 0 and ids.max() < 49152


def test_derived_tables_are_parts_of_others() -> None:
    whole = workloads.load("annotate")["prompt_token_ids"].to_list()
    assert workloads.load("prefill")["prompt_token_ids"].to_list() == [prompt[:384] for prompt in whole[:128]]
    assert workloads.load("single")["prompt_token_ids"].equals(workloads.load("decode", 1)["prompt_token_ids"])


@pytest.mark.parametrize(("name", "least", "most"), [("fewshot", 900, 1100), ("decode", 0, 2), ("annotate", 300, 302)])
def test_shared_prefix(name: str, least: int, most: int) -> None:
    prompts = workloads.load(name)["prompt_token_ids"].to_list()
    columns = zip(*prompts, strict=False)
    shared = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    assert least <= shared <= most


def test_rows_takes_the_first_ones() -> None:
    assert workloads.load("decode", 3).equals(workloads.load("decode").head(3))


def test_build_reads_no_more_than_the_tables_say() -> None:
    choices = [{"question": f"q{i} " * 40, "choices": ["a", "b"], "answer": 1} for i in range(400)]
    tables = workloads.build(lambda text: [ord(c) for c in text], choices, ["x" * 5000, "y" * 5000])
    assert {name: frame.height for name, frame in tables.items()} == {w.name: w.rows for w in workloads.STORED}
    assert tables["decode"]["prompt_token_ids"].list.len().unique().to_list() == [64]
    header_and_own = tables["fewshot"]["prompt_token_ids"].list.len()
    assert header_and_own.max() - 120 > 900


def make_run(
    system: str, repeat: int, seconds: float, first_tokens: tuple[int, ...] = (1, 2), workload: str = "decode"
) -> compare.Run:
    details = {"schedule": 0.5, "forward": 9.0, "sample": 0.25, "write": 0.25}
    return compare.Run(workload, system, repeat, seconds, 2, 20, 8, 1.0, 0.5, 0.1, 0.2, "k", first_tokens, details)


def test_ratio_is_the_median_of_neighbours() -> None:
    ours = [make_run("batchgen", i, s) for i, s in enumerate((1.0, 2.0, 4.0))]
    theirs = [make_run("openvino", i, s, (1, 3)) for i, s in enumerate((2.0, 2.0, 40.0))]
    (line,) = compare.compare_runs([*ours, *theirs])
    assert (line.workload, line.system, line.peer, line.figure) == ("decode", "batchgen", "openvino", "generated")
    assert line.ratio == 2.0
    assert line.per_s == 4.0
    assert line.peer_per_s == 4.0
    assert line.same_first_token == 0.5


def test_every_setting_has_a_line_for_every_peer() -> None:
    systems = ("batchgen", "batchgen-int8", "openvino", "openvino-warm")
    lines = compare.compare_runs([make_run(system, 0, 1.0, workload="fewshot") for system in systems])
    assert sorted((line.system, line.peer) for line in lines) == [
        ("batchgen", "openvino"),
        ("batchgen", "openvino-warm"),
        ("batchgen-int8", "openvino"),
        ("batchgen-int8", "openvino-warm"),
    ]


def test_figure_of_each_workload() -> None:
    run = make_run("batchgen", 0, 2.0)
    assert [run.per_second(figure) for figure in ("rows", "generated", "prompt")] == [1.0, 4.0, 10.0]
    assert compare.FIGURES["prefill"] == "prompt"


def test_targets_take_the_best_peer_and_the_settings_they_allow() -> None:
    speeds = {"batchgen": 2.0, "batchgen-int8": 1.0, "openvino": 16.0, "openvino-warm": 8.0}
    runs = [make_run(system, 0, s, workload=name) for name in ("fewshot", "single") for system, s in speeds.items()]
    fewshot, single = compare.peer_outcomes(compare.compare_runs(runs))
    assert (fewshot.wanted, fewshot.ratio, fewshot.met) == (">= 3x", 4 / 3, True)
    assert fewshot.what == "fewshot: rows/s, batchgen : openvino-warm"
    assert (single.ratio, single.met) == (8 / 5, True)
    assert single.what == "single: generated tokens/s, batchgen-int8 : openvino-warm"


def test_time_outside_the_kernels() -> None:
    (row,) = compare.outside_outcome([make_run("batchgen", 0, 1.0), make_run("openvino", 0, 1.0)])
    assert (row.wanted, row.figure, row.met) == ("<= 5.0%", "10.0%", False)
    assert row.ratio == pytest.approx(0.5)
    assert compare.outside_outcome([make_run("batchgen", 0, 1.0, workload="single")]) == []


def test_ratio_to_a_target_is_above_one_when_it_is_met() -> None:
    most, least = (targets.OwnTarget("a", "a", "s", 5.0, at_most) for at_most in (True, False))
    assert targets.outcome(most, 4.0, 0.0, 0.0).ratio == 1.25
    assert targets.outcome(least, 4.0, 0.0, 0.0).ratio == 0.8
    assert targets.outcome(most, 0.0, 0.0, 0.0).met
    assert targets.outcome(most, 5.0, 0.0, 0.0).met


def test_results_are_shown_with_and_without_a_peer(tmp_path: Path) -> None:
    facts = {"processor": "a processor", "cores": 2, "features": ["avx2", "sse2"]}
    ours = [make_run("batchgen", 0, 1.0)]
    for runs, expected in ((ours, "8.0"), ([*ours, make_run("openvino", 0, 2.0)], "2.00")):
        text, outcomes = StringIO(), compare.peer_outcomes(compare.compare_runs(runs)) + compare.outside_outcome(runs)
        compare.show(runs, outcomes, facts, compare.Console(file=text, width=140))
        assert "a processor, 2 cores: avx2\n" in text.getvalue()
        assert expected in text.getvalue()
        assert "time outside the kernels" in text.getvalue()
    assert "2.00x (8.0 : 4.0)" in text.getvalue()
    compare.write_json(tmp_path / "result.json", runs, outcomes, facts)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["lines"][0]["ratio"] == 2.0
    assert [row["met"] for row in written["targets"]] == [False, False]


def make_args(**fields: object) -> argparse.Namespace:
    known = {"settings": ["default"], "repeats": 1, "peer_python": "python", "peers": None, "rows": None, "ours": ""}
    return argparse.Namespace(**(known | fields))


def test_systems_take_turns() -> None:
    args = make_args(workloads=["decode", "fewshot"], repeats=2, peers=["openvino-warm"], settings=["default", "int8"])
    assert [(workload.name, system, repeat) for workload, system, repeat in compare.planned(args)] == [
        ("fewshot", "batchgen", 0),
        ("fewshot", "batchgen-int8", 0),
        ("fewshot", "openvino-warm", 0),
        ("fewshot", "batchgen", 1),
        ("fewshot", "batchgen-int8", 1),
        ("fewshot", "openvino-warm", 1),
        ("decode", "batchgen", 0),
        ("decode", "batchgen-int8", 0),
        ("decode", "batchgen", 1),
        ("decode", "batchgen-int8", 1),
    ]


def test_commands_carry_the_setting_and_whether_prefixes_are_shared() -> None:
    args, model, table = make_args(), Path("m.gguf"), Path("t.parquet")
    by_name = {workload.name: workload for workload in workloads.WORKLOADS}
    ours = compare.command("batchgen-int8", by_name["prefill"], table, args, model)
    assert ours[-4:] == ["--set", "model.weights=int8", "--set", "engine.prefix_sharing=false"]
    assert compare.command("batchgen", by_name["decode"], table, args, model)[-1] == "m.gguf"
    assert compare.command("openvino", by_name["prefill"], table, args, model)[-1] == "--no-sharing"
    assert compare.command("openvino-warm", by_name["fewshot"], table, args, model)[-1] == "--warm"


def test_a_failing_process_is_reported_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match="code 3:\nno such thing"):
        compare.run_process([sys.executable, "-c", "import sys; sys.stderr.write('no such thing'); sys.exit(3)"])


@pytest.mark.slow
def test_tables_can_be_made_anew(tmp_path: Path) -> None:
    """Fetches the model, for its vocabulary."""
    subprocess.run([sys.executable, "-m", "benchmarks.workloads", str(tmp_path)], cwd=ROOT, check=True)
    for workload in workloads.STORED:
        assert pl.read_parquet(tmp_path / f"{workload.name}.parquet").equals(workloads.load(workload.name))


@pytest.mark.bench
def test_batchgen_runs_a_table() -> None:
    """Fetches the model, and compiles kernels the first time."""
    table = workloads.table_path("decode")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_tokens", str(table), "--rows", "8"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(done.stdout)
    assert (result["rows"], result["prompt_tokens"], result["generated_tokens"]) == (8, 512, 1024)
    assert result["computed_prompt_tokens"] <= 512
    assert result["seconds"] > 0
    assert "first_step_seconds" not in result


@pytest.mark.parametrize("token_ids", [False, True])
def test_a_large_table_is_what_it_is_said_to_be(tmp_path, monkeypatch, model_path, token_ids: bool) -> None:
    monkeypatch.setattr(scale, "DOCUMENTS", 5)
    figures = scale.measure(tmp_path, rows=600, tokens=60, token_ids=token_ids, whole_job=False, model=str(model_path))
    assert (figures["rows"], figures["failed_rows"]) == (600, 0)
    assert figures["prompt_tokens"] == pytest.approx(600 * 60, rel=0.1)
    assert figures["planned_tokens"] == pytest.approx(figures["least_tokens"], rel=0.1)
    assert 0 < figures["peak_anonymous_gb"] <= figures["peak_total_gb"]


@pytest.mark.slow
def test_a_large_model_is_what_it_is_said_to_be(tmp_path, monkeypatch) -> None:
    sizes = {"HIDDEN": 256, "FFN": 512, "HEADS": 4, "KV_HEADS": 2, "VOCAB": 300}
    for name, value in sizes.items():
        monkeypatch.setattr(large_model, name, value)
    large_model.write_model(tmp_path / "model.gguf", 2)
    figures = large_model.run(tmp_path, tmp_path / "model.gguf", 3)
    assert (figures["prompt tokens"], figures["new tokens"], figures["sequences of a step"]) == (192, 48, 3)
    assert figures["peak of memory, GB"] > 0.1
