"""OpenAI's batch files: requests into prompts and parameters, answers into lines."""

import json

import numpy as np
import pyarrow as pa
import pytest

from batchgen.engine.planner import Admission
from batchgen.engine.prompt_table import MemoryStore
from batchgen.engine.types import RequestOutput, RowFailure, SamplingParams
from batchgen.errors import InputError
from batchgen.io.checkpoint import Checkpoint
from batchgen.io.deliver import Expected, deliver
from batchgen.io.openai_batch import deliver_batch_output
from batchgen.io.table import open_table
from batchgen.io.writer import JobWriter
from batchgen.prompts import PromptReader
from tests.test_prompts import CHAT, Characters, make_spec

HELLO = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"


def request(number=0, messages=HELLO, **body):
    body = {"model": "gpt-4o", "messages": messages, **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": URL, "body": body}


def write(path, requests):
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def asked(tmp_path, requests, sampling=None):
    """What becomes of each request: its prompt, parameters and number of answers, or the failure's code and message."""
    write(tmp_path / "a.jsonl", requests)
    spec = make_spec(tmp_path, {"path": str(tmp_path / "a.jsonl"), "format": "openai_batch"}, sampling)
    table = open_table(spec.input.path, format=spec.input.format)
    reader = PromptReader(spec, Characters(), CHAT, 100)
    reader.check(table)
    read = reader.read(table, Admission(100, 2**20, 1000), MemoryStore())
    found = {row.row_index: (row.failure.code, row.failure.message) for row in read.failures}
    for place, row in enumerate(read.table.row_index.tolist()):
        wish = read.wishes[place]
        found[row] = ("".join(map(chr, read.table.prompt(place))), wish.params, wish.n)
    return [found[row] for row in range(len(requests))]


def test_requests_become_prompts_and_parameters(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]
    values = {"temperature": 1, "top_p": 0.5, "seed": 7, "stop": "x", "presence_penalty": 0.5, "top_k": 3, "n": 2}
    without_effect = {"user": "u", "metadata": {"a": "b"}, "store": True, "stream": False, "tools": [], "seed": None}
    found = asked(
        tmp_path,
        [
            request(),
            request(messages=chat, max_tokens=5, **values),
            request(max_completion_tokens=6, stop=["a", "b"], response_format={"type": "text"}),
            request(**without_effect),
        ],
        {"max_tokens": 9, "temperature": 0.25},
    )
    spec = SamplingParams(max_tokens=9, temperature=0.25)
    given = {**values, "stop": ("x",), "temperature": 1.0}
    number = given.pop("n")
    assert found == [
        ("u:hi;", spec, 1),
        ("s:be brief;u:a\na;", SamplingParams(max_tokens=5, **given), number),
        ("u:hi;", SamplingParams(max_tokens=6, temperature=0.25, stop=("a", "b")), 1),
        ("u:hi;", spec, 1),
    ]


NO_TEXT = "column 'body.messages': message 0 has no text in 'content'"
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        (request(tools=[{"type": "function"}]), "schema_error", "body.tools is not supported"),
        (request(stream=True), "schema_error", "body.stream is not supported"),
        (request(response_format={"type": "json_object"}), "schema_error", "body.response_format is not supported"),
        (request(logprobs=True), "schema_error", "body.logprobs is not supported"),
        (request(somthing=1), "schema_error", "body.somthing is not supported"),
        (request(temperature=-1), "schema_error", "body.temperature: -1 is not allowed: must be >= 0"),
        (request(max_tokens="5"), "schema_error", 'body.max_tokens: "5" is not allowed'),
        (request(n=0), "schema_error", "body.n: 0 is not allowed"),
        (
            request(max_tokens=1, min_tokens=2),
            "schema_error",
            "sampling: min_tokens (2) is greater than max_tokens (1)",
        ),
        (request(messages=None), "prompt_missing", "column 'body.messages' is null"),
        (request(messages=[]), "prompt_missing", "column 'body.messages' has no messages"),
        (request(messages="hi"), "schema_error", "column 'body.messages' does not hold a list"),
        (request(messages=["hi"]), "schema_error", "column 'body.messages' does not hold a list"),
        (request(messages=[{"role": "user"}]), "schema_error", NO_TEXT),
        (request(messages=IMAGE), "schema_error", "a part of type 'image_url' is not supported, only text"),
        (request(messages=[{"role": "user", "content": [{"type": "text"}]}]), "schema_error", "a part of type 'text'"),
        (request(messages=[{"role": "user", "content": ["hi"]}]), "schema_error", "a part of type None"),
        (
            request(messages=[{"role": "x", "content": None, "tool_calls": [1]}]),
            "schema_error",
            "tool_calls is not supp",
        ),
        (request(messages=[{"role": "user", "content": "\ud800"}]), "encode_error", "not valid Unicode"),
        ({**request(), "url": "/v1/embeddings"}, "schema_error", "url '/v1/embeddings' is not supported, only"),
        ({**request(), "method": "GET"}, "schema_error", "method 'GET' is not supported, only POST"),
        ({**request(), "custom_id": 5}, "schema_error", "custom_id is missing, or no text"),
        ({**request(), "body": "{}"}, "schema_error", "body is missing, or no object"),
        ({}, "schema_error", "custom_id is missing, or no text"),
    ],
)
def test_requests_that_fail(tmp_path, row, code, words):
    good, (found, message) = asked(tmp_path, [request(), row])
    assert good[0] == "u:hi;"
    assert found == code and words in message


def test_lines_that_are_no_requests_are_told_before_anything_runs(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(request()) + "\n[]\n")
    with pytest.raises(InputError, match="line 2 is not a JSON object"):
        open_table(tmp_path / "a.jsonl", format="openai_batch")


def test_bodies_go_through_as_json(tmp_path):
    rows = [request(0), {**request(1, [{"role": "user", "content": "né"}]), "extra": 1}, {"custom_id": "x"}]
    table = open_table(write(tmp_path / "a.jsonl", rows), format="openai_batch")
    assert table.schema == pa.schema([(name, pa.string()) for name in ("custom_id", "method", "url", "body")])
    found = pa.Table.from_batches([batch for _, batch in table.batches(batch_rows=2)]).to_pylist()
    assert [json.loads(row.pop("body") or "null") for row in found] == [row.get("body") for row in rows]
    assert found[1] == {"custom_id": "request-1", "method": "POST", "url": URL}
    assert found[2] == {"custom_id": "x", "method": None, "url": None}


def answer(row, sample, text, finish_reason="stop"):
    tokens = np.arange(3, dtype=np.int32)
    arrays = {"token_ids": tokens, "token_steps": tokens, "token_times": tokens.astype(np.int64)}
    counts = {"num_prompt_tokens": 5, "num_cached_tokens": 2}
    return RequestOutput(row, sample, finish_reason, text, logprobs=tokens.astype(np.float32), **arrays, **counts)


@pytest.mark.parametrize("prefix", ["", "out_"])
def test_answers_become_lines_in_order(tmp_path, prefix):
    table = open_table(write(tmp_path / "a.jsonl", [request(7), request(8), request(9)]), format="openai_batch")
    failed = RequestOutput(1, 0, "error", error=RowFailure("schema_error", "body.tools ..."))
    expected = Expected(np.arange(3), np.array([1, 1, 2], np.int32))
    with Checkpoint.open(tmp_path / "out", {"job": 1}) as checkpoint:
        writer = JobWriter(checkpoint, part_rows=2, part_seconds=9, timings=True, clock=lambda: 0)
        writer.add([answer(2, 1, "two"), failed, answer(0, 0, "né\n"), answer(2, 0, "one", finish_reason="length")])
        writer.flush()
        options = {"columns": [], "prefix": prefix, "part_rows": 2}  # lines do not depend on the columns
        deliver(checkpoint, table, expected=expected, **options)
        deliver_batch_output(checkpoint, table, prefix=prefix, model="smollm2")
        text = (tmp_path / "out" / "batch_output.jsonl").read_text()
        deliver_batch_output(checkpoint, table, prefix=prefix, model="smollm2")
        assert (tmp_path / "out" / "batch_output.jsonl").read_text() == text
        created = int(checkpoint.started.timestamp())
        checkpoint.finish({})
    first, second, third = map(json.loads, text.splitlines())
    assert [line["custom_id"] for line in (first, second, third)] == ["request-7", "request-8", "request-9"]
    assert first == {
        "id": "batch_req_0",
        "custom_id": "request-7",
        "response": {
            "status_code": 200,
            "request_id": "req_0",
            "body": {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": created,
                "model": "smollm2",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "né\n"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 3,
                    "total_tokens": 8,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        },
        "error": None,
    }
    assert second["response"] is None and second["error"] == {"code": "schema_error", "message": "body.tools ..."}
    choices = third["response"]["body"]["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "one", "length"),
        (1, "two", "stop"),
    ]
    assert third["response"]["body"]["usage"]["completion_tokens"] == 6
    Checkpoint.open(tmp_path / "out", {"job": 2}, fresh=True).close()
    assert not (tmp_path / "out" / "batch_output.jsonl").exists()
