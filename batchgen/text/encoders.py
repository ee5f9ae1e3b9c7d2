"""Text to token ids: byte-level BPE by `tokenizers`, SPM and Unigram by `sentencepiece`; built from a vocabulary.

An encoder knows nothing of control tokens but *atoms*: strings that always become one token, whatever is around them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from batchgen.errors import ModelError
from batchgen.text.gguf_vocab import BYTE, CONTROL, UNKNOWN, USER_DEFINED, GgufVocab
from batchgen.text.pre_tokenizers import PreTokenizer
from batchgen.text.spellings import any_of


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without BOS. Raises UnicodeEncodeError for text that is no valid Unicode."""
        ...


class BpeEncoder:
    """`tokenizers` does all of it, on all cores."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class SpmEncoder:
    """`sentencepiece` on the text between atoms; as in llama.cpp, a space goes before the text at the start and before
    text that follows an atom, if the model adds one at all.

    trimmed: the atoms that swallow the white space behind them.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        atoms: Mapping[str, int],
        trimmed: Sequence[str] = (),
    ):
        self._processor = processor
        self._atoms = atoms
        self._trimmed = frozenset(trimmed)
        self._split = re.compile(f"({any_of(atoms)})" if atoms else r"((?!))")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [self._segments(text) for text in texts]
        plain = [text for row in rows for text, atom in row if atom is None]
        encoded = iter(self._processor.encode(plain, out_type=int, num_threads=-1) if plain else ())
        return [[i for _, atom in row for i in (next(encoded) if atom is None else (atom,))] for row in rows]

    def _segments(self, text: str) -> list[tuple[str, int | None]]:
        """The text cut at atoms: (text, None) for what lies between, (atom, id) for each atom; nothing empty."""
        segments: list[tuple[str, int | None]] = []
        for place, piece in enumerate(self._split.split(text)):
            if place % 2:
                segments.append((piece, self._atoms[piece]))
                continue
            if segments and segments[-1][0] in self._trimmed:
                piece = piece.lstrip(" \t\n\v\f\r")
            if piece:
                segments.append((piece, None))
        return segments


def build_bpe(vocab: GgufVocab, pre: PreTokenizer, stand_ins: Mapping[str, str]) -> BpeEncoder:
    """A byte-level BPE encoder. In its vocabulary control tokens have their stand-ins' names, so that no text and no
    merge can produce one; user-defined tokens match wherever they are spelled."""
    names = list(vocab.tokens)
    for spelling, i in control_tokens(vocab).items():
        names[i] = stand_ins[spelling]
    ids = {name: i for i, name in enumerate(names)}
    merges = [(a, b) for a, b in vocab.merges if stand_ins.keys().isdisjoint((a, b, a + b))]
    try:
        model = models.BPE(ids, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library's own class, without a name to catch
        raise ModelError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(_regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    atoms = [names[i] for i in vocab.ids_of_type(CONTROL, UNKNOWN, USER_DEFINED)]
    trimmed = set(stand_ins.values()) if vocab.trims_after else set()
    tokenizer.add_tokens([AddedToken(atom, normalized=False, rstrip=atom in trimmed) for atom in atoms])
    return BpeEncoder(tokenizer)


def _regex(pattern: str) -> Regex:
    try:
        return Regex(pattern)
    except Exception as error:  # as above
        raise ModelError(f"the tokenizer's pattern is no regular expression: {error}") from None


def build_spm(vocab: GgufVocab, stand_ins: Mapping[str, str]) -> SpmEncoder:
    """An SPM encoder: a sentencepiece model with the file's tokens, scores and types, and no table of characters."""
    proto = ModelProto()
    proto.trainer_spec.model_type = TrainerSpec.BPE if vocab.kind == "llama" else TrainerSpec.UNIGRAM
    proto.trainer_spec.byte_fallback = BYTE in vocab.types
    proto.trainer_spec.vocab_size = len(vocab.tokens)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = vocab.add_space_prefix is not False
    proto.normalizer_spec.remove_extra_whitespaces = vocab.remove_extra_spaces
    for text, score, kind in zip(vocab.tokens, vocab.scores, _piece_types(vocab), strict=True):
        proto.pieces.add(piece=text, score=score, type=kind)
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(proto.SerializeToString())
    except (RuntimeError, OSError) as error:
        raise ModelError(f"the model file's SPM vocabulary cannot be used: {error}") from None
    controls = {stand_ins[spelling]: i for spelling, i in control_tokens(vocab).items()}
    defined = {vocab.tokens[i]: i for i in vocab.ids_of_type(USER_DEFINED)}
    trimmed = tuple(controls) if vocab.trims_after else ()
    return SpmEncoder(processor, controls | defined, trimmed)


def control_tokens(vocab: GgufVocab) -> dict[str, int]:
    """The tokens that ordinary text never becomes: spelling → id."""
    return {vocab.tokens[i]: i for i in vocab.ids_of_type(CONTROL, UNKNOWN)}


def _piece_types(vocab: GgufVocab) -> list[int]:
    """Types for sentencepiece, whose numbers are GGUF's: exactly one piece is the unknown one, and user-defined ones
    are ordinary since the encoder has cut them out before."""
    unknown = vocab.ids_of_type(UNKNOWN)[:1] or [i for i in (vocab.unknown_token_id,) if i is not None]
    if not unknown:
        raise ModelError("the model file's SPM vocabulary has no unknown token (tokenizer.ggml.unknown_token_id)")
    swap = {USER_DEFINED: 1, UNKNOWN: CONTROL}
    types = [swap.get(kind, kind) for kind in vocab.types]
    types[unknown[0]] = UNKNOWN
    return types
