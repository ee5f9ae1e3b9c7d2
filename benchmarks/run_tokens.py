"""batchgen on one token table; one JSON line.

    python -m benchmarks.run_tokens TABLE [--model SOURCE] [--rows N] [--set KEY=VALUE ...] [--since SECONDS]

A whole job (`batchgen.runner.run_job`) in a temporary folder, greedy, the end of sequence ignored. `seconds` is what
the job takes from reading the table to the last row committed, per-token timings included; loading the model and
compiling kernels are reported apart, as for the peers. With `--since`, the starting process's `time.monotonic()`,
`first_step_seconds` is what passed from then to the end of the first step, when the first tokens are there.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl

from batchgen.progress import SilentProgress
from batchgen.runner import run_job
from batchgen.spec import load_spec
from batchgen.yaml_text import write_yaml
from benchmarks.workloads import MODEL


def run_table(
    table: Path, model: str, rows: int | None, overrides: list[str], since: float | None = None
) -> dict[str, Any]:
    """Run one table as a job and return its figures."""
    asked: list[float] = []

    def stop() -> bool:  # is asked before every step
        if len(asked) < 2:
            asked.append(time.monotonic())
        return False

    with tempfile.TemporaryDirectory() as folder:
        file = write_spec(Path(folder), table, model, rows)
        run_job(load_spec(file, overrides), fresh=False, progress=SilentProgress(), stop=stop)
        result = figures(Path(folder) / "out")
    return result if since is None else {**result, "first_step_seconds": asked[1] - since}


def write_spec(folder: Path, table: Path, model: str, rows: int | None = None) -> Path:
    """A job spec in `folder` that runs the table and writes to `out` there."""
    most = int(pl.read_parquet(table, columns=["max_new_tokens"], n_rows=1).item())
    spec = {
        "model": {"source": model},
        "input": {"path": str(table.absolute()), "token_ids": "prompt_token_ids", "limit": rows},
        "sampling": {"max_tokens": most, "ignore_eos": True},
        "output": {"path": f"{folder}/out"},
    }
    file = folder / "job.yaml"
    file.write_text(write_yaml(spec), encoding="utf-8")
    return file


def figures(output: Path) -> dict[str, Any]:
    job = json.loads((output / "job.json").read_text())
    totals, steps = job["totals"], pl.read_parquet(output / "steps" / "*.parquet")
    results = pl.read_parquet(output / "results" / "*.parquet")
    return {
        "system": "batchgen",
        **totals,
        "seconds": totals["plan_seconds"] + totals["generate_seconds"],
        "steps": steps.height,
        **{name: steps[f"{name}_ns"].sum() / 1e9 for name in ("schedule", "forward", "sample", "write")},
        "first_tokens": results["token_ids"].list.first().to_list(),
        **job["numerics"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of the table")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the job spec")
    parser.add_argument("--since", type=float, metavar="SECONDS", help="when the starting process began to start this")
    args = parser.parse_args()
    print(json.dumps(run_table(args.table, args.model, args.rows, args.set, args.since)))


if __name__ == "__main__":
    main()
