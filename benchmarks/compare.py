"""batchgen and OpenVINO GenAI side by side, then every target beside today's figure, then each kernel's roofline.

    python -m benchmarks.compare [--peer-python PATH] [--workloads decode ...] [--settings default int8 ...]
                                 [--targets gemm ...] [--repeats 3] [--output FILE]

`--peer-python` is the Python of a virtual environment that has the peer (`pip install openvino-genai gguf polars
numpy`); without it batchgen runs alone. The systems take turns, each run in a process of its own, and the ratio is
the median of the ratios of neighbours. batchgen runs once with each of its settings (`batchgen-int8`); the peer as it
comes and, where prompts share a prefix, once more with one row sent ahead (`openvino-warm`). Run it on a machine that
does nothing else: `others` says how many cores other processes kept busy meanwhile, the worst run of the line.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
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
from benchmarks.targets import OUTSIDE, OWN_TARGETS, PEER_TARGETS, Outcome, OwnTarget, PeerTarget, outcome
from benchmarks.workloads import MODEL, WORKLOADS, Figure, Workload, load, model_path

WIDTH = 130
ROOT = Path(__file__).parent.parent
OURS = "batchgen"
SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "int8": ("model.weights=int8",),
    "bf16": ("model.weights=bf16",),
    "int8-kv": ("model.weights=int8", "engine.kv_dtype=int8"),
}
"""Overrides of a job's spec; the system of a setting other than the default is called `batchgen-SETTING`."""
UNITS: dict[Figure, str] = {"rows": "rows/s", "generated": "generated tokens/s", "prompt": "prompt tokens/s"}
FIGURES = {workload.name: workload.figure for workload in WORKLOADS}
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

    def per_second(self, figure: Figure) -> float:
        count = {"rows": self.rows, "generated": self.generated_tokens, "prompt": self.prompt_tokens}[figure]
        return count / self.seconds

    @property
    def is_ours(self) -> bool:
        return is_ours(self.system)


@dataclass(frozen=True, slots=True)
class Line:
    """A workload's medians over the repeats, ours beside one peer's; `ratio` above 1: batchgen is faster.

    `per_s` and `peer_per_s` count what the workload's `figure` says.
    """

    workload: str
    system: str
    peer: str
    figure: Figure
    per_s: float
    peer_per_s: float
    ratio: float
    same_first_token: float
    others: float
    load: float


def is_ours(system: str) -> bool:
    return system.startswith(OURS)


def systems(workload: Workload, args: argparse.Namespace) -> list[str]:
    """In the order in which they take turns."""
    ours = [OURS if setting == "default" else f"{OURS}-{setting}" for setting in args.settings]
    if args.peer_python is None:
        return ours
    peers = ["openvino", "openvino-warm"] if workload.shared else ["openvino"]
    return ours + [peer for peer in peers if args.peers is None or peer in args.peers]


def command(system: str, workload: Workload, table: Path, args: argparse.Namespace, model: Path) -> list[str]:
    rows = [] if args.rows is None else ["--rows", str(args.rows)]
    if is_ours(system):
        overrides = list(SETTINGS[system.removeprefix(OURS).removeprefix("-") or "default"])
        overrides += [] if workload.sharing else ["engine.prefix_sharing=false"]
        sets = [word for override in overrides for word in ("--set", override)]
        ours = [sys.executable, "-m", "benchmarks.run_tokens", str(table), "--model", str(model)]
        return [*ours, *rows, *sets, *args.ours.split()]
    options = [] if workload.sharing else ["--no-sharing"]
    options += ["--warm"] if system == "openvino-warm" else []
    return [args.peer_python, str(Path(__file__).parent / "peer_openvino.py"), str(table), str(model), *rows, *options]


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


def measure(system: str, workload: Workload, repeat: int, table: Path, args: argparse.Namespace, model: Path) -> Run:
    result = run_process(command(system, workload, table, args, model))
    known = {name: result.pop(name) for name in Run.__dataclass_fields__ if name in result}
    known |= {"first_tokens": tuple(known["first_tokens"]), "system": system}
    return Run(workload=workload.name, repeat=repeat, details=result, **known)


def measure_target(target: OwnTarget, repeats: int, model: Path) -> Outcome:
    """The median of the repeats."""
    command = [sys.executable, "-m", "benchmarks.targets", target.name, "--model", str(model)]
    results = [run_process(command) for _ in range(min(repeats, target.repeats))]
    others, load = (max(result[name] for result in results) for name in ("others", "load"))
    return outcome(target, median(result["value"] for result in results), others, load)


def compare_runs(runs: list[Run]) -> list[Line]:
    """A line for every workload, peer and setting of ours."""
    pairs = dict.fromkeys((run.workload, run.system) for run in runs)
    return [
        _line(runs, workload, system, peer)
        for workload, peer in pairs
        if not is_ours(peer)
        for other, system in pairs
        if other == workload and is_ours(system)
    ]


def _line(runs: list[Run], workload: str, system: str, peer: str) -> Line:
    ours = {run.repeat: run for run in runs if (run.workload, run.system) == (workload, system)}
    theirs = {run.repeat: run for run in runs if (run.workload, run.system) == (workload, peer)}
    both = [(ours[repeat], run) for repeat, run in theirs.items() if repeat in ours]
    figure = FIGURES[workload]
    return Line(
        workload=workload,
        system=system,
        peer=peer,
        figure=figure,
        per_s=median(a.per_second(figure) for a, _ in both),
        peer_per_s=median(b.per_second(figure) for _, b in both),
        ratio=median(b.seconds / a.seconds for a, b in both),
        same_first_token=median(_agreement(a, b) for a, b in both),
        others=max(max(a.others, b.others) for a, b in both),
        load=max(max(a.load, b.load) for a, b in both),
    )


def peer_outcomes(lines: list[Line]) -> list[Outcome]:
    """The targets whose workloads were run beside a peer: our best permitted setting beside its best peer."""
    found = ((target, _best_line(target, lines)) for target in PEER_TARGETS)
    return [_peer_outcome(target, line) for target, line in found if line is not None]


def _best_line(target: PeerTarget, lines: list[Line]) -> Line | None:
    mine = [x for x in lines if x.workload == target.workload and (target.any_setting or x.system == OURS)]
    hardest = [min((x for x in mine if x.system == system), key=ratio_of) for system in {x.system for x in mine}]
    return max(hardest, key=ratio_of, default=None)


def ratio_of(line: Line) -> float:
    return line.ratio


def _peer_outcome(target: PeerTarget, line: Line) -> Outcome:
    figure = f"{line.ratio:.2f}x ({line.per_s:,.1f} : {line.peer_per_s:,.1f})"
    what = f"{line.workload}: {UNITS[line.figure]}, {line.system} : {line.peer}"
    return Outcome(what, f">= {target.factor:g}x", figure, line.ratio / target.factor, line.others, line.load)


def outside_outcome(runs: list[Run]) -> list[Outcome]:
    """The share of the steps' time that is not the model's, over the runs of decode."""
    chosen = [run for run in runs if run.workload == "decode" and run.system == OURS]
    if not chosen:
        return []
    parts = ("schedule", "forward", "sample", "write")
    shares = [1 - run.details["forward"] / sum(run.details[name] for name in parts) for run in chosen]
    others, load = max(run.others for run in chosen), max(run.load for run in chosen)
    return [outcome(OUTSIDE, median(shares), others, load)]


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


def show(runs: list[Run], outcomes: list[Outcome], facts: dict[str, Any], console: Console) -> None:
    told = [name for name in TOLD_FEATURES if name in facts["features"]]
    kernels = sorted({run.kernel for run in runs if run.is_ours})
    console.print(f"{facts['processor']}, {facts['cores']} cores: {' '.join(told)}", soft_wrap=True)
    console.print(f"batchgen's kernel: {', '.join(kernels) or 'not run'}", soft_wrap=True)
    lines = compare_runs(runs)
    if runs:
        console.print(comparison_table(lines) if lines else own_table(runs))
    if outcomes:
        console.print(target_table(outcomes))


def comparison_table(lines: list[Line]) -> Table:
    heads = ("workload", "batchgen", "peer", "figure", "peer's", "ours", "ratio", "same first", "others", "load")
    table = Table(*heads, box=SIMPLE_HEAD)
    for line in lines:
        names = (line.workload, line.system, line.peer, UNITS[line.figure])
        speeds = (f"{line.peer_per_s:,.1f}", f"{line.per_s:,.1f}", f"{line.ratio:.2f}")
        table.add_row(*names, *speeds, f"{line.same_first_token:.0%}", f"{line.others:.2f}", f"{line.load:.2f}")
    return table


def own_table(runs: list[Run]) -> Table:
    heads = ("workload", "system", "repeat", "seconds", "figure", "ours", "load s", "compile s", "others")
    table = Table(*heads, box=SIMPLE_HEAD)
    for run in runs:
        figure = FIGURES[run.workload]
        speeds = (f"{run.seconds:.2f}", UNITS[figure], f"{run.per_second(figure):,.1f}")
        apart = (f"{run.load_seconds:.2f}", f"{run.compile_seconds:.2f}", f"{run.others:.2f}")
        table.add_row(run.workload, run.system, str(run.repeat), *speeds, *apart)
    return table


def target_table(outcomes: list[Outcome]) -> Table:
    table = Table("target", "wanted", "today", "of target", "met", "others", "load", box=SIMPLE_HEAD)
    for row in outcomes:
        met = "yes" if row.met else "no"
        apart = (f"{row.others:.2f}", f"{row.load:.2f}")
        table.add_row(row.what, row.wanted, row.figure, f"{row.ratio:.2f}", met, *apart)
    return table


def write_json(path: Path, runs: list[Run], outcomes: list[Outcome], facts: dict[str, Any]) -> None:
    content = {
        "machine": facts,
        "targets": [{**asdict(row), "met": row.met} for row in outcomes],
        "lines": [asdict(line) for line in compare_runs(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the Python that has the peer; without it batchgen runs alone")
    parser.add_argument("--peers", nargs="+", default=None, choices=["openvino", "openvino-warm"], help="only these")
    parser.add_argument("--settings", nargs="+", default=["default"], choices=list(SETTINGS), help="of batchgen")
    parser.add_argument("--workloads", nargs="*", default=names, choices=names)
    own = [target.name for target in OWN_TARGETS]
    parser.add_argument("--targets", nargs="*", default=own, choices=own, help="only these of the ones without a peer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of every table")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ours", default="", help="further arguments of benchmarks.run_tokens, in one string")
    parser.add_argument("--output", type=Path, default=None, help="JSON file, written anew after every run")
    return parser.parse_args()


def planned(args: argparse.Namespace) -> list[tuple[Workload, str, int]]:
    """Workload, system and repeat of every run, in order: the systems take turns within a workload."""
    return [
        (workload, system, repeat)
        for workload in WORKLOADS
        if workload.name in args.workloads
        for repeat in range(args.repeats)
        for system in systems(workload, args)
    ]


def main() -> None:
    args, console = arguments(), Console(stderr=True)
    facts, model = machine(), model_path(args.model).absolute()
    runs: list[Run] = []
    outcomes: list[Outcome] = []

    def keep(text: str) -> None:
        console.print(text, highlight=False)
        if args.output is not None:
            write_json(args.output, runs, outcomes, facts)

    with tempfile.TemporaryDirectory() as folder:
        for workload, system, repeat in planned(args):
            table = Path(folder) / f"{workload.name}.parquet"
            load(workload.name).write_parquet(table)
            runs.append(run := measure(system, workload, repeat, table, args, model))
            keep(f"{workload.name} {system} {repeat}: {run.seconds:.2f} s, others {run.others:.2f}")
    outcomes += peer_outcomes(compare_runs(runs)) + outside_outcome(runs)
    for target in OWN_TARGETS:
        if target.name in args.targets:
            outcomes.append(row := measure_target(target, args.repeats, model))
            keep(f"{target.name}: {row.figure}, others {row.others:.2f}")
    keep("" if args.rows is None else f"only {args.rows} rows of every table: not the workloads that the targets mean")
    show(runs, outcomes, facts, Console(width=max(WIDTH, console.width)))
    if args.targets:
        roofline(model)


def roofline(model: Path) -> None:
    """Print each kernel's time, bytes and operations beside the machine's limits."""
    subprocess.run([sys.executable, "-m", "batchgen", "bench", str(model)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
