"""Everything of a job that is known before weights are loaded."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.calibration import Machine, this_machine
from batchgen.engine.planner import Admission, PrefixPlan, own_pages, plan_prefixes, shared_before_logits
from batchgen.engine.prompt_table import TokenStore
from batchgen.engine.run_order import RunOrder, pages_at_once, plan_order, run_order
from batchgen.head_start import head_rows
from batchgen.io.deliver import check_columns
from batchgen.io.schemas import DELIVERED
from batchgen.io.table import InputTable, open_table
from batchgen.kernels.base import Backend
from batchgen.loading import (
    ModelFile,
    Numerics,
    kv_pages,
    locate_model,
    make_backend,
    open_model,
    resolve_numerics,
    thread_count,
)
from batchgen.progress import Progress, ProgressListener
from batchgen.prompts import JobPrompts, OnRows, PromptReader
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
class Device:
    """What a job runs on: a backend without weights, and the KV pages that there is memory for."""

    backend: Backend
    most_pages: int


def open_device(opened: OpenedJob) -> Device:
    spec, model, numerics = opened.spec, opened.model, opened.numerics
    backend = make_backend(numerics, thread_count(spec.engine))
    page_bytes = backend.page_bytes(model.config.shape, spec.engine.page_size)
    return Device(backend, kv_pages(spec.engine, page_bytes, model.weight_bytes(numerics.weights)))


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
    spec, shape, engine, most_pages = opened.spec, opened.model.config.shape, opened.spec.engine, device.most_pages
    head = head_rows(engine, opened.table)
    admission = Admission(shape.context_length, shape.vocab_size, most_pages * engine.page_size)
    prompts = _reader(opened).read(opened.table, admission, store, on_rows, (0, head) if part == "head" else None)
    plan = plan_prefixes(prompts.table)
    rooms = admission.rooms(prompts.table.lengths, prompts.wishes.max_tokens)
    samples = prompts.wishes.n
    own_answers = prompts.wishes.computed(plan) if engine.prefix_sharing else samples
    # A sample starts in the middle of a page, of which all but one take a copy; its last token needs no place.
    answer_pages = np.where(rooms > 1, own_answers * (-(-(rooms - 1) // engine.page_size) + 1), 0)
    found = shared_before_logits(plan.lengths, plan.shared, prompts.wishes.num_logits[plan.order])
    own = own_pages(plan.lengths, found, answer_pages[plan.order], engine.page_size)
    longest = -(-int(plan.lengths.max(initial=0) + rooms.max(initial=0)) // engine.page_size)
    new_tokens = (own_answers * rooms)[plan.order]
    # A head is run from one end, so that the others go on from the other; scores have nothing to mix prompts with.
    if part == "head" or (spec.task.scores and engine.schedule != "fifo"):
        order = plan_order(plan)
    else:
        order = run_order(plan, new_tokens, engine.schedule, num_pages=most_pages, longest_pages=longest)
    wanted = min(pages_at_once(plan, order, own, engine.page_size, engine.max_num_seqs), int(own.sum()))
    # Memory is taken only as it is touched, so the cache is as large as the whole plan (which shares) where it may be.
    pages = max(1, min(most_pages, int(own.sum()))) if engine.prefix_sharing and not head else most_pages
    backend = device.backend
    return PreparedJob(opened, backend, prompts, plan, order, samples, own_answers, rooms, pages, wanted, head)


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
