"""GGUF files from raw pieces, right or wrong, and a small whole model to damage.

path.write_bytes(tiny_gguf())                                    # a sound llama of one layer
path.write_bytes(tiny_gguf({"llama.block_count": 2**31 - 1}))    # one that lies
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gguf
import numpy as np

from batchgen.text.pieces import byte_alphabet
from tests.quantised import HALVES, random_blocks
from tests.tiny_model import tensor_shapes, tiny_config

INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 5, 6, 7, 8, 9, 10

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
_CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def entry(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def build(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    """The file; counts are those of what is given, unless they are to lie."""
    counts = (len(tensors) if tensor_count is None else tensor_count, len(pairs) if pair_count is None else pair_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def value_pair(key: str, value: Any) -> bytes:
    """A metadata pair of a plain value; a list has the type of its first item."""
    if not isinstance(value, list):
        return pair(key, _kind(value), _raw(value))
    kind = _kind(value[0]) if value else INT32
    return pair(key, ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(map(_raw, value)))


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT32 if -(2**31) <= value < 2**31 else UINT64
    return FLOAT32 if isinstance(value, float) else STRING


def _raw(value: Any) -> bytes:
    kind = _kind(value)
    if kind == STRING:
        return text(value)
    return struct.pack({BOOL: "<B", INT32: "<i", UINT64: "<Q", FLOAT32: "<f"}[kind], value)


def tiny_metadata(kind: str = "gpt2") -> dict[str, Any]:
    """A byte-level BPE vocabulary ("gpt2") or an SPM one ("llama") and one layer of 32 dimensions."""
    tokens = _bpe_tokens() if kind == "gpt2" else _spm_tokens()
    sizes = {"embedding_length": 32, "feed_forward_length": 32, "block_count": 1, "context_length": 64}
    heads = {"head_count": 2, "head_count_kv": 1, "layer_norm_rms_epsilon": 1e-5}
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        **{f"llama.{name}": value for name, value in sizes.items()},
        **{f"llama.attention.{name}": value for name, value in heads.items()},
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.merges": ["h e", "he l", "l o", "hel lo"],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT,
    }


def _bpe_tokens() -> dict[str, int]:
    """Spelling → type."""
    return (
        dict.fromkeys(_CONTROLS, 3) | dict.fromkeys(byte_alphabet(), 1) | dict.fromkeys(["he", "hel", "lo", "hello"], 1)
    )


def _spm_tokens() -> dict[str, int]:
    pieces = ["▁", "h", "e", "l", "o", "he", "lo", "hel", "hello", "▁hello"]
    return {
        "<unk>": 2,
        **dict.fromkeys(_CONTROLS, 3),
        **dict.fromkeys([f"<0x{i:02X}>" for i in range(256)], 6),
        **dict.fromkeys(pieces, 1),
    }


def tiny_gguf(changes: Mapping[str, Any] | None = None, kind: str = "gpt2", **tensors: tuple[Any, ...]) -> bytes:
    """The file's bytes. `changes` replace metadata (None leaves a key out).

    tensors: by name, with "__" for ".", what replaces (dims, type, offset) of a tensor's entry; None keeps a part.
    """
    metadata = {key: value for key, value in {**tiny_metadata(kind), **(changes or {})}.items() if value is not None}
    entries, data = _tensors(len(tiny_metadata(kind)["tokenizer.ggml.tokens"]))
    for name, change in tensors.items():
        at = name.replace("__", ".")
        entries[at] = tuple(old if new is None else new for old, new in zip(entries[at], change, strict=True))
    pairs = [value_pair(key, value) for key, value in metadata.items()]
    return build(pairs, [entry(name, *parts) for name, parts in entries.items()], data)


def _tensors(vocab: int) -> tuple[dict[str, tuple[Any, ...]], bytes]:
    """By name (dims, type, offset), and the data: a type after the other, blocks of random codes."""
    config = tiny_config(
        hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=vocab
    )
    rng, entries, data = np.random.default_rng(0), {}, b""
    for name, shape, kind in zip(*_unzip(tensor_shapes(config)), _types(), strict=False):
        kind = "F32" if len(shape) == 1 else kind
        raw = _stored(rng, kind, shape)
        entries[name] = (shape[::-1], gguf.GGMLQuantizationType[kind].value, len(data))
        data += raw + bytes(-len(raw) % 32)
    return entries, data


def _unzip(items: Mapping[str, tuple[int, ...]]) -> tuple[list[str], list[tuple[int, ...]]]:
    return list(items), list(items.values())


def _types() -> Iterable[str]:
    while True:
        yield from ("Q8_0", "Q4_1", "F16", "Q5_0", "Q4_0", "BF16", "Q5_1", "F32")


def _stored(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> bytes:
    if kind in HALVES:
        return random_blocks(rng, kind, *shape).tobytes()
    values = rng.standard_normal(shape).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes()
