"""Reference for shard assignments, computed grain by grain and rank by rank: slow, but obviously correct.

The order in which amounts are distributed is part of the plan: it decides which rank gets the remainder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.placement.arcs import Arc, Groups, Path
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import Circle, Run

Given = dict[tuple[int, int], list[int]]
"""The numbers of grains by sender and receiver."""


def grains_in(circle: Circle, arcs: Sequence[Arc]) -> list[int]:
    """Return the grains that begin in some arcs, ascending."""
    ends = [(lo * circle.length, hi * circle.length) for lo, hi in arcs]
    pairs = zip(circle.grains.tolist(), circle.starts.tolist(), strict=True)
    return sorted(grain for grain, start in pairs if any(lo <= start < hi for lo, hi in ends))


def trained_of(layout: Layout, grains: Sequence[int]) -> list[int]:
    """Return those of some grains that are in a parameter group."""
    return [grain for grain in grains if layout.flats[layout.flat_of[grain]].group is not None]


def section_of(circle: Circle, num_sections: int) -> dict[int, int]:
    """Return the section of every grain."""
    pairs = zip(circle.grains.tolist(), circle.starts.tolist(), strict=True)
    return {grain: start * num_sections // circle.length for grain, start in pairs}


def runs_of(layout: Layout, grains: Sequence[int], sections: dict[int, int] | None = None) -> list[Run]:
    """Return the fewest runs of flat vectors that contain all of some grains, each run within one section."""
    runs: list[Run] = []
    last = 0
    for grain in sorted(grains, key=lambda grain: (layout.flat_of[grain], layout.start[grain])):
        flat, lo = int(layout.flat_of[grain]), int(layout.start[grain])
        hi = lo + int(layout.span[grain])
        if runs and (runs[-1].flat, runs[-1].hi) == (flat, lo) and (not sections or sections[last] == sections[grain]):
            lo = runs.pop().lo
        runs.append(Run(flat, lo, hi))
        last = grain
    return runs


def side_by_side(layout: Layout, grains: Sequence[int], held: Sequence[Run]) -> list[tuple[Run, tuple[int, ...]]]:
    """Return the positions of grains without padding, and their lengths, by tensor and held run."""
    found: list[tuple[Run, tuple[int, ...]]] = []
    last = None
    for grain in grains:
        flat, start = int(layout.flat_of[grain]), int(layout.start[grain])
        length = int(layout.hi[grain] - layout.lo[grain])
        place = next(run for run in held if run.flat == flat and run.lo <= start < run.hi), layout.tensor_of[grain]
        if found and place == last and found[-1][0].hi == start:
            run, lengths = found.pop()
            found.append((Run(flat, run.lo, start + length), (*lengths, length)))
        else:
            found.append((Run(flat, start, start + length), (length,)))
        last = place
    return found


def plan(have: Sequence[Int64s], wants: Sequence[Int64s], spans: Int64s) -> tuple[list[int], Given]:
    """Return the lost grains, or which rank sends which grains to which rank."""
    has = [set(grains.tolist()) for grains in have]
    sets = [*has, *(set(grains.tolist()) for grains in wants)]
    kinds: dict[int, list[int]] = defaultdict(list)
    for grain in range(spans.size):
        kinds[sum(1 << number for number, some in enumerate(sets) if grain in some)].append(grain)
    wanted = []
    for _, grains in sorted(kinds.items()):
        holders = [rank for rank, own in enumerate(has) if grains[0] in own]
        takers = [rank for rank, some in enumerate(sets[len(has) :]) if grains[0] in some and rank not in holders]
        wanted += [(np.array(grains), holders, taker) for taker in takers]
    if lost := {grain for grains, holders, _ in wanted if not holders for grain in grains.tolist()}:
        return sorted(lost), {}
    shares = _even_out([(holders, int(spans[grains].sum())) for grains, holders, _ in wanted])
    given: Given = defaultdict(list)
    for (grains, _, taker), share in zip(wanted, shares, strict=True):
        middles = np.cumsum(spans[grains]) - spans[grains] / 2
        edges = np.searchsorted(middles, np.cumsum(list(share.values()))[:-1])
        for giver, part in zip(share, np.split(grains, edges), strict=True):
            given[giver, taker] += part.tolist()
    return [], {pair: sorted(grains) for pair, grains in sorted(given.items()) if grains}


def _even_out(amounts: Sequence[tuple[Sequence[int], int]]) -> list[dict[int, int]]:
    """Distribute each amount on top of all others until a pass changes nothing, at most 32 times."""
    given: list[dict[int, int]] = [{} for _ in amounts]
    for _ in range(32):
        before = list(given)
        for number, (ranks, amount) in enumerate(amounts):
            others = given[:number] + given[number + 1 :]
            given[number] = _pour(amount, {rank: sum(share.get(rank, 0) for share in others) for rank in ranks})
        if given == before:
            break
    return given


def _pour(amount: int, totals: dict[int, int]) -> dict[int, int]:
    ranks = sorted(totals, key=lambda rank: (totals[rank], rank))
    for count in range(1, len(ranks) + 1):
        level, rest = divmod(amount + sum(totals[rank] for rank in ranks[:count]), count)
        if count == len(ranks) or level < totals[ranks[count]]:
            break
    shares = {rank: level - totals[rank] + (place < rest) for place, rank in enumerate(ranks[:count])}
    return {rank: share for rank, share in shares.items() if share}


def owned_of(holdings: Sequence[Int64s], spans: Int64s) -> list[list[int]]:
    """Return the grains that each rank owns: what it would send to a rank that has nothing and wants everything."""
    nothing = np.empty(0, dtype=np.int64)
    wants = [*[nothing] * len(holdings), np.arange(spans.size)]
    _, given = plan([*holdings, nothing], wants, spans)
    return [given.get((rank, len(holdings)), []) for rank in range(len(holdings))]


def are_apart(groups: Groups, arcs: Sequence[Sequence[Arc]], paths: Sequence[Path]) -> bool:
    """Return True if, at every grain, no two holders share a domain while another domain has none."""
    for at in {lo for of_rank in arcs for lo, _ in of_rank}:
        holders = [next(r for r in ranks if any(lo <= at < hi for lo, hi in arcs[r])) for ranks in groups]
        for depth in range(1 + max(map(len, paths))):
            for domain in {paths[rank][:depth] for rank in holders}:
                inner = [_within(paths[rank], depth, rank) for rank in holders if paths[rank][:depth] == domain]
                every = {_within(path, depth, rank) for rank, path in enumerate(paths) if path[:depth] == domain}
                if len(set(inner)) != min(len(every), len(inner)):
                    return False
    return True


def _within(path: Path, depth: int, rank: int) -> str | int:
    return path[depth] if depth < len(path) else rank
