"""Model directories that `transformers` wrote, and its logits.

BATCHGEN_PEER_PYTHON=/path/to/python pytest -m peer tests/peers    # a Python with torch and transformers
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from batchgen.kernels.base import StepLimits
from batchgen.kernels.reference import ReferenceBackend
from batchgen.loading import load_model, open_model
from tests.gguf_bytes import tiny_metadata
from tests.hf_models import write_tokenizer
from tests.tiny_model import Chunk, make_batch

LIMITS = StepLimits(max_tokens=256, max_seqs=36, num_pages=2, page_size=32)
SETTINGS = {
    "plain": [],
    "tied": ["tie_word_embeddings=true"],
    "wide heads, another theta": ["head_dim=32", 'rope_parameters={"rope_type": "default", "rope_theta": 500000.0}'],
}


@pytest.fixture
def peer() -> str:
    python = os.environ.get("BATCHGEN_PEER_PYTHON")
    if not python:
        pytest.skip("BATCHGEN_PEER_PYTHON names no Python with torch and transformers")
    return python


@pytest.mark.peer
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits_are_those_of_transformers(tmp_path: Path, peer: str, settings: list[str]) -> None:
    script = Path(__file__).with_name("tiny_llama.py")
    subprocess.run([peer, str(script), str(tmp_path), *settings], check=True, capture_output=True)
    write_tokenizer(tmp_path, tiny_metadata())
    assert (tmp_path / "model.safetensors.index.json").is_file()
    backend = ReferenceBackend()
    load_model(open_model(tmp_path), backend, LIMITS, lambda text: None)
    rows = np.arange(36, dtype=np.int32)
    step = make_batch([Chunk(range(4, 40), 0, [0, 1])], needs_logits=True, logits_rows=rows)
    found, expected = backend.run(step).logits[:36], np.load(tmp_path / "logits.npy")
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))
