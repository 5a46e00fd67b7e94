"""A store with stale listings, as an NFS client sees it: files that the fence names are opened by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint import CommitWriter, Retention, SaveMemory, discover, prune
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Entry
from elastic_train.core.lineage import COMMITS
from elastic_train.training.opening import resources
from elastic_train.training.opening.resources import commit_alone
from elastic_train.world.fencing import StoreFence
from elastic_train.world.restore import restore
from tests.elastic_train.checkpoint.commit_samples import facts, small_state
from tests.elastic_train.world.test_world import Job, state_of


class LateStore(LocalStore):
    """A folder of which another client lists only the files that existed when it was opened."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        now = LocalStore(root)
        self.listed = {entry.key for prefix in (COMMITS, "data/", "terms/") for entry in now.list(prefix)}

    def list(self, prefix: str) -> list[Entry]:
        return [entry for entry in super().list(prefix) if entry.key in self.listed]


class LateJob(Job):
    """A job with a first commit, and a store that does not list anything newer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.first = self.commit(None, (1, 0, 5))
        self.late = LateStore(folder)


@pytest.fixture
def job(tmp_path: Path) -> LateJob:
    return LateJob(tmp_path)


def test_a_new_process_begins_at_the_named_head(job: LateJob) -> None:
    """Neither its record nor its files are listed; both are found by name, and complete."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 10))
    job.store = job.late
    state = state_of()
    assert restore(job.plan, job.world(), state) == newest  # type: ignore[arg-type]
    assert state.step == 10


def test_the_next_commit_continues_the_named_head(job: LateJob) -> None:
    """The members' state is further; its parent is the newest commit, not the newest that is listed."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 10))
    job.store = job.late
    assert restore(job.plan, job.world(), state_of((1, 0, 5), (2, 5, 12))) == newest  # type: ignore[arg-type]


def test_a_fence_without_its_data_is_given_the_head_again(job: LateJob) -> None:
    """A later world may not find in a listing what this one has found."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 10))
    job.etcd.commit = None
    restore(job.plan, job.world(), state_of())  # type: ignore[arg-type]
    assert job.etcd.commit == newest.key


def test_the_parent_of_a_damaged_head_is_opened_by_its_name(job: LateJob) -> None:
    """Neither is listed; the fence then names the parent, so that the next world need not search."""
    parent = job.commit(job.first, (1, 0, 5), (2, 5, 10))
    newest = job.commit(parent, (1, 0, 5), (2, 5, 10), (3, 10, 12))
    (Path(job.store.url) / newest.attempt / ".metadata").write_bytes(b"damaged")
    job.store = job.late
    assert restore(job.plan, job.world(), state_of()) == parent  # type: ignore[arg-type]
    assert job.etcd.commit == parent.key


def test_a_listed_commit_that_parted_from_the_head_is_passed_over(job: LateJob) -> None:
    """Its term is the highest, but a process that was frozen while others published made it."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 6))
    commit_alone(job.plan, state_of((1, 0, 12)), SaveMemory())  # type: ignore[arg-type]
    alone = job.store.list(COMMITS)[-1].key
    found = discover(job.store, published=newest.key)
    assert found.head == newest
    assert found.skipped == ((alone, f"does not continue {newest.key}, which the fence names as head"),)
    (Path(job.store.url) / newest.attempt / ".metadata").write_bytes(b"damaged")
    fallback = discover(job.store, published=newest.key).head
    assert fallback is not None and fallback.key == alone


def test_a_commit_that_continues_the_head_comes_before_it(job: LateJob) -> None:
    """The fence learns of a commit only after it exists, and the publisher may die in between."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 6))
    found = discover(job.store, published=job.first.key)
    assert found.head == newest and not found.skipped


def test_a_head_that_is_gone_is_reported(job: LateJob) -> None:
    """Its record was deleted: the newest other commit is used, and the report names the missing one."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 6))
    job.store.delete(newest.key)
    found = discover(job.store, published=newest.key)
    assert found.head == job.first
    assert found.skipped == ((newest.key, "the fence names it as head, but its record is not in the store"),)


def test_a_process_that_leaves_alone_commits_nothing_beside_the_named_head(
    job: LateJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing ends before its own state; the commit that etcd names has the same steps, or others."""
    newest = job.commit(job.first, (1, 0, 5), (2, 5, 10))
    monkeypatch.setattr(resources, "open_store", lambda url: job.late)
    for state in (state_of((1, 0, 5), (2, 5, 9)), state_of((1, 0, 12))):
        commit_alone(job.plan, state, SaveMemory(), newest.key)  # type: ignore[arg-type]
    assert discover(job.store).head == newest
    commit_alone(job.plan, state_of((1, 0, 5), (2, 5, 13)), SaveMemory(), newest.key)  # type: ignore[arg-type]
    head = discover(job.store).head
    assert head is not None and (head.step, head.parent) == (13, newest.digest)


def test_a_save_counts_files_that_are_not_listed(tmp_path: Path) -> None:
    """Another rank wrote them; the listing of the attempt's folder may be older."""
    store = LateStore(tmp_path)
    fence = StoreFence(store)
    record = CommitWriter(store, fence, fence.claim(1), None).save(small_state(), facts(1))
    assert discover(store, published=record.key).head == record


def test_retention_keeps_the_commit_that_was_just_made(tmp_path: Path) -> None:
    """The listing lacks it; only the commit that the policy drops is deleted."""
    fence = StoreFence(LocalStore(tmp_path))
    commits = CommitWriter(LocalStore(tmp_path), fence, fence.claim(1), None)
    listed = [commits.save(small_state(step), facts(step)) for step in (1, 2)]
    store = LateStore(tmp_path)
    newest = commits.save(small_state(3), facts(3))
    assert prune(store, Retention.of(last=2), newest=newest).commits == (listed[0].key,)
