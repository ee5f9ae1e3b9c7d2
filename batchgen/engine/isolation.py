"""Steps whose faults stay with the rows that cause them.

Usually a step runs as a whole. If that fails, its sequences run one after another, in the order of the plan: nobody
depends on what a later one computes, so each finds what it would have found. Whoever fails alone is at fault. Whoever
shares with it what it should have computed in this step is held up, and is to be computed anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from batchgen.engine.batch import build_batch
from batchgen.engine.sampler import Sampler, SamplerInputs
from batchgen.engine.scheduler import ScheduledSequence, Sequence, StepPlan
from batchgen.engine.types import RowFailure
from batchgen.errors import BatchgenError, ModelError, RowError
from batchgen.kernels.base import Backend, StepResult

MOST_FAULTS = 64
"""Sequences that may fail one after another, with none between that does not: more of them are no fault of rows."""

NOT_OF_A_ROW = (BatchgenError, MemoryError)
"""Errors that stop the job whatever row they come from."""


def row_failure(error: Exception) -> RowFailure:
    if isinstance(error, RowError):
        return RowFailure(error.code, error.message)
    return RowFailure("internal_error", f"{_line(error)}; the other rows are not affected, please report this")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(slots=True, eq=False)
class Ran:
    """Sequences that have run together, and what came of it."""

    plan: StepPlan
    sampling: SamplerInputs
    result: StepResult


@dataclass(slots=True, eq=False)
class StepOutcome:
    """What of a step was computed, who failed, and who is held up by them. `started_ns`: when the model began."""

    ran: list[Ran] = field(default_factory=list)
    failed: list[tuple[Sequence, RowFailure]] = field(default_factory=list)
    held_up: list[Sequence] = field(default_factory=list)
    started_ns: int = 0

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """The parts of the plan that were computed."""
        return [part for ran in self.ran for part in ran.plan.scheduled]


class StepRunner:
    """Runs the steps of a plan on a backend."""

    def __init__(
        self, backend: Backend, sampler: Sampler, page_size: int, prefix_sharing: bool, clock: Callable[[], int]
    ):
        self._backend, self._sampler, self._clock = backend, sampler, clock
        self._page_size, self._sharing = page_size, prefix_sharing
        self._faults = 0  # since somebody ran

    def run(self, plan: StepPlan) -> StepOutcome:
        """Raises ModelError when it is not the rows that fail."""
        outcome = StepOutcome()
        try:
            self._run(plan, outcome)
        except NOT_OF_A_ROW:
            raise
        except Exception:
            self._run_one_by_one(plan, outcome)
        return outcome

    def _run(self, plan: StepPlan, outcome: StepOutcome) -> None:
        sampling = self._sampler.prepare(plan)
        batch = build_batch(plan, sampling, self._page_size, self._sharing)
        outcome.started_ns = outcome.started_ns or self._clock()
        outcome.ran.append(Ran(plan, sampling, self._backend.run(batch)))
        self._faults = 0

    def _run_one_by_one(self, plan: StepPlan, outcome: StepOutcome) -> None:
        missing: set[int] = set()  # pages that lack what should have been computed
        new = set(plan.new_pages)  # pages that nobody has taken yet
        for part in plan.scheduled:
            alone = self._alone(plan, part, new)
            new.difference_update(alone.new_pages)
            sources = {slot // self._page_size for slot in alone.copies.values()}
            if missing & sources.union(part.sequence.block_table):
                outcome.held_up.append(part.sequence)
            elif (failure := self._try(alone, outcome)) is not None:
                outcome.failed.append((part.sequence, failure))
            else:
                continue
            missing.update(self._written(part))

    def _alone(self, plan: StepPlan, part: ScheduledSequence, new: set[int]) -> StepPlan:
        """The step of one sequence, with the new pages that it takes and the copies into these."""
        pages = [page for page in part.sequence.block_table if page in new]
        copies = {to: source for to, source in plan.copies.items() if to // self._page_size in pages}
        return StepPlan([part], new_pages=pages, copies=copies, num_tokens=part.count)

    def _written(self, part: ScheduledSequence) -> list[int]:
        """The pages that it writes to."""
        first, end = part.start // self._page_size, -(-(part.start + part.count) // self._page_size)
        return part.sequence.block_table[first:end]

    def _try(self, plan: StepPlan, outcome: StepOutcome) -> RowFailure | None:
        try:
            self._run(plan, outcome)
        except NOT_OF_A_ROW:
            raise
        except Exception as error:
            self._faults += 1
            if self._faults > MOST_FAULTS:
                raise ModelError(f"{self._faults} sequences in a row cannot be computed: {_line(error)}") from error
            return row_failure(error)
        return None
