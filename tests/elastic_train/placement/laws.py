"""The laws of sharding, as functions that raise AssertionError with the law's name; and strategies that draw models.

They are functions so that they also run against deliberately wrong variants (`test_planted.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Counter as LaneCounter
from elastic_train.core.lanes import Part, merge_plan, parts_of, root_of
from elastic_train.parallel.devices.squares import grain_squares
from elastic_train.placement.arcs import Path
from elastic_train.placement.grains import ALIGN, GRAIN, Layout, Listed, cut_along, lay_out
from elastic_train.placement.holdings import Circle, Run, shared_with
from elastic_train.placement.seating import Recut, Transfer
from elastic_train.placement.seats import Seat, deal_lanes, group_lanes

SHAPES = st.one_of(st.just(()), st.tuples(st.integers(0, 200)), st.tuples(st.integers(1, 300), st.integers(1, 3000)))


# Created once: creating and validating a strategy takes longer than drawing from it.
BLOCKS, IS_SO = st.integers(0, 3), st.booleans()
DTYPES, GROUPS = st.sampled_from(["torch.float32", "torch.bfloat16"]), st.sampled_from([0, 0, 1, None])


@st.composite
def models(draw: st.DrawFn, most: int = 12, *, has_atoms: bool = False) -> list[Listed]:
    """Draw a model: tensors in several units and parameter groups, including frozen and tied ones.

    If it `has_atoms`, the tensors of parameter group 1 are atomic (never split).
    """
    listed: list[Listed] = []
    for number in range(draw(st.integers(1, most))):
        unit = f"block{draw(BLOCKS)}"
        if listed and draw(IS_SO) and draw(IS_SO):
            tied = draw(st.sampled_from([one for one in listed if one.memory is not None]))
            listed.append(replace(tied, name=f"t{number}", unit=unit))
            continue
        dtype, group, shape = draw(DTYPES), draw(GROUPS), draw(SHAPES)
        cut = cut_along(shape, draw(st.sampled_from([None, *range(len(shape))])))
        listed.append(Listed(f"t{number}", shape, dtype, unit, group, number, cut, has_atoms and group == 1))
    return listed


def blocks(num_blocks: int, grains: int) -> Layout:
    """Draw a model of equal blocks, each a unit with one tensor of `grains` whole grains."""
    return lay_out([Listed(f"b{i}", (grains, GRAIN), "torch.float32", f"b{i}") for i in range(num_blocks)])


def check_cut(layout: Layout) -> None:
    """Check that grains tile every tensor, and every part of it at any degree; their spans tile every flat vector."""
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in range(layout.num_grains):
        pieces[int(layout.tensor_of[number])].append((int(layout.lo[number]), int(layout.hi[number])))
        start = int(layout.start[number])
        places[int(layout.flat_of[number])].append((start, start + int(layout.span[number])))
    for number, tensor in enumerate(layout.tensors):
        ends = [0, *(hi for _, hi in pieces[number])]
        assert [lo for lo, _ in pieces[number]] == ends[:-1] and ends[-1] == tensor.numel, "tensor tiling"
        assert all(hi - lo <= GRAIN for lo, hi in pieces[number]), "short grains"
        assert len(pieces[number]) == len(tensor.grains), "a tensor's grains"
        if tensor.cut is None:
            assert all(hi - lo == GRAIN for lo, hi in pieces[number][:-1]), "whole grains"
        else:
            size = tensor.shape[tensor.cut.dim]
            degrees = [degree for degree in range(1, 65) if size % degree == 0]
            assert {part * tensor.numel // degree for degree in degrees for part in range(degree)} <= set(ends), "parts"
        assert tensor.start % ALIGN == 0, "alignment"
    for number, flat in enumerate(layout.flats):
        ends = [0, *(hi for _, hi in sorted(places[number]))]
        assert [lo for lo, _ in sorted(places[number])] == ends[:-1] and ends[-1] == flat.numel, "flat tiling"


def check_partition(seats: Sequence[Seat], holdings: Sequence[Int64s], num_grains: int, copies: int) -> None:
    """Check that each group holds every grain once, and that there are `copies` groups, or one per rank if fewer."""
    groups: dict[int, list[int]] = defaultdict(list)
    for seat, grains in zip(seats, holdings, strict=True):
        assert sorted(grains.tolist()) == grains.tolist(), "ascending"
        groups[seat.group] += grains.tolist()
    assert sorted(groups) == list(range(min(copies, len(seats)))), "number of groups"
    for grains in groups.values():
        assert sorted(grains) == list(range(num_grains)), "partition"
    assert sorted(seat.place for seat in seats) == list(range(len(seats))), "places"


def check_balance(circle: Circle, layout: Layout, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> None:
    """Check that a rank's elements differ from an even share of its group's by less than a grain, or the largest atomic
    tensor, for each of its arcs."""
    most = max([GRAIN, *(one.numel + ALIGN for one in layout.tensors if one.is_atomic)])
    for seat, grains in zip(seats, holdings, strict=True):
        assert abs(int(layout.span[grains].sum()) - circle.length / seat.size) < most * len(seat.arcs), "balance"


def check_atoms(layout: Layout, holdings: Sequence[Int64s], sections: Int64s) -> None:
    """Check that a rank that holds a grain of an atomic tensor holds all of it, contiguous in memory."""
    for one in (one for one in layout.tensors if one.is_atomic):
        for grains in holdings:
            assert np.isin(one.grains, grains).sum() in (0, len(one.grains)), "atoms"
        assert len({int(sections[grain]) for grain in one.grains}) <= 1, "an atom in two sections"


def check_apart(paths: Sequence[Path], holdings: Sequence[Int64s], num_grains: int) -> None:
    """Check that in every domain, a grain's holders are in as many subdomains as there are subdomains or holders."""
    holders: list[list[int]] = [[] for _ in range(num_grains)]
    for rank, grains in enumerate(holdings):
        for grain in grains.tolist():
            holders[grain].append(rank)
    for depth in range(max(map(len, paths)) + 1):
        inner: dict[Path, set[object]] = defaultdict(set)
        for rank, path in enumerate(paths):
            inner[path[:depth]].add(_inner(path, depth, rank))
        for ranks in holders:
            found: dict[Path, list[object]] = defaultdict(list)
            for rank in ranks:
                found[paths[rank][:depth]].append(_inner(paths[rank], depth, rank))
            for domain, names in found.items():
                assert len(set(names)) == min(len(inner[domain]), len(names)), "apart"


def _inner(path: Path, depth: int, rank: int) -> object:
    return path[depth] if depth < len(path) else rank


def check_survives(paths: Sequence[Path], holdings: Sequence[Int64s], num_grains: int, lost: Sequence[str]) -> None:
    """Check that the ranks outside some lost domains, given by their widest names, hold every grain."""
    left = [grains for path, grains in zip(paths, holdings, strict=True) if path[0] not in lost]
    assert np.unique(np.concatenate(left)).size == num_grains, "survival"


def check_recut(have: Sequence[Int64s], wants: Sequence[Int64s], plan: Recut) -> None:
    """Check that the transfers give each rank what it wants, each grain once, from ranks that have it."""
    has = [set(grains.tolist()) for grains in have]
    held = set().union(*has)
    wanted = {grain for grains in wants for grain in grains.tolist()}
    assert plan.lost.tolist() == sorted(wanted - held), "lost"
    if plan.lost.size:
        assert not plan.transfers, "nothing moves where something is lost"
        return
    got: list[Counter[int]] = [Counter() for _ in have]
    for giver, taker, grains in plan.transfers:
        assert set(grains.tolist()) <= has[giver], "a rank that has them"
        assert giver != taker, "no transfer to oneself"
        got[taker].update(grains.tolist())
    for rank, grains in enumerate(wants):
        needed = set(grains.tolist())
        assert got[rank] == Counter(needed - has[rank]), "exactly what is missing, once"


def check_norms(squares: Mapping[int, float], expected: Mapping[int, float]) -> None:
    """Check that sums by grain equal the uncut gradient's, bit for bit, with each grain once."""
    assert dict(squares) == dict(expected), "norm"


Tree = int | tuple["Tree", "Tree"]


def lane_tree(num_lanes: int) -> Tree:
    """Return the tree of all lanes, symbolically."""
    values: dict[Part, Tree] = {}
    counter: LaneCounter[Tree] = LaneCounter(num_lanes, lambda left, right: (left, right))
    for lane in range(num_lanes):
        counter.push(Part(0, lane), lane)
    values = counter.parts
    assert list(values) == [root_of(num_lanes)]
    return values[root_of(num_lanes)]


Leaf = tuple[int, int]


def leaf_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Transfer]:
    """Return the transfers of each leaf that a rank sends: to every other holder of its group, that holder's grains.

    The first receiver is its right neighbour, so that not all ranks send to the same receiver at once.
    """
    mine = seats[rank]
    others = [other for other, seat in enumerate(seats) if seat.group == mine.group and other != rank]
    others.sort(key=lambda other: (seats[other].slot - mine.slot) % mine.size)
    return [Transfer(rank, other, holdings[other]) for other in others if holdings[other].size]


def sum_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Transfer]:
    """Return the transfers of sums that a rank sends to each holder in another group: the grains that both hold."""
    others = [(rank + distance) % len(seats) for distance in range(1, len(seats))]
    others = [other for other in others if seats[other].group != seats[rank].group]
    both = zip(others, shared_with(holdings[rank], [holdings[other] for other in others]), strict=True)
    return [Transfer(rank, other, grains) for other, grains in both if grains.size]


def num_sent(
    rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s], spans: Int64s, num_lanes: int
) -> tuple[int, int]:
    """Return the elements that a rank sends in a step: the leaves of its lanes, and the sums of its holdings.

    `spans` has the elements of every grain, shape (grains,). With k lanes, a group of S ranks and n elements, this is
    about k * n * (S - 1) / S, and n / S * (groups - 1) for each of its group's sums.
    """
    seat = seats[rank]
    num_turns = sum(seat.slot < len(lanes) for lanes in deal_lanes(seat, len(seats), num_lanes))
    leaf = sum(int(spans[chunk.grains].sum()) for chunk in leaf_chunks(rank, seats, holdings))
    sums = sum(int(spans[chunk.grains].sum()) for chunk in sum_chunks(rank, seats, holdings))
    return num_turns * leaf, len(parts_of(group_lanes(seat, len(seats), num_lanes), num_lanes)) * sums


def sums_of_step(
    seats: Sequence[Seat],
    holdings: Sequence[Int64s],
    num_lanes: int,
    leaf_chunks_of: Callable[..., Sequence[Transfer]] = leaf_chunks,
    deal: Callable[[Seat, int, int], Sequence[Sequence[int]]] = deal_lanes,
) -> list[dict[int, Tree]]:
    """Run a step's exchange symbolically; return every rank's sums by grain, as trees of lanes.

    Asserts the law's bound on the number of sums that a holder keeps at once.
    """
    num_ranks = len(seats)
    counters = [
        {grain: LaneCounter[Tree](num_lanes, lambda left, right: (left, right)) for grain in grains.tolist()}
        for grains in holdings
    ]
    turns = [deal(seat, num_ranks, num_lanes) for seat in seats]
    for turn in range(max(map(len, turns))):
        arriving: list[list[tuple[int, int]]] = [[] for _ in seats]
        for rank, seat in enumerate(seats):
            if turn < len(turns[rank]) and seat.slot < len(turns[rank][turn]):
                lane = turns[rank][turn][seat.slot]
                arriving[rank] += [(lane, grain) for grain in holdings[rank].tolist()]
                for _, to, grains in leaf_chunks_of(rank, seats, holdings):
                    arriving[to] += [(lane, grain) for grain in grains.tolist()]
        for rank, leaves in enumerate(arriving):
            for lane, grain in sorted(leaves):
                counters[rank][grain].push(Part(0, lane), lane)
                assert len(counters[rank][grain].parts) <= 1 + (num_lanes - 1).bit_length(), "few sums"
    sums: list[dict[int, dict[Part, Tree]]] = [{g: dict(c.parts) for g, c in own.items()} for own in counters]
    arrived = [
        (to, grain, counters[rank][grain].parts)
        for rank in range(num_ranks)
        for _, to, grains in sum_chunks(rank, seats, holdings)
        for grain in grains.tolist()
    ]
    for to, grain, parts in arrived:
        assert not parts.keys() & sums[to][grain].keys(), "a sum comes twice"
        sums[to][grain] |= parts
    return [{grain: _finish(parts, num_lanes) for grain, parts in own.items()} for own in sums]


def _finish(parts: dict[Part, Tree], num_lanes: int) -> Tree:
    for left, right, parent in merge_plan(parts, num_lanes):
        parts[parent] = (parts.pop(left), parts.pop(right))
    return parts[root_of(num_lanes)]


def check_sums(
    seats: Sequence[Seat], holdings: Sequence[Int64s], num_lanes: int, sums: Sequence[dict[int, Tree]]
) -> None:
    """Check that every holder of every grain has the sum along the one tree of lanes."""
    expected = lane_tree(num_lanes)
    for seat, grains, own in zip(seats, holdings, sums, strict=True):
        assert list(own) == grains.tolist(), "holders"
        assert all(tree == expected for tree in own.values()), (
            f"the tree, in {group_lanes(seat, len(seats), num_lanes)}"
        )


def check_runs(layout: Layout, grains: Int64s, runs: Sequence[Run]) -> None:
    """Check that runs cover exactly the grains' spans, with neighbours joined."""
    expected = [
        Run(int(layout.flat_of[grain]), int(layout.start[grain]), int(layout.start[grain] + layout.span[grain]))
        for grain in grains.tolist()
    ]
    assert _joined(runs) == _joined(expected), "runs"
    assert all((a.flat, a.hi) != (b.flat, b.lo) for a, b in itertools.pairwise(runs)), "joined"


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Return runs in order, with neighbours joined."""
    found: list[Run] = []
    for flat, lo, hi in sorted(runs):
        is_next = bool(found) and (found[-1].flat, found[-1].hi) == (flat, lo)
        found.append(Run(flat, found.pop().lo if is_next else lo, hi))
    return found


def squares_of_grains(grains: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each grain; each grain is a vector."""
    return grain_squares(grains, [(grain.numel(),) for grain in grains])
