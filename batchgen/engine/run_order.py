"""In which order the requests of a plan are run, by the policy `engine.schedule`.

Any order gives the same answers. `planned` is a depth-first order of the prefix trie, in which the pages of a subtree
live briefly. Where some subtrees are heavy in prompts and others in answers, the trie's children are put in that order
and requests are taken from both ends, so that a step has some of both (the dual scan of BlendServe, arXiv:2411.16102).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import PrefixPlan

Policy = Literal["planned", "fifo", "prefill_first"]
Lengths = NDArray[np.integer]

MAX_LEVELS = 64
"""Nested prefixes whose children are put in order."""
BOTH_ENDS = 4
"""Times the longest row that the KV cache must hold to start from both ends, each of which keeps a prefix."""
SEARCHED_ROWS = 1024
"""At a time, for the end of a subtree."""
LEAST_DIFFERENCE = 0.1
"""Of the prompt tokens' share and the answer tokens' share in one half of the order, to start from both ends."""


@dataclass(frozen=True, slots=True, eq=False)
class RunOrder:
    """The i-th request is made of the equal prompts `plan.order[begins[i]:ends[i]]` and runs in lane `lanes[i]`."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    lanes: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.begins)

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each request, from values in plan order."""
        total = np.concatenate([[0], np.cumsum(values)])
        return total[self.ends] - total[self.begins]


def plan_order(plan: PrefixPlan) -> RunOrder:
    """The requests as they are planned."""
    begins = np.flatnonzero(~plan.repeats)
    return RunOrder(begins, np.append(begins[1:], len(plan.order))[: len(begins)], np.zeros(len(begins), np.int8))


def run_order(
    plan: PrefixPlan, new_tokens: NDArray[np.int64], policy: Policy, *, num_pages: int, longest_pages: int
) -> RunOrder:
    """The order for a policy; `new_tokens` (in plan order) may be generated for a row.

    The KV cache has `num_pages`, the longest row needs `longest_pages` of them.
    """
    order = plan_order(plan)
    if policy == "fifo":
        turn = np.argsort(plan.order[order.begins], kind="stable")
        return RunOrder(order.begins[turn], order.ends[turn], order.lanes)
    if policy == "planned" and len(order) > 1 and num_pages >= BOTH_ENDS * longest_pages:
        return _mixed(order, plan.lengths[order.begins], plan.shared[order.begins], order.sums(new_tokens))
    return order


def shared_in_turn(plan: PrefixPlan, order: RunOrder) -> NDArray[np.int64]:
    """Tokens that each request has in common with the one before it in an order: 0 for the first.

    What two prompts share is the least that neighbours between them in the plan do: a range minimum, from the minima of
    the ranges of 1, 2, 4, ... (a sparse table).
    """
    first = np.minimum(order.begins[1:], order.begins[:-1]) + 1
    end = np.maximum(order.begins[1:], order.begins[:-1]) + 1
    level = np.floor(np.log2(end - first)).astype(np.int64)
    found, least = np.zeros(len(order), np.int64), plan.shared
    for power in range(int(level.max(initial=-1)) + 1):
        asked = np.flatnonzero(level == power)
        found[asked + 1] = np.minimum(least[first[asked]], least[end[asked] - (1 << power)])
        least = np.minimum(least[: -(1 << power)], least[1 << power :])
    return found


def pages_at_once(plan: PrefixPlan, order: RunOrder, own: NDArray[np.int64], page_size: int, max_num_seqs: int) -> int:
    """About how many KV pages keep `max_num_seqs` requests going.

    The own pages of as many neighbours in the order (`own`, in plan order, see `planner.own_pages`), and in each lane
    those of the longest prefix that they can share with what ran before.
    """
    if not len(plan.order):
        return 0
    total = np.concatenate([[0], np.cumsum(order.sums(own))])
    width = min(max_num_seqs, len(order))
    prefixes = (1 + int(order.lanes.max())) * -(-int(plan.lengths.max()) // page_size)
    return int((total[width:] - total[:-width]).max()) + prefixes


def _mixed(order: RunOrder, lengths: Lengths, shared: Lengths, decode: NDArray[np.int64]) -> RunOrder:
    """From both ends, where these differ in what they are heavy in; else as it is."""
    prefill = (lengths - shared).astype(np.int64)
    prefill[0] -= shared[1:].min()  # what all have in common is nobody's
    turn, shared = _decode_heavy_last(shared, prefill, decode, np.append(lengths[:-1] == shared[1:], False))
    surplus = (prefill / max(prefill.sum(), 1) - decode / max(decode.sum(), 1))[turn]
    if surplus[: len(turn) // 2].sum() < LEAST_DIFFERENCE:
        return order
    units = _units(lengths[turn], shared)
    lanes = _lanes(np.add.reduceat(surplus, units).tolist())
    taken, of_lane = np.arange(len(units)), lanes.astype(bool)
    taken[~of_lane], taken[of_lane] = taken[: (~of_lane).sum()].copy(), taken[::-1][: of_lane.sum()].copy()
    sizes = np.diff(np.append(units, len(turn)))[taken]
    turn = turn[np.repeat(units[taken] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(turn))]
    return RunOrder(order.begins[turn], order.ends[turn], np.repeat(lanes, sizes))


def _units(lengths: Lengths, shared: Lengths) -> NDArray[np.int64]:
    """Where the requests begin that stay together whatever the end they are taken from.

    A prompt with which others begin is run right before them, whose tokens would else be computed without its logits.
    """
    heads = np.flatnonzero(lengths[:-1] == shared[1:])
    starts = np.ones(len(lengths), bool)
    end = 0
    for head in heads.tolist():
        if head >= end:
            end = _end_of_subtree(shared, head + 1, lengths[head])
            starts[head + 1 : end] = False
    return np.flatnonzero(starts)


def _end_of_subtree(shared: Lengths, first: int, depth: int) -> int:
    """The first place from `first` on that shares less than `depth`."""
    for begin in range(first, len(shared), SEARCHED_ROWS):
        less = np.flatnonzero(shared[begin : begin + SEARCHED_ROWS] < depth)
        if len(less):
            return begin + int(less[0])
    return len(shared)


def _lanes(surplus: list[float]) -> NDArray[np.int8]:
    """From which end each unit in turn is taken, 0 for the first: prompts and answers use up at one pace."""
    front, back, balance = 0, len(surplus) - 1, 0.0
    lanes = np.zeros(len(surplus), np.int8)
    for i in range(len(surplus)):
        lanes[i] = balance > 0
        balance += surplus[back] if lanes[i] else surplus[front]
        front, back = (front, back - 1) if lanes[i] else (front + 1, back)
    return lanes


def _decode_heavy_last(
    shared: Lengths, prefill: NDArray[np.int64], decode: NDArray[np.int64], begins_others: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], Lengths]:
    """Another depth-first order, and what each has in common with the one before it in that.

    Children are ordered by what share of their tokens is generated, from the trie's root down to where no child has
    more than half of the work. A prompt that the others of its node begin with stays the first.
    """
    work, turn, shared = prefill + decode, np.arange(len(shared)), shared.copy()
    for cuts in reversed(_heaviest_path(shared, work)):
        share = _sums(decode, cuts) / np.maximum(_sums(work, cuts), 1)
        if begins_others[cuts[0]] and cuts[1] == cuts[0] + 1:
            share[0] = -1
        place = np.argsort(np.argsort(share, kind="stable"))
        part = slice(int(cuts[0]), int(cuts[-1]))
        moved = np.argsort(np.repeat(place, np.diff(cuts)), kind="stable")
        outside, shared[part.start] = shared[part.start], shared[cuts[1]]
        turn[part], shared[part] = turn[part][moved], shared[part][moved]
        shared[part.start] = outside
    return turn, shared


def _heaviest_path(shared: Lengths, work: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The bounds of the children of nodes, from the root on."""
    levels: list[NDArray[np.int64]] = []
    first, end = 0, len(shared)
    while end - first > 1 and len(levels) < MAX_LEVELS:
        inner = shared[first + 1 : end]
        cuts = np.concatenate([[first], first + 1 + np.flatnonzero(inner == inner.min()), [end]])
        levels.append(cuts)
        of_children = _sums(work, cuts)
        heaviest = int(of_children.argmax())
        if 2 * of_children[heaviest] <= of_children.sum():
            break
        first, end = int(cuts[heaviest]), int(cuts[heaviest + 1])
    return levels


def _sums(values: NDArray[np.int64], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.add.reduceat(values[: cuts[-1]], cuts[:-1])
