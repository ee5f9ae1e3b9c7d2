"""What the sorted prompts share, as a small tree of the largest shared prefixes.

No tree over all rows is built. The rows beneath a node of the prefix trie are an interval of the plan's order, and the
node's depth is the least of what neighbours within have in common. So the prefix that saves the most is the largest
rectangle under the profile of these common prefixes. It splits the profile into the part above it and the part around
it, closed over the gap, and the next one is the largest rectangle of either.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import PrefixPlan

LEVELS = 24
"""Depths at which the largest rectangle is looked for; where there are no more it is found exactly."""

Node = tuple[int, int, int]
"""(begin, end, depth): the first `depth` tokens are the same in all prompts of order[begin:end]."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`depth` tokens that the prompts `order[begin:end]` of a plan have in common, `own` of them beyond the parent's.

    `own` tokens are computed once and not for each row, which saves `saved_tokens`. Over all nodes of the whole trie
    these add up to the prompt tokens that are not distinct.
    """

    begin: int
    end: int
    depth: int
    own: int
    children: tuple["SharedPrefix", ...] = ()

    @property
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def saved_tokens(self) -> int:
        return (self.rows - 1) * self.own

    def walk(self) -> Iterator["SharedPrefix"]:
        """This node and all beneath it."""
        yield self
        for child in self.children:
            yield from child.walk()


def largest_prefixes(plan: PrefixPlan, most: int, least_saved: int = 1) -> SharedPrefix:
    """The root, which stands for all rows, and at most `most` nodes beneath it, each the one that saves the most beside
    those before it.

    A node that is not shown leaves its tokens to those beneath it that are. A node must save `least_saved` tokens.
    Children come in order of what is saved at and below them.
    """
    shared = plan.shared[1:].astype(np.int64)
    depth = int(shared.min()) if len(shared) else 0
    nodes = sorted(_largest_nodes(shared, depth, most, least_saved), key=lambda node: (node[0], -node[1]))
    return SharedPrefix(0, len(plan.order), depth, depth, _nested(nodes, depth))


@dataclass(order=True, slots=True)
class _Part:
    """Places of the profile, above a depth, and the largest rectangle there, from `begin` to `end` of the part."""

    saved: int = field(init=False)
    places: NDArray[np.int64] = field(compare=False)
    above: int = field(compare=False)
    heights: NDArray[np.int64] = field(compare=False)
    begin: int = field(init=False, compare=False)
    end: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        saved, self.begin, self.end = _largest_rectangle(self.heights)
        self.saved = -saved  # a heap has its least first

    @property
    def depth(self) -> int:
        return self.above + int(self.heights[self.begin : self.end].min())


def _largest_nodes(shared: NDArray[np.int64], depth: int, most: int, least_saved: int) -> Iterator[Node]:
    """Of all nodes deeper than `depth`; `shared[i]` is what the prompts i and i + 1 of the order have in common."""
    waiting = [_Part(np.arange(len(shared)), depth, shared - depth)]
    for _ in range(most):
        part = heapq.heappop(waiting)
        if -part.saved < max(1, least_saved):
            return
        lower = np.flatnonzero(shared < part.depth)
        first, last = np.searchsorted(lower, part.places[[part.begin, part.end - 1]])
        begin = int(lower[first - 1]) + 1 if first else 0
        end = int(lower[last]) if last < len(lower) else len(shared)
        yield begin, end + 1, part.depth
        inside, around = part.places[part.begin : part.end], np.delete(part.places, slice(part.begin, part.end))
        for places, above in ((inside, part.depth), (around, part.above)):
            heapq.heappush(waiting, _Part(places, above, shared[places] - above))


def _largest_rectangle(heights: NDArray[np.int64]) -> tuple[int, int, int]:
    """(area, begin, end) of the run of heights whose least one times their number is the largest."""
    best = (0, 0, 0)
    for level in _levels(heights).tolist():
        edges = np.flatnonzero(np.diff(heights >= level, prepend=False, append=False))
        begins, ends = edges[::2], edges[1::2]
        least = np.minimum.reduceat(heights, edges[:-1] if ends[-1] == len(heights) else edges)[::2]
        areas = (ends - begins) * least
        i = int(np.argmax(areas))
        best = max(best, (int(areas[i]), int(begins[i]), int(ends[i])), key=lambda found: found[0])
    return best


def _levels(heights: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different heights above 0, or some of them at equal ratios: what is found is less than the largest by no more
    than one of these.
    """
    levels = np.unique(heights[heights > 0])
    if len(levels) <= LEVELS:
        return levels
    wanted = np.geomspace(levels[0], levels[-1] * (1 - 1e-9), LEVELS)  # rounding must not lead beyond the last
    return levels[np.unique(np.searchsorted(levels, wanted))]


def _nested(nodes: list[Node], depth: int) -> tuple[SharedPrefix, ...]:
    """Nodes sorted by where they begin, the outer before the inner, as trees below a node of `depth`."""
    trees = []
    while nodes:
        (begin, end, own_depth), *rest = nodes
        behind = next((i for i, node in enumerate(rest) if node[0] >= end), len(rest))
        trees.append(SharedPrefix(begin, end, own_depth, own_depth - depth, _nested(rest[:behind], own_depth)))
        nodes = rest[behind:]
    return tuple(sorted(trees, key=lambda tree: -sum(node.saved_tokens for node in tree.walk())))


def shared_among(plan: PrefixPlan, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens that each of the prompts `wanted` (one bool each, in plan order) shares with the one wanted before it.

    One entry per wanted prompt, 0 for the first.
    """
    places = np.flatnonzero(wanted)
    if len(places) < 2:
        return np.zeros(len(places), np.int64)
    return np.concatenate([[0], np.minimum.reduceat(plan.shared[: places[-1] + 1], places[:-1] + 1)])
