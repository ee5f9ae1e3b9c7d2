"""Progress on stderr."""

import io
from dataclasses import replace

import pytest

from batchgen.progress import LiveProgress, PlainProgress, Progress, RateMeter, SilentProgress, duration, make_listener

GENERATING = Progress(rows_done=10, rows_total=110, elapsed_s=100.0, phase="generating", done_share=0.25)
LATER = Progress(
    rows_done=60,
    rows_total=110,
    failed_rows=2,
    prompt_tokens_done=30_000,
    generated_tokens=5_000,
    shared_prompt_tokens=7_500,
    kv_pages_used=25,
    kv_pages_total=100,
    elapsed_s=110.0,
    phase="generating",
    done_share=0.625,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rates_are_those_of_this_phase_and_run():
    meter = RateMeter()
    meter.update(Progress(elapsed_s=0.0, phase="loading"))
    assert meter.update(GENERATING).eta_s is None
    rates = meter.update(LATER)
    assert (rates.prompt, rates.generated, rates.eta_s) == (3000.0, 500.0, 10.0)


@pytest.mark.parametrize(
    ("steps", "left", "expected"),
    [
        ([(2000, 0, 0), (2000, 0, 0)], (1000, 500), None),
        ([(2000, 0, 0), (2000, 20, 0)], (1000, 500), None),  # no answer is there yet
        ([(2000, 0, 0), (2000, 20, 0), (1000, 100, 0), (500, 200, 1)], (1000, 500), 1000 * 0.001 + 500 * 0.02),
        ([(2000, 20, 0), (0, 100, 0)], (0, 50), 50 * 0.02),
        ([(0, 100, 0), (0, 90, 0)], (0, 50), 50 * 0.02),
        ([(10, 10, 1), (20, 20, 1)], (30, 30), 30 * 0.001 + 30 * 0.02),  # always as many of either
    ],
)
def test_time_to_go_tells_prompts_from_answers(steps, left, expected):
    """A prompt token takes a millisecond here, a generated one twenty."""
    meter, state = RateMeter(), Progress(phase="generating", rows_total=9, tokens_left=left)
    meter.update(state)
    for prompt, generated, rows in steps:
        state = replace(
            state,
            prompt_tokens_done=state.prompt_tokens_done + prompt + 7,
            shared_prompt_tokens=state.shared_prompt_tokens + 7,
            generated_tokens=state.generated_tokens + generated,
            rows_done=state.rows_done + rows,
            elapsed_s=state.elapsed_s + prompt * 0.001 + generated * 0.02,
        )
        rates = meter.update(state)
    assert rates.eta_s == (None if expected is None else pytest.approx(expected))
    assert meter.update(replace(state, done_share=1.0)).eta_s == 0.0


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (LATER, "prompt 3,000 tok/s | generated 500 tok/s | shared 25% | KV 25% | 2 failed | ETA 0:10"),
        (
            replace(LATER, generated_tokens=0, tokens_left=(1, 1)),
            "prompt 3,000 tok/s | shared 25% | KV 25% | 2 failed | ETA -:--",
        ),
        (
            replace(LATER, restored_prompt_tokens=3_000, shared_prompt_tokens=0, failed_rows=0),
            "prompt 3,000 tok/s | generated 500 tok/s | restored 10% | KV 25% | ETA 0:10",
        ),
    ],
)
def test_a_plain_line_says_all_that_there_is(progress, text):
    stream = io.StringIO()
    listener = PlainProgress(stream, every_s=0.0)
    listener.update(GENERATING)
    listener.update(progress)
    first, last = stream.getvalue().splitlines()
    assert first == "[1:40] generating: 10/110 rows | ETA -:--"
    assert last == f"[1:50] generating: {progress.rows_done}/110 rows | {text}"


def test_plain_lines_come_now_and_then_at_each_phase_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    listener = PlainProgress(stream, every_s=5.0, clock=clock)
    for second in range(12):
        clock.now = float(second)
        listener.update(Progress(rows_done=second, rows_total=20, elapsed_s=float(second), phase="a"))
    listener.update(Progress(elapsed_s=11.0, phase="b"))
    listener.update(Progress(rows_done=3, rows_total=20, elapsed_s=11.5, phase="b"))
    listener.close()
    listener.close()
    starts = [line.split(" rows")[0] for line in stream.getvalue().splitlines()]
    assert starts == [
        *("[0:00] a: 0/20", "[0:05] a: 5/20", "[0:10] a: 10/20", "[0:11] a: 11/20"),
        *("[0:11] b", "[0:12] b: 3/20"),
    ]


def test_messages_are_printed_on_a_line_as_they_are():
    stream = io.StringIO()
    PlainProgress(stream).message("kernel: [bold]x[/nope] \x1b[2J\n\x9b")
    assert stream.getvalue() == "kernel: [bold]x[/nope] \\x1b[2J\\n\\x9b\n"


def test_a_terminal_gets_the_live_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    listener = make_listener(stream=stream)
    assert isinstance(listener, LiveProgress)
    listener.update(GENERATING)
    listener.update(LATER)
    listener.message("kernel: [bold]x[/nope]")
    listener.close()
    listener.close()
    text = stream.getvalue()
    for part in ("generating", "60/110 rows", "shared 25%", "KV 25%", "2 failed", "ETA 0:10", "kernel: [bold]x[/nope]"):
        assert part in text


def test_what_is_no_terminal_gets_plain_lines_and_quiet_nothing(capsys):
    assert isinstance(make_listener(stream=io.StringIO()), PlainProgress)
    listener = make_listener(quiet=True, stream=Terminal())
    assert isinstance(listener, SilentProgress)
    listener.update(LATER)
    listener.message("x")
    listener.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (0, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
