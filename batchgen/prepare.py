"""Everything of a job that is known before weights are loaded."""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import Admission, PrefixPlan, own_pages, plan_prefixes, shared_before_logits
from batchgen.engine.prompt_table import Store
from batchgen.engine.run_order import RunOrder, pages_at_once, plan_order, run_order
from batchgen.head_start import head_rows
from batchgen.io.table import InputTable, open_table
from batchgen.kernels.base import Backend
from batchgen.loading import ModelFile, Numerics, kv_pages, make_backend, thread_count
from batchgen.progress import Progress, ProgressListener
from batchgen.prompts import JobPrompts, OnRows, PromptReader
from batchgen.spec import InputSpec, JobSpec


def open_input(given: InputSpec) -> InputTable:
    """The table that the spec names."""
    return open_table(
        given.path, where=given.where, limit=given.limit, format=given.format, column_types=given.column_types
    )


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """What a job runs on: a backend without weights, and the KV pages that there is memory for."""

    backend: Backend
    most_pages: int


def open_device(spec: JobSpec, model: ModelFile, numerics: Numerics) -> Device:
    backend = make_backend(numerics, thread_count(spec.engine))
    page_bytes = backend.page_bytes(model.config.shape, spec.engine.page_size)
    return Device(backend, kv_pages(spec.engine, page_bytes, model.weight_bytes(numerics.weights)))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedJob:
    """Everything that is known before weights are loaded."""

    spec: JobSpec
    model: ModelFile
    numerics: Numerics
    backend: Backend
    prompts: JobPrompts
    plan: PrefixPlan
    order: RunOrder
    samples: NDArray[np.int64]  # answers of each prompt of the table, and the most tokens of each of them
    rooms: NDArray[np.int64]
    num_pages: int
    pages_wanted: int
    head_rows: int = 0  # rows, by index, that are planned apart, see `head_start`

    @property
    def page_bytes(self) -> int:
        return self.backend.page_bytes(self.model.config.shape, self.spec.engine.page_size)


def prepare(
    spec: JobSpec,
    table: InputTable,
    model: ModelFile,
    numerics: Numerics,
    device: Device,
    store: Store,
    on_rows: OnRows = lambda rows, tokens: None,
    part: Literal["all", "head"] = "all",
) -> PreparedJob:
    """Read, render and encode all rows (their tokens go to `store`), or the head of a large table, and plan them."""
    shape, engine, most_pages = model.config.shape, spec.engine, device.most_pages
    head = head_rows(engine, table)
    admission = Admission(shape.context_length, shape.vocab_size, most_pages * engine.page_size)
    reader = PromptReader(spec, model.tokenizer, model.chat, shape.context_length)
    prompts = reader.read(table, admission, store, on_rows, (0, head) if part == "head" else None)
    plan = plan_prefixes(prompts.table)
    rooms = admission.rooms(prompts.table.lengths, prompts.wishes.max_tokens)
    samples = prompts.wishes.n
    # A sample starts in the middle of a page, of which all but one take a copy.
    answer_pages = samples * (-(-rooms // engine.page_size) + 1)
    found = shared_before_logits(plan.lengths, plan.shared, prompts.wishes.num_logits[plan.order])
    own = own_pages(plan.lengths, found, answer_pages[plan.order], engine.page_size)
    longest = -(-int(plan.lengths.max(initial=0) + rooms.max(initial=0)) // engine.page_size)
    new_tokens = (samples * rooms)[plan.order]
    # A head is run from one end, so that the others go on from the other; scores have nothing to mix prompts with.
    if part == "head" or (spec.task.scores and engine.schedule != "fifo"):
        order = plan_order(plan)
    else:
        order = run_order(plan, new_tokens, engine.schedule, num_pages=most_pages, longest_pages=longest)
    wanted = min(pages_at_once(plan, order, own, engine.page_size, engine.max_num_seqs), int(own.sum()))
    # Memory is taken only as it is touched, so the cache is as large as the whole plan (which shares) where it may be.
    pages = max(1, min(most_pages, int(own.sum()))) if engine.prefix_sharing and not head else most_pages
    backend = device.backend
    return PreparedJob(spec, model, numerics, backend, prompts, plan, order, samples, rooms, pages, wanted, head)


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
