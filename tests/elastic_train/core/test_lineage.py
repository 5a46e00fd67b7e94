"""The order of commits, and the tiling that shows that no step is lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lineage import Interval, commit_key, cut, extend, place_of, tiling_problems

places = st.tuples(st.integers(0, 10**9), st.integers(0, 10**13))


@given(places)
def test_a_commit_key_round_trips(place: tuple[int, int]) -> None:
    """place_of is the inverse of commit_key."""
    assert place_of(commit_key(*place)) == place


@pytest.mark.parametrize(
    "key",
    [
        "x",
        "commits/1-2.json",
        "commits/a-b.json",
        "commits/00000001-000000000002.json.tmp",
        "commits/000000001-000000000002.json",
    ],
)
def test_other_keys_are_not_commits(key: str) -> None:
    """A name that commit_key cannot produce is not a commit."""
    assert place_of(key) is None


@given(st.lists(st.tuples(st.integers(0, 10**8 - 1), st.integers(0, 10**12 - 1)), unique=True))
def test_commits_are_ordered_by_term_then_step(places: list[tuple[int, int]]) -> None:
    """The order of the keys is that of (term, step)."""
    keys = sorted(commit_key(*place) for place in places)
    assert [place_of(key) for key in keys] == sorted(places)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), min_size=1))
def test_extended_intervals_tile(commits: list[tuple[bool, int]]) -> None:
    """Whatever the commits and the changes of term, the intervals of a chain tile [0, T), one to a term in a row."""
    intervals: tuple[Interval, ...] = ()
    term, step = 1, 0
    for is_new_term, num_steps in commits:
        term += is_new_term
        intervals = extend(intervals, term, step, step + num_steps)
        step += num_steps
    assert tiling_problems(intervals, step) == []
    assert [interval.term for interval in intervals] == sorted({interval.term for interval in intervals})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 60))
def test_a_lineage_cut_at_a_step_tiles_up_to_it(lengths: list[int], step: int) -> None:
    """A cut lineage is the beginning of the whole one, and ends at the step or where the whole one ends."""
    intervals: tuple[Interval, ...] = ()
    for term, length in enumerate(lengths):
        done = intervals[-1].hi if intervals else 0
        intervals = extend(intervals, term, done, done + length)
    before = cut(intervals, step)
    assert tiling_problems(before, min(step, sum(lengths))) == []
    assert [interval.term for interval in before] == [interval.term for interval in intervals[: len(before)]]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data())
def test_a_planted_gap_or_overlap_is_detected(lengths: list[int], data: st.DataObject) -> None:
    """Moving any bound of a tiling breaks it, and the report names the steps."""
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    intervals = [Interval(1, end - length, end) for end, length in zip(ends, lengths, strict=True)]
    which = data.draw(st.integers(0, len(intervals) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    moved = intervals[which]
    intervals[which] = Interval(1, moved.lo, moved.hi + shift)
    assert tiling_problems(intervals, ends[-1])


@pytest.mark.parametrize(
    ("intervals", "total", "problem"),
    [
        ([(1, 0, 50), (2, 60, 80)], 80, "gap: steps [50, 60) are in no interval before [60, 80) of term 2"),
        (
            [(1, 0, 50), (2, 40, 80)],
            80,
            "overlap: steps [40, 50) are in [40, 80) of term 2 and before it, up to [0, 50) of term 1",
        ),
        ([(1, 5, 50)], 50, "gap: steps [0, 5) are in no interval before [5, 50) of term 1"),
        ([(1, 0, 50)], 60, "gap: steps [50, 60) are in no interval"),
        ([(1, 0, 50)], 40, "overlap: the intervals end at 50, beyond the last step 40"),
        ([(2, 0, 50), (1, 50, 60)], 60, "order: [50, 60) of term 1 follows [0, 50) of term 2, but terms only grow"),
        ([(1, 0, 0)], 0, "[0, 0) of term 1 holds no step"),
        ([], 3, "gap: steps [0, 3) are in no interval"),
    ],
)
def test_problems_are_described_in_words(intervals: list[tuple[int, int, int]], total: int, problem: str) -> None:
    """A report names the steps and the terms."""
    assert tiling_problems([Interval(*interval) for interval in intervals], total) == [problem]
