"""A job from its spec to its results: the loop over the one-way path, and going on after an interruption."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.calibration import learn, measured_run, read_calibration
from batchgen.engine.cache_tiers import CacheTiers
from batchgen.engine.prompt_table import MemoryStore
from batchgen.engine.types import RequestOutput
from batchgen.errors import BatchgenError, OutputError, TooManyErrors
from batchgen.feed import Feed, asked_results
from batchgen.head_start import Reading, head_rows
from batchgen.identity import cpu, job_identity, numeric_bits, versions
from batchgen.io.checkpoint import Checkpoint, flat, read_job
from batchgen.io.deliver import Expected, deliver
from batchgen.io.openai_batch import deliver_batch_output
from batchgen.io.reuse import take_over
from batchgen.io.schemas import COMMITTED
from batchgen.io.scratch import Scratch
from batchgen.io.table import InputTable
from batchgen.io.writer import JobWriter
from batchgen.loading import (
    LoadedModel,
    compile_all,
    describe_model,
    load_model,
    locate_model,
    open_device,
    open_model,
    resolve_numerics,
    thread_count,
)
from batchgen.planned import planned
from batchgen.prefix_cache import open_tiers
from batchgen.prepare import OpenedJob, PreparedJob, open_job, prepare, reading_progress
from batchgen.progress import Progress, ProgressListener
from batchgen.run_plan import make_engine, step_limits
from batchgen.score_results import result_form, verdicts
from batchgen.spec import EngineSpec, JobSpec, ModelSpec

PROGRESS_NS = 200_000_000
IDLE_SECONDS = 0.2
"""To wait at a time for rows to be read when there is nothing else to do."""
HOW = ("engine.", "output.part_", "output.max_errors")
"""Settings, by how their names begin, that say how a job is run and not what comes of it."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a run of a job ended. `totals` as in job.json.

    `ignored`: settings of a finished job that this run would have had otherwise.
    """

    rows: int
    failed_rows: int
    totals: dict[str, Any]
    output_dir: Path
    failures: dict[str, int] = field(default_factory=dict)  # failed rows by code, of this run
    interrupted: bool = False
    already_done: bool = False
    first_step: int = 0  # of this run
    ignored: tuple[str, ...] = ()


def run_job(
    spec: JobSpec,
    *,
    fresh: bool,
    progress: ProgressListener,
    stop: Callable[[], bool],
    retry_errors: bool = False,
    reuse: bool = False,
) -> JobSummary:
    """Run a job, or what is left of it. `stop` is asked after every step; what is finished by then is kept.

    `retry_errors` computes this job's failed results again. `reuse` takes over what another job left in the output
    directory and this one would compute again.
    """
    started = time.perf_counter()
    _tell(progress, started, "opening the table and the model")
    if not spec.task.generates and (retry_errors or reuse):
        raise OutputError(f"task.kind: {spec.task.kind} is computed anew: --retry-errors and --reuse are for answers")
    dates: list[datetime] = []  # known once the output is open, wanted once prompts are made
    opened = open_job(spec, progress.message, lambda: dates[0])
    for note in opened.table.notes:
        progress.message(note)
    check_places(spec, opened.table)
    identity = job_identity(opened)
    with Checkpoint.open(spec.output.path, identity, fresh, retry_errors=retry_errors, reuse=reuse) as checkpoint:
        if checkpoint.state == "finished":
            return _finished_summary(spec, checkpoint)
        if checkpoint.state == "resumed":
            progress.message(f"resuming: {checkpoint.totals.get('rows', 0):,} rows are done")
        dates.append(checkpoint.started)
        summary = _run_opened(opened, checkpoint, started, progress, stop)
    if not summary.interrupted and summary.totals["generated_tokens"]:
        _learn(opened, summary, progress)
    return summary


def _run_opened(
    opened: OpenedJob,
    checkpoint: Checkpoint,
    started: float,
    progress: ProgressListener,
    stop: Callable[[], bool],
) -> JobSummary:
    """Plan what is open, load the model, and run."""
    _tell(progress, started, "tokenizing")
    with ExitStack() as stack:
        scratch = stack.enter_context(Scratch(checkpoint.work))
        device = open_device(opened.model, opened.numerics, opened.spec.engine)
        stack.callback(device.backend.close)
        planning, reading = time.perf_counter(), None
        if head_rows(opened.spec.engine, opened.table) and checkpoint.state != "kept":
            job = prepare(opened, device, MemoryStore(), part="head")
            reading = stack.enter_context(Reading(lambda on_rows: prepare(opened, device, scratch, on_rows)))
        else:
            job = prepare(opened, device, scratch, reading_progress(progress, opened.table, started))
        if checkpoint.state == "kept":
            _take_over(job, checkpoint, progress)
        plan_seconds = time.perf_counter() - planning
        if (tiers := _open_tiers(job, progress)) is not None:
            stack.callback(tiers.stop)
        _tell(progress, started, "loading")
        embeds, limits = opened.spec.task.kind == "embed", step_limits(opened.spec.engine, job.num_pages)
        loaded = load_model(opened.model, job.backend, limits, progress.message, embeds)
        feed = Feed(job, reading, checkpoint)
        return _Run(feed, checkpoint, loaded, tiers, progress, started, plan_seconds).run(stop)


def _tell(progress: ProgressListener, started: float, phase: str) -> None:
    """That a phase begins of which there are no figures."""
    progress.update(Progress(elapsed_s=time.perf_counter() - started, phase=phase))


def _take_over(job: PreparedJob, checkpoint: Checkpoint, progress: ProgressListener) -> None:
    reused, there = take_over(checkpoint, asked_results(job, checkpoint.identity))
    progress.message(f"reused {reused:,} of {job.prompts.samples.sum():,} results ({there:,} answers were there)")


def _learn(opened: OpenedJob, summary: JobSummary, progress: ProgressListener) -> None:
    """Let the next plan know what this run, with which the job is finished, took."""
    prefix, may_end = opened.spec.output.prefix, opened.spec.sampling.ignore_eos is False
    load_seconds = summary.totals["load_seconds"]
    try:
        run = measured_run(summary.output_dir, summary.first_step, prefix, may_end, load_seconds)
        learn(opened.machine, run)
    except OSError as error:
        progress.message(f"what this run tells of the machine's speed is not kept: {error}")


def show_model(source: str) -> dict[str, Any]:
    """What is known of a model."""
    path, _ = locate_model(ModelSpec(source=source), lambda text: None)
    return describe_model(source, path, open_model(path))


def warmup(progress: ProgressListener) -> float:
    """Compile the kernels for this processor; seconds taken."""
    start = time.perf_counter()
    compile_all(resolve_numerics(ModelSpec(source="none"), EngineSpec()), progress.message)
    return time.perf_counter() - start


def check_places(spec: JobSpec, table: InputTable) -> None:
    """Refuse an output that would replace its input, or that the next run would read as input."""
    output, given = Path(spec.output.path).resolve(), Path(spec.input.path)
    inside = given.is_dir() and output.is_relative_to(given.resolve())
    if inside or any(path.resolve().is_relative_to(output) for path in table.paths):
        raise OutputError(f"output {output} and the input {given} lie within each other; choose another output folder")


def _open_tiers(job: PreparedJob, progress: ProgressListener) -> CacheTiers | None:
    opened, page_size = job.opened, job.spec.engine.page_size
    bits = {"model": opened.sha256, **numeric_bits(opened.numerics)}
    return open_tiers(job.spec.engine.cache, job.backend, bits, page_size, job.page_bytes, progress.message)


def _finished_summary(spec: JobSpec, checkpoint: Checkpoint) -> JobSummary:
    record = read_job(checkpoint.directory) or {}
    totals, there, now = record.get("totals", {}), flat(record.get("spec", {})), flat(spec.model_dump(mode="json"))
    rows, failed = totals.get("rows", 0), totals.get("failed_rows", 0)
    ignored = tuple(name for name in now if name.startswith(HOW) and name in there and there[name] != now[name])
    return JobSummary(rows, failed, totals, Path(spec.output.path), already_done=True, ignored=ignored)


def writes_timings(spec: JobSpec) -> bool:
    """A row for each generated token."""
    return spec.output.timings == "token" and spec.task.generates


def _make_writer(spec: JobSpec, checkpoint: Checkpoint, started_ns: int) -> JobWriter:
    output = spec.output
    return JobWriter(
        checkpoint,
        part_rows=output.part_rows,
        part_seconds=output.part_seconds,
        timings=writes_timings(spec),
        clock=time.monotonic_ns,
        started_ns=started_ns,
        schema=COMMITTED[spec.task.kind],
    )


class _Run:
    """The loop of one process over one job."""

    def __init__(
        self,
        feed: Feed,
        checkpoint: Checkpoint,
        loaded: LoadedModel,
        tiers: CacheTiers | None,
        progress: ProgressListener,
        started: float,
        plan_seconds: float,
    ):
        self._feed, self._checkpoint, self._loaded, self._tiers = feed, checkpoint, loaded, tiers
        self._progress, self._started, self._plan_seconds = progress, started, plan_seconds
        self._known = read_calibration(self._job.opened.machine)
        self._figures = None if feed.is_reading else planned(self._job, self._known)  # of all rows
        job, shape = self._job, self._job.model.config.shape
        spec, tokenizer = job.spec, job.model.tokenizer
        self._engine = make_engine(
            job.backend, tokenizer, shape, spec.engine, job.num_pages, tiers, embeds=spec.task.kind == "embed"
        )
        self._generating = time.monotonic_ns()
        self._writer = _make_writer(self._job.spec, checkpoint, self._generating)
        self._first_step = checkpoint.next_step
        self._before = dict(checkpoint.totals)
        self._computed = self._rows = 0
        self._failures: Counter[str] = Counter()
        self._shown = 0
        self._verdicts: dict[str, float | None] = {}

    @property
    def _job(self) -> PreparedJob:
        return self._feed.job

    @property
    def _table(self) -> InputTable:
        return self._job.opened.table

    def run(self, stop: Callable[[], bool]) -> JobSummary:
        with self._writer:
            self._begin()
            try:
                interrupted = self._generate(stop)
            except BatchgenError:
                self._writer.flush()
                raise
            self._writer.flush()
        generated = time.monotonic_ns()
        self._show(generated)
        if not interrupted:
            self._show(generated, "writing results")
        if self._tiers is not None:
            self._tiers.close()
        if not interrupted:
            self._deliver(generated)
        totals = self._totals(generated)
        rows, failed = totals["rows"], totals["failed_rows"]
        return JobSummary(
            rows,
            failed,
            totals,
            self._checkpoint.directory,
            dict(self._failures),
            interrupted,
            first_step=self._first_step,
        )

    def _generate(self, stop: Callable[[], bool]) -> bool:
        """Step until nothing is left; True when stopped before."""
        ended = self._generating
        while self._engine.has_work or self._feed.is_reading:
            if stop():
                return True
            self._go_on_with_all()
            if not self._engine.has_work:  # what is waited for rows is no step's time
                self._write([])
                ended = time.monotonic_ns()
                continue
            outputs, record = self._engine.step()
            if record is not None:
                # A step begins where the one before it ended: writing and fetching requests lie between.
                end, wrote = record.start_ns + record.duration_ns, record.start_ns - ended
                self._writer.add_step(replace(record, start_ns=ended, duration_ns=end - ended, write_ns=wrote))
                self._computed += record.num_prefill_tokens
                ended = end
            self._write(outputs)
            self._submit()
        return False

    def _begin(self) -> None:
        """With the rows of a job."""
        if shortage := self._job.prompts.kv_shortage(self._job.spec.engine.page_size, self._job.page_bytes):
            self._progress.message(shortage)
        self._show(time.monotonic_ns())
        for outputs in self._feed.failed_rows():
            self._write(outputs)
        self._submit()

    def _submit(self) -> None:
        """Keep as many requests waiting as could start in a step."""
        most = self._job.spec.engine.max_num_seqs
        for request in self._feed.take(most - self._engine.scheduler.num_waiting):
            self._engine.submit(request)

    def _go_on_with_all(self) -> None:
        """When the head's requests are all submitted and the others are known."""
        if self._feed.go_on(0 if self._engine.has_work else IDLE_SECONDS):
            self._figures = planned(self._job, self._known)
            self._begin()

    def _write(self, outputs: list[RequestOutput]) -> None:
        places = np.searchsorted(self._job.prompts.row_index, [output.row_index for output in outputs])
        for output, place in zip(outputs, places.tolist(), strict=True):
            output.truncated_tokens = int(self._job.prompts.truncated[place])
        self._writer.add(outputs)
        self._writer.maybe_flush()
        first = [output for output in outputs if output.sample_index == 0]
        self._rows += len(first)
        self._failures.update(output.error.code for output in first if output.error is not None)
        self._show()
        self._check_failures(first)

    def _check_failures(self, outputs: list[RequestOutput]) -> None:
        """Stop when too many rows have failed; what is finished is kept."""
        most = self._job.spec.output.max_errors
        failed = self._before.get("failed_rows", 0) + self._failures.total()
        if most is None or failed <= most:
            return
        self._writer.flush()
        errors = [f"; row {o.row_index}: {o.error.code}: {o.error.message}" for o in outputs if o.error is not None]
        raise TooManyErrors(
            f"{failed:,} rows have failed, more than output.max_errors allows ({most:,}){''.join(errors[-1:])}; "
            "the same command goes on with another output.max_errors"
        )

    def _show(self, now: int = 0, phase: str = "generating") -> None:
        """Tell the listener, now and then; always with a `now`."""
        if not now and (now := time.monotonic_ns()) - self._shown < PROGRESS_NS:
            return
        self._shown = now
        before, scheduler, blocks = self._before.get, self._engine.scheduler, self._engine.blocks
        restored = before("restored_prompt_tokens", 0)
        shared = max(0, before("prompt_tokens", 0) - before("computed_prompt_tokens", 0) - restored)
        self._progress.update(
            Progress(
                rows_done=before("rows", 0) + self._rows,
                rows_total=self._rows_total,
                failed_rows=before("failed_rows", 0) + self._failures.total(),
                prompt_tokens_done=before("prompt_tokens", 0) + self._computed + scheduler.cached_prompt_tokens,
                generated_tokens=before("generated_tokens", 0) + scheduler.generated_tokens,
                shared_prompt_tokens=shared + scheduler.cached_prompt_tokens - scheduler.restored_prompt_tokens,
                restored_prompt_tokens=restored + scheduler.restored_prompt_tokens,
                kv_pages_used=blocks.num_used,
                kv_pages_total=blocks.num_pages,
                elapsed_s=time.perf_counter() - self._started,
                phase=phase,
                done_share=self._done_share(),
                tokens_left=self._tokens_left(),
            )
        )

    @property
    def _rows_total(self) -> int:
        return self._table.num_rows_upper if self._figures is None else self._figures.rows

    def _tokens_left(self) -> tuple[int, int] | None:
        """Answers that are to come are taken to be no longer than those that are there, with what is under way."""
        if self._figures is None:
            return None
        generated, rows = self._engine.scheduler.generated_tokens, self._rows_total - self._before.get("rows", 0)
        most = self._figures.max_new_tokens * rows // max(self._rows_total, 1) - generated
        if self._rows:
            most = min(most, (rows - self._rows) * generated // self._rows)
        return max(0, self._figures.computed_prompt_tokens - self._computed), max(0, most)

    def _done_share(self) -> float:
        """By tokens while answers are under way, by rows when these turn out shorter than they might."""
        before = self._before.get("rows", 0) / max(self._rows_total, 1)  # rows that were under way start over
        by_rows = before + self._rows / max(self._rows_total, 1)
        if self._figures is None:
            return min(1.0, by_rows)
        tokens = self._figures.computed_prompt_tokens + self._figures.max_new_tokens
        by_tokens = before + (self._computed + self._engine.scheduler.generated_tokens) / max(tokens, 1)
        return min(1.0, max(by_rows, by_tokens))

    def _deliver(self, generated: int) -> None:
        output, prompts = self._job.spec.output, self._job.prompts
        deliver(
            self._checkpoint,
            self._table,
            expected=Expected(prompts.row_index, prompts.samples),
            columns=output.columns,
            prefix=output.prefix,
            part_rows=output.part_rows,
            timings=writes_timings(self._job.spec),
            form=result_form(self._job.spec, self._job.model.tokenizer, self._job.model.config.shape.hidden_size),
        )
        self._verdicts = verdicts(self._job.spec, self._checkpoint.directory)
        if self._job.spec.input.is_batch:
            model = self._job.model.config.name
            deliver_batch_output(self._checkpoint, self._table, prefix=output.prefix, model=model)
        self._checkpoint.finish(self._job_record(generated))

    def _totals(self, generated: int) -> dict[str, Any]:
        """Counts over all runs of the job; seconds of this one."""
        counts = self._checkpoint.totals
        return (
            {name: counts.get(name, 0) for name in TOTAL_COUNTS}
            | self._verdicts
            | {
                "plan_seconds": round(self._plan_seconds, 3),
                "tokenize_seconds": round(self._job.prompts.tokenize_seconds, 3),
                "tokenize_tokens_per_second": round(self._job.prompts.tokens_per_second),
                "load_seconds": round(self._loaded.load_seconds, 3),
                "compile_seconds": round(self._loaded.compile_seconds, 3),
                "generate_seconds": round((generated - self._generating) / 1e9, 3),
                "wall_seconds": round(time.perf_counter() - self._started, 3),
            }
        )

    def _job_record(self, generated: int) -> dict[str, Any]:
        job, figures = self._job, self._figures
        assert figures is not None, "a job is finished when all rows are read"
        return {
            "spec": job.spec.model_dump(mode="json"),
            "spec_hash": job.spec.result_hash(),
            "threads": thread_count(job.spec.engine),
            "model": {"name": job.model.config.name, "tokenizer": job.model.tokenizer.fingerprint},
            "numerics": asdict(job.opened.numerics),
            "versions": versions(),
            "cpu": cpu(),
            "plan": asdict(figures),
            "preemptions": self._engine.scheduler.preemptions,
            "cache": self._tiers.counts if self._tiers is not None else None,
            "totals": self._totals(generated),
        }


TOTAL_COUNTS = (
    "rows",
    "failed_rows",
    "prompt_tokens",
    "computed_prompt_tokens",
    "restored_prompt_tokens",
    "generated_tokens",
    "reused_results",
    "scored_tokens",
)
