"""Makes the reduced vocabularies in tests/data/text from full ones.

    python tests/text/make_vocab_fixtures.py VOCABS [--model GGUF --reference PARQUET]

VOCABS: a folder with llama.cpp's `ggml-vocab-NAME.gguf`, `.gguf.inp` and `.gguf.out` files. GGUF and PARQUET: a model
and a table with its expected `prompt_text`, `prompt_token_ids`, `greedy_text` and `greedy_token_ids`.

A reduced vocabulary encodes its test texts exactly as the full one does: a merge (or SPM token) can only play a part if
what it makes occurs in a text, so all others are left out. Ids stay as they are; conftest.py puts placeholders where
tokens are missing.
"""

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

import polars
from gguf import GGUFReader

from batchgen.text.encoders import build_bpe, control_tokens
from batchgen.text.gguf_vocab import GgufVocab, read_vocab
from batchgen.text.pieces import byte_alphabet
from batchgen.text.pre_tokenizers import find_pre_tokenizer
from batchgen.text.spellings import Spellings

NAMES = ("llama-spm", "gpt-2", "llama-bpe", "qwen2", "deepseek-coder")
TARGET = Path(__file__).parent.parent / "data" / "text"
SPECIAL = range(2, 7)
MAX_SPECIAL = 64
EXTRA_TEXTS = (
    "<|im_start|>user\nHello, how are you?<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. 1234567890 ÄÖÜ äöü ß — “quotes” 日本語 👩‍👩‍👧‍👦",
    "<s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nHello [/INST] world </s><unk>",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabs", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--reference", type=Path)
    options = parser.parse_args()
    for name in NAMES:
        cases = read_cases(options.vocabs / f"ggml-vocab-{name}.gguf")
        write(name, reduce(read_metadata(options.vocabs / f"ggml-vocab-{name}.gguf"), cases, []))
    if options.model:
        table = polars.read_parquet(options.reference)
        cases = list(zip(table["prompt_text"].to_list(), table["prompt_token_ids"].to_list(), strict=True))
        answers = list(zip(table["greedy_text"].to_list(), table["greedy_token_ids"].to_list(), strict=True))
        write("smollm2", reduce(read_metadata(options.model), cases, answers))


def read_metadata(path: Path) -> dict[str, Any]:
    fields = GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(("tokenizer.", "general."))}


def read_cases(path: Path) -> list[tuple[str, list[int]]]:
    inputs = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = path.with_name(path.name + ".out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(inputs, outputs, strict=True)]


def reduce(metadata: dict[str, Any], cases: list[Any], answers: list[Any]) -> dict[str, Any]:
    vocab = read_vocab(metadata)
    texts = [text for text, _ in (*cases, *answers)] + list(EXTRA_TEXTS)
    words = spm_words(texts) if vocab.kind == "llama" else bpe_words(vocab, texts)
    inside = substrings(words, max(map(len, vocab.tokens)))
    merges = [i for i, (a, b) in enumerate(vocab.merges) if a + b in inside]
    kept = {i for _, ids in (*cases, *answers) for i in ids} | kept_tokens(vocab, inside)
    scalars = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    return {
        "metadata": {key: value for key, value in scalars.items() if key.startswith("tokenizer.") or "name" in key},
        "size": len(vocab.tokens),
        "tokens": [[i, vocab.tokens[i], vocab.types[i], vocab.scores[i]] for i in sorted(kept)],
        "merges": [" ".join(vocab.merges[i]) for i in merges],
        "cases": cases,
        "answers": answers,
    }


def kept_tokens(vocab: GgufVocab, inside: set[str]) -> set[int]:
    """What occurs in a text, the alphabet, and control and user-defined tokens (but not hundreds of unused ones)."""
    alphabet = set(byte_alphabet())
    special = [i for i, kind in enumerate(vocab.types) if kind in SPECIAL and kind != 6]
    return (
        {i for i, text in enumerate(vocab.tokens) if text in inside or text in alphabet}
        | set(vocab.ids_of_type(6))
        | set(special[:MAX_SPECIAL])
    )


def bpe_words(vocab: GgufVocab, texts: list[str]) -> set[str]:
    """The byte-mapped words that the texts are cut into, with control tokens meant and not meant."""
    spellings = Spellings(control_tokens(vocab))
    encoder = build_bpe(vocab, find_pre_tokenizer(vocab.pre), spellings.stand_ins)
    split = encoder.tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = [piece for text in texts for piece in (text, *_between_controls(vocab, text))]
    return {word for piece in pieces for word, _ in split(piece)}


def _between_controls(vocab: GgufVocab, text: str) -> list[str]:
    return re.split("|".join(map(re.escape, sorted(control_tokens(vocab), key=len, reverse=True))), text)


def spm_words(texts: list[str]) -> set[str]:
    return {"▁" + text.replace(" ", "▁") for text in texts}


def substrings(words: set[str], longest: int) -> set[str]:
    return {word[i : i + n] for word in words for i in range(len(word)) for n in range(1, longest + 1)}


def write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    path = TARGET / f"vocab-{name}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path.name}: {len(content['tokens'])} tokens, {len(content['merges'])} merges, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
