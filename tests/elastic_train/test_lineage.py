"""The order of commits, the chain of ancestors, and the tiling that shows that no step is lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.lineage import (
    CommitRef,
    Interval,
    ancestors,
    commit_key,
    extend,
    head_of,
    place_of,
    tiling_problems,
)
from elastic_train.order import Cursor

places = st.tuples(st.integers(0, 10**9), st.integers(0, 10**13))


def commit(term: int, step: int, parent: CommitRef | None = None) -> CommitRef:
    """Return a commit whose digest is its place."""
    key = commit_key(term, step)
    return CommitRef(term, step, key, f"digest of {key}", parent.digest if parent else None, Cursor(0, step))


@given(places)
def test_a_key_names_its_place(place: tuple[int, int]) -> None:
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
def test_other_keys_name_nothing(key: str) -> None:
    """What commit_key would not have written is no commit."""
    assert place_of(key) is None


@given(st.lists(st.tuples(st.integers(0, 10**8 - 1), st.integers(0, 10**12 - 1)), unique=True))
def test_commits_are_ordered_by_term_then_step(unordered: list[tuple[int, int]]) -> None:
    """The order is (term, step), and is that of the keys."""
    commits = [commit(*place) for place in unordered]
    by_place = sorted(commits, key=lambda ref: ref.place)
    assert [ref.place for ref in by_place] == sorted(unordered)
    assert [ref.key for ref in by_place] == sorted(ref.key for ref in commits)
    assert head_of(commits) == (by_place[-1] if by_place else None)


def test_a_late_commit_of_an_older_term_is_not_the_head() -> None:
    """A higher step does not outweigh a higher term."""
    assert head_of([commit(1, 900), commit(2, 10)]) == commit(2, 10)
    assert head_of([]) is None


def test_ancestors_are_walked_by_digest() -> None:
    """The chain leaves out what is not in it, and ends where a parent is unknown."""
    first = commit(1, 10)
    second = commit(1, 20, first)
    late = commit(1, 30, second)
    third = commit(2, 25, second)
    by_digest = {ref.digest: ref for ref in (first, second, late, third)}
    assert list(ancestors(third, by_digest)) == [second, first]
    assert list(ancestors(third, {second.digest: second})) == [second]
    assert list(ancestors(first, by_digest)) == []


def test_a_parent_after_its_child_is_refused() -> None:
    """A chain that does not go back is no lineage, and is not walked for ever."""
    first = commit(2, 10)
    child = commit(1, 20, first)
    with pytest.raises(ValueError, match="does not come before"):
        list(ancestors(child, {first.digest: first}))


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


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.data())
def test_a_planted_gap_or_overlap_is_seen(lengths: list[int], data: st.DataObject) -> None:
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
def test_problems_are_told_in_words(intervals: list[tuple[int, int, int]], total: int, problem: str) -> None:
    """A report names the steps and the terms."""
    assert tiling_problems([Interval(*interval) for interval in intervals], total) == [problem]
