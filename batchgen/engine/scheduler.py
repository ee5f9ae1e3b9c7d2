"""Which sequences run in a step, and how many tokens of each.

Sequences are admitted in the order of the plan, so a new one finds all it can share in its predecessor, the
*frontier*. Every layer writes the keys and values of all the step's tokens before attention reads any, so a sequence
may share tokens that are computed in the same step: nobody waits, nobody computes them again. A page that is shared
and about to be written is first copied (by the same step, see `StepBatch.copies`), which is how a divergence inside a
page and the samples of one prompt are served.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.types import Request, Sample


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    Before its prompt is computed it stands for all of the request's samples (`sample` is None); then one sequence per
    sample goes on. Only the scheduler changes one. `token_ids` has room for all tokens, `num_tokens` are known and the
    KV of `num_computed_tokens` is (or will be by the end of the step) in the pages of `block_table`.
    """

    request: Request
    token_ids: NDArray[np.int32]
    num_tokens: int
    arrived_ns: int
    sample: Sample | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    scheduled_ns: int = 0
    logprobs: list[float] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    token_times: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def generated(self) -> NDArray[np.int32]:
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part of a step: tokens [start, start + count); it wants logits when that reaches its last token."""

    sequence: Sequence
    start: int
    count: int
    wants_logits: bool

    @property
    def num_prompt_tokens(self) -> int:
        """How many of its tokens are of the prompt."""
        return max(0, min(self.start + self.count, self.sequence.num_prompt_tokens) - self.start)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: the sequences in order, pages that are new, slots to copy as (source, destination)."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # destination slot -> source slot
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Frontier:
    """The sequence admitted last: what its successor may share. While it lives the pages are its own."""

    sequence: Sequence
    valid: int = 0
    held: list[int] | None = None

    @property
    def block_table(self) -> list[int]:
        return self.sequence.block_table if self.held is None else self.held


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Number of leading tokens that two prompts share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


class Scheduler:
    """Queues, admission, preemption and the life of pages.

    When pages run out, the pages kept for a successor go first, then the sequence admitted last is set back (to be
    recomputed), so the oldest always advances.
    """

    def __init__(
        self, blocks: BlockManager, *, page_size: int, max_batch_tokens: int, max_num_seqs: int, prefix_sharing: bool
    ):
        self.blocks = blocks
        self._page_size = page_size
        self._max_batch_tokens, self._max_num_seqs = max_batch_tokens, max_num_seqs
        self._sharing = prefix_sharing
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._frontier: Frontier | None = None
        self._copy_sources: list[int] = []
        self.preemptions = 0
        self.cached_prompt_tokens = 0  # prompt tokens that an admitted sequence found computed
        self.generated_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others; those of one plan are added in its order."""
        self._waiting.append(sequence)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step and reserve its pages. Call `update` with its tokens before the next call."""
        plan = StepPlan()
        preemptions = self.preemptions
        self._continue_running(plan)
        if self.preemptions == preemptions:  # who was set back must not return in the same step
            self._admit(plan, now_ns)
        return plan

    def _continue_running(self, plan: StepPlan) -> None:
        index = 0
        while index < min(len(self._running), self._max_num_seqs):
            sequence = self._running[index]
            count = min(sequence.num_tokens - sequence.num_computed_tokens, self._max_batch_tokens - plan.num_tokens)
            if count <= 0:
                break
            if not self._make_room(sequence, count):
                break
            self._place(plan, sequence, count)
            index += 1

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Free pages for `count` more tokens; False when the sequence itself had to be set back."""
        while self._missing_pages(sequence, count) > self.blocks.num_free:
            if self._frontier is not None and self._frontier.held:
                self.drop_frontier()
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _missing_pages(self, sequence: Sequence, count: int) -> int:
        start = sequence.num_computed_tokens
        missing = self.pages_for(start + count) - len(sequence.block_table)
        return missing + self._writes_shared_page(sequence)

    def _writes_shared_page(self, sequence: Sequence) -> bool:
        page = sequence.num_computed_tokens // self._page_size
        return page < len(sequence.block_table) and self.blocks.is_shared(sequence.block_table[page])

    def _place(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Give the sequence its pages and its part of the step."""
        start = sequence.num_computed_tokens
        if self._writes_shared_page(sequence):
            self._copy_page(plan, sequence, start)
        while len(sequence.block_table) < self.pages_for(start + count):
            sequence.block_table.append(self._new_page(plan))
        sequence.num_computed_tokens = start + count
        plan.num_tokens += count
        plan.scheduled.append(ScheduledSequence(sequence, start, count, start + count == sequence.num_tokens))
        if self._frontier is not None and self._frontier.sequence is sequence:
            self._frontier.valid = min(sequence.num_prompt_tokens, sequence.num_computed_tokens)

    def _new_page(self, plan: StepPlan) -> int:
        page = self.blocks.allocate()
        plan.new_pages.append(page)
        return page

    def _copy_page(self, plan: StepPlan, sequence: Sequence, start: int) -> None:
        """Replace the shared page that holds position `start` by a copy of the slots before it."""
        index, offset = divmod(start, self._page_size)
        source, target = sequence.block_table[index], self._new_page(plan)
        sequence.block_table[index] = target
        self._copy_sources.append(source)  # this sequence's reference, kept until the copy has been made
        for i in range(offset):
            slot = source * self._page_size + i
            plan.copies[target * self._page_size + i] = plan.copies.get(slot, slot)

    def _admit(self, plan: StepPlan, now_ns: int) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs and plan.num_tokens < self._max_batch_tokens:
            sequence = self._waiting[0]
            self._attach(sequence)
            count = min(sequence.num_tokens - sequence.num_computed_tokens, self._max_batch_tokens - plan.num_tokens)
            if not self._fits(sequence):
                if self._running:
                    self._detach(sequence)
                    break
                self.drop_frontier()  # then all pages but its own are free, and alone it fits
            self._waiting.popleft()
            self.cached_prompt_tokens += 0 if sequence.scheduled_ns else sequence.num_cached_tokens
            self._running.append(sequence)
            sequence.scheduled_ns = sequence.scheduled_ns or now_ns
            self._replace_frontier(sequence)
            self._place(plan, sequence, count)

    def _shared_with_frontier(self, sequence: Sequence) -> int:
        """Prompt tokens in common with the frontier; the last known token is always computed, for its logits."""
        if not self._sharing or self._frontier is None:
            return 0
        shared = common_prefix(sequence.request.prompt_token_ids, self._frontier.sequence.request.prompt_token_ids)
        return min(shared, sequence.num_tokens - 1)

    def _attach(self, sequence: Sequence) -> None:
        """Take a reference to the pages it shares with the frontier.

        All that it shares is computed, by this step at the latest: a prompt is only left unfinished when the step's
        tokens are used up, and then nobody is admitted.
        """
        if self._frontier is None:
            return
        shared = min(self._shared_with_frontier(sequence), self._frontier.valid)
        pages = self._frontier.block_table[: self.pages_for(shared)]
        self.blocks.hold(pages)
        sequence.block_table = list(pages)
        sequence.num_computed_tokens = shared
        if not sequence.scheduled_ns:  # what it finds after a preemption may be its own
            sequence.num_cached_tokens = shared

    def _detach(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all its known tokens find room, with a page to spare for every other running sequence."""
        needed = self._missing_pages(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        return needed + len(self._running) <= self.blocks.num_free

    def _replace_frontier(self, sequence: Sequence) -> None:
        self.drop_frontier()
        if self._sharing:
            self._frontier = Frontier(sequence, min(sequence.num_prompt_tokens, sequence.num_computed_tokens))

    def drop_frontier(self) -> None:
        """Let go of the pages that are kept for the next request, as when none will come."""
        if self._frontier is not None and self._frontier.held:
            self.blocks.release(self._frontier.held)
        self._frontier = None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._running.remove(sequence)
        self._leave_pages(sequence)
        sequence.num_computed_tokens = 0
        self._waiting.appendleft(sequence)

    def _leave_pages(self, sequence: Sequence) -> None:
        """Release a sequence's pages, but for those that the next in line will share."""
        frontier = self._frontier
        if frontier is not None and frontier.sequence is sequence and frontier.held is None:
            successor = self._waiting[0] if self._waiting else None
            wanted = self._shared_with_frontier(successor) if successor is not None else sequence.num_prompt_tokens
            held = sequence.block_table[: self.pages_for(min(wanted, frontier.valid))]
            self.blocks.hold(held)
            frontier.held, frontier.valid = held, min(frontier.valid, len(held) * self._page_size)
        self.blocks.release(sequence.block_table)
        sequence.block_table = []

    def fork(self, parent: Sequence, samples: tuple[Sample, ...]) -> list[Sequence]:
        """Split a sequence whose prompt is computed into one per sample; they share its pages until they write."""
        parent.sample = samples[0]
        children = []
        for sample in samples[1:]:
            child = Sequence(parent.request, parent.token_ids.copy(), parent.num_tokens, parent.arrived_ns, sample)
            child.num_computed_tokens, child.num_cached_tokens = parent.num_computed_tokens, parent.num_cached_tokens
            child.block_table, child.scheduled_ns = list(parent.block_table), parent.scheduled_ns
            self.blocks.hold(child.block_table)
            children.append(child)
        at = self._running.index(parent) + 1
        self._running[at:at] = children
        return [parent, *children]

    def append_token(self, sequence: Sequence, token: int, logprob: float, step: int, now_ns: int) -> None:
        self.generated_tokens += 1
        sequence.token_ids[sequence.num_tokens] = token
        sequence.num_tokens += 1
        sequence.logprobs.append(logprob)
        sequence.token_steps.append(step)
        sequence.token_times.append(now_ns)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and free what nobody else needs."""
        self._running.remove(sequence)
        self._leave_pages(sequence)

    def end_step(self) -> None:
        """The step's copies have been made: let go of their sources."""
        self.blocks.release(self._copy_sources)
        self._copy_sources = []

    def page_holders(self) -> Iterator[list[int]]:
        """Every list of pages that someone holds, for `BlockManager.check_integrity`."""
        yield from (s.block_table for s in self._running)
        yield self._copy_sources
        if self._frontier is not None and self._frontier.held:
            yield self._frontier.held
