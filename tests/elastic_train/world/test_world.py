"""The state that a world begins with: the furthest one of the published lineage."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter, FenceNotUpdated
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError, ElasticTrainError, FencedError
from elastic_train.job.reshard import Taken
from elastic_train.parallel.group import Group
from elastic_train.training.commits import describe_commit
from elastic_train.training.opening.resources import commit_alone
from elastic_train.world import restore as restoring
from elastic_train.world.fencing import JoinedFence
from elastic_train.world.restore import restore
from elastic_train.world.world import World
from rendezvous import errors as rendezvous_errors
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.test_open_session import plan_of, state_of


class Etcd:
    """A fence's part in etcd, which learns of nothing while it is down."""

    def __init__(self) -> None:
        self.term = 0
        self.commit: str | None = None
        self.is_away = False

    def claim(self, at_least: int) -> int:
        self.term = max(at_least, self.term + 1)
        return self.term

    def publish(self, term: int, commit: str) -> None:
        if self.is_away:
            raise rendezvous_errors.StoreUnavailableError("no etcd answers")
        self.commit = commit

    def head(self) -> Etcd:
        if self.is_away:
            raise rendezvous_errors.StoreUnavailableError("no etcd answers")
        return self


class Job:
    """A job's commits, by successive worlds."""

    def __init__(self, folder: Path) -> None:
        self.plan = plan_of(folder)
        self.plan.check_continues = lambda head: None
        self.store: Store = open_store(str(folder))
        self.etcd = Etcd()
        self.named_here: str | None = None
        """The newest commit according to the run's folder."""
        self.fence = JoinedFence(self.store, self.etcd)  # type: ignore[arg-type]

    def commit(self, parent: CommitRecord | None, *intervals: tuple[int, int, int]) -> CommitRecord:
        """Publish a state under a new term, the one of its last interval."""
        state = state_of(*intervals)
        commits = CommitWriter(self.store, self.fence, self.fence.claim(intervals[-1][0]), parent)
        try:
            facts = describe_commit(self.plan, state, 1)  # type: ignore[arg-type]
            return commits.save(state.shards.share.held(), facts, state.reached.intervals)
        except FenceNotUpdated as error:
            return error.commit

    def world(self) -> World:
        """Begin the next world, of one rank."""
        term = self.fence.claim(1)
        group, history = (
            Group(0, 1, None, 1.0),
            MagicMock(last_applied=lambda: None, newest_commit=lambda: self.named_here, folder="the run's folder"),
        )
        return World(group, term, self.store, self.fence, history, None, None, 0.0, self.store)


@pytest.mark.heavy
@pytest.mark.parametrize("witness", ["etcd", "the run's folder"])
@pytest.mark.parametrize("left", [1, 0])
def test_a_store_that_has_lost_the_newest_commit_is_not_gone_back_to(tmp_path: Path, witness: str, left: int) -> None:
    """The error has both steps and the key that accepts the loss of this commit alone; restoring a copy suffices."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    newest = job.commit(first, (1, 0, 5), (2, 5, 10))
    if witness == "the run's folder":
        job.etcd.commit, job.named_here = None, newest.key
    lost = {key: (tmp_path / key).read_bytes() for key in (newest.key, *([] if left else [first.key]))}
    for key in lost:
        (tmp_path / key).unlink()
    with pytest.raises(ConfigError) as refused:
        restore(job.plan, job.world(), state_of())  # type: ignore[arg-type]
    said = str(refused.value)
    for part in (
        witness,
        newest.key,
        "step 10",
        "step 5 is the newest" if left else "no commit at all",
        f"{5 * (2 - left)} committed steps",
    ):
        assert part in said, said
    assert "checkpoint.accept_loss=2-10" in said
    job.plan.config.checkpoint.accept_loss = "1-5"
    with pytest.raises(ConfigError):
        restore(job.plan, job.world(), state_of())  # type: ignore[arg-type]
    job.plan.config.checkpoint.accept_loss = "2-10"
    world = job.world()
    assert restore(job.plan, world, state_of()) == (first if left else None)  # type: ignore[arg-type]
    assert world.history.restore.call_args.kwargs["resumed"]["steps_lost"] == (5 if left else 10)  # type: ignore[attr-defined]
    job.plan.config.checkpoint.accept_loss = None
    for key, content in lost.items():
        (tmp_path / key).write_bytes(content)
    assert restore(job.plan, job.world(), state_of()) == newest  # type: ignore[arg-type]


def test_a_fence_or_a_folder_that_names_an_older_commit_changes_nothing(tmp_path: Path) -> None:
    """Etcd was restored from an older backup than the store's, and retention has deleted the commit that it names."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    newest = job.commit(first, (1, 0, 5), (2, 5, 10))
    job.etcd.commit = job.named_here = first.key
    (tmp_path / first.key).unlink()
    assert restore(job.plan, job.world(), state_of()) == newest  # type: ignore[arg-type]


def test_members_that_are_as_far_as_the_lost_commit_lose_nothing(tmp_path: Path) -> None:
    """Their state continues; a member behind it may not roll the others back, and commits nothing alone."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    newest = job.commit(first, (1, 0, 5), (2, 5, 10))
    (tmp_path / newest.key).unlink()
    restore(job.plan, job.world(), state_of((1, 0, 5), (2, 5, 10)))  # type: ignore[arg-type]
    job.etcd.commit = newest.key
    with pytest.raises(ConfigError, match=r"step 10.*accept_loss=2-10"):
        restore(job.plan, job.world(), state_of((1, 0, 5), (2, 5, 7)))  # type: ignore[arg-type]
    commit_alone(job.plan, state_of((1, 0, 5), (2, 5, 7)), SaveMemory(), newest.key)  # type: ignore[arg-type]
    assert [entry.key for entry in job.store.list("commits/")] == [first.key]


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_rank_that_was_frozen_does_not_undo_a_commit(tmp_path: Path, is_heard: bool) -> None:
    """Others continued from an earlier commit and published, whether or not etcd was reachable."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    job.etcd.is_away = not is_heard
    newest = job.commit(first, (1, 0, 5), (2, 5, 10))
    job.etcd.is_away = False
    frozen = state_of((1, 0, 12))
    assert restore(job.plan, job.world(), frozen) == newest  # type: ignore[arg-type]
    assert frozen.reached.intervals == newest.intervals


def test_a_world_that_was_frozen_keeps_the_commit_that_it_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others form a newer world while it agrees on a step, and delete the commit that it continues."""
    job, take = Job(tmp_path), restoring.take_state
    newest = job.commit(None, (1, 0, 5))

    def freeze(*arguments: Any) -> Taken:
        (tmp_path / newest.key).unlink()
        return take(*arguments)

    monkeypatch.setattr(restoring, "take_state", freeze)
    assert restore(job.plan, job.world(), state_of((1, 0, 8))) == newest  # type: ignore[arg-type]


def test_a_rank_at_another_place_reports_what_it_had_applied(tmp_path: Path) -> None:
    """Its new place has no state; the history still records that it drops the steps of its old place."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    before, world = state_of((1, 0, 12)).reached.intervals, job.world()
    assert restore(job.plan, world, state_of(), before) == first  # type: ignore[arg-type]
    world.history.rollback.assert_called_once_with(from_step=12, to_step=5)  # type: ignore[attr-defined]


def test_a_process_that_commits_alone_undoes_no_applied_steps(tmp_path: Path) -> None:
    """A process of an older world that is asked to leave commits its state; others keep their applied steps."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    job.commit(first, (1, 0, 5), (2, 5, 6))
    commit_alone(job.plan, state_of((1, 0, 12)), SaveMemory())  # type: ignore[arg-type]
    assert [entry.key for entry in job.store.list("commits/")][-1] == "commits/00000003-000000000012.json"
    state = state_of((1, 0, 5), (2, 5, 13))
    restore(job.plan, job.world(), state)  # type: ignore[arg-type]
    assert state.reached.intervals == state_of((1, 0, 5), (2, 5, 13)).reached.intervals


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("damaged", ["record", "files"])
def test_a_state_that_skipped_a_damaged_commit_is_kept(tmp_path: Path, is_heard: bool, damaged: str) -> None:
    """No rank goes back to that state's parent, though the damaged commit is newer."""
    job = Job(tmp_path)
    first = job.commit(None, (1, 0, 5))
    job.etcd.is_away = not is_heard
    newest = job.commit(first, (1, 0, 5), (2, 5, 10))
    job.etcd.is_away = False
    (tmp_path / (newest.key if damaged == "record" else f"{newest.attempt}/.metadata")).write_bytes(b"damaged")
    job.fence.claim(3)
    state = state_of((1, 0, 5), (3, 5, 12))
    assert restore(job.plan, job.world(), state) == first  # type: ignore[arg-type]
    assert state.reached.intervals == state_of((1, 0, 5), (3, 5, 12)).reached.intervals


def test_rank_0_of_a_world_that_is_not_the_newest_finds_itself_fenced_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 asks, since only it writes; if etcd does not answer for a while it continues."""
    monkeypatch.setattr("elastic_train.world.world.FENCE_PATIENCE_S", 0.2)
    monkeypatch.setattr("elastic_train.world.world.FENCE_PAUSE_S", 0.05)
    job = Job(tmp_path)
    world = job.world()
    world.check_newest()
    job.fence.claim(1)
    with pytest.raises(FencedError, match="term 2 was claimed, so the result of term 1 is not written"):
        world.check_newest()
    replace(world, group=MagicMock(rank=1, size=2)).check_newest()
    job.etcd.is_away = True
    world.check_newest()
    monkeypatch.setattr("elastic_train.world.world.FENCE_PATIENCE_S", PATIENCE_S)
    threading.Timer(0.1, setattr, (job.etcd, "is_away", False)).start()
    with pytest.raises(FencedError, match="term 2 was claimed"):
        world.check_newest()


def test_a_commit_that_is_damaged_between_check_and_load_is_left_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process skips that commit; one that is complete but does not fit ends the job."""
    job = Job(tmp_path)
    head = job.commit(None, (1, 0, 5))
    state = state_of()

    def refuse(store: Store, record: CommitRecord, tensors: object) -> None:
        raise CommitError("bytes [0, 36) do not match their checksum")

    monkeypatch.setattr(restoring, "load", refuse)
    with pytest.raises(CommitError):
        restoring._load(job.store, job.plan, head, state)
    (tmp_path / f"{head.attempt}/.metadata").write_bytes(b"damaged")
    with pytest.raises(ElasticTrainError, match="was damaged after it was checked") as caught:
        restoring._load(job.store, job.plan, head, state)
    assert caught.value.exit_code == 1
