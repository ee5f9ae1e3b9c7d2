"""Collects what the engine makes and commits it in parts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.engine.types import RequestOutput, StepRecord
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.schemas import RESULTS, STEPS, TIMINGS

_NS = 1e9
PART_TOKENS = 1 << 21
"""Generated tokens in a part, about: bounds memory where answers are long."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Outputs and steps that are not committed yet."""

    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    tokens: int = 0

    def extend(self, outputs: Sequence[RequestOutput], steps: Sequence[StepRecord]) -> None:
        self.outputs.extend(outputs)
        self.steps.extend(steps)
        self.tokens += sum(len(output.token_ids) for output in outputs)


class JobWriter:
    """Buffers outputs and step records and commits them as parts of the checkpoint, in a thread of its own.

    A part is due when `part_rows` outputs are waiting, or `PART_TOKENS` of theirs, or `part_seconds` after the last
    one. One part is written at a time, meanwhile others wait: those of two parts at most, then `maybe_flush` waits too.
    `clock` gives nanoseconds on the engine's monotonic clock; `started_ns` is when this process began the job (default:
    now). Engine steps count from 0 in every process; steps and times are written so that they go on from earlier runs
    of the same job. With `timings` false no row per token is written; with `scores` outputs are scored tokens. A failed
    write raises OutputError in the next `maybe_flush` or `flush`; committed parts are then as they were, and what was
    buffered stays buffered. Leaving the context lets the part under way end, and writes no other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        part_rows: int,
        part_seconds: float,
        timings: bool,
        clock: Callable[[], int],
        started_ns: int | None = None,
        schema: pa.Schema = RESULTS,
    ):
        self._schema = schema
        self._checkpoint = checkpoint
        self._part_rows = part_rows
        self._part_ns = part_seconds * _NS
        self._timings = timings
        self._clock = clock
        self._flushed_ns = clock()
        self._shift_ns = checkpoint.elapsed_ns - (self._flushed_ns if started_ns is None else started_ns)
        self._first_step = checkpoint.next_step
        self._waiting, self._under_way = _Buffer(), _Buffer()
        self._pool = ThreadPoolExecutor(1, "write")
        self._writing: Future[None] | None = None

    def __enter__(self) -> "JobWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        self._waiting.extend(outputs, ())

    def add_step(self, record: StepRecord) -> None:
        self._waiting.steps.append(record)

    def maybe_flush(self) -> bool:
        """Begins to commit a part if one is due; returns whether it did."""
        if self._writing is not None and self._writing.done():
            self._settle()
        due = self._holds(1) or self._clock() - self._flushed_ns >= self._part_ns
        return due and (self._writing is None or self._holds(2)) and self._begin()

    def flush(self) -> bool:
        """Commits everything that is buffered; returns whether there was anything."""
        begun = self._begin()
        self._settle()
        return begun

    def _holds(self, parts: int) -> bool:
        waiting = self._waiting
        return len(waiting.outputs) >= parts * self._part_rows or waiting.tokens >= parts * PART_TOKENS

    def _begin(self) -> bool:
        """Hand what is waiting to the thread, when that has written the part before."""
        self._settle()
        self._flushed_ns = self._clock()
        if not self._waiting.outputs and not self._waiting.steps:
            return False
        self._under_way, self._waiting = self._waiting, _Buffer()
        self._writing = self._pool.submit(self._commit, self._under_way)
        return True

    def _settle(self) -> None:
        """Wait for the part under way; if it could not be written it is waiting again."""
        if self._writing is None:
            return
        wait([self._writing])  # may be interrupted, and is under way then as before
        failure, self._writing = self._writing.exception(), None
        part, self._under_way = self._under_way, _Buffer()
        if failure is not None:
            part.extend(self._waiting.outputs, self._waiting.steps)
            self._waiting = part
            raise failure

    def _commit(self, part: _Buffer) -> None:
        timings = timings_table(part.outputs, self._first_step, self._shift_ns)
        steps = steps_table(part.steps, self._first_step, self._shift_ns)
        results = results_table(part.outputs, self._schema)
        tables = {"results": results, "steps": steps}
        if self._timings:
            tables["timings"] = timings
        restored = sum(output.num_restored_tokens for output in part.outputs)
        totals = results_totals(results) | steps_totals(steps) | {"restored_prompt_tokens": restored}
        end_step, end_ns = part_end(timings, steps)
        self._checkpoint.commit(tables, end_step=end_step, end_ns=end_ns, totals=totals)


def results_table(outputs: Sequence[RequestOutput], schema: pa.Schema = RESULTS) -> pa.Table:
    """One row per output, one of `COMMITTED`. Seconds are null for an output that was never scheduled."""
    scheduled = _numbers(outputs, "scheduled_ns", np.int64)
    first_token = _numbers(outputs, "first_token_ns", np.int64)
    finished = _numbers(outputs, "finished_ns", np.int64)
    first_token = np.where(first_token == 0, finished, first_token)  # nothing was generated
    columns = {
        **{
            name: _numbers(outputs, name, np.int32)
            for name in ("sample_index", "num_prompt_tokens", "num_cached_tokens", "truncated_tokens")
        },
        **{
            name: [getattr(output, name) for output in outputs]
            for name in ("text", "finish_reason", "stop_reason", "request_hash")
        },
        "row_index": _numbers(outputs, "row_index", np.int64),
        "token_ids": _lists(outputs, "token_ids", np.int32),
        "token_logprobs": _lists(outputs, "logprobs", np.float32),
        "is_greedy": [output.is_greedy for output in outputs],
        "num_generated_tokens": _lengths(outputs).astype(np.int32),
        "cumulative_logprob": _numbers(outputs, "cumulative_logprob", np.float64),
        "embedding": [output.embedding for output in outputs],
        "error": [output.error and {"code": output.error.code, "message": output.error.message} for output in outputs],
        "queued_s": _seconds(_numbers(outputs, "arrived_ns", np.int64), scheduled, scheduled > 0),
        "prefill_s": _seconds(scheduled, first_token, scheduled > 0),
        "decode_s": _seconds(first_token, finished, scheduled > 0),
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def timings_table(outputs: Sequence[RequestOutput], first_step: int, shift_ns: int) -> pa.Table:
    """One row per generated token, schema `TIMINGS`; built from whole arrays, never token by token."""
    lengths = _lengths(outputs)
    token_index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    phase = pa.DictionaryArray.from_arrays((token_index > 0).astype(np.int8), ["prefill", "decode"])
    columns = [
        np.repeat(_numbers(outputs, "row_index", np.int64), lengths),
        np.repeat(_numbers(outputs, "sample_index", np.int32), lengths),
        token_index.astype(np.int32),
        _joined(outputs, "token_ids", np.int32),
        _joined(outputs, "token_steps", np.int32) + np.int32(first_step),
        _joined(outputs, "token_times", np.int64) + shift_ns,
        phase,
        _joined(outputs, "logprobs", np.float32),
    ]
    return pa.table([pa.array(column) for column in columns], schema=TIMINGS)


def steps_table(records: Sequence[StepRecord], first_step: int, shift_ns: int) -> pa.Table:
    """One row per engine step, schema `STEPS`."""
    moved = [replace(record, step=record.step + first_step, start_ns=record.start_ns + shift_ns) for record in records]
    flat = np.fromiter(chain.from_iterable(map(astuple, moved)), np.int64, len(moved) * len(STEPS))
    return pa.table(list(flat.reshape(-1, len(STEPS)).T.copy()), schema=STEPS)


def _numbers(outputs: Sequence[RequestOutput], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    return np.fromiter((getattr(output, name) for output in outputs), dtype, len(outputs))


def _lengths(outputs: Sequence[RequestOutput]) -> NDArray[np.int64]:
    return np.fromiter((len(output.token_ids) for output in outputs), np.int64, len(outputs))


def _joined(outputs: Sequence[RequestOutput], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(getattr(output, name) for output in outputs)], dtype=dtype)


def _lists(outputs: Sequence[RequestOutput], name: str, dtype: type[np.generic]) -> pa.ListArray:
    """Of arrays that run parallel to `token_ids`."""
    offsets = np.concatenate([[0], np.cumsum(_lengths(outputs))]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, _joined(outputs, name, dtype))


def _seconds(start: NDArray[np.int64], end: NDArray[np.int64], known: NDArray[np.bool_]) -> pa.Array:
    return pa.array((end - start) / _NS, mask=~known)


def part_end(timings: pa.Table, steps: pa.Table) -> tuple[int, int]:
    """The first step number and the first nanosecond behind everything in the part."""
    times, numbers = timings["t_ns"].to_numpy(), timings["step"].to_numpy()
    step_ends = steps["start_ns"].to_numpy() + steps["duration_ns"].to_numpy()
    end_ns = np.concatenate([[-1], times, step_ends]).max() + 1
    end_step = np.concatenate([[-1], numbers, steps["step"].to_numpy()]).max() + 1
    return int(end_step), int(end_ns)


def results_totals(results: pa.Table) -> dict[str, int]:
    """Countable things; rows and prompts are counted at their first sample, but each score has a prompt."""
    first = results.filter(pc.equal(results["sample_index"], 0))
    totals = {
        "rows": first.num_rows,
        "failed_rows": _sum(pc.equal(first["finish_reason"], "error")),
        "results": results.num_rows,
    }
    if "token_logprobs" in results.column_names:  # scored, see `SCORES`
        scored = _sum(pc.list_value_length(results["token_ids"]))
        return totals | {"prompt_tokens": _sum(results["num_prompt_tokens"]), "scored_tokens": scored}
    totals["prompt_tokens"] = _sum(first["num_prompt_tokens"])
    if "embedding" in results.column_names:
        return totals
    return totals | {"generated_tokens": _sum(results["num_generated_tokens"])}


def steps_totals(steps: pa.Table) -> dict[str, int]:
    return {
        "computed_prompt_tokens": _sum(steps["num_prefill_tokens"]),
        "steps": steps.num_rows,
        "step_ns": _sum(steps["duration_ns"]),
    }


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
