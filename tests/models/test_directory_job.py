"""The default model as a directory of Hugging Face: the same answers as from its GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from batchgen.loading import ModelFile
from batchgen.runner import JobSummary
from batchgen.spec import JobSpec
from tests.conftest import ROOT
from tests.hf_models import hf_config, hf_tensors, write_tokenizer, write_weights


def convert(model: ModelFile, folder: Path) -> None:
    """Its dequantised weights as float32, in three files."""
    folder.mkdir()
    tied = "output.weight" not in model.file.tensors
    config = hf_config(model.config) | {"tie_word_embeddings": tied, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, model.file.metadata)  # type: ignore[attr-defined]
    weights = {name: model.dequantize(name) for name in sorted(model.names())}
    write_weights(folder, hf_tensors(weights, model.config.shape.head_dim), parts=3)


@pytest.mark.slow
def test_a_directory_answers_as_its_gguf_twin(
    tmp_path: Path, model: ModelFile, make_spec: Callable[..., JobSpec], run: Callable[[JobSpec], JobSummary]
) -> None:
    convert(model, tmp_path / "directory")
    job = {
        "input": {
            "path": str(ROOT / "jobs" / "data" / "humaneval.parquet"),
            "prompt": "{{ prompt }}",
            "chat": False,
            "limit": 8,
        },
        "sampling": {"max_tokens": 24},
    }
    answers = []
    for name, source in (("gguf", {}), ("hf", {"source": str(tmp_path / "directory"), "sha256": None})):
        run(make_spec(name, model={**source, "weights": "fp32"}, **job))
        answers.append(pl.read_parquet(tmp_path / name / "results" / "*.parquet"))
    for column in ("token_ids", "text", "num_prompt_tokens", "cumulative_logprob"):
        assert answers[0][column].to_list() == answers[1][column].to_list()
