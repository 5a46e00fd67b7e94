"""A law that cannot fail proves nothing: each is broken here by a plausible mistake, which it must detect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from elastic_train.core.arrays import Int64s
from elastic_train.placement.arcs import Path
from elastic_train.placement.grains import GRAIN, Layout, Listed, Tensor, lay_out
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seating import Recut, Transfer, plan_recut
from elastic_train.placement.seats import Seat, seats_of
from tests.elastic_train.placement.laws import (
    blocks,
    check_apart,
    check_atoms,
    check_balance,
    check_cut,
    check_norms,
    check_partition,
    check_recut,
    check_sums,
    check_survives,
    leaf_chunks,
    squares_of_grains,
    sums_of_step,
)

LAYOUT = blocks(2, 12)
CIRCLE = circle_of(LAYOUT)
SEATS = seats_of([()] * 5, 2)
HELD = all_held(CIRCLE, SEATS)
EVERYTHING = np.arange(LAYOUT.num_grains)


def test_the_laws_hold_without_a_mistake() -> None:
    check_cut(LAYOUT)
    check_partition(SEATS, HELD, LAYOUT.num_grains, 2)
    check_balance(CIRCLE, LAYOUT, SEATS, HELD)


def test_a_tensor_that_begins_where_the_last_one_still_pads_is_caught() -> None:
    """Forgotten padding: a tensor of 70 elements takes 128."""
    layout = lay_out([Listed("a", (70,), "torch.float32"), Listed("b", (GRAIN,), "torch.float32")])
    a, b = layout.tensors
    wrong = Layout((a, Tensor(b.names, b.shape, b.units, b.flat, 70, b.first_grain)), layout.flats)
    with pytest.raises(AssertionError, match=r"alignment|flat tiling"):
        check_cut(wrong)


def test_a_cut_through_a_tensor_that_is_held_as_a_whole_is_caught() -> None:
    atoms = lay_out([Listed(f"b{i}", (12, GRAIN), "torch.float32", is_atomic=True) for i in range(2)])
    sections = np.zeros(atoms.num_grains, dtype=np.int64)
    check_atoms(atoms, all_held(circle_of(atoms), SEATS), sections)
    with pytest.raises(AssertionError, match=r"^atoms"):
        check_atoms(atoms, HELD, sections)
    with pytest.raises(AssertionError, match="two sections"):
        check_atoms(atoms, [], np.arange(atoms.num_grains) // 5)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_boundary_off_by_one_is_caught(shift: int) -> None:
    """One rank's holding ends a grain early or late: no rank has the grain, or two ranks have it."""
    wrong = [grains.copy() for grains in HELD]
    wrong[0] = wrong[0][:-1] if shift < 0 else np.union1d(wrong[0], wrong[1][:1])
    with pytest.raises(AssertionError, match="partition"):
        check_partition(SEATS, wrong, LAYOUT.num_grains, 2)


def test_shares_that_round_to_the_same_side_are_caught() -> None:
    """Half of the ranks have what all of them should."""
    wrong = [np.array_split(EVERYTHING, 4)[seat.slot % 4] for seat in seats_of([()] * 8, 1)]
    wrong = [grains if rank < 4 else grains[:0] for rank, grains in enumerate(wrong)]
    check_partition(seats_of([()] * 8, 1), wrong, LAYOUT.num_grains, 1)
    with pytest.raises(AssertionError, match="balance"):
        check_balance(CIRCLE, LAYOUT, seats_of([()] * 8, 1), wrong)


def test_groups_that_ignore_nodes_are_caught() -> None:
    """Ranks alternate between two nodes; groups of adjacent ranks would put both copies of a grain on one node."""
    paths: list[Path] = [("a",), ("b",), ("a",), ("b",)]
    wrong = all_held(CIRCLE, seats_of([()] * 4, 2))
    with pytest.raises(AssertionError, match="apart"):
        check_apart(paths, wrong, LAYOUT.num_grains)
    with pytest.raises(AssertionError, match="survival"):
        check_survives(paths, wrong, LAYOUT.num_grains, ["a"])


def plan_with(transfers: Sequence[Transfer], plan: Recut) -> Recut:
    return Recut(tuple(transfers), plan.lost)


def test_a_sender_without_the_grains_is_caught() -> None:
    """The plan takes grains from a rank that has them at another step only."""
    had = [EVERYTHING, EVERYTHING[:0], EVERYTHING[:0]]
    wants: list[Int64s] = [EVERYTHING] * 3
    plan = plan_recut(had, wants, LAYOUT.span)
    check_recut(had, wants, plan)
    wrong = [
        Transfer(1, to, grains) if to == 2 else Transfer(giver, to, grains) for giver, to, grains in plan.transfers
    ]
    with pytest.raises(AssertionError, match="a rank that has them"):
        check_recut(had, wants, plan_with(wrong, plan))


def test_a_rank_that_gets_nothing_of_what_it_wants_is_caught() -> None:
    """It may have the grains at another step: the model would mix two steps."""
    had = [EVERYTHING, EVERYTHING[:0]]
    plan = plan_recut(had, [EVERYTHING] * 2, LAYOUT.span)
    with pytest.raises(AssertionError, match="exactly what is missing"):
        check_recut(had, [EVERYTHING] * 2, plan_with([], plan))


def test_a_grain_that_is_sent_twice_is_caught() -> None:
    had = [EVERYTHING, EVERYTHING, EVERYTHING[:0]]
    wants: list[Int64s] = [EVERYTHING] * 3
    plan = plan_recut(had, wants, LAYOUT.span)
    wrong = [*plan.transfers, Transfer(0, 2, plan.transfers[1].grains[:1])]
    with pytest.raises(AssertionError, match="exactly what is missing, once"):
        check_recut(had, wants, plan_with(wrong, plan))


def test_a_grain_that_is_sent_to_one_who_has_it_is_caught() -> None:
    had = [EVERYTHING, EVERYTHING]
    plan = plan_recut(had, [EVERYTHING] * 2, LAYOUT.span)
    with pytest.raises(AssertionError, match="exactly what is missing, once"):
        check_recut(had, [EVERYTHING] * 2, plan_with([Transfer(0, 1, EVERYTHING[:1])], plan))


def test_a_loss_that_is_passed_over_is_caught() -> None:
    had = [EVERYTHING[:5], EVERYTHING[:0]]
    wants = [EVERYTHING, EVERYTHING[:0]]
    with pytest.raises(AssertionError, match="lost"):
        check_recut(had, wants, Recut())


def test_a_leaf_that_reaches_the_neighbours_grains_is_caught() -> None:
    """A chunk's boundary is off by one grain: its owner misses a leaf, another rank adds it twice."""

    def shifted(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Transfer]:
        return [
            chunk._replace(grains=chunk.grains[1:]) if chunk.taker == 1 else chunk
            for chunk in leaf_chunks(rank, seats, holdings)
        ]

    with pytest.raises(AssertionError):
        check_sums(SEATS, HELD, 8, sums_of_step(SEATS, HELD, 8, shifted))


def test_lanes_in_one_run_for_each_rank_are_caught_by_the_number_of_sums() -> None:
    """Contiguous lanes need a counter per rank: more sums at once than the tree is deep."""
    seats = seats_of([()] * 16, 1)
    with pytest.raises(AssertionError, match="few sums"):
        sums_of_step(seats, all_held(CIRCLE, seats), 64, deal=contiguous)


def contiguous(seat: Seat, num_ranks: int, num_lanes: int) -> list[Sequence[int]]:
    """Deal turns in which every rank computes the next lane of its own run."""
    each = num_lanes // num_ranks
    return [[rank * each + turn for rank in range(num_ranks)] for turn in range(each)]


def test_a_grain_that_counts_twice_is_caught() -> None:
    """With both copies of a grain in the sum, the norm is that of another gradient."""
    values = [torch.full((GRAIN,), 0.5 + number) for number in range(4)]
    squares = dict(enumerate(squares_of_grains(values).tolist()))
    with pytest.raises(AssertionError, match="norm"):
        check_norms(squares | {2: 2 * squares[2]}, squares)


def test_a_norm_over_other_blocks_is_caught() -> None:
    """Halves of a grain are summed separately and then added, in float32, as a kernel might."""
    values = torch.randn(GRAIN, generator=torch.Generator().manual_seed(5))
    wrong = float(values[:1000].square().sum() + values[1000:].square().sum())
    with pytest.raises(AssertionError, match="norm"):
        check_norms({0: wrong}, {0: float(squares_of_grains([values]))})
