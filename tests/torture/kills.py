"""Jobs in processes of their own, killed at moments that are chosen, and started again until they are done."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["startup", "generating", "delivering"]
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after a phase has begun: with the process, with its first committed part, with delivery."""

    phase: Phase
    delay: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """`kills`: the phases in which the process was killed; the others had ended before. `starts` of the command."""

    kills: tuple[Phase, ...]
    starts: int


def kill_and_resume(spec: Path, output: Path, moments: Iterable[Moment]) -> Outcome:
    """Start the job and kill it at each of the moments in turn, then let it finish."""
    kills: list[Phase] = []
    starts = 0
    for starts, moment in enumerate(moments, 1):
        if not _killed(spec, output, moment):
            return Outcome(tuple(kills), starts)
        kills.append(moment.phase)
    process = start(spec)
    assert process.wait() == 0, process.args
    return Outcome(tuple(kills), starts + 1)


def start(spec: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "batchgen", "run", str(spec), "--quiet", *options]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE)


def _killed(spec: Path, output: Path, moment: Moment) -> bool:
    """False when the job was done before the moment came."""
    begun = _begins(output, moment.phase)
    process = start(spec)
    while not begun() and process.poll() is None:
        time.sleep(_POLL_SECONDS)
    try:
        process.wait(moment.delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    code = process.wait()
    assert code in (0, -signal.SIGKILL), process.stderr and process.stderr.read()
    return code != 0


def _begins(output: Path, phase: Phase) -> Callable[[], bool]:
    """Whether a process that is started now has come to the phase."""
    manifest, before = output / ".work" / "manifest.jsonl", _size(output / ".work" / "manifest.jsonl")
    if phase == "generating":
        return lambda: _size(manifest) > before
    return (output / ".work" / "deliver").exists if phase == "delivering" else lambda: True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
