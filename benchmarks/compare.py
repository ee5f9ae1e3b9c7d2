"""batchgen and OpenVINO GenAI side by side on the three workloads.

    python -m benchmarks.compare [--peer-python PATH] [--workloads decode ...] [--repeats 3] [--output FILE]

`--peer-python` is the Python of a virtual environment that has the peer (`pip install openvino-genai gguf polars
numpy`); without it batchgen runs alone. The systems take turns, each run in a process of its own, and the ratio is
the median of the ratios of neighbours. The peer runs as it comes and, where prompts share a prefix, once more with
one row sent ahead (`openvino-warm`). Run it on a machine that does nothing else: `others` says how many cores other
processes kept busy meanwhile, the worst run of the line.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from batchgen.kernels.cpu.features import cpu_features
from benchmarks.workloads import MODEL, WORKLOADS, Workload, model_path, table_path

WIDTH = 110
ROOT = Path(__file__).parent.parent
OURS = "batchgen"
TOLD_FEATURES = ("amx-bf16", "amx-int8", "avx512bf16", "avx512vnni", "avx512f", "avx2", "fma", "bf16", "i8mm", "neon")


@dataclass(frozen=True, slots=True)
class Run:
    """One system on one workload. `others`: cores that other processes kept busy meanwhile; `load`: before it."""

    workload: str
    system: str
    repeat: int
    seconds: float
    rows: int
    prompt_tokens: int
    generated_tokens: int
    load_seconds: float
    compile_seconds: float
    others: float
    load: float
    kernel: str
    first_tokens: tuple[int, ...]
    details: dict[str, Any]

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def generated_per_s(self) -> float:
        return self.generated_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Line:
    """A workload's medians over the repeats, ours beside one peer's; `ratio` above 1: batchgen is faster."""

    workload: str
    peer: str
    peer_rows_per_s: float
    peer_generated_per_s: float
    rows_per_s: float
    generated_per_s: float
    ratio: float
    same_first_token: float
    others: float
    load: float


def systems(workload: Workload, peer_python: str | None) -> list[str]:
    if peer_python is None:
        return [OURS]
    return [OURS, "openvino", "openvino-warm"] if workload.shared else [OURS, "openvino"]


def command(system: str, workload: str, args: argparse.Namespace, model: Path) -> list[str]:
    rows = [] if args.rows is None else ["--rows", str(args.rows)]
    table = str(table_path(workload))
    if system == OURS:
        return [sys.executable, "-m", "benchmarks.run_tokens", table, "--model", str(model), *rows, *args.ours.split()]
    warm = ["--warm"] if system == "openvino-warm" else []
    return [args.peer_python, str(Path(__file__).parent / "peer_openvino.py"), table, str(model), *rows, *warm]


def busy_seconds() -> float:
    """CPU seconds that this machine has spent on anything so far."""
    times = psutil.cpu_times()._asdict()
    return sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_process(arguments: list[str]) -> dict[str, Any]:
    """The JSON of a process's last line of output, with `others` and `load`."""
    load, busy, ours, start = os.getloadavg()[0], busy_seconds(), children_seconds(), time.perf_counter()
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"{' '.join(arguments)}\nfailed with code {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    others = (busy_seconds() - busy - children_seconds() + ours) / (time.perf_counter() - start)
    return {**result, "others": max(0.0, others), "load": load}


def measure(system: str, workload: str, repeat: int, args: argparse.Namespace, model: Path) -> Run:
    result = run_process(command(system, workload, args, model))
    known = {name: result.pop(name) for name in Run.__dataclass_fields__ if name in result}
    known["first_tokens"] = tuple(known["first_tokens"])
    return Run(workload=workload, repeat=repeat, details=result, **known)


def compare_runs(runs: list[Run]) -> list[Line]:
    """A line for every workload and peer."""
    pairs = dict.fromkeys((run.workload, run.system) for run in runs if run.system != OURS)
    return [_line(runs, workload, peer) for workload, peer in pairs]


def _line(runs: list[Run], workload: str, peer: str) -> Line:
    ours = {run.repeat: run for run in runs if (run.workload, run.system) == (workload, OURS)}
    theirs = {run.repeat: run for run in runs if (run.workload, run.system) == (workload, peer)}
    both = [(ours[repeat], run) for repeat, run in theirs.items() if repeat in ours]
    return Line(
        workload=workload,
        peer=peer,
        peer_rows_per_s=median(b.rows_per_s for _, b in both),
        peer_generated_per_s=median(b.generated_per_s for _, b in both),
        rows_per_s=median(a.rows_per_s for a, _ in both),
        generated_per_s=median(a.generated_per_s for a, _ in both),
        ratio=median(a.rows_per_s / b.rows_per_s for a, b in both),
        same_first_token=median(_agreement(a, b) for a, b in both),
        others=max(max(a.others, b.others) for a, b in both),
        load=max(max(a.load, b.load) for a, b in both),
    )


def _agreement(a: Run, b: Run) -> float:
    """The share of rows whose first token is the same: low means that the two did not do the same work."""
    return sum(x == y for x, y in zip(a.first_tokens, b.first_tokens, strict=True)) / len(a.first_tokens)


def machine() -> dict[str, Any]:
    packages = ("batchgen", "numba", "llvmlite", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "features": sorted(cpu_features()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages if installed(name)},
    }


def installed(package: str) -> bool:
    return bool(list(importlib.metadata.distributions(name=package)))


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(runs: list[Run], facts: dict[str, Any], console: Console) -> None:
    told = [name for name in TOLD_FEATURES if name in facts["features"]]
    kernels = sorted({run.kernel for run in runs if run.system == OURS})
    console.print(f"{facts['processor']}, {facts['cores']} cores: {' '.join(told)}", soft_wrap=True)
    console.print(f"batchgen's kernel: {', '.join(kernels)}", soft_wrap=True)
    lines = compare_runs(runs)
    console.print(comparison_table(lines) if lines else own_table(runs))


def comparison_table(lines: list[Line]) -> Table:
    heads = ("workload", "peer", "figure", "peer's", "batchgen's", "ratio", "same first", "others", "load")
    table = Table(*heads, box=SIMPLE_HEAD)
    for line in lines:
        ends = (f"{line.ratio:.2f}", f"{line.same_first_token:.0%}", f"{line.others:.2f}", f"{line.load:.2f}")
        rows = (f"{line.peer_rows_per_s:.2f}", f"{line.rows_per_s:.2f}")
        generated = (f"{line.peer_generated_per_s:.0f}", f"{line.generated_per_s:.0f}")
        table.add_row(line.workload, line.peer, "rows/s", *rows, *ends)
        table.add_row("", "", "generated/s", *generated, "", "", "", "")
    return table


def own_table(runs: list[Run]) -> Table:
    table = Table(
        "workload", "repeat", "seconds", "rows/s", "generated/s", "load s", "compile s", "others", box=SIMPLE_HEAD
    )
    for run in runs:
        speeds = (f"{run.seconds:.2f}", f"{run.rows_per_s:.2f}", f"{run.generated_per_s:.0f}")
        apart = (f"{run.load_seconds:.2f}", f"{run.compile_seconds:.2f}", f"{run.others:.2f}")
        table.add_row(run.workload, str(run.repeat), *speeds, *apart)
    return table


def write_json(path: Path, runs: list[Run], facts: dict[str, Any]) -> None:
    content = {
        "machine": facts,
        "lines": [asdict(line) for line in compare_runs(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the Python that has the peer; without it batchgen runs alone")
    parser.add_argument("--peers", nargs="+", default=None, choices=["openvino", "openvino-warm"], help="only these")
    parser.add_argument("--workloads", nargs="+", default=names, choices=names)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of every table")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ours", default="", help="further arguments of benchmarks.run_tokens, in one string")
    parser.add_argument("--output", type=Path, default=None, help="JSON file, written anew after every run")
    return parser.parse_args()


def planned(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Workload, system and repeat of every run, in order: the systems take turns within a workload."""
    chosen = [workload for workload in WORKLOADS if workload.name in args.workloads]
    return [
        (workload.name, system, repeat)
        for workload in chosen
        for repeat in range(args.repeats)
        for system in systems(workload, args.peer_python)
        if args.peers is None or system in (OURS, *args.peers)
    ]


def main() -> None:
    args, console = arguments(), Console(stderr=True)
    facts, model = machine(), model_path(args.model).absolute()
    runs: list[Run] = []
    for workload, system, repeat in planned(args):
        run = measure(system, workload, repeat, args, model)
        runs.append(run)
        console.print(f"{workload} {system} {repeat}: {run.seconds:.2f} s, others {run.others:.2f}", highlight=False)
        if args.output is not None:
            write_json(args.output, runs, facts)
    show(runs, facts, Console(width=max(WIDTH, console.width)))


if __name__ == "__main__":
    main()
