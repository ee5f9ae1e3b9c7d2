"""How a running job shows itself on stderr: a live line on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from batchgen.shown import visible, writes_unicode

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

PLAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a job. Counts are since the job's first start, `elapsed_s` (seconds) since this process's.

    `rows_total` 0 is not known yet. `prompt_tokens_done` counts the tokens of prompts that are done with: made, while
    rows are read, and in the KV cache, while answers are generated. Of the latter `shared_prompt_tokens` were found
    there and `restored_prompt_tokens` came from a tier below; the others were computed. `tokens_left`: prompt tokens
    that are still to be computed and new ones that may be generated at most, None where that is not known. `done_share`
    is the part of the phase's work (rows, or tokens where these are further) that is done.
    """

    rows_done: int = 0
    rows_total: int = 0
    failed_rows: int = 0
    prompt_tokens_done: int = 0
    generated_tokens: int = 0
    shared_prompt_tokens: int = 0
    restored_prompt_tokens: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    elapsed_s: float = 0.0
    phase: str = ""
    done_share: float = 0.0
    tokens_left: tuple[int, int] | None = None

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens_done - self.shared_prompt_tokens - self.restored_prompt_tokens


class ProgressListener(Protocol):
    """What a job tells of itself. `close` may be called more than once."""

    def update(self, progress: Progress) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def update(self, progress: Progress) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class RateMeter:
    """Tokens per second and time to go, over the present phase: loading does not count, nor what an earlier run did.

    While answers are generated, time to go is what the tokens that are left will take. A token of a prompt takes less
    than one of an answer, so the two are told apart, by least squares over what each update brings. While prompts alone
    fill the steps answers cost next to nothing, so nothing is said before the first answer has come or the prompts are
    done. Elsewhere time to go follows from the share that is done.
    """

    def __init__(self) -> None:
        self._start = self._last = Progress()
        self._costs = TokenCosts()

    def update(self, progress: Progress) -> "Rates":
        if self._start.phase != progress.phase:
            self._start = self._last = progress
            self._costs = TokenCosts()
        start, last = self._start, self._last
        self._last = progress
        computed = progress.computed_prompt_tokens - last.computed_prompt_tokens
        self._costs.add(
            computed, progress.generated_tokens - last.generated_tokens, progress.elapsed_s - last.elapsed_s
        )
        seconds = progress.elapsed_s - start.elapsed_s
        return Rates(
            prompt=_per_second(progress.prompt_tokens_done - start.prompt_tokens_done, seconds),
            generated=_per_second(progress.generated_tokens - start.generated_tokens, seconds),
            eta_s=self._seconds_to_go(progress),
        )

    def _seconds_to_go(self, progress: Progress) -> float | None:
        if progress.done_share >= 1:
            return 0.0
        if progress.tokens_left is not None:
            early = progress.rows_done == self._start.rows_done and progress.tokens_left[0] > 0
            return None if early else self._costs.seconds(*progress.tokens_left)
        done, seconds = progress.done_share - self._start.done_share, progress.elapsed_s - self._start.elapsed_s
        return seconds * (1 - progress.done_share) / done if done > 0 else None


class TokenCosts:
    """Seconds that a prompt token and a generated one take, by least squares from times in which there were some."""

    def __init__(self) -> None:
        self._prompt = self._generated = self._both = self._prompt_s = self._generated_s = 0.0

    def add(self, prompt: int, generated: int, seconds: float) -> None:
        self._prompt += prompt * prompt
        self._generated += generated * generated
        self._both += prompt * generated
        self._prompt_s += prompt * seconds
        self._generated_s += generated * seconds

    def seconds(self, prompt: int, generated: int) -> float | None:
        """Of so many tokens; None as long as nothing was generated. A generated token takes as long at least."""
        if not self._generated:
            return None
        determinant = self._prompt * self._generated - self._both**2
        if determinant > 1e-9 * self._prompt * self._generated:
            of_prompt = (self._prompt_s * self._generated - self._generated_s * self._both) / determinant
            of_generated = (self._generated_s * self._prompt - self._prompt_s * self._both) / determinant
            if of_generated >= of_prompt >= 0:
                return of_prompt * prompt + of_generated * generated
        alike = (self._prompt_s + self._generated_s) / (self._prompt + 2 * self._both + self._generated)
        return alike * (prompt + generated)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second, and the seconds that the rest takes at the present rate (None: not known yet)."""

    prompt: float
    generated: float
    eta_s: float | None


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def describe(progress: Progress, rates: Rates) -> str:
    """Everything but the row counts and the time to go, as far as there is any: "prompt 2,900 tok/s | ..."."""
    speeds = {"prompt": rates.prompt, "generated": rates.generated}
    parts = [f"{name} {speed:,.0f} tok/s" for name, speed in speeds.items() if speed]
    found = {"shared": progress.shared_prompt_tokens, "restored": progress.restored_prompt_tokens}
    parts += [f"{name} {count / progress.prompt_tokens_done:.0%}" for name, count in found.items() if count]
    if progress.kv_pages_total:
        parts.append(f"KV {progress.kv_pages_used / progress.kv_pages_total:.0%}")
    if progress.failed_rows:
        parts.append(f"{progress.failed_rows:,} failed")
    return " | ".join(parts)


def duration(seconds: float | None) -> str:
    """`1:02:03` or `2:03`; `-:--` where it is not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainProgress:
    """A line at most every `every_s` seconds, and for the first and the last state of each phase."""

    def __init__(self, stream: TextIO, every_s: float = PLAIN_SECONDS, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._meter = RateMeter()
        self._next_at = 0.0
        self._phase = ""
        self._unsaid: str | None = None

    def update(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self._say_last()
        self._unsaid = self._line(progress)
        if progress.phase == self._phase and self._clock() < self._next_at:
            return
        self._phase = progress.phase
        self._next_at = self._clock() + self._every_s
        self._say_last()

    def message(self, text: str) -> None:
        print(visible(text), file=self._stream, flush=True)

    def close(self) -> None:
        self._say_last()

    def _say_last(self) -> None:
        if self._unsaid is not None:
            self.message(self._unsaid)
        self._unsaid = None

    def _line(self, progress: Progress) -> str:
        rates = self._meter.update(progress)
        phase = progress.phase or "running"
        if not progress.rows_total:
            return f"[{duration(progress.elapsed_s)}] {phase}"
        rows = f"{progress.rows_done:,}/{progress.rows_total:,} rows"
        parts = [f"[{duration(progress.elapsed_s)}] {phase}: {rows}", describe(progress, rates)]
        return " | ".join(filter(None, [*parts, f"ETA {duration(rates.eta_s)}"]))


class LiveProgress:
    """rich's bar, redrawn a few times a second by rich's own thread; messages appear above it."""

    def __init__(self, bar: "RichProgress"):
        self._bar = bar
        self._meter = RateMeter()
        self._task = bar.add_task("starting", total=None, detail="", rows="", eta="")
        bar.start()

    def update(self, progress: Progress) -> None:
        rates = self._meter.update(progress)
        known = progress.rows_total > 0
        self._bar.update(
            self._task,
            description=progress.phase or "running",
            completed=progress.done_share,
            total=1.0 if known else None,
            rows=f"{progress.rows_done:,}/{progress.rows_total:,} rows" if known else "",
            detail=describe(progress, rates) if known else "",
            eta=f"ETA {duration(rates.eta_s)}" if known else "",
        )

    def message(self, text: str) -> None:
        self._bar.console.print(visible(text), markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def _rich_bar(stream: TextIO, transient: bool) -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    whole = Column(no_wrap=True, min_width=6)  # a narrow terminal cuts the details, not these
    return RichProgress(
        SpinnerColumn("dots" if writes_unicode(stream) else "line"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[rows]}", markup=False, table_column=whole),
        TextColumn("{task.fields[eta]}", markup=False, table_column=whole),
        TimeElapsedColumn(table_column=whole),
        TextColumn("{task.fields[detail]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        expand=True,
        transient=transient,
        console=Console(file=stream),
        refresh_per_second=4,
    )


def make_listener(quiet: bool = False, stream: TextIO | None = None, transient: bool = False) -> ProgressListener:
    """The listener that fits `stream` (stderr by default); rich is imported only for a terminal.

    transient: a live line leaves nothing behind.
    """
    stream = stream or sys.stderr
    if quiet:
        return SilentProgress()
    if stream.isatty():
        return LiveProgress(_rich_bar(stream, transient))
    return PlainProgress(stream)
