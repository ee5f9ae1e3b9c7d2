"""A model's vocabulary as its GGUF file states it, checked once and frozen.

Keys and token types are those of the GGUF specification (ggml, `docs/gguf.md`); defaults for absent keys are
llama.cpp's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

LONGEST_CONTROL = 128
"""Characters of a control token; how long it takes to find them in text grows with it."""

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<EOT>", "[EOT]", "<end_of_utterance>"),
)


@dataclass(frozen=True)
class GgufVocab:
    """`types` and `scores` run parallel to `tokens` (the index is the id). `merges` are pairs, best first.

    `kind`: "gpt2" (byte-level BPE), "llama" (sentencepiece BPE, called SPM) or "t5" (sentencepiece Unigram).
    `trims_after`: white space after a control token belongs to it (Phi-3). `remove_extra_spaces`: sentencepiece's
    `remove_extra_whitespaces`.
    """

    kind: str
    pre: str | None
    architecture: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: frozenset[int]
    unknown_token_id: int | None
    add_bos: bool | None
    add_space_prefix: bool | None
    trims_after: bool
    chat_template: str | None
    remove_extra_spaces: bool = False

    def ids_of_type(self, *types: int) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]


def read_vocab(metadata: Mapping[str, Any]) -> GgufVocab:
    """Reads the `tokenizer.*` keys. Raises ModelError naming the key that is missing or malformed."""
    kind = _text(metadata, _PREFIX + "model")
    if kind is None:
        raise ModelError("the model file holds no tokenizer (tokenizer.ggml.model is missing)")
    if kind not in ("gpt2", "llama", "t5"):
        raise ModelError(
            f"tokenizer.ggml.model is '{kind}': only 'gpt2' (byte-level BPE), 'llama' (SPM) and 't5' (Unigram) can be"
            f" read"
        )
    refuse_charsmap(_list(metadata, "precompiled_charsmap"))
    tokens = _tokens(metadata)
    types = _parallel(metadata, "token_type", len(tokens), NORMAL)
    check_tokens(_PREFIX + "tokens", tokens, types)
    name = str(metadata.get("general.name", "")).lower()
    eos = _token_id(metadata, "eos_token_id", len(tokens), _spm_default(kind, "</s>", tokens))
    return GgufVocab(
        kind=kind,
        pre=_text(metadata, _PREFIX + "pre"),
        architecture=str(metadata.get("general.architecture", "")),
        tokens=tokens,
        types=types,
        scores=_parallel(metadata, "scores", len(tokens), 0.0),
        merges=_merges(metadata) if kind == "gpt2" else (),
        bos_token_id=_token_id(metadata, "bos_token_id", len(tokens), _spm_default(kind, "<s>", tokens)),
        eos_token_id=eos,
        end_token_ids=_end_tokens(metadata, tokens, types) | {i for i in (eos,) if i is not None},
        unknown_token_id=_token_id(metadata, "unknown_token_id", len(tokens), None),
        add_bos=_flag(metadata, "add_bos_token"),
        add_space_prefix=_flag(metadata, "add_space_prefix"),
        trims_after="phi-3" in name or "phi3" in name,
        chat_template=_text(metadata, "tokenizer.chat_template"),
        remove_extra_spaces=_flag(metadata, "remove_extra_whitespaces") is True,
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    tokens = _list(metadata, "tokens")
    if not tokens:
        raise ModelError("the model file holds no vocabulary (tokenizer.ggml.tokens is missing or empty)")
    return tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(tokens))


def _parallel(metadata: Mapping[str, Any], key: str, length: int, default: Any) -> tuple[Any, ...]:
    values = _list(metadata, key)
    if values is None:
        return (default,) * length
    if len(values) < length:
        raise ModelError(f"{_PREFIX}{key} has {len(values)} entries for a vocabulary of {length}")
    return tuple(values[:length])


def check_tokens(where: str, tokens: Sequence[str], types: Sequence[int]) -> None:
    """No token occurs twice. What finds control tokens in text nests as deep as they are long, and holds all that they
    begin with, so they are short."""
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        i, text = next((i, text) for i, text in enumerate(tokens) if first.setdefault(text, i) != i)
        raise ModelError(f"{where}: {text!r} occurs twice, as ids {first[text]} and {i}")
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, UNKNOWN) and len(text) > LONGEST_CONTROL:
            what = f"{where}[{i}] is a control token of {len(text)} characters"
            raise ModelError(f"{what}; up to {LONGEST_CONTROL} are possible")


def refuse_charsmap(charsmap: Sequence[int] | None) -> None:
    """sentencepiece follows its pointers without a look."""
    if charsmap:
        raise ModelError(
            "the tokenizer changes characters by a table (precompiled_charsmap), which is read from tokenizer.json only"
        )


def _merges(metadata: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    lines = _list(metadata, "merges")
    if lines is None:
        raise ModelError("tokenizer.ggml.merges is missing: a 'gpt2' tokenizer cannot work without it")
    pairs = tuple(tuple(line.split(" ")) for line in lines)
    bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if bad is not None:
        raise ModelError(
            f"tokenizer.ggml.merges[{bad}] is {lines[bad]!r}: two tokens with a space between are expected"
        )
    return pairs


def _end_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    """The ids named by the keys; if no end of turn is named, control tokens that chat models are known to end with.

    Many files name only the end of text although the model ends its turns with another token.
    """
    ids = (_token_id(metadata, key, len(tokens), None) for key in _END_KEYS)
    named = frozenset(i for i in ids if i is not None)
    if _PREFIX + "eot_token_id" in metadata:
        return named
    # In the harmony format <|end|> only closes a message: more of the answer follows.
    spellings = {text for text in _TURN_ENDS if text != "<|end|>" or "<|return|>" not in tokens}
    return named | {i for i, text in enumerate(tokens) if types[i] == CONTROL and text in spellings}


def _spm_default(kind: str, text: str, tokens: Sequence[str]) -> int | None:
    """The usual places of <s> and </s> in a 'llama' vocabulary whose file does not name them."""
    place = 1 if text == "<s>" else 2
    return place if kind == "llama" and tokens[place : place + 1] == (text,) else None


def _token_id(metadata: Mapping[str, Any], key: str, length: int, default: int | None) -> int | None:
    value = metadata.get(_PREFIX + key, default)
    if value is not None and not (type(value) is int and 0 <= value < length):
        raise ModelError(f"{_PREFIX}{key} is {value!r}: not an id of the vocabulary of {length} tokens")
    return value


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(_PREFIX + key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{_PREFIX}{key} is {value!r}: true or false is expected")
    return value


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{key} is {value!r}: a text is expected")
    return value


def _list(metadata: Mapping[str, Any], key: str) -> list[Any] | None:
    value = metadata.get(_PREFIX + key)
    if value is not None and not isinstance(value, list):
        raise ModelError(f"{_PREFIX}{key} is {type(value).__name__}: a list is expected")
    return value
