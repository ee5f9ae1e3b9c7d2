"""Reading a Hugging Face `tokenizer.json`."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from batchgen.errors import ModelError
from batchgen.io.model_files import parse_json, read_bytes
from batchgen.text.encoders import BpeEncoder
from batchgen.text.pieces import byte_level_pieces, spm_piece
from batchgen.text.settings import TokenizerSettings
from batchgen.text.spellings import Spellings


@dataclass(frozen=True)
class TokenizerFile:
    """`data`: the file's content. `digest`: of the file's bytes."""

    path: Path
    data: dict[str, Any]
    settings: TokenizerSettings
    digest: str

    @property
    def control_tokens(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in self.data["added_tokens"] if token["special"]}

    @cached_property
    def vocab(self) -> dict[str, int]:
        """All tokens by text, added ones included."""
        vocab = self.data["model"]["vocab"]
        base = vocab if isinstance(vocab, dict) else {text: i for i, (text, _) in enumerate(vocab)}
        return base | {token["content"]: token["id"] for token in self.data["added_tokens"]}

    def bos(self) -> tuple[int | None, bool]:
        """The BOS token's id, and whether texts start with it: as `add_bos_token` in the settings says, else if the
        file's post-processor puts it there."""
        prefix = self._prefix_token_id()
        bos = self.token_id("bos_token")
        add_bos = self.settings.add_bos
        return prefix if bos is None else bos, prefix is not None if add_bos is None else add_bos

    def _prefix_token_id(self) -> int | None:
        for processor in _flatten(self.data.get("post_processor"), "processors"):
            first = (processor.get("single") or [{}])[0]
            if "SpecialToken" in first:
                return processor["special_tokens"][first["SpecialToken"]["id"]]["ids"][0]
        return None

    def token_id(self, key: str) -> int | None:
        """The id of the token that `tokenizer_config.json` names under `key` (such as "bos_token")."""
        text = self.settings.token(key)
        return None if text is None else self.vocab.get(text)

    def end_token_ids(self) -> frozenset[int]:
        """From `tokenizer_config.json` (eos_token) and `generation_config.json` (eos_token_id, one or several)."""
        return frozenset(i for i in [*self.settings.listed_ends(), self.token_id("eos_token")] if i is not None)


def read_tokenizer_file(path: Path) -> TokenizerFile:
    """Raises ModelError when a file cannot be read."""
    content = read_bytes(path)
    data = parse_json(path, content)
    if not isinstance(data.get("model"), dict) or "vocab" not in data["model"]:
        raise ModelError(f"{path}: not a tokenizer.json (it has no model.vocab)")
    data.setdefault("added_tokens", [])
    settings = TokenizerSettings.read(path.parent)
    return TokenizerFile(path, data, settings, hashlib.sha256(content).hexdigest())


def build_encoder(file: TokenizerFile, spellings: Spellings) -> BpeEncoder:
    """The file's tokenizer with its control tokens renamed to their stand-ins, so that no text can spell one, and
    without what would cut, pad or frame a text."""
    names = spellings.stand_ins
    model = file.data["model"]
    data = file.data | {
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "added_tokens": [_unspellable(token, names) for token in file.data["added_tokens"]],
        "model": model | _renamed(model, names),
    }
    try:
        return BpeEncoder(tokenizers.Tokenizer.from_str(json.dumps(data)))
    except Exception as error:  # the library's own class, without a name to catch
        raise ModelError(f"{file.path}: the tokenizer cannot be built: {error}") from None


def file_pieces(file: TokenizerFile, vocab_size: int | None) -> list[bytes]:
    """What each id adds to a text, by the file's decoder; nothing for those beyond the vocabulary.

    Raises ModelError for a decoder that is not known, and for ids that the model does not know."""
    vocab = file.vocab
    last = max(vocab.values())
    if vocab_size is not None and last >= vocab_size:
        raise ModelError(f"{file.path}: has token id {last}, but the model knows {vocab_size} tokens (vocab_size)")
    texts = [""] * (vocab_size or last + 1)
    for text, i in vocab.items():
        texts[i] = text
    pieces = _decoder_pieces(file, texts)
    for token in file.data["added_tokens"]:
        pieces[token["id"]] = token["content"].encode()
    return pieces


def _decoder_pieces(file: TokenizerFile, texts: list[str]) -> list[bytes]:
    kinds = {decoder["type"] for decoder in _flatten(file.data.get("decoder"), "decoders")}
    if "ByteLevel" in kinds:
        return byte_level_pieces(texts)
    if kinds & {"Replace", "Metaspace"} and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return [spm_piece(text, "ByteFallback" in kinds and _is_byte(text)) for text in texts]
    raise ModelError(f"{file.path}: decoder {sorted(kinds) or 'none'} is not supported (ByteLevel and Metaspace are)")


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _unspellable(token: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A control token under its stand-in's name; any other added token as it is."""
    name = names.get(token["content"])
    return token if name is None else token | {"content": name, "special": False, "normalized": False}


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The parts of `model` that name tokens, with those in `names` renamed."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed: Any = {names.get(text, text): i for text, i in vocab.items()}
    else:
        renamed = [[names.get(text, text), score] for text, score in vocab]
    unknown = model.get("unk_token")
    return {"vocab": renamed} | ({"unk_token": names[unknown]} if unknown in names else {})


def _flatten(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A pipeline part as a list, whether it is one or a sequence (whose members are under `key`)."""
    if part is None:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]
