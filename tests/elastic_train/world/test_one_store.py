"""All ranks use one store, also if its listings are late."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chaos.services.s3_server import S3
from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Entry
from elastic_train.core.lineage import COMMITS
from elastic_train.errors import ConfigError, StorageError
from elastic_train.training.opening import resources
from elastic_train.training.opening.resources import commit_alone
from elastic_train.world import one_store
from elastic_train.world.claims import Own, new_claim, term_key
from elastic_train.world.fencing import StoreFence
from elastic_train.world.one_store import (
    Claimed,
    check,
    check_before_joining,
    check_first,
    choose,
    identify,
    proves_itself,
)
from elastic_train.world.restore import restore
from tests.elastic_train.checkpoint.commit_samples import facts, small_state
from tests.elastic_train.world.test_world import Job, state_of


class Ranks:
    """A group in whose gather the other ranks have already looked."""

    def __init__(self, *others: str | None) -> None:
        self.others = [0 if word is None else int(word, 16) for word in others]

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.tensor([int(mine), *self.others])


def choose_among(store: Any, *others: str | None) -> tuple[str | None, bool]:
    return choose(Ranks(*others), store)  # type: ignore[arg-type]


def test_a_store_gets_one_word(tmp_path: Path) -> None:
    """A later process reads the id that the first one wrote."""
    word = identify(LocalStore(tmp_path))
    assert identify(LocalStore(tmp_path)) == word
    check(LocalStore(tmp_path), word)


@pytest.mark.parametrize("is_used", [True, False])
def test_another_store_is_refused(tmp_path: Path, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node may have its own commits there, or an empty folder."""
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    other = LocalStore(tmp_path / "other")
    if is_used:
        identify(other)
    with pytest.raises(ConfigError, match=r"other .*is not where this job keeps its commits: it has .*run.dir"):
        check(other, identify(LocalStore(tmp_path / "job")))


@pytest.mark.parametrize("look", [check, check_first])
def test_a_copy_of_the_store_is_refused(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the id and every file, but lacks rank 0's later claims, or has an additional claim."""
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    monkeypatch.setattr(one_store, "LEADER_S", 0.0)
    job, copy = LocalStore(tmp_path / "job"), LocalStore(tmp_path / "copy")
    word = identify(job)
    StoreFence(job).claim()
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    fence = StoreFence(job)
    claimed = Claimed(fence.claim(), fence.nonce)
    look(job, word, claimed=claimed)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"copy .*not where this job .*terms/00000002.json, which rank 0 has just"
        ):
            look(copy, word, claimed=claimed)
        assert StoreFence(copy).claim() >= 2


def test_a_claim_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait lasts as long as rank 0 is there; if it left because its own store was wrong, the world has ended."""
    monkeypatch.setattr(one_store, "LOOK_S", 0.0)
    store, asked = LocalStore(tmp_path), list[float]()
    word, (content, nonce) = identify(store), new_claim(Own("run"))

    def still(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 3:
            store.create(term_key(1), content)

    check(store, word, still, Claimed(1, nonce))
    assert len(asked) == 3


def test_a_word_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client may not see the key for a while; meanwhile the world is asked whether it still exists."""
    monkeypatch.setattr(one_store, "LOOK_S", 0.0)
    asked: list[float] = []

    def still(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 3:
            LocalStore(tmp_path).create(one_store.KEY, b"word")

    check(LocalStore(tmp_path), "word", still)
    assert len(asked) == 3


def test_the_first_world_keeps_its_commits_where_most_ranks_see_them(tmp_path: Path) -> None:
    """One node without its mount is rejected, even if it leads; of two nodes the leader's store counts."""
    mine = LocalStore(tmp_path)
    word = identify(mine)
    assert choose_among(mine, word, "1") == (word, True)
    assert choose_among(mine, "1") == (word, True)
    with pytest.raises(ConfigError, match="another store-id"):
        choose_among(mine, "1", "1")


def test_a_store_that_does_not_answer_has_no_say() -> None:
    """Its rank trains without writing a part; an outage does not cause a rejection."""

    def fail(*_: object) -> None:
        raise StorageError("away")

    assert choose_among(SimpleNamespace(open=fail, url="away"), "1") == (f"{1:015x}", False)
    assert choose_among(SimpleNamespace(open=fail, url="away"), None) == (None, False)


def test_who_cannot_ask_joins_and_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins, a process is rejected for a wrong store only."""
    config: Any = SimpleNamespace(checkpoint_url=str(tmp_path))
    check_before_joining(config, None, lambda: None)
    (tmp_path / one_store.KEY).mkdir()
    check_before_joining(config, "word", lambda: None)
    (tmp_path / one_store.KEY).rmdir()
    monkeypatch.setattr(one_store, "LOCAL_PATIENCE_S", 0.0)
    with pytest.raises(ConfigError, match="has no store-id"):
        check_before_joining(config, "word", lambda: None)


def test_a_store_that_creates_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Any folder passes; an S3 server that ignores If-None-Match fails, and its data stays."""
    local = LocalStore(tmp_path)
    assert proves_itself(local, identify(local))
    assert not proves_itself(local, "another")


@pytest.mark.slow
def test_an_s3_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the store and the header; the same server passes once it honours the header."""
    with S3() as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        store = open_store(s3.url("run"))
        word = identify(store)
        spoilt = s3.spoil("no_conditional_create")
        with pytest.raises(ConfigError, match=r"/run ignores .* honours If-None-Match"):
            proves_itself(store, word)
        s3.heal(spoilt)
        assert proves_itself(store, word) and identify(store) == word


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
