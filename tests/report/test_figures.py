"""Figures of small jobs, counted by hand."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from batchgen.io.delivered import DeliveredJob
from batchgen.io.schemas import RESULTS, STEPS, TIMINGS
from batchgen.report import figures
from tests.report.made_jobs import answer, failed, step, token, write_job

SECOND = 1_000_000_000


def results(*answers: dict[str, Any]) -> pl.LazyFrame:
    return frame(answers, RESULTS)


def frame(rows: Any, schema: Any) -> pl.LazyFrame:
    return pl.from_arrow(pa.Table.from_pylist(list(rows), schema)).lazy()  # type: ignore[union-attr]


def steps(*rows: dict[str, int]) -> pl.LazyFrame:
    return frame(rows, STEPS)


def timings(*rows: dict[str, Any]) -> pl.LazyFrame:
    return frame(rows, TIMINGS)


# Three answers: of rows 4 and 5, and two of row 6; 6's second is one token long, and 5's tokens skip a step.
TOKENS = [
    *[token(4, 0, 0), token(4, 1, 1)],
    *[token(6, 0, 1, 1)],
    *[token(5, 0, 0), token(5, 1, 2), token(5, 2, 3)],
    *[token(6, 0, 1), token(6, 1, 2), token(6, 2, 3)],
]


def test_tokens_and_ends_by_step():
    found = figures.tokens_by_step(timings(*TOKENS)).sort("step")
    assert found.rows() == [(0, 2, 0), (1, 3, 2), (2, 2, 0), (3, 2, 2)]


@pytest.mark.parametrize("kept", [True, False])
def test_step_counts_come_from_timings_where_there_are_any(kept):
    rows = [step(n, n, 1, num_prefill_tokens=10 * n, num_decode_tokens=n, num_seqs=2, pages_used=3) for n in (1, 0, 2)]
    found = figures.step_counts(steps(*rows), timings(*TOKENS) if kept else None)
    assert found["start_s"].to_list() == [0, 1, 2]
    assert found["end_s"].to_list() == [1, 2, 3]
    assert found["prompt"].to_list() == [0, 10, 20]
    assert found["generated"].to_list() == ([2, 3, 2] if kept else [0, 1, 2])
    assert found["finished"].to_list() == ([0, 2, 0] if kept else [None] * 3)
    assert found["forward"].to_list() == [1, 1, 1]


def test_the_timeline_spreads_a_step_over_its_time():
    counts = figures.step_counts(
        steps(
            step(0, 0, 3, num_prefill_tokens=300, num_seqs=2, pages_used=6),
            step(1, 3, 1, num_prefill_tokens=8, num_seqs=6, pages_used=2, write_ns=SECOND // 4),
            step(2, 4, 2, num_seqs=1, pages_used=2),
        ),
        timings(token(0, 0, 0), token(0, 1, 1), token(1, 0, 1), token(1, 1, 2)),
    )
    found = figures.timeline(counts, most=1)
    assert found.select("start_s", "end_s", "prompt", "generated", "finished").row(0) == pytest.approx(
        (0, 6, 308 / 6, 4 / 6, 2)
    )
    assert found.select("seqs", "pages").row(0) == pytest.approx((14 / 6, 24 / 6))
    assert found.select("forward", "write").row(0) == pytest.approx((5.75, 0.25))
    many = pl.concat([counts.with_columns(pl.col("start_s", "end_s") + 6 * i) for i in range(3)])
    found = figures.timeline(many)
    assert found.height == 3
    assert found["prompt"].to_list() == pytest.approx([308 / 6] * 3)
    assert found["finished"].to_list() == [2, 4, 6]


def test_a_step_across_two_spans_counts_in_both():
    rows = [step(n, start, took, num_prefill_tokens=12) for n, (start, took) in enumerate([(0, 1), (1, 4), (5, 1)] * 2)]
    rows = [{**row, "start_ns": row["start_ns"] + 6 * SECOND * (n // 3)} for n, row in enumerate(rows)]
    found = figures.timeline(figures.step_counts(steps(*rows), None), most=4)
    assert found["end_s"].to_list() == [6, 12]
    assert found["prompt"].to_list() == [6, 6]
    found = figures.timeline(figures.step_counts(steps(*rows), None), most=1)
    assert found["prompt"].to_list() == [6]


def test_time_between_steps_is_not_the_steps():
    """As after a resume: means are over the time that steps took, rates over all of it."""
    rows = [step(n, start, 1, num_prefill_tokens=5, num_seqs=4) for n, start in enumerate((0, 1, 8))]
    found = figures.timeline(figures.step_counts(steps(*rows), None))
    assert (found["end_s"].to_list(), found["seqs"].to_list()) == ([9], [4])
    assert found["prompt"].to_list() == pytest.approx([15 / 9])


def test_a_job_without_steps_has_no_timeline():
    counts = figures.step_counts(steps(), timings())
    assert figures.timeline(counts).height == 0
    assert figures.time_parts(counts)["share"].to_list() == [0, 0, 0, 0]


def test_time_parts():
    counts = figures.step_counts(
        steps(step(0, 0, 2, schedule_ns=SECOND // 2), step(1, 2, 2, sample_ns=SECOND, write_ns=SECOND // 2)), None
    )
    found = {part: (seconds, share) for part, seconds, share in figures.time_parts(counts).rows()}
    assert found == {"forward": (2, 0.5), "schedule": (0.5, 0.125), "sample": (1, 0.25), "write": (0.5, 0.125)}


def test_latencies_are_of_answers_that_have_them():
    answers = [answer(i, queued_s=float(i), prefill_s=0.5, decode_s=3.0, num_generated_tokens=4) for i in range(101)]
    answers += [answer(101, queued_s=0.0, prefill_s=0.5, decode_s=0.0, num_generated_tokens=1)]
    answers += [failed(102, "prompt_missing", "null")]
    found = {row["name"]: row for row in figures.latencies(results(*answers)).rows(named=True)}
    first = found["first token"]
    assert [first[key] for key in ("p50", "p90", "p99", "max")] == pytest.approx([50.0, 90.4, 99.49, 100.5])
    assert first["mean"] == pytest.approx(sum(range(101)) / 102 + 0.5)
    assert set(list(found["per token"].values())[1:]) == {1.0}  # not of the one token
    assert found["answer"]["max"] == 103.5


def test_latencies_of_nothing_are_null():
    for answers in ([], [failed(0, "prompt_missing", "null")]):
        assert set(sum((row[1:] for row in figures.latencies(results(*answers)).rows()), ())) == {None}


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 1), (0.004, 0.005), (0.3, 0.5), (1.0, 1), (1.1, 2), (2.0, 2), (7.0, 10), (120.0, 200)]
)
def test_round_up(value, expected):
    assert figures.round_up(value) == pytest.approx(expected)


def test_a_histogram_keeps_stragglers_in_its_last_bar():
    answers = results(*(answer(i, queued_s=value) for i, value in enumerate([0.0, 0.9, 1.0, 9.9, 1000.0, None])))
    bars = figures.histogram(answers, pl.col("queued_s"), 4.0, least=1.0)
    assert bars.rows() == [(0, 1, 2), (1, 2, 1), (2, 3, 0), (3, 4, 2)]
    assert figures.histogram(results(), pl.col("queued_s"), 0.0).rows() == []
    zeros = results(answer(0, queued_s=0.0))
    assert figures.histogram(zeros, pl.col("queued_s"), 0.0).rows() == [(0, 1, 1)]


@pytest.mark.parametrize("high", [0.1, 0.3, 1e-6, 7.3, 12345.6])
def test_a_histogram_of_floats_counts_all(high):
    values = [high * i / 50 for i in range(51)]
    bars = figures.histogram(results(*(answer(0, queued_s=v) for v in values)), pl.col("queued_s"), high)
    assert bars["count"].sum() == 51
    assert 10 <= bars.height <= figures.BINS + 1
    assert bars["end"][-1] >= high * (1 - 1e-9)


def test_highest_shown():
    assert figures.highest_shown(2.0, 2.5) == 2.5
    assert figures.highest_shown(2.0, 100.0) == 3.0
    assert figures.highest_shown(None, None) == figures.highest_shown(0.0, 0.0) == 0.0


def test_answer_lengths_by_reason():
    answers = [answer(i, num_generated_tokens=n, finish_reason=why) for i, (n, why) in enumerate(
        [(0, "length"), (2, "length"), (2, "stop"), (2, "length")])]  # fmt: skip
    found = figures.answer_lengths(results(*answers, failed(9, "prompt_missing", "null")))
    assert found.filter(pl.col("count") > 0).select("start", "end", "count", "reason").rows() == [
        (0, 1, 1, "length"),
        (2, 3, 2, "length"),
        (2, 3, 1, "stop"),
    ]
    assert figures.answer_lengths(results()).height == 0


def test_failures_count_rows_and_keep_the_first():
    answers = [failed(i, "prompt_too_long", f"long {i}") for i in range(5)]
    answers += [failed(7, "prompt_missing", "null", sample_index=k) for k in range(3)] + [answer(8)]
    codes = figures.failures(results(*answers))
    assert codes.select("code", "rows").rows() == [("prompt_too_long", 5), ("prompt_missing", 1)]
    assert codes["row_index"].to_list() == [[0, 1, 2], [7]]
    assert codes["message"].to_list() == [["long 0", "long 1", "long 2"], ["null"]]
    assert codes["characters"].to_list() == [[6, 6, 6], [4]]
    assert figures.failures(results(answer(0))).height == 0


def test_longest_are_in_order_and_of_equals_the_first():
    answers = [answer(i, num_prompt_tokens=10 + i // 4, num_generated_tokens=i % 2) for i in range(30)]
    found = figures.longest(results(*answers, failed(99, "prompt_too_long", "x")))
    assert found["row_index"].to_list() == [29, 25, 27, 28, 21, 23, 24, 26, 17, 19]


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (3, [0, 1, 2]), (23, list(range(0, 23, 2)))])
def test_sample_positions(count, expected):
    assert figures.sample_positions(count) == expected


def test_answers_are_found_by_place_and_cut():
    answers = [answer(row, sample_index=k, text="ä" * (3000 * k)) for row in (5, 9) for k in range(2)]
    found = figures.answers_at(results(*answers), [1, 2])
    assert found.select("row_index", "sample_index", "characters").rows() == [(5, 1, 3000), (9, 0, 0)]
    assert found["text"].to_list() == ["ä" * figures.SHOWN, ""]


def test_a_job_with_a_prefix_and_columns_of_the_same_names(tmp_path: Path):
    inputs = pa.table({"text": ["a", "b"], "row_index": ["c", "d"]})
    job = DeliveredJob.open(write_job(tmp_path / "job", [answer(3), answer(4)], prefix="out_", inputs=inputs))
    found = figures.job_figures(job)
    assert found.samples["text"].to_list() == ["yes", "yes"]
    assert list(job.input_schema()) == ["text", "row_index"]
    assert job.input_rows([4], ["row_index", "text"]) == {4: {"row_index": "d", "text": "b"}}


def test_totals_of_a_job(tmp_path: Path):
    rows = [step(0, 0, 1, num_prefill_tokens=15), step(1, 1, 3)]
    path = write_job(tmp_path / "job", [answer(0), answer(1), failed(2, "prompt_missing", "x")], rows)
    totals = figures.job_figures(DeliveredJob.open(path)).totals
    assert (totals.rows, totals.failed_rows, totals.answers) == (3, 1, 3)
    assert totals.finish_reasons == {"stop": 2, "error": 1}
    assert (totals.prompt_tokens, totals.computed_prompt_tokens, totals.generated_tokens) == (20, 15, 4)
    assert (totals.seconds, totals.rate(totals.generated_tokens)) == (4.0, 1.0)
