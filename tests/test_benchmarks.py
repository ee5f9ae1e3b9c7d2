"""The benchmark's tables are what benchmarks/data/README.md says, and its arithmetic is right."""

import argparse
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import polars as pl
import pytest

from benchmarks import compare, workloads

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
    assert {name: frame.height for name, frame in tables.items()} == {w.name: w.rows for w in workloads.WORKLOADS}
    assert tables["decode"]["prompt_token_ids"].list.len().unique().to_list() == [64]
    header_and_own = tables["fewshot"]["prompt_token_ids"].list.len()
    assert header_and_own.max() - 120 > 900


def make_run(system: str, repeat: int, seconds: float, first_tokens: tuple[int, ...] = (1, 2)) -> compare.Run:
    return compare.Run("decode", system, repeat, seconds, 2, 20, 8, 1.0, 0.5, 0.1, 0.2, "k", first_tokens, {})


def test_ratio_is_the_median_of_neighbours() -> None:
    ours = [make_run("batchgen", i, s) for i, s in enumerate((1.0, 2.0, 4.0))]
    theirs = [make_run("openvino", i, s, (1, 3)) for i, s in enumerate((2.0, 2.0, 40.0))]
    (line,) = compare.compare_runs([*ours, *theirs])
    assert (line.workload, line.peer) == ("decode", "openvino")
    assert line.ratio == 2.0
    assert line.rows_per_s == 1.0
    assert line.peer_generated_per_s == 4.0
    assert line.same_first_token == 0.5


def test_results_are_shown_with_and_without_a_peer(tmp_path: Path) -> None:
    facts = {"processor": "a processor", "cores": 2, "features": ["avx2", "sse2"]}
    ours = [make_run("batchgen", 0, 1.0)]
    for runs, expected in ((ours, "8"), ([*ours, make_run("openvino", 0, 2.0)], "2.00")):
        text = StringIO()
        compare.show(runs, facts, compare.Console(file=text, width=120))
        assert "a processor, 2 cores: avx2\n" in text.getvalue()
        assert expected in text.getvalue()
    compare.write_json(tmp_path / "result.json", runs, facts)
    assert json.loads((tmp_path / "result.json").read_text())["lines"][0]["ratio"] == 2.0


def test_systems_take_turns() -> None:
    args = argparse.Namespace(workloads=["decode", "fewshot"], repeats=2, peer_python="python", peers=["openvino-warm"])
    assert compare.planned(args) == [
        ("fewshot", "batchgen", 0),
        ("fewshot", "openvino-warm", 0),
        ("fewshot", "batchgen", 1),
        ("fewshot", "openvino-warm", 1),
        ("decode", "batchgen", 0),
        ("decode", "batchgen", 1),
    ]


def test_a_failing_process_is_reported_with_what_it_said() -> None:
    with pytest.raises(SystemExit, match="code 3:\nno such thing"):
        compare.run_process([sys.executable, "-c", "import sys; sys.stderr.write('no such thing'); sys.exit(3)"])


@pytest.mark.slow
def test_tables_can_be_made_anew(tmp_path: Path) -> None:
    """Fetches the model, for its vocabulary."""
    subprocess.run([sys.executable, "-m", "benchmarks.workloads", str(tmp_path)], cwd=ROOT, check=True)
    for workload in workloads.WORKLOADS:
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
