"""Finished jobs made by hand: the files that a run leaves, with figures that a test knows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.io import checkpoint
from batchgen.io.schemas import RESULTS, STEPS, TIMINGS
from batchgen.spec import JobSpec

ANSWER: dict[str, Any] = {
    "sample_index": 0,
    "text": "yes",
    "token_ids": [1, 2],
    "finish_reason": "stop",
    "stop_reason": None,
    "num_prompt_tokens": 10,
    "num_cached_tokens": 0,
    "truncated_tokens": 0,
    "num_generated_tokens": 2,
    "cumulative_logprob": -0.5,
    "error": None,
    "queued_s": 0.5,
    "prefill_s": 0.25,
    "decode_s": 0.1,
}
FAILED: dict[str, Any] = {
    "text": None,
    "token_ids": [],
    "finish_reason": "error",
    "num_prompt_tokens": 0,
    "num_generated_tokens": 0,
    "queued_s": None,
    "prefill_s": None,
    "decode_s": None,
}
STEP: dict[str, int] = dict.fromkeys(STEPS.names, 0)


def answer(row: int, **values: Any) -> dict[str, Any]:
    return {"row_index": row, **ANSWER, **values}


def failed(row: int, code: str, message: str, **values: Any) -> dict[str, Any]:
    return answer(row, **FAILED, error={"code": code, "message": message}, **values)


def step(number: int, start_s: float, seconds: float, **values: int) -> dict[str, int]:
    """A step whose time is all the model's, but for what `values` say of its other parts."""
    start, duration = round(start_s * 1e9), round(seconds * 1e9)
    other = sum(values.get(f"{part}_ns", 0) for part in ("schedule", "sample", "write"))
    return {
        **STEP,
        "step": number,
        "start_ns": start,
        "duration_ns": duration,
        "forward_ns": duration - other,
        **values,
    }


def token(row: int, index: int, step: int, sample: int = 0) -> dict[str, Any]:
    phase = "decode" if index else "prefill"
    return dict(zip(TIMINGS.names, (row, sample, index, 7, step, step, phase, -0.5), strict=True))


def write_job(
    directory: Path,
    answers: Sequence[dict[str, Any]],
    steps: Sequence[dict[str, int]] = (),
    tokens: Sequence[dict[str, Any]] | None = (),
    *,
    inputs: pa.Table | None = None,
    prefix: str = "",
    state: str = "finished",
    record: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A job's directory. `inputs` has a row per answer; `tokens` None writes no timings; `sections` are the spec's."""
    results = pa.Table.from_pylist(list(answers), RESULTS)
    results = results.rename_columns([prefix + name for name in RESULTS.names])
    for name in (inputs.schema.names if inputs is not None else [])[::-1]:
        results = results.add_column(0, inputs.schema.field(name), inputs[name])
    write_parts(directory / "results", results, 3)
    write_parts(directory / "steps", pa.Table.from_pylist(list(steps), STEPS), 1000)
    if tokens is not None:
        write_parts(directory / "timings", pa.Table.from_pylist(list(tokens), TIMINGS), 4)
    sections = {"output": {"prefix": prefix}, "input": {"path": "in.parquet", "prompt": "x"}, **sections}
    spec = JobSpec.model_validate({"name": "made", "model": {"source": "m.gguf"}, **sections})
    values = {
        "batchgen_job": checkpoint._JOB_FORMAT,
        "state": state,
        **job_record(spec, answers, steps),
        **(record or {}),
    }
    (directory / "job.json").write_text(json.dumps(values))
    return directory


def write_parts(directory: Path, table: pa.Table, rows: int) -> None:
    directory.mkdir(parents=True)
    for number, start in enumerate(range(0, max(1, table.num_rows), rows)):
        pq.write_table(table.slice(start, rows), directory / f"part-{number:05d}.parquet")


def job_record(spec: JobSpec, answers: Sequence[dict[str, Any]], steps: Sequence[dict[str, int]]) -> dict[str, Any]:
    first = [a for a in answers if a["sample_index"] == 0]
    prompt_tokens = sum(a["num_prompt_tokens"] for a in first)
    totals = {
        "rows": len(first),
        "failed_rows": sum(a["finish_reason"] == "error" for a in first),
        "prompt_tokens": prompt_tokens,
        "computed_prompt_tokens": sum(s["num_prefill_tokens"] for s in steps),
        "restored_prompt_tokens": 0,
        "generated_tokens": sum(a["num_generated_tokens"] for a in answers),
        **{f"{name}_seconds": 1.0 for name in ("plan", "load", "compile", "generate", "wall")},
    }
    return {
        "started": "2026-01-02T03:04:05+00:00",
        "spec": spec.model_dump(mode="json"),
        "threads": 2,
        "model": {"name": "Made", "tokenizer": "t"},
        "numerics": {"kernel": "portable", "weights": "fp32", "kv_dtype": "fp32"},
        "versions": {"batchgen": "0"},
        "cpu": {"machine": "x86_64", "count": 2, "features": ["avx2", "fma", "sse"]},
        "plan": {
            "prompt_tokens": prompt_tokens,
            "distinct_prompt_tokens": prompt_tokens - 1,
            "computed_prompt_tokens": prompt_tokens,
            "kv_pages": 8,
            "generate_seconds": [1.0, 2.5],
        },
        "preemptions": 0,
        "totals": totals,
        "identity": {"input": "i", "model": "m"},
    }
