"""Two finished jobs beside each other: what they were told, how fast they were, which of their answers differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import polars as pl

from batchgen.engine.types import FinishReason
from batchgen.io.checkpoint import flat
from batchgen.io.delivered import DeliveredJob, reading
from batchgen.report.figures import Totals, collect, finish_reasons, job_totals

SHOWN_ROWS = 10
BEFORE, AFTER = 20, 60
"""Characters shown before and after the place from which on two texts differ."""
ACCURACY = ("is_correct", "correct")
"""Names that a boolean column with a verdict on each answer may have."""
REASONS = get_args(FinishReason)
COUNTS = {
    "only_a": ~pl.col("in_b"),
    "only_b": ~pl.col("in_a"),
    "both": pl.col("in_a") & pl.col("in_b"),
    "equal_texts": pl.col("same_text"),
    "equal_finish_reasons": pl.col("same_reason"),
}
_KEY = ["row_index", "sample_index"]


@dataclass(frozen=True, slots=True)
class JobSide:
    """One of the jobs. `accuracy` is the share of its answers with a true verdict, None without such a column."""

    directory: Path
    totals: Totals
    accuracy: float | None

    def figures(self) -> dict[str, float | None]:
        """What is set beside the other job's, under names of its own; None where there is nothing to count."""
        totals = self.totals
        answered = totals.answers - totals.finish_reasons.get("error", 0)
        return {
            "rows": totals.rows,
            "failed_rows": totals.failed_rows,
            "answers": totals.answers,
            **{f"ended_by_{reason}": totals.finish_reasons.get(reason, 0) for reason in REASONS},
            "prompt_tokens": totals.prompt_tokens,
            "computed_prompt_tokens": totals.computed_prompt_tokens,
            "restored_prompt_tokens": totals.restored_prompt_tokens,
            "generated_tokens": totals.generated_tokens,
            "generated_tokens_per_answer": totals.generated_tokens / answered if answered else None,
            "generating_seconds": totals.seconds,
            "rows_per_s": totals.rate(totals.rows - totals.failed_rows),
            "prompt_tokens_per_s": totals.rate(totals.prompt_tokens),
            "generated_tokens_per_s": totals.rate(totals.generated_tokens),
            "accuracy": self.accuracy,
        }


@dataclass(frozen=True, slots=True)
class TextDifference:
    """Texts that are equal for `same` characters; `a` and `b` show the place, null for no answer."""

    row_index: int
    sample_index: int
    same: int
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers are matched by row_index and sample_index; `settings` are those that differ, as (name, a, b).

    `same_input`: whether both jobs read the same rows.
    """

    a: JobSide
    b: JobSide
    same_input: bool
    settings: list[tuple[str, Any, Any]]
    only_a: int
    only_b: int
    both: int
    equal_texts: int
    equal_finish_reasons: int
    differences: list[TextDifference]

    @property
    def different_texts(self) -> int:
        return self.both - self.equal_texts


def compare_jobs(directory_a: Path, directory_b: Path) -> Comparison:
    """Raises OutputError when one of them is not the directory of a finished job, or is damaged."""
    a, b = DeliveredJob.open(directory_a), DeliveredJob.open(directory_b)
    with reading(directory_a, directory_b):
        side_a, side_b = job_side(a), job_side(b)
        matched = match_answers(answers(a), answers(b))
        counts = collect(matched.select(which.sum().alias(name) for name, which in COUNTS.items())).row(0, named=True)
        different = collect(matched.filter(~pl.col("same_text")).bottom_k(SHOWN_ROWS, by=_KEY)).select(_KEY)
        differences = text_differences(a, b, different)
    return Comparison(
        side_a,
        side_b,
        same_input=a.record["identity"]["input"] == b.record["identity"]["input"],
        settings=different_settings(settings(a), settings(b)),
        **{name: int(count) for name, count in counts.items()},
        differences=differences,
    )


def job_side(job: DeliveredJob) -> JobSide:
    end = pl.max_horizontal((pl.col("start_ns") + pl.col("duration_ns")).max(), 0) / 1e9
    seconds = float(collect(job.steps().select(end)).item())
    return JobSide(job.directory, job_totals(job, finish_reasons(job.results()), seconds), accuracy(job))


def accuracy(job: DeliveredJob) -> float | None:
    prefix = job.record["spec"]["output"]["prefix"]
    names = [*ACCURACY, prefix + ACCURACY[0]]
    schema = job.table("results").collect_schema()
    verdict = next((name for name in names if schema.get(name) == pl.Boolean), None)
    return None if verdict is None else collect(job.table("results").select(pl.col(verdict).mean())).item()


def settings(job: DeliveredJob) -> dict[str, Any]:
    """What the job was told, and what became of its `auto`s, as `section.key`."""
    return {name: value for name, value in flat(_sections(job)).items() if name not in ("output.path", "model.sha256")}


def _sections(job: DeliveredJob) -> dict[str, Mapping[str, Any]]:
    spec = {name: part for name, part in job.record["spec"].items() if isinstance(part, dict)}
    taken = {"batchgen": job.record["versions"]["batchgen"], "sha256": job.record["identity"]["model"]}
    return {**spec, "used": {**job.record["numerics"], "threads": job.record["threads"], **taken}}


def different_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]


def answers(job: DeliveredJob) -> pl.LazyFrame:
    """Each answer's key, finish reason and text; of the text a 64-bit hash, so that a large job fits in memory."""
    reason = pl.col("finish_reason").cast(pl.Enum(REASONS))
    return job.results().select(*_KEY, reason, pl.col("text").hash(), there=pl.lit(True))


def match_answers(a: pl.LazyFrame, b: pl.LazyFrame) -> pl.LazyFrame:
    """A row per key of either: whether it is `in_a` and `in_b`, and if in both, whether it has the `same_text` and the
    `same_reason`."""
    joined = a.join(b, on=_KEY, how="full", coalesce=True, suffix="_b")
    there = {"in_a": pl.col("there").fill_null(False), "in_b": pl.col("there_b").fill_null(False)}
    both = pl.col("there") & pl.col("there_b")
    return joined.select(
        *_KEY,
        **there,
        same_text=pl.when(both).then(pl.col("text").eq_missing(pl.col("text_b"))),
        same_reason=pl.when(both).then(pl.col("finish_reason") == pl.col("finish_reason_b")),
    )


def text_differences(a: DeliveredJob, b: DeliveredJob, keys: pl.DataFrame) -> list[TextDifference]:
    rows = keys["row_index"].to_list()
    wanted = [
        collect(job.results().filter(pl.col("row_index").is_in(rows)).select(*_KEY, "text")).join(keys, on=_KEY)
        for job in (a, b)
    ]
    joined = wanted[0].join(wanted[1], on=_KEY, suffix="_b").sort(_KEY)
    return [text_difference(*row) for row in joined.iter_rows()]


def text_difference(row: int, sample: int, a: str | None, b: str | None) -> TextDifference:
    """Where two texts part, with a little before it."""
    x, y = a or "", b or ""
    same = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    return TextDifference(row, sample, same, a and _place(a, same), b and _place(b, same))


def _place(text: str, at: int) -> str:
    start, end = max(0, at - BEFORE), at + AFTER
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
