"""The columns that a job writes."""

import pyarrow as pa

RESULTS = pa.schema(
    [
        ("row_index", pa.int64()),
        ("sample_index", pa.int32()),
        ("text", pa.large_string()),
        ("token_ids", pa.list_(pa.field("element", pa.int32()))),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("num_cached_tokens", pa.int32()),
        ("truncated_tokens", pa.int32()),
        ("num_generated_tokens", pa.int32()),
        ("cumulative_logprob", pa.float64()),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
        ("queued_s", pa.float64()),
        ("prefill_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("request_hash", pa.string()),
    ]
)

TIMINGS = pa.schema(
    [
        ("row_index", pa.int64()),
        ("sample_index", pa.int32()),
        ("token_index", pa.int32()),
        ("token_id", pa.int32()),
        ("step", pa.int32()),
        ("t_ns", pa.int64()),
        ("phase", pa.dictionary(pa.int8(), pa.string())),
        ("logprob", pa.float32()),
    ]
)

STEPS = pa.schema(
    [
        (name, pa.int64())
        for name in (
            "step",
            "start_ns",
            "duration_ns",
            "num_prefill_tokens",
            "num_decode_tokens",
            "num_seqs",
            "pages_used",
            "schedule_ns",
            "forward_ns",
            "sample_ns",
            "write_ns",
            "num_prefill_context",
            "num_decode_context",
        )
    ]
)

BATCH_OUTPUT = "batch_output.jsonl"
"""Beside the results: the answers as OpenAI's batch output, when they were asked for as such a batch."""

SCHEMAS = {"results": RESULTS, "timings": TIMINGS, "steps": STEPS}
