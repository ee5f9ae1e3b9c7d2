"""Text to token ids and back, for a vocabulary from a GGUF file or a model directory.

Three ways to read a text, differing only in what a control token's spelling (such as `<|im_end|>`) means:

- `encode_batch(parse_special=False)`: it is ordinary text. For what users and tables provide.
- `encode_batch(parse_special=True)`: it is the token. For text that was rendered elsewhere.
- `encode_rendered_batch`: it is the token where the chat template wrote it, and text where it came with the messages.
  The messages go through `protect` before rendering; see there.

Tokens that the vocabulary calls user-defined match in all three, as in llama.cpp.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.errors import ModelError, RowError
from batchgen.io.model_files import TOKENIZERS, tokenizer_path
from batchgen.text import gguf_vocab, tokenizer_file
from batchgen.text.encoders import Encoder, build_bpe, build_spm, control_tokens
from batchgen.text.pieces import gguf_pieces
from batchgen.text.pre_tokenizers import PreTokenizer, find_pre_tokenizer
from batchgen.text.spellings import Spellings
from batchgen.text.vocab_files import read_vocab_file


@dataclass(frozen=True)
class TokenizerInfo:
    """What is known of a vocabulary besides how it encodes. `pieces`: what each id adds to a text."""

    pieces: Sequence[bytes]
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None
    fingerprint: str


class Tokenizer:
    """Immutable; may be used from several threads.

    `eos_token_ids`: all tokens that end an answer. `bos_token`, `eos_token`: the texts that chat templates are given.
    `add_bos`: prompts start with BOS unless told otherwise. `fingerprint`: equal for tokenizers that encode equally.
    """

    def __init__(self, encoder: Encoder, spellings: Spellings, info: TokenizerInfo):
        self._encoder = encoder
        self._spellings = spellings
        self._pieces = list(info.pieces)
        self.control_token_ids = spellings.token_ids
        self._visible = [b"" if i in self.control_token_ids else piece for i, piece in enumerate(self._pieces)]
        self.vocab_size = len(self._pieces)
        self.bos_token_id = info.bos_token_id
        self.eos_token_id = info.eos_token_id
        self.eos_token_ids = info.end_token_ids
        self.bos_token = None if info.bos_token_id is None else self.token_text(info.bos_token_id)
        self.eos_token = None if info.eos_token_id is None else self.token_text(info.eos_token_id)
        self.add_bos = info.add_bos
        self.chat_template = info.chat_template
        self.fingerprint = info.fingerprint

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], pre_tokenizer: str | None = None) -> "Tokenizer":
        """From GGUF keys and values (str, int, float, bool, list).

        pre_tokenizer: overrides the file's `tokenizer.ggml.pre`.
        Raises ModelError when the vocabulary is malformed or of a kind that is not known, and when a byte-level BPE
        one names no known pre-tokenizer.
        """
        vocab = gguf_vocab.read_vocab(metadata)
        return cls._from_vocab(vocab, _pre_tokenizer(vocab, pre_tokenizer), len(vocab.tokens))

    @classmethod
    def from_directory(cls, folder: Path, vocab_size: int, pre_tokenizer: str | None = None) -> "Tokenizer":
        """From a model directory's `tokenizer.json`, or else `tekken.json`, `tokenizer.model` or a `.tiktoken` file.

        vocab_size: how many ids the model knows; those beyond the file's add nothing to a text.
        pre_tokenizer: for tiktoken files only, which do not say theirs.
        Raises ModelError when there is none, and for what is malformed.
        """
        path = tokenizer_path(folder)
        if path is None:
            raise ModelError(f"{folder}: has no tokenizer ({', '.join(TOKENIZERS)} or NAME.tiktoken)")
        if path.name == "tokenizer.json" and pre_tokenizer is None:
            return cls.from_file(path, vocab_size)
        if path.name == "tokenizer.json":
            raise ModelError(f"model.pre_tokenizer is '{pre_tokenizer}', but tokenizer.json has its own: remove it")
        vocab, pre = read_vocab_file(path, pre_tokenizer)
        if len(vocab.tokens) > vocab_size:
            raise ModelError(f"{path}: has {len(vocab.tokens)} tokens, but the model knows {vocab_size} (vocab_size)")
        return cls._from_vocab(vocab, pre, vocab_size)

    @classmethod
    def _from_vocab(cls, vocab: gguf_vocab.GgufVocab, pre: PreTokenizer | None, vocab_size: int) -> "Tokenizer":
        add_bos = _default_add_bos(vocab, pre) if vocab.add_bos is None else vocab.add_bos
        if add_bos:
            _needed_bos(vocab.bos_token_id)
        spellings = Spellings(control_tokens(vocab))
        encoder = build_spm(vocab, spellings.stand_ins) if pre is None else build_bpe(vocab, pre, spellings.stand_ins)
        info = TokenizerInfo(
            pieces=gguf_pieces(vocab) + [b""] * (vocab_size - len(vocab.tokens)),
            bos_token_id=vocab.bos_token_id,
            eos_token_id=vocab.eos_token_id,
            end_token_ids=vocab.end_token_ids,
            add_bos=add_bos,
            chat_template=vocab.chat_template,
            fingerprint=_gguf_fingerprint(vocab, pre, add_bos),
        )
        return cls(encoder, spellings, info)

    @classmethod
    def from_file(cls, path: str | Path, vocab_size: int | None = None) -> "Tokenizer":
        """From a `tokenizer.json`; BOS, EOS and chat template come from `tokenizer_config.json`,
        `generation_config.json` (or `config.json`) and `chat_template.jinja` in the same folder, as far as these exist.

        vocab_size: how many ids the model knows; those beyond the file's add nothing to a text.
        """
        file = tokenizer_file.read_tokenizer_file(Path(path))
        spellings = Spellings(file.control_tokens)
        bos, add_bos = file.bos()
        if add_bos:
            _needed_bos(bos)
        info = TokenizerInfo(
            pieces=tokenizer_file.file_pieces(file, vocab_size),
            bos_token_id=bos,
            eos_token_id=file.token_id("eos_token"),
            end_token_ids=file.end_token_ids(),
            add_bos=add_bos,
            chat_template=file.settings.chat_template(),
            fingerprint=_digest([file.digest, bos if add_bos else None]),
        )
        return cls(tokenizer_file.build_encoder(file, spellings), spellings, info)

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool, add_bos: bool | None = None
    ) -> list[NDArray[np.int32]]:
        """Token ids (int32, one-dimensional) of each text, in order, computed on all cores.

        parse_special: control tokens' spellings are those tokens (True) or ordinary text (False).
        add_bos: put BOS in front of a text that does not start with it already; None: if the model asks for it.
        Bytes for which a vocabulary has no token are left out, as the models' own tokenizers do.
        Raises RowError("encode_error") when a text is not valid Unicode (a lone surrogate).
        """
        marked = [self._spellings.mark(text) for text in texts] if parse_special else list(texts)
        return self._encode(marked, add_bos)

    def encode_rendered_batch(self, texts: Sequence[str], *, add_bos: bool | None = None) -> list[NDArray[np.int32]]:
        """Token ids of texts that a chat template rendered from `protect`ed messages.

        Equal to `encode_batch(texts, parse_special=True)` where no message spells a control token; where one does,
        the spelling is encoded as the ordinary text it is, together with the text around it.
        """
        return self.encode_batch(texts, parse_special=True, add_bos=add_bos)

    def protect(self, value: Any) -> Any:
        """Messages or tools (strings in lists and mappings) for rendering: control tokens' spellings in them are
        guarded by characters that no text contains and that `encode_rendered_batch` removes.

        To show a rendered text to a person, `unprotect` it first.
        """
        return self._spellings.protect(value)

    def unprotect(self, text: str) -> str:
        """A rendered text without the guards of `protect`."""
        return self._spellings.unprotect(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text that `ids` add to what comes before them. U+FFFD stands for bytes that are no valid UTF-8.

        skip_special: leave control tokens out. An SPM vocabulary's space before the first word is kept: it is part
        of a continuation, and belongs to the encoding, not the text, only where `ids` are a whole encoded text.
        """
        return self._bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_batch(self, batch: Iterable[Iterable[int]], *, skip_special: bool = True) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, skip_special=skip_special) for ids in batch]

    def token_text(self, token_id: int) -> str:
        """What one token, control tokens included, adds to a text; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """What one token adds to a text: nothing for a control token if `skip_special`."""
        return self._bytes((token_id,), skip_special)

    def num_bytes(self, ids: Iterable[int]) -> int:
        """Bytes that `ids` add to a text, the spellings of control tokens among them."""
        return len(self._bytes(ids, skip_special=False))

    def incremental(self, *, skip_special: bool = True) -> "IncrementalDecoder":
        """A decoder for ids that arrive one by one."""
        return IncrementalDecoder(self, skip_special)

    def _bytes(self, ids: Iterable[int], skip_special: bool) -> bytes:
        pieces = self._visible if skip_special else self._pieces
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if numbers and (min(numbers) < 0 or max(numbers) >= self.vocab_size):
            bad = next(i for i in numbers if not 0 <= i < self.vocab_size)
            raise RowError("internal_error", f"token id {bad} is not in the vocabulary of {self.vocab_size} tokens")
        return b"".join([pieces[i] for i in numbers])

    def _encode(self, texts: list[str], add_bos: bool | None) -> list[NDArray[np.int32]]:
        wants_bos = self.add_bos if add_bos is None else add_bos
        bos = _needed_bos(self.bos_token_id) if wants_bos else None
        try:
            rows = self._encoder.encode(texts)
        except (UnicodeEncodeError, TypeError):
            raise _unencodable(texts) from None
        if bos is not None:
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        return [np.array(row, np.int32) for row in rows]


class IncrementalDecoder:
    """Text from ids that arrive one by one: all pushes and the flush together are `decode` of the ids.

    A character whose bytes are spread over several tokens comes out with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, skip_special=self._skip_special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


def _pre_tokenizer(vocab: gguf_vocab.GgufVocab, override: str | None) -> PreTokenizer | None:
    """None for SPM and Unigram, which have none."""
    if vocab.kind == "gpt2":
        return find_pre_tokenizer(override or vocab.pre, vocab.architecture)
    if override is not None:
        raise ModelError(
            f"model.pre_tokenizer is '{override}', but the model's tokenizer ({vocab.kind}) has none: remove it"
        )
    return None


def _default_add_bos(vocab: gguf_vocab.GgufVocab, pre: PreTokenizer | None) -> bool:
    return vocab.kind == "llama" if pre is None else pre.add_bos


def _needed_bos(bos_token_id: int | None) -> int:
    if bos_token_id is None:
        raise ModelError("prompts are to start with BOS, but the model's tokenizer names no BOS token")
    return bos_token_id


def _gguf_fingerprint(vocab: gguf_vocab.GgufVocab, pre: PreTokenizer | None, add_bos: bool) -> str:
    rules = None if pre is None else [pre.patterns, pre.ignore_merges]
    scores = vocab.scores if pre is None else None
    bos = vocab.bos_token_id if add_bos else None
    spaces = [vocab.add_space_prefix is not False, vocab.trims_after, vocab.remove_extra_spaces]
    return _digest([vocab.kind, rules, vocab.tokens, vocab.types, scores, vocab.merges, bos, spaces])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unencodable(texts: Sequence[str]) -> Exception:
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            return TypeError(f"text {place} of the batch is {type(text).__name__}, not str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"at character {error.start + 1} of text {place + 1} of {len(texts)}"
            return RowError("encode_error", f"not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} {where}")
    return TypeError("texts must be a sequence of str")
