"""Allot pipeline stages to nodes so that as many members as possible keep their state.

A node has room for some groups, and each group is one stage of some cell. A group keeps as many members as stay at
their places; a further group of the same stage on the same node never keeps more. So the choice of groups is a
maximum-weight matching of nodes with stages: a greedy start, then improvements while there are any (cycle cancelling:
Klein 1967). Stages that lack groups then get the remaining room, next to neighbouring stages of the same node.
"""

from __future__ import annotations

from collections.abc import Sequence

Counts = list[list[int]]
"""Number of groups that each node has for each stage."""


def allot(rooms: Sequence[int], keeps: Sequence[Sequence[Sequence[int]]], num_stages: int, num_each: int) -> Counts:
    """Return the number of groups per node and stage, so that each stage has `num_each`.

    `keeps` has the members kept by each node's first, second, third... group of each stage, in non-increasing order.
    """
    assert num_stages * num_each <= sum(rooms), f"no room for {num_each} groups of {num_stages} stages"
    counts = _most_kept(rooms, keeps, num_stages, num_each)
    while (moves := _improvement(counts, rooms, keeps, num_each)) is not None:
        for node, (source, target) in moves:
            for stage, change in ((source, -1), (target, 1)):
                if stage < num_stages:
                    counts[node][stage] += change
    _fill(counts, rooms, num_stages, num_each)
    return counts


def _most_kept(rooms: Sequence[int], keeps: Sequence[Sequence[Sequence[int]]], num_stages: int, most: int) -> Counts:
    """Choose groups greedily by the number of members kept."""
    counts, loads = [[0] * num_stages for _ in rooms], [0] * num_stages
    groups = ((-kept, node, stage) for node, by in enumerate(keeps) for stage, of in enumerate(by) for kept in of)
    for kept, node, stage in sorted(groups):
        if kept and loads[stage] < most and sum(counts[node]) < rooms[node]:
            counts[node][stage] += 1
            loads[stage] += 1
    return counts


Move = tuple[int, tuple[int, int]]
"""A node that exchanges a group of one stage for one of another; the number of stages means free room."""
_NOBODY = -1
_WORST = (-1 << 62, _NOBODY)


def _improvement(
    counts: Counts, rooms: Sequence[int], keeps: Sequence[Sequence[Sequence[int]]], most: int
) -> list[Move] | None:
    """Return moves that keep more members, with at most `most` groups per stage; None if there are none."""
    free, loads = len(counts[0]), [sum(column) for column in zip(*counts, strict=True)]
    best: dict[tuple[int, int], tuple[int, int]] = {
        (target, source): (0, _NOBODY)  # a chain may end here, and another begin anywhere
        for target in range(free + 1)
        for source in range(free + 1)
        if source != target and (target == free or loads[target] < most)
    }
    for node, row in enumerate(counts):
        gains = [_at(keeps[node][stage], row[stage]) for stage in range(free)] + [0]
        losses = [_at(keeps[node][stage], row[stage] - 1) for stage in range(free)] + [0]
        sources = [stage for stage in range(free) if row[stage]] + [free] * (sum(row) < rooms[node])
        for source in sources:
            for target, gain in enumerate(gains):
                if source != target and (target == free or gain):
                    better = gain - losses[source]
                    if better > best.get((source, target), _WORST)[0]:
                        best[source, target] = better, node
    cycle = _cycle({edge: weight for edge, (weight, _) in best.items()}, free + 1)
    return None if cycle is None else [(node, edge) for edge in cycle if (node := best[edge][1]) != _NOBODY]


def _at(kept: Sequence[int], number: int) -> int:
    return kept[number] if 0 <= number < len(kept) else 0


def _cycle(weights: dict[tuple[int, int], int], size: int) -> list[tuple[int, int]] | None:
    """Return the edges of a cycle of positive weight, None if there is none (Bellman and Ford)."""
    longest, before = [0] * size, [-1] * size
    at = -1
    for _ in range(size):
        at = -1
        for (source, target), weight in weights.items():
            if longest[source] + weight > longest[target]:
                longest[target], before[target], at = longest[source] + weight, source, target
        if at < 0:
            return None
    for _ in range(size):
        at = before[at]
    found, target = list[tuple[int, int]](), at
    while not found or target != at:
        found.append((before[target], target))
        target = before[target]
    return found


def _fill(counts: Counts, rooms: Sequence[int], num_stages: int, num_each: int) -> None:
    """Use the remaining room, node by node, for stages that lack groups."""
    loads, last = [sum(row[stage] for row in counts) for stage in range(num_stages)], -1
    for row, room in zip(counts, rooms, strict=True):
        for _ in range(room - sum(row)):
            if not (lacking := [stage for stage in range(num_stages) if loads[stage] < num_each]):
                return
            last = max(lacking, key=lambda stage: (_neighbours(row, stage), -((stage - last - 1) % num_stages)))
            row[last] += 1
            loads[last] += 1


def _neighbours(row: Sequence[int], stage: int) -> int:
    """Return the number of neighbouring stages whose groups on this node lack one of this stage."""
    return sum(0 <= other < len(row) and row[other] > row[stage] for other in (stage - 1, stage + 1))
