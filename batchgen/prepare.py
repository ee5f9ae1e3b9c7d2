"""Everything of a job that is known before weights are loaded."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.calibration import Machine, this_machine
from batchgen.engine.planner import Admission, PrefixPlan
from batchgen.engine.prompt_table import TokenStore
from batchgen.engine.run_order import RunOrder
from batchgen.head_start import head_rows
from batchgen.io.deliver import check_columns
from batchgen.io.schemas import DELIVERED
from batchgen.io.table import InputTable, open_table
from batchgen.kernels.base import Backend
from batchgen.loading import Device, ModelFile, Numerics, locate_model, open_model, resolve_numerics, thread_count
from batchgen.progress import Progress, ProgressListener
from batchgen.prompts import JobPrompts, OnRows, PromptReader
from batchgen.run_plan import plan_run
from batchgen.spec import JobSpec


@dataclass(frozen=True, slots=True, eq=False)
class OpenedJob:
    """What a spec names: the table, the model's header and the arithmetic; `sha256` (hex) is the model file's."""

    spec: JobSpec
    table: InputTable
    model: ModelFile
    sha256: str
    numerics: Numerics

    @property
    def machine(self) -> Machine:
        return this_machine(self.sha256, self.numerics, thread_count(self.spec.engine))


def open_job(spec: JobSpec, on_message: Callable[[str], None], now: Callable[[], datetime] = datetime.now) -> OpenedJob:
    """Open all that the spec names and check that it fits together. `now` is the date that a chat template prints."""
    given = spec.input
    table = open_table(
        given.path, where=given.where, limit=given.limit, format=given.format, column_types=given.column_types
    )
    check_columns(table.schema, spec.output.columns, spec.output.prefix, DELIVERED[spec.task.kind])
    numerics = resolve_numerics(spec.model, spec.engine)
    path, sha256 = locate_model(spec.model, on_message)
    model = open_model(path, spec.model.pre_tokenizer, now)
    opened = OpenedJob(spec, table, model, sha256, numerics)
    _reader(opened).check(table)
    return opened


def _reader(opened: OpenedJob) -> PromptReader:
    model = opened.model
    return PromptReader(opened.spec, model.tokenizer, model.chat, model.config.shape.context_length)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedJob:
    """Everything that is known before weights are loaded."""

    opened: OpenedJob
    backend: Backend
    prompts: JobPrompts
    plan: PrefixPlan
    order: RunOrder
    # Of each prompt of the table: its answers, those that are computed for it, and the most tokens of each of them.
    samples: NDArray[np.int64]
    own_answers: NDArray[np.int64]
    rooms: NDArray[np.int64]
    num_pages: int
    pages_wanted: int
    head_rows: int = 0  # rows, by index, that are planned apart, see `head_start`

    @property
    def spec(self) -> JobSpec:
        return self.opened.spec

    @property
    def model(self) -> ModelFile:
        return self.opened.model

    @property
    def page_bytes(self) -> int:
        return self.backend.page_bytes(self.model.config.shape, self.spec.engine.page_size)


def prepare(
    opened: OpenedJob,
    device: Device,
    store: TokenStore,
    on_rows: OnRows = lambda rows, tokens: None,
    part: Literal["all", "head"] = "all",
) -> PreparedJob:
    """Read, render and encode all rows (their tokens go to `store`), or the head of a large table, and plan them."""
    shape, engine, most_pages = opened.model.config.shape, opened.spec.engine, device.most_pages
    head = head_rows(engine, opened.table)
    admission = Admission(shape.context_length, shape.vocab_size, most_pages * engine.page_size)
    prompts = _reader(opened).read(opened.table, admission, store, on_rows, (0, head) if part == "head" else None)
    # A head is run from one end, so that the others go on from the other.
    plan = plan_run(prompts.table, prompts.wishes, admission, engine, one_end=part == "head")
    # Memory is taken only as it is touched, so the cache is as large as the whole plan (which shares) where it may be.
    pages = max(1, min(most_pages, plan.pages)) if engine.prefix_sharing and not head else most_pages
    return PreparedJob(
        opened,
        device.backend,
        prompts,
        plan.prefixes,
        plan.order,
        prompts.wishes.n,
        plan.own_answers,
        plan.rooms,
        pages,
        plan.pages_wanted,
        head,
    )


def reading_progress(progress: ProgressListener, table: InputTable, started: float) -> OnRows:
    """Show how far reading and encoding has come, while there is more to come."""
    total = table.num_rows_upper

    def on_rows(rows: int, tokens: int) -> None:
        if rows == total:
            return
        progress.update(
            Progress(
                rows_done=rows,
                rows_total=total,
                prompt_tokens_done=tokens,
                elapsed_s=time.perf_counter() - started,
                phase="tokenizing",
                done_share=rows / max(total, 1),
            )
        )

    return on_rows
