"""Retention policies: what each keeps, and that pruning often keeps the same as pruning once at the end."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.commits.record import CommitRecord, Improvement
from elastic_train.checkpoint.commits.retention_policies import (
    Best,
    Candidate,
    EverySeconds,
    EverySteps,
    Last,
    Retention,
)
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import FileRecord
from elastic_train.errors import ConfigError
from tests.elastic_train.checkpoint.commit_samples import commit_steps


@functools.cache
def some_record() -> CommitRecord:
    """Return the record of some commit."""
    return commit_steps(open_store("memory://policies/run"), 1)[0]


def candidate(
    step: int, *, at: float = 0.0, loss: float | None = None, size: int = 10, known: Improvement | None = None
) -> Candidate:
    """Return a commit named after its step."""
    files = {"file": FileRecord(size, (0,), "")}
    record = dataclasses.replace(
        some_record(), step=step, created_at=at, metrics={"loss": loss}, files=files, improvement=known
    )
    return Candidate(str(step), step, lambda: record)


def unreadable(step: int) -> Candidate:
    """Return a commit whose record is damaged."""
    return Candidate(str(step), step, lambda: None)


def test_each_policy_keeps_what_it_promises() -> None:
    """Policies count by number, by steps, by time or by metric."""
    commits = [
        unreadable(70),
        candidate(65, at=650, loss=3.0),
        candidate(50, at=500, loss=1.0),
        candidate(40, at=400, loss=1.0),
        candidate(25, at=250, loss=None),
        candidate(10, at=100, loss=2.0),
    ]
    assert list(Last(2).wanted(commits)) == ["70", "65"]
    assert sorted(EverySteps(20).wanted(commits)) == ["25", "40", "65"]
    assert sorted(EverySeconds(300).wanted(commits)) == ["10", "40", "65"]
    assert Best.parse("min loss").wanted(commits) == ["40"]
    assert Best.parse("max loss").wanted(commits) == ["65"]
    assert Best.parse("max f1").wanted(commits) == []


def test_the_best_commit_is_the_one_that_the_run_counts_as_best() -> None:
    """A later one may have a value that is better by less than early stopping asks for, or that of an earlier step."""
    first, last = (Improvement("min loss", 1.0, step, 30) for step in (10, 20))
    commits = [candidate(step, loss=1.0 - step / 1000, known=first) for step in (30, 20, 10)]
    assert Best.parse("min loss").wanted(commits) == ["10"]
    assert Best.parse("max loss").wanted([candidate(40, loss=0.5, known=first), *commits]) == ["10"], "another metric"
    assert Best.parse("min loss").wanted([candidate(40, loss=0.5, known=last), *commits]) == ["20"]
    assert Best.parse("min loss").wanted(commits[:2]) == ["30"], "the commit of the best step is gone"


def test_a_budget_keeps_what_policies_want_and_then_the_newest() -> None:
    """Certain commits come first, then those a policy wants, then the newest, until the budget is used."""
    commits = [candidate(step, loss=float(step), size=10) for step in (6, 5, 4, 3, 2, 1)]
    retention = Retention.of(last=99, best=["min loss"], budget=45)
    assert retention.unwanted(commits, sure={"3"}) == ["2", "4"]
    assert Retention.of(last=99, budget=5).unwanted(commits, sure={"6", "1"}) == ["2", "3", "4", "5"]


@pytest.mark.parametrize("text", ["loss", "best loss", "min", "max ", "min a b"])
def test_an_invalid_keep_best_is_refused(text: str) -> None:
    """The message shows the correct syntax."""
    with pytest.raises(ConfigError, match="write 'min loss'"):
        Best.parse(text)


def test_keeping_nothing_is_refused() -> None:
    """At least one commit stays."""
    with pytest.raises(ConfigError, match="at least 1"):
        Retention.of(last=0)
    with pytest.raises(ConfigError, match="bytes of commits to keep must be at least 1, not 0"):
        Retention.of(last=1, budget=0)


losses = st.one_of(st.none(), st.integers(0, 5).map(float))
runs = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), losses, st.integers(1, 20)), max_size=20)
policies = st.one_of(
    st.integers(1, 4).map(Last),
    st.integers(1, 60).map(EverySteps),
    st.integers(1, 90).map(EverySeconds),
    st.sampled_from([Best("loss", False), Best("loss", True)]),
)


def commits_of(run: list[tuple[int, int, float | None, int]]) -> list[Candidate]:
    """Return the commits, oldest first, from a list of (steps, seconds, loss, size) relative to the previous one."""
    commits, step, at = [], 0, 0
    for num_steps, seconds, loss, size in run:
        step, at = step + num_steps, at + seconds
        commits.append(candidate(step, at=at, loss=loss, size=size))
    return commits


@settings(deadline=None)
@given(runs, st.lists(policies, max_size=3))
def test_how_often_commits_are_pruned_does_not_change_what_is_kept(run: list, chosen: list) -> None:
    """A commit that a policy wants at the end is never deleted earlier, so the frequency of pruning does not matter."""
    retention = Retention((Last(1), *chosen))
    commits, left = commits_of(run), []
    for commit in commits:
        left.insert(0, commit)
        doomed = retention.unwanted(left, sure=())
        left = [other for other in left if other.key not in doomed]
    doomed = retention.unwanted(commits[::-1], sure=())
    assert {commit.key for commit in left} == {commit.key for commit in commits} - set(doomed)


@settings(deadline=None)
@given(runs, st.lists(policies, max_size=2), st.integers(1, 200), st.sets(st.integers(0, 19), max_size=2))
def test_a_budget_is_kept(run: list, chosen: list, budget: int, numbers: set) -> None:
    """The kept commits fit, unless those that must stay exceed the budget alone; and no further one would fit."""
    commits = commits_of(run)[::-1]
    sure = {commit.key for number, commit in enumerate(commits) if number in numbers}
    sizes = {commit.key: commit.record.num_bytes for commit in commits if commit.record}
    doomed = set(Retention(tuple(chosen), budget).unwanted(commits, sure))
    stays = set(sizes) - doomed
    num_bytes = sum(sizes[key] for key in stays)
    assert sure <= stays
    assert num_bytes <= budget or stays == sure
    assert all(num_bytes + sizes[key] > budget for key in doomed)
