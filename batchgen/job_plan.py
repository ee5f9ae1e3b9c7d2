"""`batchgen plan`: all that is known of a job before weights are loaded."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from batchgen.advice import Advice, advise
from batchgen.calibration import read_calibration
from batchgen.engine.prefix_tree import SharedPrefix, largest_prefixes
from batchgen.io.files import cache_root
from batchgen.io.scratch import Scratch
from batchgen.loading import open_device
from batchgen.planned import Planned, planned
from batchgen.prepare import PreparedJob, open_job, prepare, reading_progress
from batchgen.progress import ProgressListener
from batchgen.prompts import FailedRow
from batchgen.spec import JobSpec

SHOWN_PREFIXES = 12
LEAST_SAVED = 0.005
"""Of the prompt tokens: what a prefix must save to be shown."""
TEXT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class PrefixText:
    """A prefix of `tokens` that `rows` share; `text` is how the `own_tokens` beyond the one above it begin."""

    rows: int
    tokens: int
    own_tokens: int
    saved_tokens: int
    text: str
    children: tuple["PrefixText", ...]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The figures, the rows that will fail, the largest shared prefixes, and how more could be shared.

    `notes`: what might surprise in the input's files, and what the figures do not say.

    `shared_tokens`: prompt tokens that all shared prefixes together save, those that are not shown too.
    `idle_prompt_tokens`: those of rows that ask for no tokens, which are neither computed nor saved.
    `tokenize_seconds`: what reading, rendering and encoding took, `tokenize_tokens_per_second` their speed.
    """

    figures: Planned
    failing_rows: list[FailedRow]
    shared_tokens: int
    prefixes: PrefixText
    advice: list[Advice]
    tokenize_seconds: float
    tokenize_tokens_per_second: float
    idle_prompt_tokens: int = 0
    notes: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        failing = [
            {"row_index": row.row_index, "id": row.name, "code": row.failure.code, "message": row.failure.message}
            for row in self.failing_rows
        ]
        return {
            **asdict(self.figures),
            "tokenize_seconds": self.tokenize_seconds,
            "tokenize_tokens_per_second": self.tokenize_tokens_per_second,
            "shared_prefixes": asdict(self.prefixes),
            "advice": [advice.values_for_json() for advice in self.advice],
            "failing_rows": failing,
            "notes": list(self.notes),
        }


def plan_job(spec: JobSpec, progress: ProgressListener) -> JobPlan:
    """What a job will compute, from the table and the model's header alone."""
    started = time.perf_counter()
    opened = open_job(spec, progress.message)
    table, device = opened.table, open_device(opened.model, opened.numerics, opened.spec.engine)
    with closing(device.backend), Scratch(cache_root()) as scratch:
        job = prepare(opened, device, scratch, reading_progress(progress, table, started))
        prefixes = _prefixes(job)
    figures = planned(job, read_calibration(opened.machine))
    return JobPlan(
        figures=figures,
        failing_rows=job.prompts.failures,
        shared_tokens=job.plan.prompt_tokens - job.plan.trie_tokens,
        prefixes=prefixes,
        advice=advise(spec.input, table, figures.computed_prompt_tokens) if spec.engine.prefix_sharing else [],
        tokenize_seconds=job.prompts.tokenize_seconds,
        tokenize_tokens_per_second=job.prompts.tokens_per_second,
        idle_prompt_tokens=int(job.plan.lengths[job.rooms[job.plan.order] <= 0].sum()),
        notes=(*table.notes, *_notes(job)),
    )


def _notes(job: PreparedJob) -> Iterator[str]:
    """What the figures do not say, a line each."""
    engine = job.spec.engine
    if shortage := job.prompts.kv_shortage(engine.page_size, job.page_bytes):
        yield shortage
    if engine.cache.is_on:
        yield "engine.cache: what a run finds there is counted here as computed"


def _prefixes(job: PreparedJob) -> PrefixText:
    least = int(LEAST_SAVED * job.plan.prompt_tokens) + 1
    return _with_text(job, largest_prefixes(job.plan, SHOWN_PREFIXES, least))


def _with_text(job: PreparedJob, prefix: SharedPrefix) -> PrefixText:
    text = ""
    if prefix.own:
        prompt, begin = job.prompts.table.prompt(int(job.plan.order[prefix.begin])), prefix.depth - prefix.own
        text = job.model.tokenizer.decode(prompt[begin : min(prefix.depth, begin + TEXT_TOKENS)], skip_special=False)
    children = tuple(_with_text(job, child) for child in prefix.children)
    return PrefixText(prefix.rows, prefix.depth, prefix.own, prefix.saved_tokens, text, children)
