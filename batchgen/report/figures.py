"""The figures of a finished job: small frames, made by polars' streaming engine from tables of any size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

import numpy as np
import polars as pl

from batchgen.io.delivered import DeliveredJob

PARTS = ("forward", "schedule", "sample", "write")
"""What a step's time is made up of."""
TIME_BINS, BINS = 100, 40
LONGEST, SAMPLES, EXAMPLES = 10, 12, 3
SHOWN, SHOWN_MESSAGE = 2000, 300
"""Characters of a text, and of an error's message, that the page shows."""
LATENCIES = {
    "queued": pl.col("queued_s"),
    "prefill": pl.col("prefill_s"),
    "first token": pl.col("queued_s") + pl.col("prefill_s"),
    "per token": pl.when(pl.col("num_generated_tokens") > 1).then(
        pl.col("decode_s") / (pl.col("num_generated_tokens") - 1)
    ),
    "answer": pl.col("queued_s") + pl.col("prefill_s") + pl.col("decode_s"),
}
"""Seconds of an answer. First token: from when the engine took the row; per token: each after the first."""
STATISTICS = {
    "mean": pl.Expr.mean,
    "p50": lambda expr: expr.quantile(0.5, "linear"),
    "p90": lambda expr: expr.quantile(0.9, "linear"),
    "p99": lambda expr: expr.quantile(0.99, "linear"),
    "max": pl.Expr.max,
}
_KEY = ("row_index", "sample_index")


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole job. Of prompt tokens, `distinct_prompt_tokens` are the fewest that could be computed and
    `planned_prompt_tokens` were to be; `shared_prompt_tokens` were found computed for another row, and
    `restored_prompt_tokens` kept by an earlier job. `seconds`: generating, of all runs of the job, up to the end of the
    last step."""

    rows: int
    failed_rows: int
    answers: int
    finish_reasons: dict[str, int]
    prompt_tokens: int
    distinct_prompt_tokens: int
    planned_prompt_tokens: int
    computed_prompt_tokens: int
    shared_prompt_tokens: int
    restored_prompt_tokens: int
    generated_tokens: int
    seconds: float

    def rate(self, count: float) -> float:
        """Of something per second; 0 for a job without a step."""
        return count / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What a report shows of a job; see the function of each name for the columns."""

    totals: Totals
    timeline: pl.DataFrame
    latencies: pl.DataFrame
    first_token: pl.DataFrame
    per_token: pl.DataFrame
    lengths: pl.DataFrame
    time_parts: pl.DataFrame
    failures: pl.DataFrame
    longest: pl.DataFrame
    samples: pl.DataFrame


def job_figures(job: DeliveredJob) -> Figures:
    """Reads the tables a few times, each time the columns of one figure."""
    results, steps = job.results(), step_counts(job.steps(), job.timings())
    spread = latencies(results)
    high = {row["name"]: highest_shown(row["p99"], row["max"]) for row in spread.iter_rows(named=True)}
    reasons = finish_reasons(results)
    answers = sum(reasons.values())
    return Figures(
        totals=job_totals(job, reasons, last_end(steps)),
        timeline=timeline(steps),
        latencies=spread,
        first_token=histogram(results, LATENCIES["first token"], high["first token"]),
        per_token=histogram(results, LATENCIES["per token"], high["per token"]),
        lengths=answer_lengths(results),
        time_parts=time_parts(steps),
        failures=failures(results),
        longest=longest(results),
        samples=answers_at(results, sample_positions(answers)),
    )


def collect(frame: pl.LazyFrame) -> pl.DataFrame:
    """A small frame of a large one, whose rows are not all in memory at any time."""
    return frame.collect(engine="streaming")


# --- counts ------------------------------------------------------------------------------------------------------


def finish_reasons(results: pl.LazyFrame) -> dict[str, int]:
    """Answers by why they ended, the most frequent first."""
    found = collect(results.group_by("finish_reason").len()).sort("len", "finish_reason", descending=[True, False])
    return dict(found.iter_rows())


def job_totals(job: DeliveredJob, reasons: dict[str, int], seconds: float) -> Totals:
    totals, plan = job.record["totals"], job.record["plan"]
    first = job.results().filter(pl.col("sample_index") == 0)  # prompts are counted at their first answer
    found = collect(first.select(pl.col("num_cached_tokens").cast(pl.Int64).sum())).item()
    return Totals(
        rows=totals["rows"],
        failed_rows=totals["failed_rows"],
        answers=sum(reasons.values()),
        finish_reasons=reasons,
        prompt_tokens=totals["prompt_tokens"],
        distinct_prompt_tokens=plan["distinct_prompt_tokens"],
        planned_prompt_tokens=plan["computed_prompt_tokens"],
        computed_prompt_tokens=totals["computed_prompt_tokens"],
        shared_prompt_tokens=max(0, found - totals["restored_prompt_tokens"]),
        restored_prompt_tokens=totals["restored_prompt_tokens"],
        generated_tokens=totals["generated_tokens"],
        seconds=seconds,
    )


# --- over time ---------------------------------------------------------------------------------------------------


def step_counts(steps: pl.LazyFrame, timings: pl.LazyFrame | None) -> pl.DataFrame:
    """A row per step, in order: `start_s`, `end_s`, `prompt` and `generated` tokens, `finished` answers, `seqs`,
    `pages`, and the seconds of each of PARTS.

    Without timings `finished` is null, and `generated` lacks each answer's first token, which a prefill gives.
    """
    found = collect(steps).sort("step")
    if timings is None:
        counted = found.select("step", generated="num_decode_tokens", finished=pl.lit(None, pl.Int64))
    else:
        counted = found.select("step").join(tokens_by_step(timings), on="step", how="left", maintain_order="left")
        counted = counted.fill_null(0)
    return found.select(
        (pl.col("start_ns") / 1e9).alias("start_s"),
        ((pl.col("start_ns") + pl.col("duration_ns")) / 1e9).alias("end_s"),
        pl.col("num_prefill_tokens").alias("prompt"),
        counted["generated"],
        counted["finished"],
        pl.col("num_seqs").alias("seqs"),
        pl.col("pages_used").alias("pages"),
        *((pl.col(f"{part}_ns") / 1e9).alias(part) for part in PARTS),
    )


def tokens_by_step(timings: pl.LazyFrame) -> pl.DataFrame:
    """`step`, tokens `generated` in it and answers `finished` by it.

    Timings hold each answer's tokens one after the other, so an answer ends where the next row begins another.
    """
    last = pl.col("token_index").shift(-1, fill_value=0) == 0
    rows = timings.select(pl.col("step").cast(pl.Int64), last=last)
    counts = (pl.len().cast(pl.Int64).alias("generated"), pl.col("last").sum().cast(pl.Int64).alias("finished"))
    return collect(rows.group_by("step").agg(*counts))


def timeline(steps: pl.DataFrame, most: int = TIME_BINS) -> pl.DataFrame:
    """The job in at most `most` equal spans: `start_s`, `end_s`, `prompt` and `generated` tokens per second,
    `finished` answers by the end of the span, the mean `seqs` and `pages`, and the seconds of each of PARTS.

    What a step does counts evenly over the step's time; means are over the time that steps took.
    """
    count = max(1, min(most, steps.height // 3)) if steps.height else 0
    edges = np.linspace(0.0, last_end(steps), count + 1)
    width = np.diff(edges)
    took = (steps["end_s"] - steps["start_s"]).to_numpy()

    def of(amount: Any) -> Any:
        return _per_span(steps, np.asarray(amount, np.float64), edges)

    busy = np.maximum(of(took), 1e-12)
    return pl.DataFrame(
        {
            "start_s": edges[:-1],
            "end_s": edges[1:],
            "prompt": of(steps["prompt"]) / width,
            "generated": of(steps["generated"]) / width,
            "finished": _finished_by(steps, edges[1:]),
            "seqs": of(steps["seqs"] * took) / busy,
            "pages": of(steps["pages"] * took) / busy,
            **{part: of(steps[part]) for part in PARTS},
        }
    )


def last_end(steps: pl.DataFrame) -> float:
    return float(steps["end_s"].to_numpy().max(initial=0.0))


def _per_span(steps: pl.DataFrame, amount: Any, edges: Any) -> Any:
    """How much of each step's amount lies between neighbouring edges (seconds)."""
    times = np.stack([steps["start_s"].to_numpy(), steps["end_s"].to_numpy()], axis=1).reshape(-1)
    total = np.cumsum(amount)
    reached = np.stack([total - amount, total], axis=1).reshape(-1)
    return np.diff(np.interp(edges, times, reached)) if len(times) else np.zeros(len(edges) - 1)


def _finished_by(steps: pl.DataFrame, times: Any) -> pl.Series:
    """Answers finished by each time; null where it was not recorded. A step's answers come at its end."""
    if steps["finished"].null_count():
        return pl.Series([None] * len(times), dtype=pl.Int64)
    total = np.concatenate([[0], steps["finished"].cum_sum().to_numpy()])
    # The last edge is the last step's end, but for rounding.
    return pl.Series(total[np.searchsorted(steps["end_s"].to_numpy(), times * (1 + 1e-12), side="right")])


def time_parts(steps: pl.DataFrame) -> pl.DataFrame:
    """`part`, `seconds` and `share` of all steps' time, for each of PARTS."""
    seconds = [float(steps[part].sum()) for part in PARTS]
    whole = sum(seconds) or 1.0
    return pl.DataFrame({"part": PARTS, "seconds": seconds, "share": [value / whole for value in seconds]})


# --- distributions -----------------------------------------------------------------------------------------------


def latencies(results: pl.LazyFrame) -> pl.DataFrame:
    """`name` (of LATENCIES) and its STATISTICS over all answers, in seconds; null where no answer has it."""
    values = results.select(expr.alias(name) for name, expr in LATENCIES.items())
    wanted = [make(pl.col(name)).alias(f"{name}/{what}") for name in LATENCIES for what, make in STATISTICS.items()]
    found = collect(values.select(wanted)).row(0, named=True)
    rows = [{"name": name, **{what: found[f"{name}/{what}"] for what in STATISTICS}} for name in LATENCIES]
    return pl.DataFrame(rows, schema={"name": pl.String, **dict.fromkeys(STATISTICS, pl.Float64)})


def highest_shown(p99: float | None, most: float | None) -> float:
    """Where a histogram ends: a few stragglers do not squeeze the rest into one bar."""
    return min(most, 1.5 * p99) if most and p99 else 0.0


def histogram(results: pl.LazyFrame, value: pl.Expr, high: float, least: float = 0.0) -> pl.DataFrame:
    """`start`, `end` and `count` of equal bars from 0 to `high`, of round widths of `least` or more.

    Values above `high` are in the last bar; nulls are nowhere.
    """
    width = max(round_up(high / BINS), least)
    bars = max(1, -(-int(high * 1e9) // int(width * 1e9)))
    number = (value / width).floor().clip(0, bars - 1).cast(pl.Int64)
    found = collect(results.select(start=number).drop_nulls().group_by("start").agg(count=pl.len().cast(pl.Int64)))
    found = found if found.height else pl.DataFrame(schema={"start": pl.Int64, "count": pl.Int64})
    every = pl.DataFrame({"start": range(bars if found.height else 0)}, schema={"start": pl.Int64})
    found = every.join(found, on="start", how="left", maintain_order="left").fill_null(0)
    return found.select(pl.col("start") * width, end=(pl.col("start") + 1) * width, count="count")


def round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ...; 1 for 0."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** floor(log10(value))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= value * (1 - 1e-9))


def answer_lengths(results: pl.LazyFrame) -> pl.DataFrame:
    """A histogram of generated tokens, for each `reason` that an answer ended with but errors."""
    tokens = pl.col("num_generated_tokens")
    good = results.filter(pl.col("finish_reason") != "error")
    high = collect(good.select(tokens.max())).item() or 0
    reasons = list(finish_reasons(good))
    each = [histogram(good.filter(finish_reason=reason), tokens, high + 1, least=1.0) for reason in reasons]
    named = [bars.with_columns(reason=pl.lit(reason)) for reason, bars in zip(reasons, each, strict=True)]
    return pl.concat(named) if named else pl.DataFrame(schema={"start": pl.Float64, "reason": pl.String})


# --- rows --------------------------------------------------------------------------------------------------------


def failures(results: pl.LazyFrame) -> pl.DataFrame:
    """`code`, failed `rows`, and of the first EXAMPLES their `row_index`, `message` (its beginning) and the whole
    number of `characters`; the most frequent first."""
    message = pl.col("error").struct.field("message")
    failed = results.filter(pl.col("finish_reason") == "error").select(
        "row_index",
        code=pl.col("error").struct.field("code"),
        message=message.str.slice(0, SHOWN_MESSAGE),
        characters=message.str.len_chars(),
    )
    first = failed.unique("row_index", keep="first", maintain_order=True)
    examples = pl.col("row_index", "message", "characters").head(EXAMPLES)
    counted = collect(first.group_by("code").agg(pl.len().cast(pl.Int64).alias("rows"), examples))
    return counted.sort("rows", "code", descending=[True, False])


def longest(results: pl.LazyFrame) -> pl.DataFrame:
    """The LONGEST answers by prompt and generated tokens together, as `answers_at` gives them."""
    tokens = pl.col("num_prompt_tokens") + pl.col("num_generated_tokens")
    keyed = results.filter(pl.col("finish_reason") != "error").select(*_KEY, tokens=tokens)
    first = keyed.top_k(LONGEST, by=["tokens", *_KEY], reverse=[False, True, True])  # of equals the first rows
    keys = collect(first).sort("tokens", *_KEY, descending=[True, False, False]).select(_KEY)
    return keys.join(answers_of(results, keys), on=_KEY, how="left", maintain_order="left")


def sample_positions(count: int) -> list[int]:
    """SAMPLES places spread evenly over `count` answers, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(1, SAMPLES - 1)) for i in range(SAMPLES)}) if count else []


def answers_at(results: pl.LazyFrame, positions: Sequence[int]) -> pl.DataFrame:
    """The answers at these places of the results, in their order."""
    keys = results.select(_KEY).with_row_index("position").filter(pl.col("position").is_in(list(positions)))
    return answers_of(results, collect(keys.select(_KEY))).sort(_KEY)


def answers_of(results: pl.LazyFrame, keys: pl.DataFrame) -> pl.DataFrame:
    """Some answers: their key, counts, times and first SHOWN characters, with the whole number of `characters`."""
    rows: Iterable[int] = keys["row_index"].to_list()
    few = results.filter(pl.col("row_index").is_in(list(rows))).select(
        *_KEY,
        pl.col("text").str.slice(0, SHOWN),
        pl.col("text").str.len_chars().alias("characters"),
        "finish_reason",
        "num_prompt_tokens",
        "num_generated_tokens",
        LATENCIES["answer"].alias("seconds"),
        pl.col("error").struct.field("code").alias("error"),
    )
    return collect(few).join(keys.select(_KEY), on=_KEY, how="semi")
