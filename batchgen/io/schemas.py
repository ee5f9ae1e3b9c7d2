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

_TOKENS = pa.list_(pa.field("element", pa.int32()))
_LOGPROBS = pa.list_(pa.field("element", pa.float32()))
_KEY = [("row_index", pa.int64()), ("sample_index", pa.int32())]
_REST = [
    ("finish_reason", pa.string()),
    *((name, pa.int32()) for name in ("num_prompt_tokens", "num_cached_tokens", "truncated_tokens")),
    ("error", RESULTS.field("error").type),
    *((name, pa.float64()) for name in ("queued_s", "prefill_s", "decode_s")),
]
_OF_TEXT = [
    ("logprob_sum", pa.float64()),
    ("token_logprobs", _LOGPROBS),
    ("token_ids", _TOKENS),
    ("is_greedy", pa.bool_()),
    ("num_continuation_tokens", pa.int32()),
    ("num_continuation_bytes", pa.int32()),
]
CHOICE = pa.struct(
    [
        ("text", pa.large_string()),
        ("logprob", pa.float64()),
        ("logprob_per_byte", pa.float64()),
        ("logprob_per_token", pa.float64()),
        ("num_tokens", pa.int32()),
        ("num_bytes", pa.int32()),
        ("is_greedy", pa.bool_()),
    ]
)
_WAYS = ("", "_per_byte", "_per_token")

SCORES = pa.schema(
    [
        *_KEY,
        ("token_ids", _TOKENS),
        ("token_logprobs", _LOGPROBS),
        ("cumulative_logprob", pa.float64()),
        ("is_greedy", pa.bool_()),
        *_REST,
    ]
)
"""What is committed of tasks that score: a row for each choice or window; the rows of `DELIVERED` are made of these."""

EMBEDDINGS = pa.schema([*_KEY, ("embedding", pa.list_(pa.field("element", pa.float32()))), *_REST])
"""Embeddings; as delivered, lists have a fixed size, the model's hidden size."""

COMMITTED = {
    "generate": RESULTS,
    "score": SCORES,
    "choose": SCORES,
    "perplexity": SCORES,
    "embed": EMBEDDINGS,
}
"""The columns of a job's parts, by the kind of the task."""

DELIVERED = {
    "generate": RESULTS,
    "score": pa.schema([*_KEY, *_OF_TEXT, *_REST]),
    "choose": pa.schema(
        [
            *_KEY,
            ("choice_scores", pa.list_(pa.field("element", CHOICE))),
            *((f"choice{way}", pa.int32()) for way in _WAYS),
            *((f"is_correct{way}", pa.bool_()) for way in _WAYS),
            *_REST,
        ]
    ),
    "perplexity": pa.schema([*_KEY, *_OF_TEXT, ("perplexity", pa.float64()), ("bits_per_byte", pa.float64()), *_REST]),
    "embed": EMBEDDINGS,
}
"""The result columns, by the kind of the task."""

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
