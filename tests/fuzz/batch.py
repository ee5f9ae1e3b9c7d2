"""Reads damaged files one after the other, in a process with limits: `python -m tests.fuzz.batch FORMAT SEED COUNT`.

Prints the figures as a line of JSON. Any input of a run is made again from its format, seed and number.
"""

import faulthandler
import json
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.fuzz.formats import FORMATS, REFUSALS, Format

SECONDS = 2
"""An input that takes longer hangs."""
MORE_MEMORY = 512 << 20
"""What all inputs together may take beyond the sound one, in address space."""
LONGEST_MESSAGE = 2000

Bytes = bytearray
Mutation = Callable[[Bytes, Sequence[int], np.random.Generator], None]


@dataclass
class Figures:
    """`refusals`: by the words that a message begins with, numbers left out."""

    tried: int = 0
    read: int = 0
    refused: int = 0
    kinds: int = 0
    slowest_s: float = 0.0
    peak_mib: int = 0
    faults: list[str] = field(default_factory=list)


class Hang(BaseException):
    """No Exception, so that nothing takes it for an error of its own."""


# --- damage


def flip(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    for at in rng.integers(0, len(raw), rng.integers(1, 9)):
        raw[at] ^= 1 << rng.integers(8)


def flip_near_seams(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    for at in rng.choice(seams, rng.integers(1, 4)) + rng.integers(0, 8):
        raw[min(at, len(raw) - 1)] = rng.integers(256)


def set_number(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    """A length, count, type or size that lies a little or a lot."""
    size, at = int(rng.choice([1, 4, 8])), int(rng.choice(seams))
    there = int.from_bytes(raw[at : at + size], "little")
    value = int(rng.choice([there + 1, there - 1, there * 2, 0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32]))
    value = [value, 2**63 - 1, 2**64 - 1][int(rng.choice([0, 0, 0, 1, 2]))]
    raw[at : at + size] = (value % 256**size).to_bytes(size, "little")


def splice(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    """A piece between two seams goes to a third, in place of what is there or before it."""
    start, stop, to = (int(at) for at in [*sorted(rng.choice(seams, 2)), rng.choice(seams)])
    piece = raw[start : min(stop, start + 4096)]
    raw[to : to + int(rng.choice([0, len(piece)]))] = piece


def remove(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    start, stop = sorted(int(at) for at in rng.choice(seams, 2))
    del raw[start : min(stop, start + 64)]


def truncate(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    del raw[int(rng.choice([rng.integers(len(raw)), rng.choice(seams)])) :]


def leave(raw: Bytes, seams: Sequence[int], rng: np.random.Generator) -> None:
    """What the sample itself has of lies will do."""


MUTATIONS: tuple[Mutation, ...] = (flip, flip_near_seams, set_number, splice, remove, truncate, leave, leave, leave)


def damaged(form: Format, seams: Sequence[int], seed: int, number: int) -> bytes:
    """Input `number` of a run."""
    rng = np.random.default_rng([seed, number])
    raw = bytearray(form.sample(rng))
    for mutate in rng.choice(np.array(MUTATIONS, object), rng.integers(1, 3)):
        if len(raw):
            mutate(raw, [min(at, len(raw)) for at in seams], rng)
    return bytes(raw)


# --- what comes of it


def run(form: Format, seed: int, count: int, folder: Path) -> Figures:
    figures, kinds = Figures(), set[str]()
    path = folder / ("input" + form.suffix)
    path.write_bytes(sound(form))
    seams = list(form.seams(path))
    form.read(path)
    limit_memory()
    for number in range(count):
        path.write_bytes(damaged(form, seams, seed, number))
        begun = time.perf_counter()
        outcome = attempt(form, path)
        figures.tried += 1
        figures.slowest_s = max(figures.slowest_s, round(time.perf_counter() - begun, 3))
        if outcome is None:
            figures.read += 1
        elif isinstance(outcome, REFUSALS) and (problem := unclear(str(outcome), path)) is None:
            figures.refused += 1
            kinds.add("".join(c for c in str(outcome)[len(str(path)) :][:40] if not c.isdigit()))
        else:
            reason = problem if isinstance(outcome, REFUSALS) else type(outcome).__name__
            figures.faults.append(f"input {number}: {reason}: {str(outcome)[:300]!r}")
    figures.kinds, figures.peak_mib = len(kinds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return figures


def sound(form: Format) -> bytes:
    """A sample that reads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("sound" + form.suffix)
        for seed in range(100):
            raw = form.sample(np.random.default_rng(seed))
            path.write_bytes(raw)
            if attempt(form, path) is None:
                return raw
    raise AssertionError("no sample is sound")


def attempt(form: Format, path: Path) -> BaseException | None:
    """What reading the file raises."""
    try:
        with time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numbers of a damaged model overflow
            form.read(path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        return error
    return None


def unclear(message: str, path: Path) -> str | None:
    """What is wrong with an error message. A spec may have several problems, each with a line that names the file."""
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters"
    if any(not char.isprintable() and char != "\n" for char in message):
        return "unprintable characters"
    return None if all(line.startswith(str(path)) for line in message.split("\n")) else "a line does not name the file"


@contextmanager
def time_limit() -> Iterator[None]:
    """Hang in Python code that takes long; the process ends, with a traceback, where it is native code."""

    def hang(*_: object) -> None:
        raise Hang(f"takes more than {SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    faulthandler.enable()
    form, seed, count = FORMATS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asdict(run(form, seed, count, Path(folder)))))
