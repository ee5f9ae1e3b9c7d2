"""A job on the real model, killed fifty times over at random moments: nothing is lost, doubled or changed."""

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.conftest import ROOT
from tests.test_job import answers, job, results
from tests.torture.kills import Moment, Phase, kill_and_resume, start

RUNS, ROWS = 50, 300
PHASES: tuple[Phase, ...] = ("startup", "generating", "delivering")


def sections(folder: Path) -> dict[str, Any]:
    table = ROOT / "benchmarks" / "data" / "choices.parquet"
    prompt = "{{ question }}\n{% for c in choices %}{{ loop.index }}. {{ c }}\n{% endfor %}Answer:"
    return {
        "input": {"path": str(table), "prompt": prompt, "limit": ROWS, "chat": False},
        "sampling": {"max_tokens": 4, "temperature": 0.7, "seed": 5},
        "engine": {"max_num_seqs": 32, "max_batch_tokens": 512, "kv_memory": "256MiB"},
        "output": {"path": str(folder), "part_rows": 16},
    }


@pytest.mark.slow
def test_fifty_runs_killed_at_random_moments(make_spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_spec("whole", **sections(tmp_path / "whole"))
    lengths = phase_lengths(tmp_path / "whole.yaml", tmp_path / "whole")
    wanted, passed_through = answers(whole), results(whole).drop(TIMES)
    spec = make_spec("killed", **sections(tmp_path / "killed"))
    rng, kills, starts, begun = np.random.default_rng(0), Counter[str](), 0, time.perf_counter()
    for number in range(RUNS):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        moments = random_moments(rng, lengths, first=PHASES[number % len(PHASES)])
        outcome = kill_and_resume(tmp_path / "killed.yaml", tmp_path / "killed", moments)
        kills.update(outcome.kills)
        starts += outcome.starts
        assert answers(spec) == wanted, (number, moments)
        assert results(spec).drop(TIMES).equals(passed_through), (number, moments)
        assert job(spec)["totals"]["rows"] == ROWS and not (tmp_path / "killed" / ".work").exists()
        check_logs(tmp_path / "killed", len(wanted))
    assert min(kills[phase] for phase in PHASES) >= RUNS // 5
    with capsys.disabled():
        print(f"\n{RUNS} runs of {ROWS} rows, {starts} starts, {sum(kills.values())} kills ({dict(kills)}): ", end="")
        print(f"{RUNS} bitwise equal, 0 rows lost, 0 doubled; {time.perf_counter() - begun:.0f} s")


TIMES = ["queued_s", "prefill_s", "decode_s", "num_cached_tokens"]
"""What may differ from run to run."""


def random_moments(rng: np.random.Generator, lengths: dict[Phase, float], first: Phase) -> list[Moment]:
    """One or two, the first of them in the phase `first`."""
    phases = [first, *(PHASES[i] for i in rng.integers(0, len(PHASES), rng.integers(0, 2)))]
    return [Moment(phase, float(rng.uniform(0, lengths[phase]))) for phase in phases]


def phase_lengths(spec: Path, output: Path) -> dict[Phase, float]:
    """Seconds that each phase of an uninterrupted run takes."""
    manifest, deliver = output / ".work" / "manifest.jsonl", output / ".work" / "deliver"
    times, process = [time.perf_counter()], start(spec)
    for begun in (manifest.exists, deliver.exists):
        while not begun() and process.poll() is None:
            time.sleep(0.001)
        times.append(time.perf_counter())
    assert process.wait() == 0
    times.append(time.perf_counter())
    return dict(zip(PHASES, np.diff(times).tolist(), strict=True))


def check_logs(output: Path, num_results: int) -> None:
    steps = pl.read_parquet(output / "steps" / "*.parquet")
    assert steps["step"].is_unique().all()
    timings = pl.read_parquet(output / "timings" / "*.parquet")
    assert timings.select("row_index", "sample_index", "token_index").is_unique().all()
    assert timings.select("row_index", "sample_index").n_unique() == num_results
