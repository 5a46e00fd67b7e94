"""Lanes: their assignment to replicas, and the fixed binary tree in which their gradients are summed.

Replica r of W owns the lanes [r*L//W, (r+1)*L//W). The L lanes are the leaves of one binary tree: the node (level, i)
covers the lanes [i * 2^level, (i+1) * 2^level), clipped at L. A node without a right child passes its left child up. A
replica sums its own lanes up to the largest whole subtrees (`parts_of`), and `merge_plan` lists the additions that
remain once all replicas' subtrees are together. Floating-point addition commutes, so only the tree matters; it depends
on L alone, so no sum depends on the world.

With context parallelism, each part of a lane's tokens is a leaf (`leaf_of`): a tree has L leaves per part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from elastic_train.core.keyed_random import derive

T = TypeVar("T")
_RANDOMNESS = 3


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A node of the tree: the sum over its lanes, once computed."""

    level: int
    index: int

    @property
    def lo(self) -> int:
        """First lane below this node."""
        return self.index << self.level

    @property
    def parent(self) -> Part:
        return Part(self.level + 1, self.index >> 1)

    @property
    def sibling(self) -> Part:
        return Part(self.level, self.index ^ 1)

    def is_empty(self, num_lanes: int) -> bool:
        """Return True if no lane is below this node: it is beyond the tree's clipped right edge."""
        return self.lo >= num_lanes


def owned_lanes(replica: int, num_replicas: int, num_lanes: int) -> range:
    """Return a replica's slice of [0, num_lanes); slices are disjoint, in order, and differ by at most one lane.

    If every rank holds a whole model, a replica is a rank. Any `num_replicas` from 1 to `num_lanes` gives each at least
    one lane; there is no divisor rule.
    """
    assert 0 <= replica < num_replicas, f"no replica {replica} among {num_replicas}"
    return range(replica * num_lanes // num_replicas, (replica + 1) * num_lanes // num_replicas)


Lanes = range | tuple[int, ...]
"""Some lanes, ascending."""
Assignment = tuple[range, ...]
"""Lanes of every replica, ascending, with a stride if dealt; disjoint, and covering all lanes."""


@lru_cache(64)
def contiguous(num_replicas: int, num_lanes: int) -> Assignment:
    """Return the assignment that gives each replica consecutive lanes."""
    return tuple(owned_lanes(replica, num_replicas, num_lanes) for replica in range(num_replicas))


def leaf_of(lane: int, part: int, num_lanes: int) -> int:
    """Return the leaf, in [0, parts * num_lanes), of one context-parallel part of a lane.

    Leaves of one part are consecutive, so a rank keeps no more partial sums than one that computes whole rows.
    """
    return part * num_lanes + lane


def leaves_of(lanes: Assignment, num_parts: int) -> Assignment:
    """Return the leaves of each rank, by lane group and part, from the lane groups' lanes."""
    num_lanes = sum(map(len, lanes))
    return tuple(
        range(leaf_of(some.start, part, num_lanes), leaf_of(some.stop, part, num_lanes), some.step)
        for some in lanes
        for part in range(num_parts)
    )


def lanes_by_cell(lanes: Assignment, size: int) -> tuple[Lanes, ...]:
    """Return the lanes of every cell, from those of its `size` consecutive lane groups."""
    cells = [lanes[first : first + size] for first in range(0, len(lanes), size)]
    return tuple(tuple(sorted(lane for owner in cell for lane in owner)) for cell in cells)


def root_of(num_lanes: int) -> Part:
    """Return the node above all lanes."""
    return Part((num_lanes - 1).bit_length(), 0)


@lru_cache(1024)
def settle(part: Part, num_lanes: int) -> Part:
    """Lift a node through parents with no other lanes, while its sibling is empty."""
    while part != root_of(num_lanes) and part.index % 2 == 0 and part.sibling.is_empty(num_lanes):
        part = part.parent
    return part


@lru_cache(256)
def parts_of(lanes: Lanes, num_lanes: int) -> tuple[Part, ...]:
    """Return the largest whole subtrees that make up lanes, left to right; at most 2 log2 L for consecutive lanes."""
    parts: list[Part] = []
    for lane in lanes:
        part = settle(Part(0, lane), num_lanes)
        while parts and part.index % 2 and parts[-1] == part.sibling:
            parts.pop()
            part = settle(part.parent, num_lanes)
        parts.append(part)
    return tuple(parts)


def merge_plan(parts: Iterable[Part], num_lanes: int) -> tuple[tuple[Part, Part, Part], ...]:
    """Return the additions (left, right, sum) that complete the tree, in an order that respects dependencies."""
    return _merge_plan(tuple(parts), num_lanes)  # a step requests the same plan for every flat vector


@lru_cache(256)
def _merge_plan(parts: tuple[Part, ...], num_lanes: int) -> tuple[tuple[Part, Part, Part], ...]:
    stack: list[Part] = []
    plan: list[tuple[Part, Part, Part]] = []
    for part in sorted(parts, key=lambda part: part.lo):
        top = part
        while stack and top.index % 2 and stack[-1] == top.sibling:
            left = stack.pop()
            merged = settle(top.parent, num_lanes)
            plan.append((left, top, merged))
            top = merged
        stack.append(top)
    assert stack == [root_of(num_lanes)], f"the parts do not make up {num_lanes} lanes: {stack} is left"
    return tuple(plan)


@lru_cache(64)
def lane_additions(num_lanes: int) -> tuple[tuple[int, int], ...]:
    """Return the tree's additions as pairs of lanes, the right one added to the left one; the total is in lane 0's."""
    leaves = [settle(Part(0, lane), num_lanes) for lane in range(num_lanes)]
    lane_of = {leaf: lane for lane, leaf in enumerate(leaves)}
    additions = []
    for left, right, merged in merge_plan(leaves, num_lanes):
        additions.append((lane_of[left], lane_of[right]))
        lane_of[merged] = lane_of[left]
    return tuple(additions)


def lane_seed(seed: int, step: int, lane: int) -> int:
    """Return the seed of a lane's random numbers in one step, below 2^63; the rank plays no role."""
    return derive(seed, _RANDOMNESS, step, lane) >> 1


def tree_sum(values: Sequence[float]) -> float:
    """Add the lanes' values along the tree."""
    sums = list(values)
    for left, right in lane_additions(len(sums)):
        sums[left] += sums[right]
    return sums[0]


class Counter(Generic[T]):
    """Sums of whole subtrees of one holder's share, as a binary counter; `add` may change its first argument.

    Leaves may come in any order; in ascending order there are at most 1 + log2 L sums.
    """

    def __init__(self, num_lanes: int, add: Callable[[T, T], T]) -> None:
        self._num_lanes, self._add = num_lanes, add
        self._sums: dict[Part, T] = {}

    @property
    def parts(self) -> dict[Part, T]:
        """The sums so far, by subtree, in lane order."""
        return {part: self._sums[part] for part in sorted(self._sums, key=lambda part: part.lo)}

    def push(self, part: Part, total: T) -> None:
        """Add the sum of one subtree; each lane is pushed once."""
        part = settle(part, self._num_lanes)
        while part.sibling in self._sums:
            other = self._sums.pop(part.sibling)
            total = self._add(other, total) if part.index % 2 else self._add(total, other)
            part = settle(part.parent, self._num_lanes)
        assert part not in self._sums, f"{part} is there already"
        self._sums[part] = total
