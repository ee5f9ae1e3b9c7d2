import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchgen.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "text"


@dataclass(frozen=True)
class Vocab:
    """A reduced vocabulary with placeholders for the tokens that were left out, and what it must encode to."""

    metadata: dict[str, Any]
    cases: list[tuple[str, list[int]]]
    answers: list[tuple[str, list[int]]]
    kept_ids: list[int]


def load_vocab(name: str) -> Vocab:
    content = json.loads(gzip.decompress((DATA / f"vocab-{name}.json.gz").read_bytes()))
    size = content["size"]
    tokens = [f"[left out {i}]" for i in range(size)]
    types, scores = [5] * size, [-1e9] * size
    for i, text, kind, score in content["tokens"]:
        tokens[i], types[i], scores[i] = text, kind, score
    lists = {"tokens": tokens, "token_type": types, "scores": scores, "merges": content["merges"]}
    metadata = content["metadata"] | {f"tokenizer.ggml.{key}": value for key, value in lists.items()}
    return Vocab(metadata, content["cases"], content["answers"], [i for i, *_ in content["tokens"]])


@pytest.fixture(scope="session")
def vocabs() -> Callable[[str], Vocab]:
    known: dict[str, Vocab] = {}

    def get(name: str) -> Vocab:
        if name not in known:
            known[name] = load_vocab(name)
        return known[name]

    return get


@pytest.fixture(scope="session")
def tokenizers_by_name(vocabs: Callable[[str], Vocab]) -> Callable[[str], Tokenizer]:
    known: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in known:
            known[name] = Tokenizer.from_gguf(vocabs(name).metadata)
        return known[name]

    return get


@pytest.fixture(scope="session")
def smollm2(tokenizers_by_name: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizers_by_name("smollm2")


@pytest.fixture(scope="session")
def spm(tokenizers_by_name: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizers_by_name("llama-spm")
