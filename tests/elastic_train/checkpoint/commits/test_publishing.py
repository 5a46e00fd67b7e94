"""Publishing: one winner, a fence, and no failure that leaves a mixture."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, cast

import pytest
from torch import nn

from elastic_train.checkpoint.commits.reader import Discovery, discover, read_state
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.stores.disk import RealDisk
from elastic_train.checkpoint.stores.fsspec_store import FsspecStore
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store, Uncertain
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.config.schema import Config
from elastic_train.core.lineage import Interval
from elastic_train.core.mesh import Mesh
from elastic_train.errors import CommitError, FencedError, StorageError
from elastic_train.job.build import build_state
from elastic_train.job.plan import Plan
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import TrainProgress
from elastic_train.placement.seats import seats_of
from elastic_train.training.opening.resources import commit_alone
from elastic_train.world.fencing import StoreFence
from tests.conftest import run_source
from tests.elastic_train.checkpoint.commit_samples import facts, small_state, writer

pytestmark = pytest.mark.slow


def test_two_writers_of_one_key_have_one_winner(store: Store) -> None:
    """Of writers with the same term, one publishes; the others get an error and leave no files."""
    if store.url.startswith("plain"):
        pytest.skip("a claimed create may have no winner")
    fence = StoreFence(store)
    term = fence.claim(1)

    def save(number: int) -> str | None:
        try:
            return CommitWriter(store, fence, term, None).save(small_state(number), facts(5)).digest
        except FencedError:
            return None

    with ThreadPoolExecutor(4) as pool:
        digests = [digest for digest in pool.map(save, range(4)) if digest]
    head = discover(store).head
    assert head is not None
    assert digests == [head.digest]
    assert {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")} == {head.attempt}


def test_a_fenced_world_does_not_extend_the_lineage(local_store: Store) -> None:
    """Once a higher term is claimed, a publish fails, and the newer world's commits come first."""
    old = writer(local_store)
    first = old.save(small_state(1), facts(1))
    new = writer(local_store, first)
    with pytest.raises(FencedError, match="term 2 was claimed"):
        old.save(small_state(100), facts(100))
    second = new.save(small_state(2), facts(2))
    assert second.parent == first.digest
    assert discover(local_store).head == second


class FailingDisk(RealDisk):
    """A disk on which the n-th operation fails; writes fail after their first half."""

    def __init__(self, failing: int, code: int) -> None:
        super().__init__()
        self.left = failing
        self.code = code

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, "injected")

    def create(self, path: Path) -> BinaryIO:
        self.count()
        return FailingFile(super().create(path), self)  # type: ignore[return-value]

    def sync(self, files: Sequence[BinaryIO], directories: Sequence[Path]) -> None:
        self.count()

    def link(self, source: Path, target: Path) -> None:
        self.count()
        super().link(source, target)

    def make_directory(self, path: Path) -> None:
        self.count()
        super().make_directory(path)


class FailingFile:
    """A file whose writes count as operations of its disk."""

    def __init__(self, file: BinaryIO, disk: FailingDisk) -> None:
        self.file = file
        self.disk = disk

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        self.disk.count()
        return self.file.write(content)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_old_head_survives_a_failure_of_any_operation(tmp_path: Path, code: int) -> None:
    """At every single operation of a save, a full or broken disk ends it cleanly, and the next save works."""
    for failing in range(1, 100):
        root = tmp_path / str(failing)
        good = LocalStore(root)
        commits = writer(good)
        first = commits.save(small_state(1), facts(1))
        disk = FailingDisk(failing, code)
        broken = CommitWriter(LocalStore(root, disk), StoreFence(good), 1, first)
        if disk_outlasts(broken, disk):
            break
        found = discover(good)
        assert (found.head, found.skipped) == (first, ())
        assert {entry.key.split("/")[1] for entry in good.list("data/")} == {"step-000000000001"}
        disk.left = -1
        assert discover(good).head == first
        second = broken.save(small_state(2), facts(2))
        assert discover(good).head == second
    assert failing > 12, "the disk hardly failed"


def disk_outlasts(broken: CommitWriter, disk: FailingDisk) -> bool:
    """Save on a failing disk; return True if the save succeeded because it took fewer operations."""
    try:
        broken.save(small_state(2), facts(2))
    except StorageError as error:
        assert "injected" in str(error)
        return False
    assert disk.left > 0, "a failure was swallowed"
    return True


FULL_DISK = """
import resource, signal, sys
import torch
from tests.elastic_train.checkpoint.commit_samples import facts, writer
from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(sys.argv[1])
commits = writer(store)
first = commits.save({"w": torch.zeros(10)}, facts(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
try:
    commits.save({"w": torch.zeros(2_000_000)}, facts(2))
except StorageError as error:
    assert discover(store).head == first
    assert len(store.list("data/")) == len(first.files), store.list("data/")
    print("refused:", error)
"""


def test_a_write_refused_by_the_kernel_is_a_storage_error(tmp_path: Path) -> None:
    """A real failed write, in the middle of a tensor, leaves the head intact and the process alive."""
    result = run_source(FULL_DISK, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "refused:" in result.stdout
    assert "File too large" in result.stdout


class UnansweredStore(LocalStore):
    """A store whose answer to the creation of a record is lost, whether or not the record was created."""

    does_arrive = True

    def create(self, key: str, content: bytes) -> None:
        if not key.startswith("commits/"):
            return super().create(key, content)
        if self.does_arrive:
            super().create(key, content)
        raise Uncertain(f"{key}: no answer")


def test_an_unanswered_create_that_arrived_is_a_commit(tmp_path: Path) -> None:
    """The record is searched for and found."""
    store = UnansweredStore(tmp_path)
    record = writer(store).save(small_state(), facts(1))
    assert discover(store).head == record


def test_an_unanswered_create_keeps_its_files(tmp_path: Path) -> None:
    """A record that may still arrive must find its files."""
    store = UnansweredStore(tmp_path)
    store.does_arrive = False
    with pytest.raises(StorageError, match="no answer"):
        writer(store).save(small_state(), facts(1))
    assert len(store.list("data/")) == 2


def test_a_taken_record_that_cannot_be_read_keeps_its_files(tmp_path: Path) -> None:
    """The refusal may concern a retry after a successful first try, so the record may be ours."""

    class MuteStore(UnansweredStore):
        def open(self, key: str) -> BinaryIO:
            raise StorageError(f"{key}: no answer")

    with pytest.raises(Uncertain, match="to see who created it"):
        writer(MuteStore(tmp_path)).save(small_state(), facts(1))
    head = discover(LocalStore(tmp_path)).head
    assert head is not None
    assert head.step == 1


def test_a_record_is_the_next_commits_parent_even_if_the_fence_did_not_answer(local_store: Store) -> None:
    """The commit exists once its record does, whatever the fence says afterwards."""

    class LostFence(StoreFence):
        is_lost = True

        def publish(self, term: int, commit: str) -> None:
            if self.is_lost:
                raise StorageError("no answer")
            super().publish(term, commit)

    fence = LostFence(local_store)
    commits = CommitWriter(local_store, fence, fence.claim(1), None)
    with pytest.raises(StorageError):
        commits.save(small_state(1), facts(1))
    head = discover(local_store).head
    fence.is_lost = False
    assert commits.save(small_state(1), facts(1)) == head
    second = commits.save(small_state(2), facts(2))
    assert head is not None
    assert second.parent == head.digest


def test_a_state_changed_after_its_save_is_not_changed_in_the_commit(local_store: Store) -> None:
    """A commit is a copy."""
    state = small_state(1)
    record = writer(local_store).save(state, facts(1))
    state["model"]["w"].zero_()
    assert read_state(local_store, record)["model"]["w"].tolist() == [1.0] * 5


def plan_of(folder: Path) -> Plan:
    """Return the parts of a plan that a commit without a world needs."""
    config = Config.model_validate({"run": {"dir": str(folder)}, "data": {"train": "unused"}})
    manifest, order = (
        SimpleNamespace(digest="manifest", num_rows=9),
        SimpleNamespace(block_row_groups=8, arrangement=None),
    )
    whole = SimpleNamespace(config=config, manifest=manifest, order=order, num_lanes=8, micro_batch=8, sources=())
    return cast(Plan, whole)


def test_a_commit_without_a_world_continues_its_own_states_parent(tmp_path: Path) -> None:
    """A state with more steps than a newer world's commit has as its parent the commit before that one."""
    store = LocalStore(tmp_path)
    first = CommitWriter(store, StoreFence(store), 1, None).save(small_state(), facts(5))
    others = (Interval(1, 0, 5), Interval(2, 5, 6))
    CommitWriter(store, StoreFence(store), 2, first).save(small_state(), facts(6), others)
    state = build_state(nn.Linear(2, 1), OptimizerConfig(), total_steps=10, device="cpu", is_fp16=False)
    state.reached = TrainProgress(step=8, intervals=(Interval(1, 0, 8),))
    plan = plan_of(tmp_path)
    commit_alone(plan, state, SaveMemory())
    alone = discover(store).head
    assert alone is not None
    assert (alone.term, alone.step, alone.parent_key) == (3, 8, first.key)


def test_a_state_is_committed_without_a_world_where_no_commit_is_intact(tmp_path: Path) -> None:
    """The process holds what the store has lost; a commit with more steps is not covered by one with fewer."""
    store = LocalStore(tmp_path)
    lost = [CommitWriter(store, StoreFence(store), 1, None).save(small_state(), facts(step)) for step in (5, 9)]
    shutil.rmtree(tmp_path / "data")
    state = build_state(nn.Linear(2, 1), OptimizerConfig(), total_steps=10, device="cpu", is_fp16=False)
    state.reached = TrainProgress(step=8, intervals=(Interval(1, 0, 8),))
    with pytest.raises(CommitError, match="none is intact"):
        commit_alone(plan_of(tmp_path), state, SaveMemory())
    store.delete(lost[1].key)
    commit_alone(plan_of(tmp_path), state, SaveMemory())
    alone = discover(store).head
    assert alone is not None and (alone.step, alone.parent_key) == (8, lost[0].key)


def test_a_share_of_the_state_is_not_committed_without_a_world(tmp_path: Path) -> None:
    """Its peers hold the rest; a rank that holds all of it commits as if it had no shards."""
    sharded = ParallelConfig(shards="optimizer", copies=1)
    state = build_state(nn.Linear(2, 1), OptimizerConfig(), 10, "cpu", is_fp16=False, parallel=sharded)
    shards = state.shards.share
    assert isinstance(shards, Zero1Share)
    state.reached = TrainProgress(step=8, intervals=(Interval(1, 0, 8),))
    assert not commit_alone(plan_of(tmp_path), state, SaveMemory()), "it has no seat yet"
    table = replace(state.shards.table, seats=seats_of([("0",), ("1",)], 1), rank=1, size=2)
    shards.sit(table, shards.runs_for(table), [0.0, 0.0])
    assert not commit_alone(plan_of(tmp_path), state, SaveMemory())
    assert discover(LocalStore(tmp_path)).head is None
    alone = replace(table, seats=seats_of([("0",)], 1), rank=0, size=1)
    state.shards.enter(Mesh(1, 2), None)  # a world that gives it another rank, and no seat
    shards.sit(alone, shards.runs_for(alone), [0.0, 0.0])
    assert commit_alone(plan_of(tmp_path), state, SaveMemory())
    head = discover(LocalStore(tmp_path)).head
    assert head is not None and head.step == 8


@pytest.mark.parametrize("store", ["plain"], indirect=True)
@pytest.mark.parametrize(("call", "path"), [("pipe_file", "/run/commits/0"), ("rm_file", "/run/claims/commits/0")])
def test_a_claimed_record_whose_answer_is_lost_keeps_its_files(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, path: str
) -> None:
    """Without conditional create, too: what was sent may have arrived, and the content says whose it is."""
    assert isinstance(store, FsspecStore)
    commits, real, lost = writer(store), getattr(store._fs, call), list[str]()

    def act(where: str, *content: bytes) -> None:
        real(where, *content)
        if path in where and not lost:
            lost.append(where)
            raise ConnectionResetError("connection reset by peer")

    monkeypatch.setattr(store._fs, call, act)
    record = commits.save(small_state(1), facts(1))
    assert lost and discover(store) == Discovery(record, ())
