"""OpenAI's batch files: requests in as JSON lines, answers out as JSON lines.

A request is `{"custom_id", "method", "url", "body": {"model", "messages", ...}}`. As a table it has these four columns,
the body as JSON text, so that requests with different fields go together. The model is the job's, whatever `body.model`
says; of the other fields those that sampling has are taken, those without a bearing on the answer are passed over, and
any other makes the row fail.
"""

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import RowError
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.files import output_errors, write_atomically
from batchgen.io.json_lines import Row, is_unicode, read_blocks
from batchgen.io.schemas import BATCH_OUTPUT
from batchgen.io.sources import SourceFile

if TYPE_CHECKING:
    from batchgen.io.table import InputTable

COLUMNS = ("custom_id", "method", "url", "body")

_SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
_URL = "/v1/chat/completions"
_WITHOUT_EFFECT = (
    *("model", "messages", "max_completion_tokens"),
    *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"),
)
_OFF: Mapping[str, tuple[Any, ...]] = {  # values that ask for nothing
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


# --- requests ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _BatchReader:
    _source: SourceFile
    num_rows: int
    schema = _SCHEMA

    def batches(self, columns: Sequence[str], start: int, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        position = 0
        for block in read_blocks(self._source, rows):
            yield position, pa.RecordBatch.from_pylist([_texts(row) for row in block], _SCHEMA).select(list(columns))
            position += len(block)


def _texts(row: Row) -> dict[str, str | None]:
    """The row's columns; null where a text (or, for the body, an object) is missing."""
    texts = {name: row[name] for name in COLUMNS[:3] if isinstance(row.get(name), str) and is_unicode(row[name])}
    return {**texts, "body": _json(row["body"]) if isinstance(row.get("body"), dict) else None}


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


def open_openai_batch(files: Sequence[SourceFile], as_text: Container[str]) -> Sequence[_BatchReader]:
    """Reads all lines, to count them and to find those that are no JSON."""
    return [_open(source) for source in files]


def _open(source: SourceFile) -> _BatchReader:
    with source.errors("cannot be read"):
        return _BatchReader(source, sum(len(block) for block in read_blocks(source, 1 << 12)))


def read_body(row: Mapping[str, Any]) -> Row:
    """The body of a request. Raises RowError when the request is none that can be answered."""
    if row["custom_id"] is None:
        raise RowError("schema_error", "custom_id is missing, or no text")
    if row["method"] not in (None, "POST"):
        raise RowError("schema_error", f"method {row['method']!r} is not supported, only POST")
    if row["url"] not in (None, _URL):
        raise RowError("schema_error", f"url {row['url']!r} is not supported, only {_URL}")
    if row["body"] is None:
        raise RowError("schema_error", "body is missing, or no object")
    body: Row = json.loads(row["body"])
    return body


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The request's messages; the text parts of one are joined with newlines, as vLLM does.

    What is not a list of messages with texts comes back as it is. Raises RowError.
    """
    messages = read_body(row).get("messages")
    return [_message(m) for m in messages] if isinstance(messages, list) else messages


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RowError("schema_error", f"body.messages: {name} is not supported")
    return {**message, "content": _content(message.get("content"))}


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind != "text" or not isinstance(text, str):
        raise RowError("schema_error", f"body.messages: a part of type {kind!r} is not supported, only text")
    return text


def sampling_of(row: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The sampling values that the request brings; `known` are the names of those that there are.

    Raises RowError for a field that asks for something else.
    """
    body = {name: value for name, value in read_body(row).items() if value is not None}
    for name, value in body.items():
        if name not in known and name not in _WITHOUT_EFFECT and value not in _OFF.get(name, ()):
            raise RowError("schema_error", f"body.{name} is not supported")
    values = {name: body[name] for name in known if name in body}
    if "max_completion_tokens" in body:
        values["max_tokens"] = body["max_completion_tokens"]
    return values


# --- answers ----------------------------------------------------------------------------------------------------


def deliver_batch_output(checkpoint: Checkpoint, table: "InputTable", *, prefix: str, model: str) -> None:
    """Writes `BATCH_OUTPUT` beside the results just delivered: a line per request, in input order.

    `prefix` is that of the result columns. The same job gives the same bytes. Raises OutputError when writing fails.
    """
    ids = chain.from_iterable(batch.column("custom_id").to_pylist() for _, batch in table.batches(["custom_id"]))
    created = int(checkpoint.started.timestamp())

    def write(file: IO[bytes]) -> None:
        results = _results(checkpoint.directory / "results", prefix)
        for custom_id, (_, samples) in zip(ids, groupby(results, lambda result: result["row_index"]), strict=True):
            line = _line(custom_id, list(samples), model, created)
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    with output_errors(checkpoint.directory):
        write_atomically(checkpoint.directory / BATCH_OUTPUT, write, checkpoint.work / BATCH_OUTPUT)


def _results(directory: Path, prefix: str) -> Iterator[Row]:
    """The delivered results in order, under the columns' own names."""
    names = [
        "row_index",
        "sample_index",
        "text",
        "finish_reason",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_generated_tokens",
        "error",
    ]
    for path in sorted(directory.iterdir()):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1 << 12, columns=[prefix + name for name in names]):
                yield from batch.rename_columns([name.removeprefix(prefix) for name in batch.schema.names]).to_pylist()


def _line(custom_id: str | None, samples: list[Row], model: str, created: int) -> Row:
    row = samples[0]["row_index"]
    error = next((sample["error"] for sample in samples if sample["error"]), None)
    body = None if error else _completion(f"chatcmpl-{row}", samples, model, created)
    response = body and {"status_code": 200, "request_id": f"req_{row}", "body": body}
    return {"id": f"batch_req_{row}", "custom_id": custom_id, "response": response, "error": error}


def _completion(name: str, samples: list[Row], model: str, created: int) -> Row:
    asked, answered = samples[0]["num_prompt_tokens"], sum(sample["num_generated_tokens"] for sample in samples)
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(sample) for sample in samples],
        "usage": {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
            "prompt_tokens_details": {"cached_tokens": samples[0]["num_cached_tokens"]},
        },
    }


def _choice(sample: Row) -> Row:
    message = {"role": "assistant", "content": sample["text"]}
    return {
        "index": sample["sample_index"],
        "message": message,
        "logprobs": None,
        "finish_reason": sample["finish_reason"],
    }
