"""Small model directories as Hugging Face has them, right or wrong.

write_directory(folder)                                  # a sound llama
write_directory(folder, parts=3, kind="BF16")            # its weights in several files
write_directory(folder, {"vocab_size": 2**31 - 1})       # one that lies
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from batchgen.models.config import ModelConfig
from batchgen.models.matrices import split_rotary
from tests.gguf_bytes import CHAT, tiny_metadata
from tests.tiny_model import tiny_config, tiny_weights

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
NAMES = {
    **{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"},
    "output.weight": "lm_head.weight",
}
PARTS = {
    **{"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"},
    **{"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}


def directory_config(**shape: int) -> ModelConfig:
    """Of the model that `write_directory` writes."""
    vocab = len(tiny_metadata()["tokenizer.ggml.tokens"])
    return tiny_config(**{"vocab_size": vocab, "context_length": 64, **shape})


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json`."""
    s = config.shape
    return {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": s.vocab_size},
        **{"hidden_size": s.hidden_size, "intermediate_size": s.intermediate_size, "num_hidden_layers": s.num_layers},
        **{"num_attention_heads": s.num_heads, "num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim},
        **{"rms_norm_eps": config.norm_eps, "rope_theta": config.ropes[0].theta, "hidden_act": "silu"},
        **{"max_position_embeddings": s.context_length, "tie_word_embeddings": False, "eos_token_id": 3},
    }


def hf_tensors(weights: Mapping[str, NDArray[np.float32]], head_dim: int) -> dict[str, NDArray[np.float32]]:
    """GGUF's tensors as Hugging Face has them: under its names, rotary dimensions as halves."""
    return {hf_name(name): hf_rows(name, values, head_dim) for name, values in weights.items()}


def hf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, number, part, _ = name.split(".")
    return f"model.layers.{number}.{PARTS[part]}.weight"


def hf_rows(name: str, values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    return split_rotary(values, head_dim) if "attn_q." in name or "attn_k." in name else values  # type: ignore


def stored(values: NDArray[np.float32], kind: str) -> bytes:
    """Values as a file has them; bfloat16 by cutting."""
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[kind]).tobytes()


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A file; `tensors`: name → (type, shape, data)."""
    header, data = {}, b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(header, data)


def with_header(header: Any, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_weights(folder: Path, tensors: Mapping[str, NDArray[np.float32]], kind: str = "F32", parts: int = 1) -> None:
    files = {name: (kind, values.shape, stored(values, kind)) for name, values in tensors.items()}
    if parts == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(files))
        return
    index = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(files)}
    for file in set(index.values()):
        (folder / file).write_bytes(safetensors_bytes({name: files[name] for name in files if index[name] == file}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """The byte-level vocabulary of a GGUF file as `tokenizer.json`, with its template and end token."""
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([text for text, i in ids.items() if types[i] == 3])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.eos_token_id"]]
    settings = {"eos_token": end, "bos_token": None, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_directory(
    folder: Path, changes: Mapping[str, Any] | None = None, kind: str = "F32", parts: int = 1, **shape: int
) -> ModelConfig:
    """`changes` replace keys of `config.json` (None leaves one out), `shape` fields of `ModelShape`."""
    folder.mkdir(exist_ok=True)
    config = directory_config(**shape)
    content = {key: value for key, value in {**hf_config(config), **(changes or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    write_weights(folder, hf_tensors(tiny_weights(0, config), config.shape.head_dim), kind, parts)
    write_tokenizer(folder, tiny_metadata())
    return config
