"""What a job is expected to compute: the figures that `plan` prints and that job.json sets beside what was achieved."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.calibration import Calibration
from batchgen.engine.planner import shared_before_logits
from batchgen.engine.prefix_tree import shared_among
from batchgen.engine.run_order import RunOrder, shared_in_turn
from batchgen.estimate import Sequences, estimate_seconds
from batchgen.prepare import PreparedJob


@dataclass(frozen=True, slots=True)
class Planned:
    """Counts of rows, tokens and pages; names as in job.json's `totals` where these count the same when it is done.

    rows: all of them. answers: results, n per row. failed_rows: rows that cannot be answered, in failures by the
    code of their error. duplicate_rows: rows, or continuations, whose prompt is that of an earlier one. bos_in_text:
    prompts that bring by their template the BOS token that they would have been given anyway.
    distinct_prompt_tokens: the fewest that can be computed; computed_prompt_tokens: what will be. Rows that ask for no
    tokens are in neither.
    max_new_tokens: the most that can be generated; scored_tokens: given ones whose log-probabilities are wanted.
    kv_pages_needed and kv_bytes_needed: about what keeps all sequences of a step going; kv_pages: what the cache has.
    load_seconds, generate_seconds (low, high): from the machine's calibration, None without one.
    """

    rows: int
    answers: int
    failed_rows: int
    failures: dict[str, int]
    duplicate_rows: int
    bos_in_text: int
    prompt_tokens: int
    distinct_prompt_tokens: int
    computed_prompt_tokens: int
    max_new_tokens: int
    scored_tokens: int
    longest_prompt: int
    context_length: int
    kv_pages_needed: int
    kv_pages: int
    kv_bytes_needed: int
    load_seconds: float | None
    generate_seconds: tuple[float, float] | None


def planned(job: PreparedJob, known: Calibration | None) -> Planned:
    """The figures of a job that is ready to run, on a machine of which `known` is known."""
    plan, prompts, task = job.plan, job.prompts, job.spec.task
    sequences = _sequences(job)
    with_answer = job.rooms[plan.order] > 0
    distinct = int(plan.lengths[with_answer].sum() - _shared_as_planned(job, with_answer).sum())
    return Planned(
        rows=len(prompts.row_index),
        answers=int(prompts.samples.sum()) if task.generates else len(prompts.row_index),
        failed_rows=len(prompts.failures),
        failures=dict(Counter(failed.failure.code for failed in prompts.failures)),
        duplicate_rows=int(plan.repeats.sum()),
        bos_in_text=prompts.bos_in_text,
        prompt_tokens=plan.prompt_tokens,
        distinct_prompt_tokens=distinct,
        computed_prompt_tokens=sequences.prefill_tokens,
        max_new_tokens=int((job.samples * job.rooms).sum()) if task.generates else 0,
        scored_tokens=int(prompts.wishes.num_logits(prompts.table.lengths).sum()) if task.scores else 0,
        longest_prompt=int(plan.lengths.max(initial=0)),
        context_length=job.model.config.shape.context_length,
        kv_pages_needed=job.pages_wanted,
        kv_pages=job.num_pages,
        kv_bytes_needed=job.pages_wanted * job.page_bytes,
        load_seconds=None if known is None else known.load_seconds,
        generate_seconds=None if known is None else estimate_seconds(sequences, known, job.model.config.shape),
    )


def _sequences(job: PreparedJob) -> Sequences:
    """What runs, in plan order."""
    plan, engine, wishes = job.plan, job.spec.engine, job.prompts.wishes
    rooms, samples = job.rooms[plan.order], job.samples[plan.order]
    with_answer = rooms > 0
    shared = _shared(job, with_answer)
    fitting = min(1.0, job.num_pages / max(job.pages_wanted, 1))
    return Sequences(
        lengths=plan.lengths[with_answer].astype(np.int64),
        shared=shared,
        prefills=np.ones_like(shared) if engine.prefix_sharing else samples[with_answer],
        answers=job.own_answers[plan.order][with_answer],
        rooms=rooms[with_answer],
        ends=wishes.may_end[plan.order][with_answer],
        max_batch_tokens=engine.max_batch_tokens,
        at_once=max(1, int(min(engine.max_num_seqs, engine.max_batch_tokens) * fitting)),
    )


def _shared(job: PreparedJob, runs: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Prompt tokens that each row of the plan that runs finds computed, by the way the job is scheduled."""
    plan, engine = job.plan, job.spec.engine
    if not engine.prefix_sharing:
        return np.zeros(runs.sum(), np.int64)
    if engine.schedule != "fifo":
        return _shared_in_parts(job, runs) if job.head_rows else _shared_as_planned(job, runs)
    kept = job.order.sums(runs.astype(np.int64)) > 0
    order = RunOrder(job.order.begins[kept], job.order.ends[kept], job.order.lanes[kept])
    shared = plan.lengths[runs].astype(np.int64)
    first = np.searchsorted(np.flatnonzero(runs), order.begins)  # of each request, that runs
    shared[first] = np.minimum(shared_in_turn(plan, order), shared[first] - 1)
    return _without_logits(job, runs, shared)


def _shared_as_planned(job: PreparedJob, runs: NDArray[np.bool_]) -> NDArray[np.int64]:
    return _without_logits(job, runs, shared_among(job.plan, runs))


def _without_logits(job: PreparedJob, runs: NDArray[np.bool_], shared: NDArray[np.int64]) -> NDArray[np.int64]:
    logits = job.prompts.wishes.num_logits(job.prompts.table.lengths)[job.plan.order]
    return shared_before_logits(job.plan.lengths[runs], shared, logits[runs])


def _shared_in_parts(job: PreparedJob, runs: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The same where the head is run by itself; the other rows may find one prefix more, that of its last row."""
    head = job.prompts.table.row_index[job.plan.order] < job.head_rows
    shared = np.zeros(len(head), np.int64)
    for part in (runs & head, runs & ~head):
        shared[part] = _shared_as_planned(job, part)
    return shared[runs]
