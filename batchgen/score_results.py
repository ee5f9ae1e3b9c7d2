"""What is delivered of tasks that score, or embed: one row per input row, made of the scores of its continuations or
windows, or of its embedding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from batchgen.errors import RowError
from batchgen.io.deliver import ANSWERS, ResultForm
from batchgen.io.schemas import DELIVERED, EMBEDDINGS, SCORES
from batchgen.prompt_sources import PythonRow, python_rows
from batchgen.scored_sources import Continuations, continuations_of, or_failure, right_choice
from batchgen.spec import JobSpec, TaskSpec
from batchgen.text.tokenizer import Tokenizer

WAYS = ("", "_per_byte", "_per_token")
"""What choices are compared by, as the names of columns end: the log-likelihood itself, or divided."""


def result_form(spec: JobSpec, tokenizer: Tokenizer, hidden_size: int) -> ResultForm:
    if spec.task.kind == "generate":
        return ANSWERS
    if spec.task.kind == "embed":
        return Embeddings(hidden_size)
    return ChoiceResults(spec.task) if spec.task.kind == "choose" else TextResults(spec.task.kind, tokenizer)


def verdicts(spec: JobSpec, directory: Path) -> dict[str, float | None]:
    """Over all rows of delivered results: the share of right choices, or what a text's byte costs on the average."""

    def column(name: str) -> pl.Expr:
        return pl.col(spec.output.prefix + name)

    results = pl.scan_parquet(directory / "results" / "part-*.parquet")
    if spec.task.kind == "choose" and spec.task.answer is not None:
        found = [column(f"is_correct{way}").mean().alias(f"accuracy{way}") for way in WAYS]
    elif spec.task.kind == "perplexity":
        total = -column("logprob_sum").sum()
        bits = total / column("num_continuation_bytes").sum() / np.log(2)
        tokens = column("logprob_sum").is_not_null() * column("num_continuation_tokens")
        found = [(total / tokens.sum()).exp().alias("perplexity"), bits.alias("bits_per_byte")]
    else:
        return {}
    return results.select(found).collect(engine="streaming").row(0, named=True)


class Embeddings:
    """A row's embedding as a list of fixed size, null where it has failed."""

    parts, columns, one_per_row = EMBEDDINGS, frozenset[str](), True

    def __init__(self, hidden_size: int):
        self._type = pa.list_(pa.field("element", pa.float32()), hidden_size)
        place = EMBEDDINGS.get_field_index("embedding")
        self.delivered = EMBEDDINGS.set(place, pa.field("embedding", self._type))

    def finish(self, batch: pa.RecordBatch, samples: NDArray[np.int32], results: pa.Table) -> pa.Table:
        place, found = results.schema.get_field_index("embedding"), results["embedding"].combine_chunks()
        missing = found.is_null().to_numpy(zero_copy_only=False)
        values = np.zeros((len(found), self._type.list_size), np.float32)
        values[~missing] = found.flatten().to_numpy().reshape(-1, self._type.list_size)
        lists = pa.FixedSizeListArray.from_arrays(values.reshape(-1), type=self._type, mask=pa.array(missing))
        return results.set_column(place, self.delivered.field(place), lists)


class TextResults:
    """Scores of one text per row, which may have been predicted in several windows.

    Its bytes are those of its tokens.
    """

    parts, columns, one_per_row = SCORES, frozenset[str](), True

    def __init__(self, kind: str, tokenizer: Tokenizer):
        self.delivered = DELIVERED[kind]
        self._tokenizer = tokenizer

    def finish(self, batch: pa.RecordBatch, samples: NDArray[np.int32], results: pa.Table) -> pa.Table:
        counts = [self._tokenizer.num_bytes(ids) for ids in results["token_ids"].to_pylist()]
        frame = frame_of(results).with_columns(num_continuation_bytes=pl.Series(counts, dtype=pl.Int32))
        good, total = pl.col("error").is_null().all(), pl.col("cumulative_logprob").sum()
        tokens, size = pl.col("token_ids").list.len().sum(), pl.col("num_continuation_bytes").sum()
        merged = merge(
            frame,
            logprob_sum=pl.when(good).then(total),
            token_logprobs=pl.col("token_logprobs").explode().drop_nulls(),
            token_ids=pl.col("token_ids").explode().drop_nulls(),
            is_greedy=pl.when(good).then(pl.col("is_greedy").all()),
            num_continuation_tokens=tokens,
            num_continuation_bytes=size,
            perplexity=pl.when(good).then((-total / tokens).exp()),
            bits_per_byte=pl.when(good).then(-total / size / np.log(2)),
        )
        return in_schema(merged, self.delivered)


class ChoiceResults:
    """Scores of a row's choices, and which of them is the likeliest. The texts are made from the input again."""

    parts, delivered, one_per_row = SCORES, DELIVERED["choose"], True

    def __init__(self, task: TaskSpec):
        self._continuations: Continuations = continuations_of(task)
        self._answer = task.answer
        self.columns = self._continuations.columns | ({task.answer} if task.answer is not None else frozenset())

    def finish(self, batch: pa.RecordBatch, samples: NDArray[np.int32], results: pa.Table) -> pa.Table:
        rows = python_rows(batch) if batch.num_columns else [{}] * len(samples)
        texts = [self._texts(row, count) for row, count in zip(rows, samples.tolist(), strict=True)]
        right = [self._right(row, found) for row, found in zip(rows, texts, strict=True)]
        frame = frame_of(results).with_columns(
            text=pl.Series([text for row in texts for text in row], dtype=pl.String),
            right=pl.Series(np.repeat(np.array(right, object), samples).tolist(), dtype=pl.Int32),
        )
        return in_schema(_chosen(merge(_rated(frame), **_choices())), self.delivered)

    def _texts(self, row: PythonRow, count: int) -> Sequence[str | None]:
        """As many as there are results: a row that has failed may have one alone."""
        found = or_failure(self._continuations.of, row) if isinstance(row, Mapping) else None
        return found if isinstance(found, list) and len(found) == count else [None] * count

    def _right(self, row: PythonRow, texts: Sequence[Any]) -> int | None:
        if self._answer is None or not isinstance(row, Mapping):
            return None
        try:
            return right_choice(self._answer, row[self._answer], list(texts))
        except RowError:
            return None


def _rated(frame: pl.DataFrame) -> pl.DataFrame:
    """With what is told of each choice."""
    logprob, tokens = pl.col("cumulative_logprob"), pl.col("token_ids").list.len()
    size = pl.col("text").str.len_bytes()
    return frame.with_columns(
        logprob=logprob,
        logprob_per_byte=logprob / size,
        logprob_per_token=logprob / tokens,
        num_tokens=tokens,
        num_bytes=size,
    )


def _choices() -> dict[str, pl.Expr]:
    """The choices of a row that has not failed, the likeliest of them and the right one."""
    good = pl.col("error").is_null().all()
    names = [field.name for field in DELIVERED["choose"].field("choice_scores").type.value_type]
    best = {f"choice{way}": pl.when(good).then(pl.col(f"logprob{way}").arg_max()) for way in WAYS}
    return {"choice_scores": pl.struct(names).filter(good), **best, "right": pl.col("right").first()}


def _chosen(merged: pl.DataFrame) -> pl.DataFrame:
    return merged.with_columns((pl.col(f"choice{way}") == pl.col("right")).alias(f"is_correct{way}") for way in WAYS)


# --- rows --------------------------------------------------------------------------------------------------------


def frame_of(results: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(results)
    assert isinstance(frame, pl.DataFrame)
    return frame


def merge(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """One row for each `row_index`, in order: `columns`, and what all tasks tell; of several errors the first."""
    sums = ("num_prompt_tokens", "num_cached_tokens")
    longest = ("truncated_tokens", "queued_s", "prefill_s", "decode_s")
    failed = pl.col("error").is_not_null()
    return frame.group_by("row_index", maintain_order=True).agg(
        pl.lit(0, pl.Int32).alias("sample_index"),
        pl.when(failed.any()).then(pl.lit("error")).otherwise(pl.lit("stop")).alias("finish_reason"),
        pl.col("error").filter(failed).first(),
        *(pl.col(name).sum() for name in sums),
        *(pl.col(name).max() for name in longest),
        **columns,
    )


def in_schema(frame: pl.DataFrame, schema: pa.Schema) -> pa.Table:
    return frame.select(schema.names).to_arrow().cast(schema)
