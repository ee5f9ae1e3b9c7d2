"""What each token adds to a text, as bytes: decoding is putting them together."""

from collections.abc import Iterable

from batchgen.text.gguf_vocab import BYTE, CONTROL, UNKNOWN, USER_DEFINED, GgufVocab

SPM_SPACE = "▁"


def gguf_pieces(vocab: GgufVocab) -> list[bytes]:
    """One entry per id. Control and user-defined tokens are their spelling."""
    as_spelled = (CONTROL, UNKNOWN, USER_DEFINED)
    return [
        text.encode() if kind in as_spelled else piece if vocab.kind == "gpt2" else spm_piece(text, kind == BYTE)
        for text, kind, piece in zip(vocab.tokens, vocab.types, byte_level_pieces(vocab.tokens), strict=True)
    ]


def spm_piece(text: str, is_byte: bool) -> bytes:
    """A sentencepiece token: `<0xNN>` is a byte, U+2581 a space."""
    return bytes([int(text[3:5], 16)]) if is_byte else text.replace(SPM_SPACE, " ").encode()


def byte_level_pieces(texts: Iterable[str]) -> list[bytes]:
    """Tokens in GPT-2's byte alphabet; one with a character outside of it is taken as it is spelled."""
    outside = chr(0x100)
    table = dict.fromkeys(range(0x100), outside) | {ord(char): chr(b) for char, b in byte_alphabet().items()}
    return [_from_alphabet(text, table) for text in texts]


def _from_alphabet(text: str, table: dict[int, str]) -> bytes:
    try:
        return text.translate(table).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 stands for itself, the rest for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
