"""What the sorted prompts share, as a small tree of the largest shared prefixes.

No tree over all rows is built: the rows beneath a node of the prefix trie are an interval of the plan's order, its
depth is the least of the common prefixes between neighbours within, and its children lie between the places where
that least one stands. Only nodes that save much are split further.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import PrefixPlan

LOOKED_AT = 8
"""Nodes looked at for each that is shown, so that a large one below small ones is found."""

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
    """The root, which stands for all rows, and at most `most` nodes beneath it, those that save the most.

    A node that is not shown leaves its tokens to those beneath it that are. A node must save `least_saved` tokens.
    Children come in order of what is saved at and below them.
    """
    shared = np.append(plan.shared, 0).astype(np.int64)
    rows = len(plan.order)
    root = (0, rows, int(shared[1:rows].min()) if rows > 1 else 0)
    beneath = list(_explore(shared, root, LOOKED_AT * most))
    beneath.sort(key=lambda found: -found[1])
    nodes = [node for node, saved in beneath[:most] if saved >= least_saved]
    nodes.sort(key=lambda node: (node[0], -node[1]))
    begin, end, depth = root
    return SharedPrefix(begin, end, depth, depth, _nested(nodes, depth))


def _explore(shared: NDArray[np.int64], root: Node, most: int) -> Iterator[tuple[Node, int]]:
    """Nodes beneath the root and what each saves by itself, those first below which most is saved."""
    before = np.concatenate([[0], np.cumsum(shared)])
    waiting: list[tuple[int, Node, int]] = _beneath(shared, before, root, most)
    heapq.heapify(waiting)
    for _ in range(most):
        if not waiting:
            return
        _, node, parent_depth = heapq.heappop(waiting)
        begin, end, depth = node
        yield node, (end - begin - 1) * (depth - parent_depth)
        for child in _beneath(shared, before, node, most):
            heapq.heappush(waiting, child)


def _beneath(
    shared: NDArray[np.int64], before: NDArray[np.int64], node: Node, most: int
) -> list[tuple[int, Node, int]]:
    """(minus what is saved at and below it, child, the node's depth) of children of two rows and more.

    At most `most` of them, those that save the most. `before[i]`: the sum of `shared[:i]`.
    """
    begin, end, depth = node
    cuts = begin + 1 + np.flatnonzero(shared[begin + 1 : end] == depth)
    begins, ends = np.concatenate([[begin], cuts]), np.concatenate([cuts, [end]])
    wide = ends - begins > 1
    begins, ends = begins[wide], ends[wide]
    if not len(begins):
        return []
    depths = np.minimum.reduceat(shared, np.stack([begins + 1, ends], axis=1).ravel())[::2]
    saved = before[ends] - before[begins + 1] - (ends - begins - 1) * depth
    best = np.argsort(-saved, kind="stable")[:most]
    return [(-int(saved[i]), (int(begins[i]), int(ends[i]), int(depths[i])), depth) for i in best]


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
