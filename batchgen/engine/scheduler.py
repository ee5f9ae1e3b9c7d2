"""Which sequences run in a step, and how many tokens of each.

Sequences are admitted in the order of the plan, so a new one finds all it can share in the one admitted before it, the
*frontier* (of its lane, where a plan is run from both ends, or of the other). Every layer writes the keys and values
of all the step's tokens before attention reads any, so a sequence may share tokens that are computed in the same step:
nobody waits, nobody computes them again. A page that is shared and about to be written is first copied (by the same
step, see `StepBatch.copies`), which is how a divergence inside a page and the samples of one prompt are served.

Who is admitted has pages reserved for the longest answer it may give, so memory never runs out under it and nothing is
computed twice. Some are admitted in the hope of an answer as long as those that have finished; when they outgrow it and
memory runs out they are set back, to be recomputed. What that can cost is kept below `RISK` of what was computed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.types import Request, Sample

RISK = 0.05
"""Of the tokens computed so far, the most that may have to be computed again."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    Before its prompt is computed it stands for all of the request's samples (`sample` is None); then one sequence per
    sample goes on. Only the scheduler changes one. `token_ids` has room for all tokens, `num_tokens` are known and the
    KV of `num_computed_tokens` is (or will be by the end of the step) in the pages of `block_table`.

    Of tokens that are scored, `hits` says which are the likeliest; `logprobs` and what follows it run parallel to it.
    `hidden_sum` (hidden size,) float64 adds up the hidden states of tokens that are pooled.

    While it runs it has `seats`, one or one for each sample, and pages are reserved: `reserved_pages` for itself and
    `sample_pages` for the samples that will leave it; `hopeful` says that these may not be enough. `set_back`: it has
    been preempted, with `lost_tokens` to compute again.
    """

    request: Request
    token_ids: NDArray[np.int32]
    num_tokens: int
    arrived_ns: int
    sample: Sample | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    scheduled_ns: int = 0
    logprobs: list[float] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    token_times: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    hidden_sum: NDArray[np.float64] | None = None
    seats: int = 0
    reserved_pages: int = 0
    sample_pages: int = 0
    hopeful: bool = False
    set_back: bool = False
    lost_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def generated(self) -> NDArray[np.int32]:
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    @property
    def room(self) -> int:
        """Tokens that may be generated, by the first of its samples at least."""
        return (self.sample or self.request.samples[0]).room

    @property
    def first_wanted(self) -> int:
        """Its first token whose logits are wanted: the last one, or that before a continuation to be scored.

        Or whose hidden state is wanted.

        From there on it computes all tokens itself, whoever has computed them: for their logits.
        """
        if self.sample is not None:
            return self.num_tokens - 1
        prompt = self.num_prompt_tokens
        return prompt - max(sample.num_logits(prompt) for sample in self.request.samples)

    @property
    def unforked_samples(self) -> tuple[Sample, ...]:
        """Those that will leave it when its prompt is computed."""
        return () if self.sample else self.request.samples[1:]


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part of a step: tokens [start, start + count), of the last `num_logits` of which it wants logits."""

    sequence: Sequence
    start: int
    count: int
    num_logits: int

    @property
    def reaches_end(self) -> bool:
        """Whether all its tokens are computed then, so that the next one can be drawn."""
        return self.start + self.count == self.sequence.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """How many of its tokens are of the prompt."""
        return max(0, min(self.start + self.count, self.sequence.num_prompt_tokens) - self.start)

    @property
    def context(self) -> tuple[int, int]:
        """How many tokens its tokens of the prompt attend to, each up to itself, all together; and the others."""
        prompt = self.num_prompt_tokens
        middle, end = self.start + prompt, self.start + self.count
        return attended(self.start, middle), attended(middle, end)


@dataclass(slots=True, eq=False)
class RestoredPages:
    """What goes into pages of a sequence, from number `first` of its block table on, before the step."""

    sequence: Sequence
    first: int
    content: list[NDArray[np.uint8]]

    @property
    def pages(self) -> list[int]:
        return self.sequence.block_table[self.first : self.first + len(self.content)]


class LowerTiers(Protocol):
    """What the scheduler asks of the tiers below the device, see `cache_tiers.CacheTiers`."""

    def restorable(self, prompt: NDArray[np.int32], first_page: int, most_pages: int) -> list[NDArray[np.uint8]]: ...
    def let_go(self, page: int) -> None: ...


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: the sequences in order, pages that are new or restored, slots to be copied, by destination."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    restored: list[RestoredPages] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # destination slot -> source slot
    num_tokens: int = 0
    num_logits: int = 0


@dataclass(slots=True, eq=False)
class Frontier:
    """The sequence admitted last in a lane: what its successor may share. While it lives the pages are its own."""

    sequence: Sequence
    valid: int = 0
    held: list[int] | None = None

    @property
    def block_table(self) -> list[int]:
        return self.sequence.block_table if self.held is None else self.held

    @property
    def waits_for_samples(self) -> bool:
        """Its samples have no seats yet and will share its prompt, so nobody may take its place before them."""
        return len(self.sequence.unforked_samples) >= self.sequence.seats > 0


class LengthEstimate:
    """How long answers get, of the tokens they may have: as nine of ten that have finished.

    All of them until `LEAST` have.
    """

    LEAST, SHARE, BINS = 32, 0.9, 64

    def __init__(self) -> None:
        self._counts = np.zeros(self.BINS + 1, np.int64)

    def add(self, generated: int, room: int) -> None:
        self._counts[-(-generated * self.BINS // room)] += 1

    def tokens(self, room: int) -> int:
        total = int(self._counts.sum())
        if total < self.LEAST:
            return room
        share = int(np.searchsorted(np.cumsum(self._counts), self.SHARE * total))
        return -(-room * share // self.BINS)


IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])


def attended(begin: IntOrArray, end: IntOrArray) -> IntOrArray:
    """Tokens that those at positions [begin, end) attend to, each up to itself, all together; also of many at once."""
    return (end * (end + 1) - begin * (begin + 1)) // 2


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Number of leading tokens that two prompts share."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


class Scheduler:
    """Queues, admission, preemption and the life of pages.

    `prefill_first`: a step's tokens go to prompts before they go to answers. Logits are wanted of at most
    `max_num_logits` tokens of a step (by default as many as sequences).
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        page_size: int,
        max_batch_tokens: int,
        max_num_seqs: int,
        prefix_sharing: bool,
        prefill_first: bool = False,
        tiers: LowerTiers | None = None,
        max_num_logits: int | None = None,
    ):
        self.blocks = blocks
        self._tiers = tiers
        self._page_size = page_size
        self._max_batch_tokens, self._max_num_seqs = max_batch_tokens, max_num_seqs
        self._max_num_logits = max_num_seqs if max_num_logits is None else max_num_logits
        self._sharing, self._prefill_first = prefix_sharing, prefill_first
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._late: dict[int, Sequence] = {}  # samples that have drawn their first token and found no seat
        self._frontiers: dict[int, Frontier] = {}  # by lane
        self._copy_sources: list[int] = []
        self._lengths = LengthEstimate()
        self._computed = self._wasted = 0
        self.preemptions = 0
        self.cached_prompt_tokens = 0  # prompt tokens that admitted sequences found computed,
        self.restored_prompt_tokens = 0  # and those of them that came from a tier below the device
        self.generated_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others; those of one plan are added in its order."""
        self._waiting.append(sequence)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step and reserve its pages. Call `end_step` when its tokens are appended."""
        plan = StepPlan()
        preemptions = self.preemptions
        if self._prefill_first:
            prompts = [s for s in self._running if s.num_computed_tokens < s.num_prompt_tokens]
            others = [s for s in self._running if s.num_computed_tokens >= s.num_prompt_tokens]
            self._go_on(plan, prompts)
            self._admit(plan, now_ns)
            self._go_on(plan, others)
        else:
            self._go_on(plan, list(self._running))
            if self.preemptions == preemptions:  # who was set back must not return in the same step
                self._admit(plan, now_ns)
        if not plan.scheduled:  # unless nobody is left: then all that is held makes way for one of them
            self._admit(plan, now_ns)
        return plan

    def _go_on(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            count = self._most_tokens(plan, sequence)
            if count and sequence.seats and self._make_room(plan, sequence, count):
                self._place(plan, sequence, count)

    def _most_tokens(self, plan: StepPlan, sequence: Sequence) -> int:
        """How many of its tokens the step has room for."""
        left = self._max_batch_tokens - plan.num_tokens
        without_logits = max(0, sequence.first_wanted - sequence.num_computed_tokens)
        with_logits = self._max_num_logits - plan.num_logits
        return min(sequence.num_tokens - sequence.num_computed_tokens, left, without_logits + with_logits)

    # Pages

    def _make_room(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Have pages for `count` more tokens; False when the sequence itself had to be set back for want of them.

        What is reserved is there. Who needs more takes what nobody has reserved, then sets hopeful ones back.
        """
        if self.pages_for(sequence.num_computed_tokens + count) <= sequence.reserved_pages:
            return True
        while self._missing_pages(sequence, count) > self._spare_pages() + self._outstanding(sequence):
            victim = self._cheapest(plan)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _spare_pages(self) -> int:
        """Free pages that no running sequence has a claim to."""
        return self.blocks.num_free - sum(map(self._outstanding, self._running))

    def _outstanding(self, sequence: Sequence) -> int:
        """Pages that a running sequence may still claim."""
        own = max(0, sequence.reserved_pages - len(sequence.block_table))
        return own + sequence.sample_pages + self._writes_shared_page(sequence)

    def _cheapest(self, plan: StepPlan) -> Sequence:
        """The hopeful sequence, not yet in this step, whose return costs fewest tokens; of equal ones the youngest."""
        placed = {id(s.sequence) for s in plan.scheduled}
        able = [s for s in reversed(self._running) if s.hopeful and id(s) not in placed]
        return min(able, key=lambda s: s.num_computed_tokens - min(self._shared(s)[0], s.num_computed_tokens))

    def _missing_pages(self, sequence: Sequence, count: int) -> int:
        missing = self.pages_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
        return missing + self._writes_shared_page(sequence)

    def _writes_shared_page(self, sequence: Sequence) -> bool:
        """Whether its next token goes to a page that somebody else reads; a copy that is due reads other slots."""
        index = sequence.num_computed_tokens // self._page_size
        if index >= len(sequence.block_table):
            return False
        page = sequence.block_table[index]
        return self.blocks.is_shared(page) and self.blocks.num_holders(page) - self._copy_sources.count(page) > 1

    def _place(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Give the sequence its pages and its part of the step."""
        start = sequence.num_computed_tokens
        if self._writes_shared_page(sequence):
            self._copy_page(plan, sequence, start)
        elif self._tiers is not None and start // self._page_size < len(sequence.block_table):
            self._tiers.let_go(sequence.block_table[start // self._page_size])  # what another prompt had in it
        while len(sequence.block_table) < self.pages_for(start + count):
            sequence.block_table.append(self._new_page(plan))
        sequence.num_computed_tokens = start + count
        self._computed += count
        logits = max(0, start + count - max(start, sequence.first_wanted))
        plan.num_tokens, plan.num_logits = plan.num_tokens + count, plan.num_logits + logits
        plan.scheduled.append(ScheduledSequence(sequence, start, count, logits))
        frontier = self._frontiers.get(sequence.request.lane)
        if frontier is not None and frontier.sequence is sequence:
            frontier.valid = min(sequence.num_prompt_tokens, sequence.num_computed_tokens)

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

    # Admission

    def _admit(self, plan: StepPlan, now_ns: int) -> None:
        seats = self._max_num_seqs - sum(s.seats for s in self._running) if self._waiting else 0
        spare = self._spare_pages() if seats else 0
        while self._waiting and seats and self._has_room(plan):
            sequence = self._waiting[0]
            frontier = self._frontiers.get(sequence.request.lane)
            if frontier is not None and frontier.waits_for_samples:
                break
            self._attach(sequence)
            if not self._seat(sequence, seats, spare):
                self._release(sequence)
                break
            self._waiting.popleft()
            seats, spare = seats - sequence.seats, spare - self._outstanding(sequence)
            self._running.append(sequence)
            self._restore(plan, sequence)
            self._count_shared(sequence, now_ns)
            spare += self._replace_frontier(sequence)
            self._place(plan, sequence, self._most_tokens(plan, sequence))

    def _has_room(self, plan: StepPlan) -> bool:
        """For a token, whether its logits are wanted or not."""
        return plan.num_tokens < self._max_batch_tokens and plan.num_logits < self._max_num_logits

    def _restore(self, plan: StepPlan, sequence: Sequence) -> None:
        """Fill full pages of its prompt, beyond those that it shares, with what a tier below the device has of them.

        A page that it shares in part is replaced, which would else be copied: they are pages that it has reserved.
        """
        if self._tiers is None:
            return
        first = sequence.num_computed_tokens // self._page_size
        end = min(sequence.num_prompt_tokens, sequence.first_wanted) // self._page_size
        content = self._tiers.restorable(sequence.request.prompt_token_ids, first, end - first)
        if content:
            self.blocks.release(sequence.block_table[first:])
            sequence.block_table[first:] = [self.blocks.allocate() for _ in content]
            plan.restored.append(RestoredPages(sequence, first, content))
            restored = (first + len(content)) * self._page_size - sequence.num_computed_tokens
            sequence.num_computed_tokens += restored
            if not sequence.scheduled_ns:  # after it was set back it may find its own
                sequence.num_restored_tokens += restored
                self.restored_prompt_tokens += restored

    def _count_shared(self, sequence: Sequence, now_ns: int) -> None:
        shared = sequence.num_computed_tokens
        if not sequence.scheduled_ns:  # what it finds after it was set back may be its own
            sequence.scheduled_ns, sequence.num_cached_tokens = now_ns, shared
            self.cached_prompt_tokens += shared
        self._wasted -= min(shared, sequence.lost_tokens)
        sequence.lost_tokens = 0

    def _shared(self, sequence: Sequence) -> tuple[int, Frontier | None]:
        """Computed tokens that it may share, and with whom; tokens whose logits are wanted are always computed."""
        best: tuple[int, Frontier | None] = (0, None)
        for frontier in self._frontiers.values():
            prompt = frontier.sequence.request.prompt_token_ids
            shared = min(
                common_prefix(sequence.request.prompt_token_ids, prompt), sequence.first_wanted, frontier.valid
            )
            best = max(best, (shared, frontier), key=lambda found: found[0])
        return best

    def _attach(self, sequence: Sequence) -> None:
        """Take a reference to the pages that it shares.

        All that it shares is computed, by this step at the latest: a prompt is only left unfinished when the step has
        no room, for tokens or for logits, and then nobody is admitted.
        """
        shared, frontier = self._shared(sequence)
        if frontier is not None:
            sequence.block_table = frontier.block_table[: self.pages_for(shared)]
            self.blocks.hold(sequence.block_table)
        sequence.num_computed_tokens = shared

    def _seat(self, sequence: Sequence, seats: int, spare: int) -> bool:
        """Reserve seats and pages: for all samples, for the first alone, or for a short answer where that is no risk.

        When nothing else runs, what is held for others makes way, and one sample finds room.
        """
        for reservation in self._reservations(sequence):
            sequence.seats, sequence.reserved_pages, sequence.sample_pages, sequence.hopeful = reservation
            if sequence.seats <= seats and self._outstanding(sequence) <= spare:
                return True
        sequence.seats = 0
        if self._running:
            return False
        self.drop_frontiers()
        sequence.seats, sequence.reserved_pages, sequence.sample_pages, sequence.hopeful = self._in_full(sequence)
        return True

    def _reservations(self, sequence: Sequence) -> Iterator[tuple[int, int, int, bool]]:
        """(seats, own pages, pages of samples, hopeful), the best first."""
        seats, own, _, _ = self._in_full(sequence)
        others = sequence.unforked_samples
        if others:
            full = sequence.num_prompt_tokens // self._page_size
            yield 1 + len(others), own, sum(self._pages(sequence, s.room) - full for s in others if s.room > 1), False
        yield seats, own, 0, False
        expected = max(self._lengths.tokens(sequence.room), sequence.num_generated + 1)
        if expected < sequence.room and self._may_risk(sequence):
            yield seats, self._pages(sequence, expected), 0, True

    def _in_full(self, sequence: Sequence) -> tuple[int, int, int, bool]:
        return 1, self._pages(sequence, sequence.room), 0, False

    def _pages(self, sequence: Sequence, generated: int) -> int:
        """Pages of its prompt and of so many generated tokens, the last of which is not stored."""
        return self.pages_for(sequence.num_prompt_tokens + max(generated - 1, 0))

    def _may_risk(self, sequence: Sequence) -> bool:
        """Whether all hopeful ones, this one too, could be computed again within `RISK`. Nobody is set back twice."""
        if sequence.set_back:
            return False
        hopeful = chain((s for s in self._running if s.hopeful), [sequence])
        at_risk = sum(s.num_prompt_tokens + s.room for s in hopeful)
        return self._wasted + at_risk <= RISK * (self._computed - self._wasted)

    def _replace_frontier(self, sequence: Sequence) -> int:
        """Make it its lane's frontier, unless it has come back and others are further on; returns the pages freed."""
        lane, free = sequence.request.lane, self.blocks.num_free
        known = self._frontiers.get(lane)
        if not self._sharing or (sequence.set_back and known is not None and known.sequence is not sequence):
            return 0
        self._drop(lane)
        self._frontiers[lane] = Frontier(sequence, min(sequence.num_prompt_tokens, sequence.num_computed_tokens))
        return self.blocks.num_free - free

    def drop_frontiers(self) -> None:
        """Let go of all pages that are kept for requests to come, as when none will."""
        for lane in list(self._frontiers):
            self._drop(lane)

    def _drop(self, lane: int) -> None:
        frontier = self._frontiers.pop(lane, None)
        if frontier is not None and frontier.held:
            self.blocks.release(frontier.held)

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.set_back, sequence.lost_tokens = True, sequence.num_computed_tokens
        self._wasted += sequence.lost_tokens
        sequence.hidden_sum = None
        self._leave(sequence)
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give up seats and pages, but for the pages that the next in its lane will share."""
        self._running.remove(sequence)
        frontier = self._frontiers.get(sequence.request.lane)
        if frontier is not None and frontier.sequence is sequence and frontier.held is None:
            frontier.valid = min(frontier.valid, self._wanted(sequence))
            frontier.held = sequence.block_table[: self.pages_for(frontier.valid)]
            self.blocks.hold(frontier.held)
        self._release(sequence)
        sequence.seats = sequence.reserved_pages = sequence.sample_pages = 0

    def _wanted(self, sequence: Sequence) -> int:
        """Prompt tokens that its successor shares, or somebody who was set back; all when there is no successor yet."""
        prompt, wanted = sequence.request.prompt_token_ids, 0
        for other in chain(self._late.values(), self._waiting):
            if other.request.lane == sequence.request.lane:
                wanted = max(wanted, common_prefix(prompt, other.request.prompt_token_ids))
                if not other.set_back:
                    return wanted
        return len(prompt)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table, sequence.num_computed_tokens = [], 0

    def fork(self, parent: Sequence, samples: tuple[Sample, ...]) -> list[Sequence]:
        """Split a sequence whose prompt is computed into one per sample; they share its pages until they write.

        Those without a seat are the next to be admitted, if their first token is not their last.
        """
        parent.sample = samples[0]
        children = [self._child(parent, sample) for sample in samples[1:]]
        if parent.seats == len(samples):
            at = self._running.index(parent) + 1
            self._running[at:at] = children
            for child in children:
                self._take_seat(child, parent)
        else:
            self._late.update((id(child), child) for child in children)
        parent.seats, parent.sample_pages = 1, 0
        return [parent, *children]

    def _child(self, parent: Sequence, sample: Sample) -> Sequence:
        tokens = np.zeros(parent.num_tokens + sample.room, np.int32)
        tokens[: parent.num_tokens] = parent.token_ids[: parent.num_tokens]
        child = Sequence(parent.request, tokens, parent.num_tokens, parent.arrived_ns, sample)
        child.num_cached_tokens, child.scheduled_ns = parent.num_cached_tokens, parent.scheduled_ns
        child.logprobs, child.hits = list(parent.logprobs), list(parent.hits)
        child.token_steps, child.token_times = list(parent.token_steps), list(parent.token_times)
        return child

    def _take_seat(self, child: Sequence, parent: Sequence) -> None:
        child.num_computed_tokens, child.block_table = parent.num_computed_tokens, list(parent.block_table)
        self.blocks.hold(child.block_table)
        child.seats, child.reserved_pages = 1, self._pages(child, child.room)

    def append_token(self, sequence: Sequence, token: int, logprob: float, step: int, now_ns: int) -> None:
        self.generated_tokens += 1
        sequence.token_ids[sequence.num_tokens] = token
        sequence.num_tokens += 1
        sequence.logprobs.append(logprob)
        sequence.token_steps.append(step)
        sequence.token_times.append(now_ns)

    def append_scores(
        self, sequence: Sequence, logprobs: list[float], hits: list[bool], step: int, now_ns: int
    ) -> None:
        """What is known of the next tokens of a continuation, whether they are the likeliest among it."""
        sequence.logprobs += logprobs
        sequence.hits += hits
        sequence.token_steps += [step] * len(hits)
        sequence.token_times += [now_ns] * len(hits)

    def add_hidden(self, sequence: Sequence, hidden: NDArray[np.float32]) -> None:
        """Hidden states (tokens, hidden size) of its next tokens, added one after the other: chunks do not show."""
        before = np.zeros(hidden.shape[1]) if sequence.hidden_sum is None else sequence.hidden_sum
        sequence.hidden_sum = np.add.accumulate(np.vstack([before, hidden]), axis=0)[-1]

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and free what nobody else needs."""
        self._lengths.add(sequence.num_generated, sequence.room)
        if self._late.pop(id(sequence), None) is None:
            self._leave(sequence)

    def abandon(self, failed: list[Sequence], held_up: list[Sequence]) -> None:
        """Take out those that a step could not compute, and set those back that need what these should have computed.

        Nothing is kept for requests to come: some of it is not there.
        """
        self.drop_frontiers()
        for sequence in failed:
            self._leave(sequence)
        for sequence in reversed(held_up):
            self._preempt(sequence)

    def end_step(self) -> None:
        """The step's copies have been made: let go of their sources. Samples without a seat queue up first."""
        self.blocks.release(self._copy_sources)
        self._copy_sources = []
        self._waiting.extendleft(reversed(self._late.values()))
        self._late.clear()

    def page_holders(self) -> Iterator[list[int]]:
        """Every list of pages that someone holds, for `BlockManager.check_integrity`."""
        yield from (s.block_table for s in self._running)
        yield self._copy_sources
        yield from (frontier.held for frontier in self._frontiers.values() if frontier.held)
