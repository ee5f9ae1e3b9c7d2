"""The real model against log-probabilities and greedy answers that transformers computed in float32."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from batchgen.kernels.base import SAMPLE_DTYPE, Backend, StepBatch, StepLimits
from batchgen.kernels.cpu.features import available_kernels
from batchgen.loading import ModelFile, load_model, make_backend, resolve_numerics
from batchgen.spec import EngineSpec, ModelSpec

PAGE, PAGES, TOKENS, ROWS = 32, 128, 4096, 64
REFERENCE = pl.read_parquet(Path(__file__).parent / "data" / "job" / "smollm2_greedy.parquet")


SHORTEST = REFERENCE.sort(pl.col("prompt_token_ids").list.len())


def load(model: ModelFile, weights: str, kv_dtype: str = "auto") -> Backend:
    numerics = resolve_numerics(ModelSpec(source="x", weights=weights), EngineSpec(kv_dtype=kv_dtype))
    backend = make_backend(numerics, 2)
    load_model(model, backend, StepLimits(TOKENS, ROWS, PAGES, PAGE), lambda text: None)
    return backend


def log_probabilities(backend: Backend, tokens: list[int], count: int) -> np.ndarray:
    """Log-probabilities (count, vocabulary) at the last `count` positions of one sequence."""
    length = len(tokens)
    positions = np.arange(length, dtype=np.int32)
    samples = np.zeros(count, SAMPLE_DTYPE)
    samples["row"], samples["greedy"] = np.arange(count), 1
    none = np.zeros(0, np.int32)
    batch = StepBatch(
        input_ids=np.array(tokens, np.int32),
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        block_tables=np.arange(-(-length // PAGE), dtype=np.int32)[None],
        cu_seqlens_q=np.array([0, length], np.int32),
        seq_lens=np.array([length], np.int32),
        logits_rows=np.arange(length - count, length, dtype=np.int32),
        needs_logits=np.ones(count, bool),
        samples=samples,
        history=none,
        suppress=none,
        copies=np.zeros((0, 2), np.int64),
        cleared_pages=np.arange(-(-length // PAGE), dtype=np.int32),
        shared_runs=np.zeros((0, 3), np.int32),
    )
    logits = backend.run(batch).logits[:count].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def forced(backend: Backend, row: dict) -> np.ndarray:
    """Log-probabilities at every position that predicts a token of the reference answer."""
    answer = row["greedy_token_ids"]
    return log_probabilities(backend, row["prompt_token_ids"] + answer[:-1], len(answer))


def test_float32_gives_the_reference_tokens_and_log_probabilities(model: ModelFile) -> None:
    backend, checked = load(model, "fp32"), 0
    for row in REFERENCE.iter_rows(named=True):
        found = forced(backend, row)
        np.testing.assert_allclose(found[0, row["top10_ids"]], row["top10_logprobs"], atol=1e-3)
        picked = found[np.arange(len(found)), row["greedy_token_ids"]]
        np.testing.assert_allclose(picked, row["greedy_logprobs"], atol=1e-3)
        if row["margin"] > 1e-3:
            assert found.argmax(axis=1).tolist() == row["greedy_token_ids"], row["id"]
            checked += 1
    backend.close()
    assert checked == 32


def test_default_weights_stay_close_to_float32(model: ModelFile) -> None:
    backend, differences = load(model, "auto"), []
    for row in REFERENCE.iter_rows(named=True):
        found = forced(backend, row)
        differences.append(found[np.arange(len(found)), row["greedy_token_ids"]] - np.array(row["greedy_logprobs"]))
    backend.close()
    assert np.abs(np.concatenate(differences)).mean() < 0.02


@pytest.mark.parametrize("kernel", ["avx512_bf16", "portable"])
def test_other_kernels_with_narrow_weights_stay_close_too(model: ModelFile, kernel: str) -> None:
    if kernel not in available_kernels():
        pytest.skip(f"this processor has no {kernel}")
    numerics = resolve_numerics(ModelSpec(source="x", weights="bf16"), EngineSpec(kernel=kernel))
    backend, differences = make_backend(numerics, 2), []
    load_model(model, backend, StepLimits(TOKENS, ROWS, PAGES, PAGE), lambda text: None)
    for row in SHORTEST.head(8).iter_rows(named=True):
        found = forced(backend, row)
        differences.append(found[np.arange(len(found)), row["greedy_token_ids"]] - np.array(row["greedy_logprobs"]))
    backend.close()
    assert np.abs(np.concatenate(differences)).mean() < 0.02


def of_shortest(model: ModelFile, count: int, weights: str, kv_dtype: str = "auto") -> list[np.ndarray]:
    """Log-probabilities at every predicted token of the reference rows with the shortest prompts."""
    backend = load(model, weights, kv_dtype)
    found = [forced(backend, row) for row in SHORTEST.head(count).iter_rows(named=True)]
    backend.close()
    return found


def test_native_weights_are_bf16_to_the_bit(model: ModelFile) -> None:
    native, plain = (np.concatenate(of_shortest(model, 2, weights)) for weights in ("native", "bf16"))
    assert native.tobytes() == plain.tobytes()


def test_int8_weights_stay_close_to_float32(model: ModelFile) -> None:
    exact, found = (np.concatenate(of_shortest(model, 6, weights)) for weights in ("fp32", "int8"))
    divergence = (np.exp(exact) * (exact - found)).sum(axis=1)
    assert divergence.mean() < 0.08
    assert (exact.argmax(axis=1) == found.argmax(axis=1)).mean() > 0.85


@pytest.mark.parametrize("kv_dtype", ["int8", "q8_0"])
def test_int8_caches_stay_close_to_float32(model: ModelFile, kv_dtype: str) -> None:
    differences = []
    for found, row in zip(of_shortest(model, 6, "auto", kv_dtype), SHORTEST.head(6).iter_rows(named=True), strict=True):
        differences.append(found[np.arange(len(found)), row["greedy_token_ids"]] - np.array(row["greedy_logprobs"]))
    assert np.abs(np.concatenate(differences)).mean() < 0.03
