"""Thousands of damaged models and specs: each is read, or refused in words, in bounded time and memory."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import ROOT
from tests.fuzz.batch import MORE_MEMORY, SECONDS
from tests.fuzz.formats import FORMATS

QUICK = {"gguf-bpe": 1200, "gguf-spm": 1200, "directory": 400, "spec": 500}


def test_damaged_files(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        figures = list(pool.map(lambda name: fuzz(name, seed=0, count=QUICK[name]), FORMATS))
    show(capsys, figures)


@pytest.mark.slow
def test_many_damaged_files(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [(name, seed) for seed in range(1, 11) for name in FORMATS]  # some five minutes
    with ThreadPoolExecutor(2) as pool:
        figures = list(pool.map(lambda run: fuzz(*run, count=4 * QUICK[run[0]]), runs))
    show(capsys, figures)


def fuzz(name: str, seed: int, count: int) -> dict[str, object]:
    """The figures of a run; the process must not end on its own, be it by a fault or by a hang in native code."""
    command = [sys.executable, "-m", "tests.fuzz.batch", name, str(seed), str(count)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, (name, seed, result.stderr[-3000:])
    figures = json.loads(result.stdout)
    assert figures["faults"] == [], (name, seed, figures["faults"][:5])
    assert figures["tried"] == count and figures["slowest_s"] <= SECONDS
    assert figures["read"] > count / 20 and figures["kinds"] > 20  # neither all sound nor all refused for one reason
    return {"format": name, "seed": seed, **figures}


def show(capsys: pytest.CaptureFixture[str], figures: list[dict[str, object]]) -> None:
    with capsys.disabled():
        for row in figures:
            print(f"\n{row['format']}, seed {row['seed']}: {row['tried']} inputs, {row['read']} read, ", end="")
            print(f"{row['refused']} refused in {row['kinds']} ways, 0 crashes, 0 hangs, ", end="")
            print(f"slowest {row['slowest_s']} s, peak {row['peak_mib']} MiB (limit: +{MORE_MEMORY >> 20} MiB)", end="")
        print()
