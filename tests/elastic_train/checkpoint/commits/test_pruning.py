"""Retention deletes unneeded commits, in an order in which a crash leaves nothing half deleted."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from elastic_train.checkpoint.commits.lookup import survey_store
from elastic_train.checkpoint.commits.pruning import prune, sweep
from elastic_train.checkpoint.commits.reader import commit_keys, discover, strays_from, verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Best, Retention, held, holding, pin, pinned, unpin
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import KeyClaimed, KeyMissing, Store
from elastic_train.core.lineage import Interval
from elastic_train.errors import StorageError
from tests.elastic_train.checkpoint.commit_samples import commit_steps, facts, small_state, writer


def damage(store: Store, record: CommitRecord) -> None:
    """Truncate a commit's data."""
    os.truncate(Path(store.url) / record.attempt / "__0_0.distcp", 3)


def steps_of(store: Store) -> list[int]:
    """Return the steps of the commits in a store, the newest first."""
    return [int(key[-17:-5]) for key in commit_keys(store)]


def test_the_last_commits_are_kept(store: Store) -> None:
    """keep_last commits remain complete; nothing of the others is left."""
    commits = commit_steps(store, 1, 2, 3, 4)
    pruned = prune(store, Retention.of(last=2))
    assert steps_of(store) == [4, 3]
    assert set(pruned.commits) == {commits[0].key, commits[1].key}
    assert {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")} == {
        commits[2].attempt,
        commits[3].attempt,
    }
    assert discover(store).head == commits[3]


def test_the_newest_valid_commit_is_kept_whatever_its_age(local_store: Store) -> None:
    """If all newer ones are damaged, the last good commit is kept, and so is any commit it may depend on."""
    commits = commit_steps(local_store, 1, 2, 3, 4, 5)
    for commit in commits[3:]:
        damage(local_store, commit)
    prune(local_store, Retention.of(last=2))
    assert steps_of(local_store) == [5, 4, 3, 2]
    assert discover(local_store).head == commits[2]


def test_commits_of_a_dead_branch_do_not_count_towards_keep_last(local_store: Store) -> None:
    """A commit may be damaged at once, so its parent is kept, however many dead commits sort between them.

    Dead commits are deleted with the first commits of the lineage that exceed keep_last.
    """
    (whole,) = commit_steps(local_store, 1)
    for _ in range(3):
        (dead,) = commit_steps(local_store, 2, parent=whole)
        damage(local_store, dead)
    commits = writer(local_store, whole)
    next_one = commits.save(small_state(2), facts(2))
    prune(local_store, Retention.of(last=2), newest=next_one)
    assert steps_of(local_store) == [2, 2, 2, 2, 1]
    damage(local_store, next_one)
    assert discover(local_store).head == whole
    prune(local_store, Retention.of(last=2), newest=commits.save(small_state(3), facts(3)))
    assert steps_of(local_store) == [3, 2]


@pytest.mark.parametrize("how", [{"last": 2}, {"last": 9, "budget": 2}])
def test_a_commit_of_a_term_that_applied_nothing_is_part_of_the_lineage(
    local_store: Store, how: dict[str, int]
) -> None:
    """A process that is alone commits steps that others have applied, under a new term."""
    (first,) = commit_steps(local_store, 1)
    alone = writer(local_store, first).save(small_state(2), facts(2), (Interval(1, 0, 2),))
    (before,) = commit_steps(local_store, 2, parent=first)
    intervals = (Interval(1, 0, 2), Interval(4, 2, 3))
    newest = writer(local_store, alone).save(small_state(3), facts(3), intervals)
    budget = how["budget"] * newest.num_bytes + 3 if "budget" in how else None
    prune(local_store, Retention.of(last=how["last"], budget=budget), newest=newest)
    kept = [newest.key, *([before.key] if budget is None else []), alone.key]
    assert commit_keys(local_store) == kept


def test_a_dead_branch_does_not_use_up_a_retention_period(local_store: Store) -> None:
    """The first commit of a period is kept for rollbacks."""
    (whole,) = commit_steps(local_store, 1)
    commit_steps(local_store, 2, parent=whole)
    commits = writer(local_store, whole)
    for step in (2, 3, 4):
        newest = commits.save(small_state(step), facts(step))
    prune(local_store, Retention.of(last=1, every_steps=2), newest=newest)
    assert [key[8:16] + key[-7:-5] for key in commit_keys(local_store)] == ["0000000304", "0000000302"]


def test_the_best_commit_of_a_dead_branch_does_not_stand_for_the_lineages(local_store: Store) -> None:
    """Steps that are repeated after damage have the same metrics, so the best commit is there twice."""
    by_step = {step: dataclasses.replace(facts(step), metrics={"loss": abs(2.0 - step)}) for step in (1, 2, 3)}
    first = writer(local_store).save(small_state(1), by_step[1])
    damage(local_store, writer(local_store, first).save(small_state(2), by_step[2]))
    commits = writer(local_store, first)
    best, newest = (commits.save(small_state(step), by_step[step]) for step in (2, 3))
    prune(local_store, Retention.of(last=1, best=["min loss"]), newest=newest)
    assert commit_keys(local_store) == [newest.key, best.key]


def test_nothing_is_deleted_while_every_commit_is_damaged(local_store: Store) -> None:
    """A user may still be able to rescue the data."""
    for commit in commit_steps(local_store, 1, 2, 3):
        damage(local_store, commit)
    assert prune(local_store, Retention.of(last=1)).commits == ()
    assert steps_of(local_store) == [3, 2, 1]


def test_pinned_commits_are_kept(store: Store) -> None:
    """A pin keeps a commit until it is removed; pinning and unpinning can be repeated."""
    commits = commit_steps(store, 1, 2, 3)
    for _ in range(2):
        pin(store, commits[0].key)
    assert pinned(store) == {commits[0].key}
    prune(store, Retention.of(last=1))
    assert steps_of(store) == [3, 1]
    for _ in range(2):
        unpin(store, commits[0].key)
    prune(store, Retention.of(last=1))
    assert steps_of(store) == [3]


def test_a_pin_that_another_process_claims_is_not_taken_for_pinned(
    local_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two at a time on GCS or Azure neither may have pinned the commit."""
    [commit] = commit_steps(local_store, 1)

    def claimed(key: str, content: bytes) -> None:
        raise KeyClaimed(f"{key}: another writer is claiming it")

    with monkeypatch.context() as rival, pytest.raises(StorageError, match="another writer is claiming it"):
        rival.setattr(local_store, "create", claimed)
        pin(local_store, commit.key)
    pin(local_store, commit.key)
    assert pinned(local_store) == {commit.key}


def test_a_commit_held_by_a_reader_is_kept(store: Store) -> None:
    """While the hold exists nothing of the commit is deleted; afterwards it is."""
    commits = commit_steps(store, 1, 2)
    with holding(store, commits[0].key):
        assert prune(store, Retention.of(last=1)).commits == ()
    assert store.list("holds/") == []
    assert prune(store, Retention.of(last=1)).commits == (commits[0].key,)
    with pytest.raises(KeyMissing), holding(store, commits[0].key):
        pass
    assert store.list("holds/") == []


def test_a_lineage_strays_from_a_commit_that_its_world_did_not_know(local_store: Store) -> None:
    """One that continues the commit, or has steps of a newer term, does not."""
    first, second = commit_steps(local_store, 1, 2)
    (newer,) = commit_steps(local_store, 3)
    assert not strays_from(second.intervals, first) and not strays_from(newer.intervals, second)
    assert strays_from(first.intervals, newer) and not strays_from(newer.intervals, newer)


def test_a_hold_expires(local_store: Store) -> None:
    """A dead reader keeps a commit until its hold's expiry time."""
    (commit,) = commit_steps(local_store, 1)
    hold = holding(local_store, commit.key, ttl_s=100)
    hold.__enter__()
    assert held(local_store, now=time.time() + 90) == {commit.key}
    assert held(local_store, now=time.time() + 110) == set()
    assert local_store.list("holds/") == []


def test_a_read_only_user_sees_that_a_hold_has_expired(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired hold has no effect even if its object cannot be deleted: `ckpt ls` of another user's run works."""
    (commit,) = commit_steps(local_store, 1)
    hold = holding(local_store, commit.key, ttl_s=-10)
    hold.__enter__()

    def refuse(store: LocalStore, key: str) -> None:
        raise StorageError(f"{key}: cannot delete: Read-only file system")

    monkeypatch.setattr(LocalStore, "delete", refuse)
    assert held(local_store) == set()
    assert [row.marks for row in survey_store(local_store, Best.parse("min loss")).rows] == [("head", "best")]


def test_a_hold_taken_while_the_record_is_deleted_keeps_the_files(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that still saw the record has its files until it is done, whatever happens meanwhile."""
    old, _ = commit_steps(local_store, 1, 2)
    hold, delete = holding(local_store, old.key), LocalStore.delete

    def delete_after_a_reader_came(store: LocalStore, key: str) -> None:
        if key == old.key:
            hold.__enter__()
        delete(store, key)

    monkeypatch.setattr(LocalStore, "delete", delete_after_a_reader_came)
    assert prune(local_store, Retention.of(last=1)).num_bytes == 0
    assert sweep(local_store, term=9).attempts == ()
    verify(local_store, old)
    hold.__exit__(None, None, None)
    assert sweep(local_store, term=9).attempts == (old.attempt,)


def test_a_read_only_store_is_read_without_a_hold(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Read-only credentials suffice for a reader; the log says what that means."""
    (commit,) = commit_steps(local_store, 1)

    def refuse(store: LocalStore, key: str, content: bytes) -> None:
        raise StorageError(f"{key}: read-only")

    monkeypatch.setattr(LocalStore, "create", refuse)
    with holding(local_store, commit.key):
        assert "without a hold" in caplog.text


def test_a_dry_run_deletes_nothing(local_store: Store) -> None:
    """It lists what would be deleted, and its size."""
    commits = commit_steps(local_store, 1, 2)
    planned = prune(local_store, Retention.of(last=1), is_rehearsal=True)
    assert planned.commits == (commits[0].key,)
    assert planned.num_bytes == commits[0].num_bytes
    assert steps_of(local_store) == [2, 1]


def test_a_commit_known_to_be_valid_is_not_read_again(local_store: Store) -> None:
    """A caller that knows the newest commit to be valid saves reading it."""
    commits = commit_steps(local_store, 1, 2)
    damage(local_store, commits[1])
    prune(local_store, Retention.of(last=1), newest=commits[1])
    assert steps_of(local_store) == [2]


def test_a_record_is_deleted_before_its_files(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is there a record without its files."""
    commits = commit_steps(local_store, 1, 2)
    deleted: list[str] = []
    monkeypatch.setattr(local_store, "delete", deleted.append)
    prune(local_store, Retention.of(last=1))
    assert deleted[0] == commits[0].key
    assert all(key.startswith(commits[0].attempt) for key in deleted[1:])
    assert len(deleted) == 3


def test_an_overtaken_writer_does_not_delete_the_newest_commit(local_store: Store) -> None:
    """A process that was frozen after its commit prunes long after others have published newer ones."""
    (mine,) = commit_steps(local_store, 5)
    theirs = commit_steps(local_store, 6, 7, parent=mine)
    prune(local_store, Retention.of(last=1, budget=theirs[-1].num_bytes * 3 // 2), newest=mine)
    assert discover(local_store).head == theirs[-1]
    assert steps_of(local_store) == [7]
