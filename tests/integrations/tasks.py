"""Tasks of lm-evaluation-harness on tables of this repository, without any hub."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from batchgen.yaml_text import write_yaml
from tests.conftest import ROOT

CHOICES, CODE = ROOT / "jobs" / "data" / "choices.parquet", ROOT / "jobs" / "data" / "humaneval.parquet"
SHOTS = 5
QUESTION = "Question: {{question}}\nAnswer:"


def write_tasks(folder: Path, rows: int) -> None:
    """`choices` and `answers` (generated) with five shots, `code` (rolling); of each so many rows, the shortest."""
    frame = pl.read_parquet(CHOICES).sort(pl.col("question").str.len_bytes())
    frame[:SHOTS].write_parquet(folder / "shots.parquet")
    frame[SHOTS : SHOTS + rows].write_parquet(folder / "test.parquet")
    questions = {"test": str(folder / "test.parquet"), "train": str(folder / "shots.parquet")}
    shots = {
        **_data("parquet", questions),
        "training_split": "train",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": SHOTS,
        "doc_to_text": QUESTION,
    }
    choose = {"output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
    _write(folder, "choices", shots | choose | _metrics("acc", "acc_norm"))
    answers = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    until = {"generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}}
    _write(folder, "answers", shots | answers | until | _metrics("exact_match"))
    texts = pl.read_parquet(CODE).sort(pl.col("prompt").str.len_bytes())["prompt"][:rows].to_list()
    (folder / "code.json").write_text(json.dumps([{"text": text} for text in texts]), encoding="utf-8")
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    code = _data("json", {"test": str(folder / "code.json")})
    _write(folder, "code", code | rolling | _metrics("word_perplexity", "byte_perplexity", "bits_per_byte"))


def _data(kind: str, files: dict[str, str]) -> dict[str, Any]:
    return {"dataset_path": kind, "dataset_kwargs": {"data_files": files}, "test_split": "test"}


def _metrics(*names: str) -> dict[str, Any]:
    return {"metric_list": [{"metric": name} for name in names]}


def _write(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / f"{name}.yaml").write_text(write_yaml({"task": name, **values}), encoding="utf-8")
