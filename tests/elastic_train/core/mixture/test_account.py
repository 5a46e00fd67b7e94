"""The account of a mixture: sums of each source tell a repeated or missing sample, whatever holes leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.accounting import CoverageSums, Hole
from elastic_train.core.arrays import Int64s, ranges_of
from elastic_train.core.mixture import Mixture, check_passes, expected_sums_of, sums_of_sources
from elastic_train.core.order import Cursor
from elastic_train.errors import CoverageError
from tests.elastic_train.core.mixture.test_dealing import mixtures, order_of

MICRO_BATCH = 3


@dataclass
class Run:
    """Steps of a mixture, as training takes them, without the samples of holes."""

    mixture: Mixture
    holes: Sequence[Hole] = ()

    def __post_init__(self) -> None:
        self.wholes = [
            (f"source-{number}", CoverageSums.of_all(order.num_samples))
            for number, order in enumerate(self.mixture.orders)
        ]
        self.step, self.sums = 0, tuple(CoverageSums() for _ in self.wholes)

    def ids(self, step: int) -> Int64s:
        cursor = self.mixture.cursor_at(step, MICRO_BATCH)
        ids = np.concatenate(
            [self.mixture.samples(cursor, lane, MICRO_BATCH).ids for lane in range(self.mixture.num_lanes)]
        )
        for hole in self.holes:
            if hole.since <= step:
                ids = ids[(ids < hole.lo) | (ids >= hole.hi)]
        return ids

    def take(self, ids: Int64s | None = None) -> None:
        """Apply the next step, or these samples in its place, and compare what it ends."""
        more = sums_of_sources(self.ids(self.step) if ids is None else ids, self.mixture.first_id)
        self.sums = tuple(before + own for before, own in zip(self.sums, more, strict=True))
        before, after = (self.mixture.cursor_at(at, MICRO_BATCH) for at in (self.step, self.step + 1))
        in_effect = [hole for hole in self.holes if hole.since <= self.step]
        check_passes(self.mixture, self.wholes, before, after, in_effect, self.sums)
        self.step += 1


def hole_of(mixture: Mixture, group: int, since: int, hi: int | None = None) -> Hole:
    """A row group, or its first samples, that are left out from a step on."""
    epoch, applied = mixture.applied_of_group(group, mixture.cursor_at(since, MICRO_BATCH))
    lo = int(mixture.group_first_id[group])
    end = lo + int(mixture.group_rows[group]) if hi is None else hi
    return Hole(group, "rows", group, lo, end, since, epoch, ranges_of(applied[(applied >= lo) & (applied < end)]), "")


@pytest.mark.heavy
@settings(max_examples=25)
@given(mixtures(), st.integers(1, 25), st.data())
def test_sums_are_what_the_order_and_the_holes_say_after_any_step(
    made: tuple[Mixture, object, object], num_steps: int, data: st.DataObject
) -> None:
    """At any place, not only where a source's epoch ends; training never stops of itself."""
    mixture = made[0]
    groups = data.draw(st.lists(st.integers(0, mixture.group_rows.size - 1), max_size=2, unique=True))
    holes = [hole_of(mixture, group, data.draw(st.integers(0, num_steps))) for group in groups]
    run = Run(mixture, holes)
    for step in range(num_steps):
        run.take()
        in_effect = [hole for hole in holes if hole.since <= step]
        for number, (_, whole) in enumerate(run.wholes):
            place = (step + 1) * MICRO_BATCH
            assert expected_sums_of(mixture, number, whole, place, in_effect) == run.sums[number]


def test_a_hole_of_one_sample_counts_as_one() -> None:
    """Begun in the midst of a source's second epoch, in which lanes have had some of it."""
    mixture = Mixture([order_of(20, 2, 1), order_of(9, 2, 2)], [2, 1])
    group = int(mixture.first_group[1])
    lo = int(mixture.group_first_id[group])
    run = Run(mixture, [hole_of(mixture, group, 7, lo + 1)])
    for _ in range(40):
        run.take()
    assert run.sums[1].count + 1 < int(sum(mixture.counts(lane, 120)[1] for lane in range(2)))


@pytest.mark.parametrize("how", ["repeated", "left out", "another's", "of the other source"])
@pytest.mark.parametrize("source", [0, 1])
def test_a_wrong_sample_ends_the_run_where_its_source_is_passed(how: str, source: int) -> None:
    """Once; by then the source is named, and nothing before is accused."""
    mixture = Mixture([order_of(20, 2, 1), order_of(9, 2, 2)], [2, 1])
    run = Run(mixture)
    lo = int(mixture.first_id[source])
    for _ in range(30):
        ids = run.ids(run.step)
        of_source = np.flatnonzero((ids >= lo) & (ids < lo + mixture.orders[source].num_samples))
        if run.step == 1:
            at, other = int(of_source[0]), int(mixture.first_id[1 - source])
            wrong = {"repeated": ids[at : at + 1], "left out": ids[:0], "another's": np.array([lo]) + (ids[at] == lo)}
            wrong["of the other source"] = np.array([other])
            kept = np.delete(ids, [] if how == "repeated" else [at])
            ids = np.concatenate([kept, wrong[how]])
        before = mixture.num_passes(run.step * MICRO_BATCH)
        try:
            run.take(ids)
        except CoverageError as error:
            named = {source} if how != "of the other source" else {0, 1}
            assert any(f"source 'source-{number}' were not applied once" in str(error) for number in named)
            ended = np.flatnonzero(mixture.num_passes((run.step + 1) * MICRO_BATCH) > before)
            assert named & set(ended.tolist())
            return
    pytest.fail("nothing noticed it")


def test_the_sums_of_ranks_add_up() -> None:
    """Each over the samples that its lanes read."""
    mixture = Mixture([order_of(20, 3, 1), order_of(9, 3, 2)], [2, 1])
    ids = mixture.samples(Cursor(0, 6), 1, 30).ids
    first, second = (sums_of_sources(part, mixture.first_id) for part in (ids[:11], ids[11:]))
    whole = sums_of_sources(ids, mixture.first_id)
    assert tuple(one + other for one, other in zip(first, second, strict=True)) == whole
    assert sum(each.count for each in whole) == 30
