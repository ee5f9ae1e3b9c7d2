"""A model source into something that runs: file, configuration, tokenizer, kernel, weights."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from batchgen.errors import ModelError, SpecError
from batchgen.io.gguf_codes import UNPACKERS
from batchgen.io.gguf_file import GGUFFile
from batchgen.io.hf_quantised import CODE_FORMATS as HF_FORMATS
from batchgen.io.hf_weights import HfWeights
from batchgen.io.hub import directory_name
from batchgen.io.model_files import TensorInfo, WeightsFile, check_kind, model_files, read_json
from batchgen.io.model_source import model_sha256, resolve_source
from batchgen.kernels.base import Backend, Codes, ModelShape, Ops, StepLimits
from batchgen.models.architectures import BY_GGUF_NAME
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import forward, forward_hidden
from batchgen.models.handles import DecoderWeights
from batchgen.models.rope import Rope
from batchgen.models.weights import load_weights
from batchgen.shown import counted
from batchgen.spec import EngineSpec, ModelSpec
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.tokenizer import Tokenizer

AUTO_MEMORY_SHARE = 0.5
"""Of the memory that is available when the job starts, the most that `kv_memory: auto` takes."""


CODE_FORMATS = {name: (block.bits, block.group, block.minima) for name, block in UNPACKERS.items()} | HF_FORMATS
"""Types that are kept as codes: bits, group and whether there are minima."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An opened model, its weights still on disk."""

    file: WeightsFile
    config: ModelConfig
    tokenizer: Tokenizer
    chat: ChatTemplate | None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        info = self.file.tensors.get(name)
        return None if info is None else info.shape

    def dequantize(self, name: str) -> NDArray[np.float32]:
        return self.file.dequantize(name)

    def codes(self, name: str) -> Codes | None:
        return self.file.codes(name)

    def names(self) -> frozenset[str]:
        return frozenset(self.file.tensors)

    @property
    def has_tied_output(self) -> bool:
        return self.config.tied or self._name_of("output") not in self.file.tensors

    def _name_of(self, part: str) -> str:
        return f"{self.config.architecture.stem(part, self.config.naming)}.weight"

    def weight_bytes(self, weights: str) -> int:
        """About what the packed weights take; a tied embedding is kept twice, as a table and to multiply with."""
        tensors, head = dict(self.file.tensors), self._name_of("output")
        table = tensors.pop(self._name_of("embedding"), None)
        looked_up = prod(table.shape) * (4 if weights == "fp32" else 2) if table else 0
        if table and head not in tensors:
            tensors[head] = table
        return looked_up + sum(_packed_bytes(tensor, weights) for tensor in tensors.values())


def _packed_bytes(tensor: TensorInfo, weights: str) -> int:
    """Of one matrix; types that are not kept as codes are expanded."""
    count = prod(tensor.shape)
    if weights == "native" and tensor.type_name in CODE_FORMATS:
        bits, group, minima = CODE_FORMATS[tensor.type_name]
        return count * bits // 8 + count // group * 4 * (2 if minima else 1)
    return count * {"fp32": 4, "bf16": 2, "native": 2, "int8": 1}[weights]


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of a result beside the model: kernel, weight type, KV type (all resolved)."""

    kernel: str
    weights: str
    kv_dtype: str


def locate_model(spec: ModelSpec, on_message: Callable[[str], None]) -> tuple[Path, str]:
    """The model's file (fetched if need be) and its SHA-256, see `model_sha256`."""
    path = resolve_source(spec.source, spec.sha256, on_message=on_message)
    return path, spec.sha256 or model_sha256(path)


def open_model(path: Path, pre_tokenizer: str | None = None, now: Callable[[], datetime] = datetime.now) -> ModelFile:
    """Read the headers of a GGUF file or a safetensors directory: configuration, vocabulary, chat template, whose date
    is `now`. ModelError names the file."""
    check_kind(path)
    try:
        if path.is_dir():
            file, config, tokenizer = _open_directory(path, pre_tokenizer)
        else:
            file, config, tokenizer = _open_gguf(path, pre_tokenizer)
        template = tokenizer.chat_template
        chat = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token, now) if template else None
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise ModelError(f"{path}: malformed metadata: {type(error).__name__}: {error}") from None
    return ModelFile(file, config, tokenizer, chat)


Opened = tuple[WeightsFile, ModelConfig, Tokenizer]


def _open_gguf(path: Path, pre_tokenizer: str | None) -> Opened:
    file = GGUFFile.open(path)
    return file, ModelConfig.from_gguf(file.metadata), Tokenizer.from_gguf(file.metadata, pre_tokenizer)


def _open_directory(path: Path, pre_tokenizer: str | None) -> Opened:
    settings = read_json(path / "config.json")
    config = ModelConfig.from_hf(settings, directory_name(path))
    file = HfWeights.open(path, settings.get("quantization_config"))
    _check_vocabulary(file, config.shape.vocab_size)
    return file, config, Tokenizer.from_directory(path, config.shape.vocab_size, pre_tokenizer)


def _check_vocabulary(file: WeightsFile, size: int) -> None:
    """What `config.json` says must be so before anything of that size is made."""
    if not any(info.shape[:1] == (size,) for info in file.tensors.values()):
        raise ModelError(f"vocab_size is {size}, but no tensor of the model has as many rows")


def resolve_numerics(model: ModelSpec, engine: EngineSpec) -> Numerics:
    """Replace every "auto" by what this processor does best; SpecError for what it cannot do."""
    from batchgen.kernels.cpu.features import available_kernels

    able = available_kernels()
    kernel: str = engine.kernel
    if kernel == "auto":
        kernel = "portable" if model.weights == "fp32" else able[0]
    if kernel not in (*able, "reference"):
        raise SpecError(f"engine.kernel: '{kernel}' does not run on this processor; it has {', '.join(able)}")
    narrow = kernel in ("amx_bf16", "avx512_bf16")
    if narrow and model.weights == "fp32":
        raise SpecError(
            f"model.weights: kernel '{kernel}' works on bf16, native or int8; for fp32 set engine.kernel: portable"
        )
    weights = ("native" if narrow else "fp32") if model.weights == "auto" else model.weights
    kv_dtype = ("bf16" if narrow else "fp32") if engine.kv_dtype == "auto" else engine.kv_dtype
    return Numerics(kernel, weights, kv_dtype)


def make_backend(numerics: Numerics, threads: int) -> Backend:
    """A backend without weights."""
    if numerics.kernel == "reference":
        from batchgen.kernels.reference import ReferenceBackend

        return ReferenceBackend(numerics.weights, numerics.kv_dtype)
    from batchgen.kernels.cpu.backend import CpuBackend

    return CpuBackend(numerics.kernel, numerics.weights, numerics.kv_dtype, threads)


def thread_count(engine: EngineSpec) -> int:
    """`engine.threads`, or one per processor that this process may use."""
    if isinstance(engine.threads, int):
        return engine.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kv_pages(spec: EngineSpec, page_bytes: int, weight_bytes: int) -> int:
    """Pages that the KV cache may have: `kv_memory`, or for auto a share of the memory that the weights leave free."""
    budget = spec.kv_memory_bytes
    if budget is None:
        free = psutil.virtual_memory().available - weight_bytes
        return max(1, int(free * AUTO_MEMORY_SHARE) // page_bytes)
    if budget < page_bytes:
        raise SpecError(
            f"engine.kv_memory: {counted(budget, 'byte')} is less than one page of this model, which takes "
            f"{page_bytes:,} and holds {spec.page_size} tokens; a row needs room for its prompt and its answer"
        )
    return budget // page_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """What runs: a backend without weights, and the KV pages that there is memory for."""

    backend: Backend
    most_pages: int


def open_device(model: ModelFile, numerics: Numerics, engine: EngineSpec) -> Device:
    backend = make_backend(numerics, thread_count(engine))
    page_bytes = backend.page_bytes(model.config.shape, engine.page_size)
    return Device(backend, kv_pages(engine, page_bytes, model.weight_bytes(numerics.weights)))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A backend ready to step, and the seconds it took to load weights and to compile (or load) kernels."""

    backend: Backend
    load_seconds: float
    compile_seconds: float


def load_model(
    model: ModelFile, backend: Backend, limits: StepLimits, on_message: Callable[[str], None], embeds: bool = False
) -> LoadedModel:
    """Pack the weights, allocate the KV cache, compile the kernels; what is damaged in their cache is made anew.

    `embeds`: without the output head, for embeddings.
    """
    program = forward_hidden if embeds else forward
    try:
        return _load(model, backend, limits, on_message, program)
    except (UnpicklingError, EOFError, OSError) as error:
        discard_kernels(error)
        on_message("the kernels on disk are damaged; compiling them again")
        return _load(model, backend, limits, on_message, program)


def _load(
    model: ModelFile,
    backend: Backend,
    limits: StepLimits,
    on_message: Callable[[str], None],
    program: Callable[[Ops, ModelConfig, DecoderWeights], None],
) -> LoadedModel:
    start = time.perf_counter()
    config = model.config
    try:
        weights = load_weights(model, config, backend)
    except ModelError as error:
        raise ModelError(f"{model.file.path}: {error}") from None
    positions = min(config.shape.context_length, limits.num_pages * limits.page_size)
    rope = config.rope_tables(positions, weights.rope_factors)
    backend.build(lambda ops: program(ops, config, weights), config.shape, limits, rope)
    loaded = time.perf_counter()
    compile_kernels(backend, on_message)
    return LoadedModel(backend, loaded - start, time.perf_counter() - loaded)


def discard_kernels(error: Exception) -> None:
    """Remove compiled kernels that cannot be read; ModelError when it is room that is missing."""
    from batchgen.kernels.cpu.compiling import cache_directory

    if isinstance(error, OSError):
        reason = error.strerror or error
        raise ModelError(
            f"kernel cache {cache_directory()}: {reason}; BATCHGEN_CACHE_DIR names another folder"
        ) from None
    shutil.rmtree(cache_directory(), ignore_errors=True)


def compile_kernels(backend: Backend, on_message: Callable[[str], None]) -> None:
    """Make a built backend ready for its first step, with a word when that takes long."""
    if backend.kernel != "reference":
        from batchgen.kernels.cpu import program
        from batchgen.kernels.cpu.compiling import is_compiled

        if not is_compiled(program.run):
            on_message("compiling kernels for this processor (once; about half a minute)")
    backend.warm_up()


def compile_all(numerics: Numerics, on_message: Callable[[str], None]) -> None:
    """Compile the kernels without a model, on a tiny one made up here."""
    backend = make_backend(numerics, 1)
    shape = ModelShape(32, 32, 1, 2, 1, 16, 64, 32)
    config = ModelConfig(BY_GGUF_NAME["llama"], "gguf", "tiny", shape, 1e-5, (Rope(shape.head_dim),))
    weights = load_weights(_Zeros(shape), config, backend)
    limits = StepLimits(max_tokens=32, max_seqs=1, num_pages=1, page_size=32)
    backend.build(lambda ops: forward(ops, config, weights), shape, limits, config.rope_tables())
    compile_kernels(backend, on_message)
    backend.close()
    for other in {"fp32", "bf16", "native", "int8"} - {numerics.weights}:  # what packs them is compiled, too
        kernel = "portable" if other == "fp32" else numerics.kernel
        load_weights(_Zeros(shape), config, make_backend(Numerics(kernel, other, numerics.kv_dtype), 1))


class _Zeros:
    """A model file whose weights are all zero."""

    def __init__(self, shape: ModelShape):
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, ffn = shape.hidden_size, shape.intermediate_size
        self._shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (shape.vocab_size, hidden),
            "output.weight": (shape.vocab_size, hidden),
            "output_norm.weight": (hidden,),
            "blk.0.attn_norm.weight": (hidden,),
            "blk.0.ffn_norm.weight": (hidden,),
            "blk.0.attn_q.weight": (q, hidden),
            "blk.0.attn_k.weight": (kv, hidden),
            "blk.0.attn_v.weight": (kv, hidden),
            "blk.0.attn_output.weight": (hidden, q),
            "blk.0.ffn_gate.weight": (ffn, hidden),
            "blk.0.ffn_up.weight": (ffn, hidden),
            "blk.0.ffn_down.weight": (hidden, ffn),
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def codes(self, name: str) -> Codes:
        """Of both kinds that kernels know, so that what packs them is compiled, too."""
        rows, columns = self._shapes[name]
        zeros = np.zeros((rows, columns // 32), np.float32)
        if name == "output.weight":
            return Codes(np.zeros((rows, columns), np.int8), 8, zeros, None)
        return Codes(np.zeros((rows, columns), np.uint8), 4, zeros, zeros)

    def dequantize(self, name: str) -> NDArray[np.float32]:
        return np.zeros(self._shapes[name], np.float32)


def describe_model(source: str, path: Path, model: ModelFile) -> dict[str, Any]:
    """What `batchgen models show` prints."""
    shape, types = model.config.shape, sorted({t.type_name for t in model.file.tensors.values()})
    return {
        "name": model.config.name,
        "architecture": model.config.architecture.name,
        "file": str(path),
        "file_bytes": sum(file.stat().st_size for file in model_files(path)),
        "parameters": sum(prod(t.shape) for t in model.file.tensors.values()),
        "tensor_types": ", ".join(types),
        **{f"bytes_as_{name}": model.weight_bytes(name) for name in ("native", "int8", "bf16", "fp32")},
        "context_length": shape.context_length,
        "vocab_size": shape.vocab_size,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "heads": shape.num_heads,
        "key_value_heads": shape.num_kv_heads,
        "head_size": shape.head_dim,
        "rope_theta": model.config.ropes[0].theta,
        "tied_output": model.has_tied_output,
        "bos_token": model.tokenizer.bos_token,
        "end_tokens": ", ".join(model.tokenizer.token_text(i) for i in sorted(model.tokenizer.eos_token_ids)),
        "adds_bos": model.tokenizer.add_bos,
        "chat_template": model.tokenizer.chat_template,
    }
