"""Vocabularies of model directories without `tokenizer.json`, brought into the form that GGUF files have them in:

- `tokenizer.model`: sentencepiece's (https://github.com/google/sentencepiece), BPE or Unigram;
- `tekken.json`: Mistral's (https://github.com/mistralai/mistral-common), which says how it cuts text into words;
- `*.tiktoken`, or such a `tokenizer.model`: lines of a token in base64 and its rank (https://github.com/openai/tiktoken),
  which does not: `model.pre_tokenizer` names it.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]

from batchgen.errors import ModelError
from batchgen.io.model_files import parse_json, read_bytes
from batchgen.text.gguf_vocab import CONTROL, NORMAL, UNUSED, USER_DEFINED, GgufVocab, check_tokens, refuse_charsmap
from batchgen.text.pieces import byte_alphabet
from batchgen.text.pre_tokenizers import PreTokenizer, find_pre_tokenizer, nearest
from batchgen.text.settings import TokenizerSettings

_LONGEST_TOKEN = 1024  # bytes; all ways to cut a token in two are tried
_LONGEST_PATTERN = 10_000
_TEKKEN_CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Of files that do not list them."""


def read_vocab_file(path: Path, pre_tokenizer: str | None) -> tuple[GgufVocab, PreTokenizer | None]:
    """The vocabulary of a file, completed by the settings beside it, and its pre-tokenizer (None for sentencepiece,
    which has none). Raises ModelError, naming the file, for what is malformed or not known."""
    settings = TokenizerSettings.read(path.parent)
    content = read_bytes(path)
    try:
        vocab, pre = _read(path, content, pre_tokenizer)
        return _completed(vocab, settings), pre
    except ModelError as error:
        raise error if str(path.parent) in str(error) else ModelError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(f"{path}: malformed: {type(error).__name__}: {error}") from None


def _read(path: Path, content: bytes, name: str | None) -> tuple[GgufVocab, PreTokenizer | None]:
    ranks = None if path.name == "tekken.json" else _tiktoken_ranks(content)
    if ranks is not None:
        if name is None:
            near = ", ".join(nearest(""))
            raise ModelError(f"does not say how text is cut into words: name it with model.pre_tokenizer ({near}, ...)")
        pre = find_pre_tokenizer(name)
        return _rank_vocab(ranks, []), replace(pre, ignore_merges=True)
    if name is not None:
        raise ModelError(f"model.pre_tokenizer is '{name}', but this tokenizer needs none: remove it")
    return _read_tekken(path, content) if path.name == "tekken.json" else (_read_sentencepiece(content), None)


# --- sentencepiece ----------------------------------------------------------------------------------------------


def _read_sentencepiece(content: bytes) -> GgufVocab:
    try:
        model = ModelProto.FromString(content)
    except DecodeError:
        raise ModelError("neither a sentencepiece model nor a tiktoken file") from None
    kinds = {TrainerSpec.UNIGRAM: "t5", TrainerSpec.BPE: "llama"}
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in kinds:
        raise ModelError("a sentencepiece model of words or characters; BPE and Unigram can be read")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ModelError("a sentencepiece model that treats white space in its own way")
    refuse_charsmap(normalizer.precompiled_charsmap)
    tokens = [piece.piece for piece in model.pieces]
    empty = _empty_vocab(kinds[trainer.model_type], tokens, [piece.type for piece in model.pieces])
    return replace(
        empty,
        scores=tuple(piece.score for piece in model.pieces),
        bos_token_id=_known(trainer.bos_id, tokens),
        eos_token_id=_known(trainer.eos_id, tokens),
        unknown_token_id=_known(trainer.unk_id, tokens),
        add_space_prefix=normalizer.add_dummy_prefix,
        remove_extra_spaces=normalizer.remove_extra_whitespaces,
    )


def _known(token_id: int, tokens: Sequence[str]) -> int | None:
    return token_id if 0 <= token_id < len(tokens) else None


# --- byte-level BPE by ranks ------------------------------------------------------------------------------------


def _tiktoken_ranks(content: bytes) -> dict[bytes, int] | None:
    """Token → rank; None for what is no such file."""
    lines = content.split(b"\n")
    if len(lines[0].split(b" ")) != 2:
        return None
    try:
        pairs = [line.split() for line in lines if line.strip()]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (binascii.Error, ValueError):
        return None


def _read_tekken(path: Path, content: bytes) -> tuple[GgufVocab, PreTokenizer]:
    data = parse_json(path, content)
    config = data["config"]
    count, pattern = config["default_num_special_tokens"], config["pattern"]
    size = config["default_vocab_size"] - count
    if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN or not 0 <= count <= len(data["vocab"]) + 1000:
        raise ModelError("its config names no pattern, or more control tokens than there can be")
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
    listed = {entry["rank"]: entry["token_str"] for entry in data.get("special_tokens") or []}
    controls = [listed.get(i) or _tekken_control(i) for i in range(count)]
    vocab = replace(
        _rank_vocab(ranks, controls), bos_token_id=controls.index("<s>"), eos_token_id=controls.index("</s>")
    )
    return vocab, PreTokenizer((pattern,), ignore_merges=True, add_bos=True)


def _tekken_control(rank: int) -> str:
    return _TEKKEN_CONTROLS[rank] if rank < len(_TEKKEN_CONTROLS) else f"<SPECIAL_{rank}>"


def _rank_vocab(ranks: Mapping[bytes, int], controls: Sequence[str]) -> GgufVocab:
    """Control tokens have the first ids, then the others in the order of their ranks, which must be 0, 1, ..."""
    ordered = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in ordered] != list(range(len(ordered))):
        raise ModelError("the ranks of its tokens are not 0, 1, 2 and so on")
    longest = max(map(len, ordered), default=0)
    if longest > _LONGEST_TOKEN or not all(ordered):
        raise ModelError(f"has tokens of none or of {longest} bytes; 1 to {_LONGEST_TOKEN} are possible")
    letters = {byte: char for char, byte in byte_alphabet().items()}
    names = {token: token.decode("latin-1").translate(letters) for token in ordered}
    vocab = _empty_vocab("gpt2", [*controls, *names.values()], [CONTROL] * len(controls) + [NORMAL] * len(names))
    return replace(vocab, merges=tuple((names[a], names[b]) for a, b in _merges(ordered, ranks)))


def _merges(ordered: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that are a token together, in the order of that one's rank: merging them in this order is
    merging by rank."""
    merges = []
    for token in ordered:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += sorted((c for c in cuts if c[0] in ranks and c[1] in ranks), key=lambda c: (ranks[c[0]], ranks[c[1]]))
    return merges


# --- what all have in common ------------------------------------------------------------------------------------


def _empty_vocab(kind: str, tokens: Sequence[str], types: Sequence[int]) -> GgufVocab:
    if not tokens:
        raise ModelError("holds no vocabulary")
    return GgufVocab(
        kind=kind,
        pre=None,
        architecture="",
        tokens=tuple(tokens),
        types=tuple(types),
        scores=(0.0,) * len(tokens),
        merges=(),
        bos_token_id=None,
        eos_token_id=None,
        end_token_ids=frozenset(),
        unknown_token_id=None,
        add_bos=None,
        add_space_prefix=None,
        trims_after=False,
        chat_template=None,
    )


def _completed(vocab: GgufVocab, settings: TokenizerSettings) -> GgufVocab:
    """With added tokens, and what the settings say of ends, BOS and the chat template."""
    tokens, types = list(vocab.tokens), list(vocab.types)
    for i, (text, special) in sorted(settings.added_tokens().items()):
        if i > len(tokens) + _LONGEST_TOKEN:
            raise ModelError(f"tokenizer_config.json adds token {i} to a vocabulary of {len(tokens)}")
        for place in range(len(tokens), i + 1):
            tokens.append(f"[UNUSED_{place}]")
            types.append(UNUSED)
        tokens[i], types[i] = text, CONTROL if special else USER_DEFINED
    check_tokens("the vocabulary", tokens, types)
    ids = {text: i for i, text in enumerate(tokens)}
    bos, eos = (ids.get(settings.token(key) or "") for key in ("bos_token", "eos_token"))
    eos = vocab.eos_token_id if eos is None else eos
    return replace(
        vocab,
        tokens=tuple(tokens),
        types=tuple(types),
        scores=vocab.scores + (0.0,) * (len(tokens) - len(vocab.scores)),
        bos_token_id=vocab.bos_token_id if bos is None else bos,
        eos_token_id=eos,
        end_token_ids=frozenset([*settings.listed_ends(), *(i for i in (eos,) if i is not None)]),
        add_bos=vocab.add_bos if settings.add_bos is None else settings.add_bos,
        chat_template=settings.chat_template(),
    )
