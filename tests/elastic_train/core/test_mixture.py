"""Laws of mixtures: shares are kept, every epoch of every source is whole, and only lane and place decide."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.lanes import owned_lanes
from elastic_train.core.mixture import LONGEST_TURN, Mixture, shares_of
from elastic_train.core.order import Order

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
LANES = st.integers(1, 5)


def order_of(num_samples: int, num_lanes: int, seed: int) -> Order:
    rows = [3] * (num_samples // 3) + [num_samples % 3] * (num_samples % 3 > 0)
    return Order(rows, num_lanes=num_lanes, seed=seed, block_row_groups=2)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Mixture, list[Order], list[int]]:
    shares, num_lanes = draw(SHARES), draw(LANES)
    sizes = draw(st.lists(st.integers(num_lanes, 30), min_size=len(shares), max_size=len(shares)))
    orders = [order_of(size, num_lanes, seed) for seed, size in enumerate(sizes)]
    return Mixture(orders, shares), orders, shares


@settings(max_examples=50)
@given(mixtures(), st.integers(0, 120))
def test_every_epoch_of_every_source_has_each_sample_once(
    made: tuple[Mixture, list[Order], list[int]], length: int
) -> None:
    """What lanes have taken: nothing twice in an epoch, nothing left out of one that is over, in the source's order."""
    mixture, orders, _ = made
    for number, order in enumerate(orders):
        taken: dict[int, Counter[int]] = defaultdict(Counter)
        num_whole = []
        for lane in range(mixture.num_lanes):
            run = mixture.runs(lane, 0, length)[number]
            for epoch in np.unique(run.epochs).tolist():
                ids = run.ids[run.epochs == epoch]
                assert (ids == order.epoch(epoch).ids(lane, 0, len(ids))).all()
                taken[epoch].update(ids.tolist())
            lo, hi = order.lane_bounds(lane)
            num_whole.append(int(mixture.counts(lane, length)[number]) // (hi - lo))
        assert all(set(counter.values()) <= {1} for counter in taken.values())
        for epoch in range(min(num_whole)):
            assert set(taken[epoch]) == set(range(order.num_samples))


@given(mixtures(), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_places_may_be_asked_for_in_any_pieces(made: tuple[Mixture, list[Order], list[int]], sizes: list[int]) -> None:
    """A resume at any place goes on with what one go would have taken: the cursor is the state."""
    mixture, _, shares = made
    bounds = np.cumsum([0, *sizes])
    lane = mixture.num_lanes - 1
    whole = mixture.runs(lane, 0, int(bounds[-1]))
    pieces = [mixture.runs(lane, int(lo), int(hi)) for lo, hi in pairwise(bounds)]
    for number in range(len(shares)):
        for name in ("ids", "epochs"):
            joined = np.concatenate([getattr(piece[number], name) for piece in pieces])
            assert (joined == getattr(whole[number], name)).all()
        places = np.concatenate([piece[number].places + lo for piece, lo in zip(pieces, bounds, strict=False)])
        assert (places == whole[number].places).all()
    places = np.concatenate([run.places for run in whole])
    assert sorted(places.tolist()) == list(range(int(bounds[-1])))


@given(mixtures(), st.integers(0, 300), st.integers(0, 50))
def test_shares_are_kept_everywhere(made: tuple[Mixture, list[Order], list[int]], lo: int, length: int) -> None:
    """In every turn exactly, and in any places of any lane to within a few: as an even spread allows."""
    mixture, _, shares = made
    turn = sum(shares)
    for lane in range(mixture.num_lanes):
        taken = mixture.counts(lane, lo + length) - mixture.counts(lane, lo)
        assert taken.sum() == length
        assert (np.bincount(mixture.sources(lane, lo, lo + length), minlength=len(shares)) == taken).all()
        assert (mixture.counts(lane, lo + turn) - mixture.counts(lane, lo) == shares).all()
        exact = length * np.array(shares) / turn
        assert (abs(taken - exact) <= 1 + len(shares) * np.array(shares) / turn).all()


@given(mixtures(), st.integers(1, 5), st.integers(0, 40))
def test_any_number_of_ranks_takes_the_same(
    made: tuple[Mixture, list[Order], list[int]], num_ranks: int, step: int
) -> None:
    """A step has the same samples whoever owns the lanes, and about the shares, since lanes begin apart."""
    mixture, _, _ = made
    num_ranks = min(num_ranks, mixture.num_lanes)
    lo, hi = 2 * step, 2 * step + 2

    def step_of(ranks: int) -> Counter[tuple[int, int, int]]:
        taken: Counter[tuple[int, int, int]] = Counter()
        for rank in range(ranks):
            for lane in owned_lanes(rank, ranks, mixture.num_lanes):
                for number, run in enumerate(mixture.runs(lane, lo, hi)):
                    taken.update((number, int(e), int(i)) for e, i in zip(run.epochs, run.ids, strict=True))
        return taken

    assert step_of(num_ranks) == step_of(1)
    assert step_of(1).total() == 2 * mixture.num_lanes


def test_the_turn_is_spread_evenly() -> None:
    """A golden turn: a run goes on only in the order in which it began."""
    mixture = Mixture([order_of(12, 1, 0), order_of(9, 1, 1), order_of(5, 1, 2)], [5, 3, 1])
    assert mixture.sources(0, 0, 18).tolist() == [0, 1, 0, 0, 1, 2, 0, 1, 0] * 2
    assert mixture.counts(0, 13).tolist() == [8, 4, 1]
    halves = Mixture([order_of(12, 2, 0), order_of(9, 2, 1)], [1, 1])
    assert [halves.sources(lane, 0, 4).tolist() for lane in (0, 1)] == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_a_place_far_away_costs_no_more_than_the_first() -> None:
    """Nothing is counted one by one: a place after 10^15 others, of 42 million samples."""
    mixture = Mixture([Order([2048] * 20_508, num_lanes=64, seed=1), order_of(100, 64, 2)], shares_of([0.97, 0.03]))
    far = 10**15
    runs = mixture.runs(63, far, far + 1000)
    assert [len(run.ids) for run in runs] == [970, 30]
    assert runs[1].epochs[0] == int(mixture.counts(63, far)[1]) // 2


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_weights_become_shares(weights: list[float]) -> None:
    shares = shares_of(weights)
    assert sum(shares) == 1000 and min(shares) >= 1
    exact = [weight / sum(weights) * 1000 for weight in weights]
    assert all(abs(share - wanted) <= 1 + len(weights) for share, wanted in zip(shares, exact, strict=True))


@pytest.mark.parametrize(
    ("sizes", "lanes", "shares", "message"),
    [
        ([], [], [], "0 sources have 0 shares"),
        ([9], [2], [1, 1], "1 sources have 2 shares"),
        ([9, 9], [2, 3], [1, 1], r"the sources have \[2, 3\] lanes"),
        ([9, 2], [3, 3], [1, 1], "source 1 has 2 samples for 3 lanes"),
        ([9], [3], [0], "shares must be at least 1"),
        ([9], [3], [LONGEST_TURN + 1], "add up to at most 65536"),
    ],
)
def test_an_impossible_mixture_is_refused(sizes: list[int], lanes: list[int], shares: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture([order_of(size, num, 0) for size, num in zip(sizes, lanes, strict=True)], shares)


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("nan")], [float("inf")]])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be positive numbers"):
        shares_of(weights)
