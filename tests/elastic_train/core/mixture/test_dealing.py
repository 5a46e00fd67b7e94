"""Laws of mixtures: shares are kept, every epoch of every source is whole, and only lane and place decide."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config.datasets import shares_of
from elastic_train.core.arrays import group_of
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.mixture import LONGEST_TURN, Mixture, Run
from elastic_train.core.order import Cursor, Order

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


def by_epoch(runs: list[Run]) -> dict[int, Counter[int]]:
    """Return how often lanes have taken each sample of a source, by the source's epochs."""
    taken: dict[int, Counter[int]] = defaultdict(Counter)
    for run in runs:
        for epoch, id_ in zip(run.epochs.tolist(), run.ids.tolist(), strict=True):
            taken[epoch][id_] += 1
    return taken


@pytest.mark.heavy
@settings(max_examples=15)
@given(mixtures(), st.integers(0, 120))
def test_every_epoch_of_every_source_has_each_sample_once(
    made: tuple[Mixture, list[Order], list[int]], length: int
) -> None:
    """What lanes have taken: nothing twice in an epoch, nothing left out of one that is over, in the source's order."""
    mixture, orders, _ = made
    of_lanes = [mixture.runs(lane, 0, length) for lane in range(mixture.num_lanes)]
    for number, order in enumerate(orders):
        runs = [of_lane[number] for of_lane in of_lanes]
        taken = by_epoch(runs)
        num_passes = int(mixture.num_passes(length)[number])
        whole = Counter(range(order.num_samples))
        assert all(set(counter.values()) <= {1} for counter in taken.values())
        assert all(taken[epoch] == whole for epoch in range(num_passes))
        assert taken[num_passes] != whole
        ahead = Counter(int(id_) for ids in mixture.ahead(number, num_passes, length) for id_ in ids)
        assert ahead == sum((counter for epoch, counter in taken.items() if epoch >= num_passes), Counter())
        for lane, run in enumerate(runs):
            for epoch in np.unique(run.epochs).tolist():
                ids = run.ids[run.epochs == epoch]
                assert (ids == order.epoch(epoch).ids((lane + epoch) % order.num_lanes, 0, len(ids))).all()


@given(mixtures(), st.integers(0, 10**6))
def test_lanes_stay_together_however_many_epochs_there_were(
    made: tuple[Mixture, list[Order], list[int]], length: int
) -> None:
    """A lane whose part of an epoch is shorter has a longer one later: what lanes are ahead by does not grow."""
    mixture, orders, _ = made
    for number, order in enumerate(orders):
        num_passes = int(mixture.num_passes(length)[number])
        num_ahead = sum(len(ids) for ids in mixture.ahead(number, num_passes, length))
        assert num_ahead < order.num_samples + 3 * mixture.num_lanes


@given(mixtures(), st.integers(1, 4), st.integers(1, 7))
def test_steps_end_with_the_pass_of_the_slowest_source(
    made: tuple[Mixture, list[Order], list[int]], num_passes: int, micro_batch: int
) -> None:
    mixture, _, _ = made
    step = mixture.steps_for(num_passes, micro_batch)
    assert mixture.num_passes(step * micro_batch).min() >= num_passes
    assert mixture.num_passes((step - 1) * micro_batch).min() < num_passes


@pytest.mark.heavy
@settings(max_examples=50)
@given(mixtures(), st.integers(0, 20), st.integers(1, 12), st.integers(1, 5))
def test_a_lane_has_the_blocks_of_each_step(
    made: tuple[Mixture, list[Order], list[int]], first: int, num_steps: int, micro_batch: int
) -> None:
    """Each step's samples are in the blocks loaded for it, and blocks come in the order of their first steps."""
    mixture, _, _ = made
    lane = mixture.num_lanes - 1
    blocks = list(mixture.blocks(lane, range(first, first + num_steps), micro_batch))
    assert [block.first for block in blocks] == sorted(block.first for block in blocks)
    assert all(block.first < first + num_steps and block.end > first for block in blocks)
    for step in range(first, first + num_steps):
        ids = mixture.samples(mixture.cursor_at(step, micro_batch), lane, micro_batch).ids
        needed = set(group_of(mixture.group_first_id, ids).tolist())
        assert needed <= {int(g) for block in blocks if block.first <= step < block.end for g in block.groups}


@pytest.mark.heavy
@settings(max_examples=50)
@given(mixtures(), st.integers(0, 80), st.data())
def test_what_was_applied_of_a_row_group_is_what_lanes_have_taken_of_it(
    made: tuple[Mixture, list[Order], list[int]], place: int, data: st.DataObject
) -> None:
    """With what whole passes had, it is every sample of the group that any lane has taken."""
    mixture, _, _ = made
    group = data.draw(st.integers(0, mixture.group_rows.size - 1))
    num_passes, applied = mixture.applied_of_group(group, Cursor(0, place))
    first = int(mixture.group_first_id[group])
    within = range(first, first + int(mixture.group_rows[group]))
    every = [mixture.samples(Cursor(0, 0), lane, place).ids.tolist() for lane in range(mixture.num_lanes)]
    taken = Counter(id_ for ids in every for id_ in ids if id_ in within)
    assert taken == Counter(applied.tolist()) + Counter(dict.fromkeys(within, num_passes))


@pytest.mark.heavy
@settings(max_examples=30)
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
    assert runs[1].epochs[0] == (64 * (int(mixture.counts(63, far)[1]) + 98 + 1) - 1) // 100 - 63
    assert mixture.steps_for(10**9, 8) > 10**9 and mixture.num_passes(far).tolist() == [
        1_478_081_724,
        19_200_000_000_000,
    ]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_weights_become_shares(weights: list[float]) -> None:
    """In their ratio, as near as a ten-thousandth allows."""
    shares = shares_of(weights)
    assert sum(shares) <= 10_000 and min(shares) >= 1
    exact = [weight / sum(weights) * sum(shares) for weight in weights]
    assert all(abs(share - wanted) <= 1 + len(weights) for share, wanted in zip(shares, exact, strict=True))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], (7, 3)),
        ([70, 30], (7, 3)),
        ([1], (1,)),
        ([2.5, 1], (5, 2)),
        ([0.333, 0.667], (333, 667)),
        ([1e-9, 1], (1, 9999)),
        ([12345, 67891], (1539, 8461)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: list[float], shares: tuple[int, ...]) -> None:
    """0.7 is seven tenths, and no binary fraction; only what has too many places is rounded."""
    assert shares_of(weights) == shares


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
