"""Damaged files of every format: a table or one line of error, and never a crash, a long wait or much memory."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.io.fuzz_input import KINDS

ROOT = Path(__file__).parents[2]
PROCESSES = 2
PEAK_MIB = 1024


def outcomes(folder: Path, first: int, last: int) -> dict[int, str]:
    """What became of each file; a process that died leaves its last one at "..."."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.io.fuzz_input", str(folder), str(first), str(last)]
    # Arrow's own pool keeps addresses of what it did not get, and they are limited.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    *lines, last = ran.stdout.splitlines()
    assert ran.returncode == 0, f"died of {last}: {ran.stderr[-2000:]}"
    assert int(last.removeprefix("peak ")) < PEAK_MIB
    return {int(number): outcome for number, _, outcome in (line.partition(" ") for line in lines)}


def check(folder: Path, numbers: range) -> None:
    edges = [numbers.start + len(numbers) * part // PROCESSES for part in range(PROCESSES + 1)]
    folders = [folder / str(first) for first in edges[:-1]]
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(outcomes, folders, edges[:-1], edges[1:]))
    found = {number: outcome for part in parts for number, outcome in part.items()}
    assert sorted(found) == list(numbers)
    assert {n: text for n, text in found.items() if not re.fullmatch(r"\S+ (\d+ rows|error .*)", text)} == {}
    for name in KINDS:  # some files are still good, most are not
        of_kind = [text for text in found.values() if text.startswith(name)]
        good = sum(text.endswith(" rows") for text in of_kind)
        assert 0 < good < len(of_kind)


def test_hundreds(tmp_path):
    check(tmp_path, range(1000))


@pytest.mark.slow
def test_thousands(tmp_path):
    check(tmp_path, range(10_000, 40_000))
