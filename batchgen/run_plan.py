"""Prompts into the order that they are run in, what that takes, and the engine that runs them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.cache_tiers import CacheTiers
from batchgen.engine.engine import Engine, EngineLimits
from batchgen.engine.planner import Admission, PrefixPlan, own_pages, plan_prefixes, shared_before_logits
from batchgen.engine.prompt_table import PromptTable
from batchgen.engine.run_order import RunOrder, pages_at_once, plan_order, run_order
from batchgen.kernels.base import Backend, ModelShape, StepLimits
from batchgen.prompts import Wishes
from batchgen.spec import EngineSpec
from batchgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """`prefixes` and `order` of the prompts of a table; `own_answers` (those computed for it) and `rooms` (the most
    tokens of each) of every prompt, in the table's order.

    `pages`: KV pages of the whole plan; `pages_wanted`: about what keeps all sequences of a step going.
    """

    prefixes: PrefixPlan
    order: RunOrder
    own_answers: NDArray[np.int64]
    rooms: NDArray[np.int64]
    pages: int
    pages_wanted: int


def plan_run(
    table: PromptTable, wishes: Wishes, admission: Admission, engine: EngineSpec, *, one_end: bool = False
) -> RunPlan:
    """Plan the prompts of a table, each of which `wishes` for something. `one_end`: run the plan from its beginning."""
    page_size = engine.page_size
    plan, rooms = plan_prefixes(table), admission.rooms(table.lengths, wishes.max_tokens)
    own_answers = wishes.computed(plan) if engine.prefix_sharing else wishes.n
    # A sample starts in the middle of a page, of which all but one take a copy; its last token needs no place.
    answer_pages = np.where(rooms > 1, own_answers * (-(-(rooms - 1) // page_size) + 1), 0)
    found = shared_before_logits(plan.lengths, plan.shared, wishes.num_logits(table.lengths)[plan.order])
    own = own_pages(plan.lengths, found, answer_pages[plan.order], page_size)
    if one_end or (not wishes.answers and engine.schedule != "fifo"):  # no answers to mix prompts with
        order = plan_order(plan)
    else:
        longest = -(-int(plan.lengths.max(initial=0) + rooms.max(initial=0)) // page_size)
        new_tokens, most = (own_answers * rooms)[plan.order], admission.kv_tokens // page_size
        order = run_order(plan, new_tokens, engine.schedule, num_pages=most, longest_pages=longest)
    pages = int(own.sum())
    wanted = min(pages_at_once(plan, order, own, page_size, engine.max_num_seqs), pages)
    return RunPlan(plan, order, own_answers, rooms, pages, wanted)


def step_limits(engine: EngineSpec, num_pages: int) -> StepLimits:
    """What the steps of such an engine hold at most."""
    return StepLimits(engine.max_batch_tokens, engine.max_num_seqs, num_pages, engine.page_size)


def make_engine(
    backend: Backend,
    tokenizer: Tokenizer,
    shape: ModelShape,
    engine: EngineSpec,
    num_pages: int,
    tiers: CacheTiers | None = None,
    embeds: bool = False,
) -> Engine:
    """An engine on a backend that is built for `step_limits(engine, num_pages)`; `embeds`: without an output head."""
    limits = EngineLimits(
        max_batch_tokens=engine.max_batch_tokens,
        max_num_seqs=engine.max_num_seqs,
        num_pages=num_pages,
        page_size=engine.page_size,
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        prefix_sharing=engine.prefix_sharing,
        prefill_first=engine.schedule == "prefill_first",
        max_num_logits=engine.max_batch_tokens if embeds else engine.max_num_seqs,
    )
    return Engine(backend, tokenizer, limits, tiers=tiers)
