"""Every architecture against what transformers computed; a row's bits alone, in company and on a shared prefix."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from batchgen.io.gguf_file import GGUFFile
from batchgen.kernels.base import Backend, Matrix
from batchgen.kernels.cpu.features import available_kernels
from batchgen.loading import ModelFile
from batchgen.models.architectures import BY_MODEL_TYPE
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import forward
from batchgen.models.weights import load_weights
from tests.kernels.kernel_programs import relative_error, same_bits
from tests.models.as_gguf import as_gguf
from tests.models.recorded import FOLDER, Recorded, load
from tests.tiny_model import LIMITS, ArraySource, Chunk, make_backend, make_batch, quantise

NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
KERNELS = {"portable": ("portable", "fp32", "fp32"), "best": (available_kernels()[0], "native", "bf16")}
WITHOUT_KEYS = ("gemma2-scaled", "qwen2-window")
"""What GGUF has no keys for: a scale of scores that does not follow from sizes, windows of Qwen's."""
Open = Callable[..., Backend]


@pytest.fixture
def open_model() -> Iterator[Open]:
    """`open_model(config, tensors, kernel="portable")`; closed after the test."""
    opened: list[Backend] = []

    def open_one(config: ModelConfig, tensors: Mapping[str, Matrix] | ModelFile, kernel: str = "portable") -> Backend:
        backend = make_backend(*KERNELS[kernel], threads=2)
        opened.append(backend)
        source = tensors if isinstance(tensors, ModelFile) else ArraySource(tensors)
        weights = load_weights(source, config, backend)
        rope = config.rope_tables(factors=weights.rope_factors)
        backend.build(lambda ops: forward(ops, config, weights), config.shape, LIMITS, rope)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture(params=NAMES)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return load(request.param)


def config_of(recorded: Recorded) -> ModelConfig:
    return ModelConfig.from_hf(recorded.config, recorded.name)


def logits_at(
    backend: Backend, chunks: list[Chunk], rows: NDArray[Any] | list[int], **fields: Any
) -> NDArray[np.float32]:
    batch = make_batch(chunks, True, logits_rows=np.asarray(rows, np.int32), **fields)
    return backend.run(batch).logits[: len(rows)].copy()


def test_every_architecture_is_recorded():
    assert {load(name).config["model_type"] for name in NAMES} == set(BY_MODEL_TYPE)


def test_prompts_and_decoding_against_transformers(open_model: Open, recorded: Recorded):
    """Prompts are longer than any window. The last tokens are fed one by one, in company of another sequence."""
    backend, tokens = open_model(config_of(recorded), recorded.weights()), recorded.tokens
    assert relative_error(logits_at(backend, [Chunk(tokens, 0, [0, 1, 2])], recorded.at), recorded.logits) < 1e-4
    logits_at(backend, [Chunk(tokens[:74], 0, [3, 4, 5]), Chunk(tokens[::-1][:9], 0, [6])], [73])
    for position in range(74, 80):
        got = logits_at(
            backend, [Chunk([5], position - 65, [6]), Chunk(tokens[position:][:1], position, [3, 4, 5])], [1]
        )
        expected = recorded.logits[np.flatnonzero(recorded.at == position)]
        assert relative_error(got, expected) < 1e-4, position


@pytest.mark.parametrize("recorded", [name for name in NAMES if name not in WITHOUT_KEYS], indirect=True)
def test_the_same_under_gguf_s_names(open_model: Open, recorded: Recorded):
    metadata, tensors = as_gguf(recorded)
    backend = open_model(ModelConfig.from_gguf(metadata), tensors)
    got = logits_at(backend, [Chunk(recorded.tokens, 0, [0, 1, 2])], recorded.at)
    assert relative_error(got, recorded.logits) < 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_company_and_a_shared_prefix_change_no_bit(open_model: Open, recorded: Recorded, kernel: str):
    """70 tokens alone; in pieces beside others; the last 6 on two pages that two more sequences share."""
    backend, tokens = open_model(config_of(recorded), recorded.weights(), kernel), recorded.tokens[:70]
    others = np.random.default_rng(3).integers(3, 96, (3, 60))
    alone = logits_at(backend, [Chunk(tokens, 0, [0, 1, 2])], range(64, 70))
    logits_at(backend, [Chunk(others[0], 0, [8, 9]), Chunk(tokens[:37], 0, [5, 6, 7])], [0])
    chunks = [Chunk(others[1][:40], 0, [11, 12]), Chunk(tokens[37:], 37, [5, 6, 7]), Chunk(others[2][:3], 60, [8, 9])]
    assert same_bits(logits_at(backend, chunks, np.arange(27, 33) + 40), alone)
    shared = [Chunk(others[n][:5], 64, [0, 1, 13 + n]) for n in range(2)]
    shared.insert(1, Chunk(tokens[64:], 64, [0, 1, 15]))
    runs = np.array([[0, 3, 2]], np.int32)
    assert same_bits(logits_at(backend, shared, np.arange(5, 11), shared_runs=runs), alone)
    assert same_bits(logits_at(backend, shared, np.arange(5, 11)), alone)


@pytest.mark.parametrize("name", ["granite", "qwen3_moe", "phi3", "gemma2", "gpt_neox"])
def test_codes_give_nearly_what_their_weights_give(open_model: Open, name: str):
    """Scaled, cut out of fused tensors, turned: codes stand for the same weights."""
    recorded = load(name)
    weights = recorded.weights()
    codes = {n: quantise(w, 8, 32, False) if w.ndim == 2 and w.shape[1] % 32 == 0 else w for n, w in weights.items()}
    plain = {n: w if isinstance(w, np.ndarray) else w.weights() for n, w in codes.items()}
    chunk = [Chunk(recorded.tokens, 0, [0, 1, 2])]
    one, two = (logits_at(open_model(config_of(recorded), t), chunk, recorded.at) for t in (codes, plain))
    assert relative_error(one, two) < 1e-5


@pytest.mark.peer
def test_recordings_are_what_transformers_computes(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "tests.models.record_models", str(tmp_path)]
    subprocess.run(command, check=True, cwd=FOLDER.parents[2])
    for name in NAMES:
        with np.load(tmp_path / f"{name}.npz") as new, np.load(FOLDER / f"{name}.npz") as kept:
            assert relative_error(new["logits"], kept["logits"]) < 1e-5, name


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_of_experts(tmp_path, open_model: Open, kind: str):
    """What gguf writes: experts in one tensor of three dimensions, quantised or not."""
    metadata, tensors = as_gguf(load("mixtral"))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    for key, value in metadata.items():
        if isinstance(value, int | float):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    stored = {name: kind if value.ndim == 3 else "F32" for name, value in tensors.items()}
    for name, value in tensors.items():
        kept = gguf.GGMLQuantizationType[stored[name]]
        writer.add_tensor(name, gguf.quants.quantize(value, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "m.gguf")
    model = ModelFile(file, ModelConfig.from_gguf(file.metadata), None, None)
    plain = {name: file.dequantize(name) for name in tensors}
    for kernel in KERNELS:
        chunk, rows = [Chunk(load("mixtral").tokens, 0, [0, 1, 2])], range(70, 80)
        results = [logits_at(open_model(model.config, t, kernel), chunk, rows) for t in (model, plain)]
        assert same_bits(*results)
