"""What planning saves: tokens planned, computed and least possible, and the time with sharing and without.

    python -m benchmarks.sharing [--model SOURCE] [--repeats N] [--set KEY=VALUE ...]

Three tables of real tokens, their settings run in turn: `fewshot` (one header for all), `levels` (an instruction, then
few-shot blocks, then documents, then questions) and `mixed` (long prompts that ask for one token, then short ones that
ask for many, the order in which a plan has them). `levels` and `fewshot` with sharing on and off; `mixed` under the
schedules. Seconds are those of generating.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from batchgen.progress import SilentProgress
from batchgen.runner import run_job
from batchgen.spec import load_spec
from batchgen.yaml_text import write_yaml
from benchmarks.workloads import MODEL, load

SHARING = {"shared": [], "not shared": ["engine.prefix_sharing=false"]}
SEATS = "engine.max_num_seqs=32"  # fewer than rows, so that the order matters
SCHEDULES = {name: [f"engine.schedule={name}", SEATS] for name in ("planned", "prefill_first", "fifo")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: prompt tokens of the table, the fewest possible, those planned and computed; steps and seconds."""

    prompt: int
    least: int
    planned: int
    computed: int
    steps: int
    seconds: float


def tables() -> dict[str, tuple[pl.DataFrame, dict[str, list[str]]]]:
    """(table, settings) by name."""
    return {"fewshot": (load("fewshot"), SHARING), "levels": (levels(), SHARING), "mixed": (mixed(), SCHEDULES)}


class _Text:
    """Pieces of real text, as token ids, none of them twice."""

    def __init__(self) -> None:
        self._tokens = np.concatenate(load("annotate")["prompt_token_ids"].list.slice(300).to_list())
        self._taken = 0

    def take(self, count: int) -> list[int]:
        piece = self._tokens[self._taken : self._taken + count]
        if len(piece) < count:
            raise ValueError("the text is used up")
        self._taken += count
        return piece.tolist()


def levels() -> pl.DataFrame:
    """240 rows of 940 tokens: 200 for all, 400 for 60, 300 for 6, 40 of their own."""
    text, prompts = _Text(), []
    instruction = text.take(200)
    for _ in range(4):
        block = instruction + text.take(400)
        for _ in range(10):
            document = block + text.take(300)
            prompts += [document + text.take(40) for _ in range(6)]
    return _frame(prompts, [1] * len(prompts))


def mixed() -> pl.DataFrame:
    """92 rows of 470 tokens that ask for one token, and as many of 16 that ask for 32 to 160."""
    text = _Text()
    long, short = [[1, *text.take(469)] for _ in range(92)], [[2, *text.take(15)] for _ in range(92)]
    return _frame(long + short, [1] * 92 + np.random.default_rng(6).integers(32, 161, 92).tolist())


def _frame(prompts: list[list[int]], new_tokens: list[int]) -> pl.DataFrame:
    shuffled = np.random.default_rng(5).permutation(len(prompts)).tolist()
    columns = {"prompt_token_ids": [prompts[i] for i in shuffled], "max_new_tokens": [new_tokens[i] for i in shuffled]}
    return pl.DataFrame(columns, schema={"prompt_token_ids": pl.List(pl.Int32), "max_new_tokens": pl.Int32})


def run(frame: pl.DataFrame, model: str, overrides: list[str]) -> Outcome:
    """The table as a job in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        frame.write_parquet(f"{folder}/table.parquet")
        spec = {
            "model": {"source": model},
            "input": {"path": "table.parquet", "token_ids": "prompt_token_ids"},
            "sampling": {"max_tokens": "{{ max_new_tokens }}", "ignore_eos": True},
            "output": {"path": f"{folder}/out"},
        }
        (Path(folder) / "job.yaml").write_text(write_yaml(spec), encoding="utf-8")
        job = load_spec(Path(folder) / "job.yaml", overrides)
        run_job(job, fresh=False, progress=SilentProgress(), stop=lambda: False)
        record: dict[str, Any] = json.loads((Path(folder) / "out" / "job.json").read_text())
        steps = pl.scan_parquet(f"{folder}/out/steps/*.parquet").select(pl.len()).collect().item()
    plan, totals = record["plan"], record["totals"]
    return Outcome(
        plan["prompt_tokens"],
        plan["distinct_prompt_tokens"],
        plan["computed_prompt_tokens"],
        totals["computed_prompt_tokens"],
        steps,
        totals["generate_seconds"],
    )


def show(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    table = Table(title=name, title_justify="left")
    for column in (
        "setting",
        "prompt tokens",
        "least",
        "planned",
        "computed",
        "steps",
        "seconds",
        "ratio to the first",
    ):
        table.add_column(column, justify="left" if column == "setting" else "right")
    first = next(iter(outcomes.values()))
    for setting, runs in outcomes.items():
        tokens = (runs[0].prompt, runs[0].least, runs[0].planned, runs[0].computed, runs[0].steps)
        ratios = [run.seconds / base.seconds for run, base in zip(runs, first, strict=True)]
        seconds = f"{median(run.seconds for run in runs):.2f}"
        table.add_row(setting, *(f"{count:,}" for count in tokens), seconds, f"{median(ratios):.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tables", nargs="+", default=["fewshot", "levels", "mixed"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the job spec")
    args = parser.parse_args()
    for name, (frame, settings) in tables().items():
        if name in args.tables:
            outcomes: dict[str, list[Outcome]] = {setting: [] for setting in settings}
            for _ in range(args.repeats):
                for setting, overrides in settings.items():
                    outcomes[setting].append(run(frame, args.model, [*args.set, *overrides]))
            show(name, outcomes)


if __name__ == "__main__":
    main()
