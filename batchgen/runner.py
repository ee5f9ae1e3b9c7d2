"""A job from its spec to its results: the loop over the one-way path, and going on after an interruption."""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from batchgen import __version__
from batchgen.calibration import Calibration, Machine, learn, measured_run, read_calibration, this_machine
from batchgen.engine.cache_tiers import CacheTiers
from batchgen.engine.engine import Engine, EngineLimits
from batchgen.engine.prompt_table import MemoryStore
from batchgen.engine.requests import make_requests
from batchgen.engine.types import Request, RequestOutput
from batchgen.errors import BatchgenError, OutputError, TooManyErrors
from batchgen.head_start import Reading, head_rows
from batchgen.io.checkpoint import Checkpoint, read_job
from batchgen.io.deliver import Expected, check_columns, deliver
from batchgen.io.openai_batch import deliver_batch_output
from batchgen.io.reuse import ASKED, take_over
from batchgen.io.schemas import DELIVERED
from batchgen.io.scratch import Scratch
from batchgen.io.table import InputTable
from batchgen.io.writer import JobWriter
from batchgen.kernels.base import StepLimits
from batchgen.loading import (
    LoadedModel,
    Numerics,
    compile_all,
    describe_model,
    load_model,
    locate_model,
    open_model,
    resolve_numerics,
    thread_count,
)
from batchgen.planned import planned
from batchgen.prefix_cache import open_tiers
from batchgen.prepare import PreparedJob, open_device, open_input, prepare, reading_progress
from batchgen.progress import Progress, ProgressListener
from batchgen.prompts import PromptReader
from batchgen.score_results import result_form, verdicts
from batchgen.spec import EngineSpec, JobSpec, ModelSpec

PROGRESS_NS = 200_000_000
IDLE_SECONDS = 0.2
"""To wait at a time for rows to be read when there is nothing else to do."""
DONE_CHUNK = 1024
"""Results looked up in the checkpoint at a time."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How a run of a job ended. `totals` as in job.json."""

    rows: int
    failed_rows: int
    totals: dict[str, Any]
    output_dir: Path
    failures: dict[str, int] = field(default_factory=dict)  # failed rows by code, of this run
    interrupted: bool = False
    already_done: bool = False


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
    if spec.task.scores and (retry_errors or reuse):
        raise OutputError(f"task.kind: {spec.task.kind} is computed anew: --retry-errors and --reuse are for answers")
    table = open_input(spec.input)
    for note in table.notes:
        progress.message(note)
    check_columns(table.schema, spec.output.columns, spec.output.prefix, DELIVERED[spec.task.kind])
    numerics = resolve_numerics(spec.model, spec.engine)
    path, sha256 = locate_model(spec.model, progress.message)
    dates: list[datetime] = []  # known once the output is open, wanted once prompts are made
    model = open_model(path, spec.model.pre_tokenizer, lambda: dates[0])
    PromptReader(spec, model.tokenizer, model.chat, model.config.shape.context_length).check(table)
    check_places(spec, table)
    identity = _identity(spec, table, sha256, numerics)
    with Checkpoint.open(spec.output.path, identity, fresh, retry_errors=retry_errors, reuse=reuse) as checkpoint:
        if checkpoint.state == "finished":
            return _finished_summary(spec, checkpoint)
        if checkpoint.state == "resumed":
            progress.message(f"resuming: {checkpoint.totals.get('rows', 0):,} rows are done")
        dates.append(checkpoint.started)
        with Scratch(checkpoint.work) as scratch:
            device = open_device(spec, model, numerics)
            machine = this_machine(sha256, numerics, thread_count(spec.engine))
            read = partial(prepare, spec, table, model, numerics, device)
            planning = time.perf_counter()
            with ExitStack() as stack:
                stack.callback(device.backend.close)
                reading = None
                if head_rows(spec.engine, table) and checkpoint.state != "kept":
                    job = read(MemoryStore(), part="head")
                    reading = stack.enter_context(Reading(lambda on_rows: read(scratch, on_rows)))
                else:
                    job = read(scratch, reading_progress(progress, table, started))
                if checkpoint.state == "kept":
                    _take_over(job, checkpoint, progress)
                plan_seconds = time.perf_counter() - planning
                if (tiers := _open_tiers(job, sha256, progress)) is not None:
                    stack.callback(tiers.close)
                loaded = load_model(model, job.backend, _step_limits(job), progress.message)
                known = read_calibration(machine)
                run = _Run(job, reading, known, loaded, tiers, table, checkpoint, progress, started, plan_seconds)
                summary = run.run(stop)
    if not summary.interrupted and summary.totals["generated_tokens"]:
        _learn(machine, spec, summary, progress)
    return summary


def _take_over(job: PreparedJob, checkpoint: Checkpoint, progress: ProgressListener) -> None:
    reused, there = take_over(checkpoint, _asked(job, checkpoint.identity))
    progress.message(f"reused {reused:,} of {job.prompts.samples.sum():,} results ({there:,} answers were there)")


def _learn(machine: Machine, spec: JobSpec, summary: JobSummary, progress: ProgressListener) -> None:
    """Let the next plan know what this finished run took."""
    output, may_end = spec.output, spec.sampling.ignore_eos is False
    try:
        learn(machine, measured_run(summary.output_dir, output.prefix, may_end, summary.totals["load_seconds"]))
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


def _identity(spec: JobSpec, table: InputTable, sha256: str, numerics: Numerics) -> dict[str, Any]:
    """What must be equal for two runs to be the same job."""
    return {
        "spec": spec.result_values(),
        "input": table.fingerprint(),
        "model": sha256,
        "batchgen": __version__,
        **_bits(numerics),
    }


def _bits(numerics: Numerics) -> dict[str, str | bool]:
    """What of the numerics decides the bits of a result."""
    return {
        "kernel": numerics.kernel,
        "fused_multiply_add": has_fma(),
        "weights": "bf16 or native" if numerics.weights in ("bf16", "native") else numerics.weights,  # the same bits
        "kv_dtype": numerics.kv_dtype,
    }


def _requests(job: PreparedJob, identity: dict[str, Any]) -> Iterator[Request]:
    """All requests of the plan. Their hashes tell models and arithmetic apart, not what a spec says or where it is."""
    prompts, sharing = job.prompts, job.spec.engine.prefix_sharing
    root = json.dumps({name: value for name, value in sorted(identity.items()) if name not in ("spec", "input")})
    wish = prompts.wishes.__getitem__
    return make_requests(prompts.table, job.plan, job.order, wish, sharing=sharing, root=root.encode())


def _asked(job: PreparedJob, identity: dict[str, Any]) -> pl.DataFrame:
    """The results that the requests want, for `take_over`."""
    requests, frames = _requests(job, identity), [pl.DataFrame(schema=ASKED)]
    while chunk := list(islice(requests, DONE_CHUNK)):
        samples = [sample for request in chunk for sample in request.samples]
        wanted = [(*target, sample.request_hash, 0) for sample in samples for target in sample.targets]
        frames.append(pl.DataFrame(wanted, ASKED, orient="row"))
    asked = pl.concat(frames)
    places = np.searchsorted(job.prompts.row_index, asked["row_index"].to_numpy())
    return asked.with_columns(truncated_tokens=pl.Series(job.prompts.truncated[places], dtype=pl.Int32))


def _open_tiers(job: PreparedJob, sha256: str, progress: ProgressListener) -> CacheTiers | None:
    bits, page_size = {"model": sha256, **_bits(job.numerics)}, job.spec.engine.page_size
    return open_tiers(job.spec.engine.cache, job.backend, bits, page_size, job.page_bytes, progress.message)


def _step_limits(job: PreparedJob) -> StepLimits:
    engine = job.spec.engine
    return StepLimits(engine.max_batch_tokens, engine.max_num_seqs, job.num_pages, engine.page_size)


def _finished_summary(spec: JobSpec, checkpoint: Checkpoint) -> JobSummary:
    totals = (read_job(checkpoint.directory) or {}).get("totals", {})
    rows, failed = totals.get("rows", 0), totals.get("failed_rows", 0)
    return JobSummary(rows, failed, totals, Path(spec.output.path), already_done=True)


def _make_engine(job: PreparedJob, tiers: CacheTiers | None) -> Engine:
    engine, shape = job.spec.engine, job.model.config.shape
    limits = EngineLimits(
        max_batch_tokens=engine.max_batch_tokens,
        max_num_seqs=engine.max_num_seqs,
        num_pages=job.num_pages,
        page_size=engine.page_size,
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        prefix_sharing=engine.prefix_sharing,
        prefill_first=engine.schedule == "prefill_first",
    )
    return Engine(job.backend, job.model.tokenizer, limits, tiers=tiers)


def writes_timings(spec: JobSpec) -> bool:
    """A row for each generated token."""
    return spec.output.timings == "token" and not spec.task.scores


def _make_writer(spec: JobSpec, checkpoint: Checkpoint, started_ns: int) -> JobWriter:
    output = spec.output
    return JobWriter(
        checkpoint,
        part_rows=output.part_rows,
        part_seconds=output.part_seconds,
        timings=writes_timings(spec),
        clock=time.monotonic_ns,
        started_ns=started_ns,
        scores=spec.task.scores,
    )


class _Run:
    """The loop of one process over one job."""

    def __init__(
        self,
        job: PreparedJob,
        reading: Reading[PreparedJob] | None,
        known: Calibration | None,
        loaded: LoadedModel,
        tiers: CacheTiers | None,
        table: InputTable,
        checkpoint: Checkpoint,
        progress: ProgressListener,
        started: float,
        plan_seconds: float,
    ):
        self._reading, self._known, self._plan_seconds = reading, known, plan_seconds
        self._figures = planned(job, known) if reading is None else None  # of all rows
        self._job, self._loaded, self._table, self._checkpoint = job, loaded, table, checkpoint
        self._progress, self._started, self._tiers = progress, started, tiers
        self._engine = _make_engine(job, tiers)
        self._generating = time.monotonic_ns()
        self._writer = _make_writer(job.spec, checkpoint, self._generating)
        self._pending: Iterator[Request] = iter(())
        self._all_submitted = False
        self._first_row = 0  # those before are taken care of
        self._before = dict(checkpoint.totals)
        self._computed = self._rows = 0
        self._failures: Counter[str] = Counter()
        self._shown = 0
        self._verdicts: dict[str, float | None] = {}

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
        if self._tiers is not None:
            self._tiers.close()
        if not interrupted:
            self._deliver(generated)
        totals = self._totals(generated)
        rows, failed = totals["rows"], totals["failed_rows"]
        return JobSummary(rows, failed, totals, self._checkpoint.directory, dict(self._failures), interrupted)

    def _generate(self, stop: Callable[[], bool]) -> bool:
        """Step until nothing is left; True when stopped before."""
        ended = self._generating
        while self._engine.has_work or self._reading is not None:
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
            self._feed()
        return False

    def _begin(self) -> None:
        """With the rows of `_job`."""
        for outputs in self._failed_rows():
            self._write(outputs)
        self._pending, self._all_submitted = self._requests(), False
        self._feed()

    def _go_on_with_all(self) -> None:
        """When the head's requests are all submitted and the others are known, go on with these."""
        if self._reading is None or not self._all_submitted:
            return
        if self._reading.is_ready(0 if self._engine.has_work else IDLE_SECONDS):
            self._job, self._reading, self._first_row = self._reading.result(), None, self._job.head_rows
            self._figures = planned(self._job, self._known)
            self._begin()

    def _feed(self) -> None:
        """Keep as many requests waiting as could start in a step."""
        most = self._job.spec.engine.max_num_seqs
        for _ in range(most - self._engine.scheduler.num_waiting):
            request = next(self._pending, None)
            if request is None:
                self._all_submitted = True
                return
            self._engine.submit(request)

    def _requests(self) -> Iterator[Request]:
        """The plan's requests without the answers that are there already."""
        requests = _requests(self._job, self._checkpoint.identity)
        return self._left_of(requests) if len(self._checkpoint.done) or self._first_row else requests

    def _left_of(self, requests: Iterator[Request]) -> Iterator[Request]:
        while chunk := list(islice(requests, DONE_CHUNK)):
            targets = [target for request in chunk for sample in request.samples for target in sample.targets]
            done = iter(self._are_done(targets))
            for request in chunk:
                samples = [(s, tuple(target for target in s.targets if not next(done))) for s in request.samples]
                left = tuple(replace(sample, targets=targets) for sample, targets in samples if targets)
                if left:
                    yield replace(request, samples=left)

    def _are_done(self, targets: list[tuple[int, int]]) -> list[bool]:
        rows, samples = np.array(targets, np.int64).reshape(-1, 2).T
        return ((rows < self._first_row) | self._checkpoint.is_done(rows, samples)).tolist()

    def _failed_rows(self) -> Iterator[list[RequestOutput]]:
        """The results of rows that cannot be answered, some at a time."""
        rows = ((row, sample) for row in self._job.prompts.failures for sample in range(row.samples))
        while chunk := list(islice(rows, DONE_CHUNK)):
            done = self._are_done([(row.row_index, sample) for row, sample in chunk])
            left = [place for place, known in zip(chunk, done, strict=True) if not known]
            yield [RequestOutput(row.row_index, sample, "error", error=row.failure) for row, sample in left]

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

    def _show(self, now: int = 0) -> None:
        """Tell the listener, now and then; always with a `now`."""
        if not now and (now := time.monotonic_ns()) - self._shown < PROGRESS_NS:
            return
        self._shown = now
        before, scheduler, blocks = self._before.get, self._engine.scheduler, self._engine.blocks
        shared_before = before("prompt_tokens", 0) - before("computed_prompt_tokens", 0)
        self._progress.update(
            Progress(
                rows_done=before("rows", 0) + self._rows,
                rows_total=self._rows_total,
                failed_rows=before("failed_rows", 0) + self._failures.total(),
                prompt_tokens_done=before("prompt_tokens", 0) + self._computed + scheduler.cached_prompt_tokens,
                generated_tokens=before("generated_tokens", 0) + scheduler.generated_tokens,
                saved_prompt_tokens=max(0, shared_before) + scheduler.cached_prompt_tokens,
                kv_pages_used=blocks.num_used,
                kv_pages_total=blocks.num_pages,
                elapsed_s=time.perf_counter() - self._started,
                phase="generating",
                done_share=self._done_share(),
            )
        )

    @property
    def _rows_total(self) -> int:
        return self._table.num_rows_upper if self._figures is None else self._figures.rows

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
            form=result_form(self._job.spec, self._job.model.tokenizer),
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
            "numerics": asdict(job.numerics),
            "versions": _versions(),
            "cpu": _cpu(),
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


def has_fma() -> bool:
    """Whether the portable kernel fuses multiplications and additions here, which shows in the last bit."""
    from batchgen.kernels.cpu.features import HAS_FMA

    return HAS_FMA


def _versions() -> dict[str, str]:
    import numba
    import pyarrow

    return {
        "batchgen": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "pyarrow": pyarrow.__version__,
    }


def _cpu() -> dict[str, Any]:
    from batchgen.kernels.cpu.features import cpu_features

    return {"machine": platform.machine(), "count": os.cpu_count(), "features": sorted(cpu_features())}
