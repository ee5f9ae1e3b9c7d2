"""Models that lie: each is refused in one line that names the file, at once and without taking memory."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import BatchgenError, ModelError
from batchgen.text.gguf_vocab import CONTROL
from batchgen.text.sandbox import MAX_SOURCE
from tests.fuzz.formats import read_model
from tests.gguf_bytes import build, entry, tiny_gguf, tiny_metadata, value_pair

BPE, SPM = tiny_metadata("gpt2"), tiny_metadata("llama")
MIB = 1 << 20


def swapped(key: str, place: int, item: Any, metadata: dict[str, Any] = BPE) -> dict[str, Any]:
    """The metadata's list with another item at `place`."""
    values = list(metadata[key])
    values[place] = item
    return {key: values}


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "layers without end": ({"llama.block_count": 2**31 - 1}, "asks for 2147483647 layers; 65536 are possible"),
    "a size beyond int32": ({"llama.embedding_length": 2**31}, "embedding_length = 2147483648"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count = 0"),
    "more heads than dimensions": ({"llama.attention.head_count": 64}, "key_length = 0"),
    "negative epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon is -9.99"),
    "an epsilon that is none": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "frequencies without end": ({"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
    "a text for a number": ({"llama.context_length": "x" * MIB}, "context_length = 'xxx"),
    "a list for a text": ({"general.architecture": ["llama"] * 9999}, "architecture '['llama', "),
    "control characters": ({"general.architecture": "\n\x1b[31m"}, r"architecture '\n\x1b[31m' is not supported"),
    "no vocabulary": ({"tokenizer.ggml.tokens": []}, "holds no vocabulary"),
    "numbers as tokens": ({"tokenizer.ggml.tokens": [1, 2, 3]}, "malformed metadata"),
    "too few types": ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
    "a token twice": (swapped("tokenizer.ggml.tokens", 9, "<s>"), "'<s>' occurs twice"),
    "a control token without end": (
        swapped("tokenizer.ggml.tokens", 0, "<" * MIB),
        "tokens[0] is a control token of 1048576 characters",
    ),
    "every token a control token that begins like another": (
        {
            "tokenizer.ggml.tokens": ["<" + "a" * i for i in range(300)],
            "tokenizer.ggml.token_type": [CONTROL] * 300,
        },
        "is a control token of 129 characters",
    ),
    "merges of nothing": ({"tokenizer.ggml.merges": ["x y"]}, "merges do not fit"),
    "merges that are no pairs": ({"tokenizer.ggml.merges": ["a" * MIB]}, "merges[0] is 'aaa"),
    "an id outside": ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
    "another pre-tokenizer": ({"tokenizer.ggml.pre": "x" * MIB}, "unknown pre-tokenizer 'xxx"),
    "a template without end": ({"tokenizer.chat_template": "x" * (MAX_SOURCE + 1)}, "is longer than 262,144"),
    "a template that is none": ({"tokenizer.chat_template": "{{ x"}, "not valid, line 1"),
    "a template nested too deeply": ({"tokenizer.chat_template": "{% if x %}" * 999}, "nested too deeply"),
}


@pytest.mark.parametrize(("changes", "words"), METADATA.values(), ids=METADATA)
def test_metadata_that_lies(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    refused(tmp_path, tiny_gguf(changes), words)


def test_an_spm_vocabulary_that_lies(tmp_path: Path) -> None:
    scores = {"tokenizer.ggml.scores": ["a"] * len(SPM["tokenizer.ggml.scores"])}
    refused(tmp_path, tiny_gguf(scores, "llama"), "malformed metadata")
    refused(
        tmp_path, tiny_gguf({"tokenizer.ggml.unknown_token_id": None, **swapped_type()}, "llama"), "no unknown token"
    )
    broken = swapped("tokenizer.ggml.tokens", 20, "\n0x0F>", SPM)
    refused(tmp_path, tiny_gguf(broken, "llama"), r"byte piece \n0x0F> is invalid")


def swapped_type() -> dict[str, Any]:
    return swapped("tokenizer.ggml.token_type", 0, 1, SPM)


I32 = 26
TENSORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "transposed": (([256, 33], None, None), "has shape (33, 256); the metadata asks for"),
    "another rank": (([32, 4, 66], None, None), "the metadata asks for"),
    "empty": (([0, 264], None, None), "is empty"),
    "as many values as there are in no file": (([1 << 62, 1 << 62], None, None), "ends at byte"),
    "whole numbers": (([8, 264], I32, None), "has shape (264, 8)"),
    "not aligned": ((None, None, 4), "not aligned"),
    "over another": ((None, None, 32 * 100), "overlap"),
    "outside": ((None, None, 1 << 40), "ends at byte"),
}


@pytest.mark.parametrize(("change", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_lie(tmp_path: Path, change: tuple[Any, ...], words: str) -> None:
    refused(tmp_path, tiny_gguf(None, "gpt2", token_embd__weight=change), words)


def test_a_header_of_nothing_but_items(tmp_path: Path) -> None:
    """No bytes are missing; there are only more of them than any model has."""
    pairs = [value_pair(f"k{i}", [""] * (1 << 20)) for i in range(5)]
    refused(tmp_path, build(pairs), "cannot fit", seconds=10, mib=400)


def test_a_name_without_end(tmp_path: Path) -> None:
    refused(tmp_path, build([], [entry("t" * MIB, [8], 77, 0)]), "type number 77")


def test_numbers_that_are_none_are_computed_with(tmp_path: Path) -> None:
    """A file may hold NaN; its answers are worth nothing, but nothing breaks."""
    path = tmp_path / "model.gguf"
    raw = tiny_gguf()
    path.write_bytes(raw[:-4096] + b"\xff" * 4096)
    read_model(path)


def refused(folder: Path, raw: bytes, words: str, seconds: float = 2, mib: int = 64) -> None:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BatchgenError) as caught:
        read_model(path)
    message = str(caught.value)
    assert isinstance(caught.value, ModelError) and words in message
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 1100
    assert time.perf_counter() - begun < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mib << 10
