"""Crash states: whenever the machine stops, whatever is unsynced, a load yields the old commit or the new one.

Saves and deletions run on a disk that is mirrored by a simulated one. After every operation, each state that a crash
may leave is built, with an independent fate for every name and write; a restart is tested from each different one.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
import torch

from elastic_train.checkpoint.commits.pruning import prune, sweep
from elastic_train.checkpoint.commits.reader import Discovery, commit_keys, damage_of, discover, read_state
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store, create_once
from elastic_train.errors import CommitError, StorageError
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.checkpoint.commit_samples import State, commit_steps, facts, small_state
from tests.elastic_train.checkpoint.piece_samples import cut, save_by
from tests.elastic_train.checkpoint.simulated_disk import Image, MirroredDisk, SimulatedDisk

pytestmark = pytest.mark.slow


class Machine:
    """A machine with a store on its disk, and every state that a crash since `watch` could have left."""

    def __init__(self, root: Path) -> None:
        self._simulated = SimulatedDisk(root)
        self._seen: set[frozenset[tuple[str, bytes]]] = set()
        self._failing = range(0)
        self._is_done = False
        self.num_operations = 0
        self.disk = MirroredDisk(self._simulated, self._operation)
        self.store = LocalStore(root, self.disk)

    def watch(self, failing: range = range(0), *, is_done: bool = False) -> None:
        """Start from the present state; make some later operations fail, either undone or done nevertheless."""
        self._seen, self.num_operations = set(), 0
        self._failing, self._is_done = failing, is_done
        self._look()

    def states(self) -> list[Image]:
        """Return the different states that were seen."""
        return [dict(files) for files in self._seen]

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        self.num_operations += 1
        fails = self.num_operations in self._failing
        if fails and not self._is_done:
            raise OSError(errno.EIO, "injected")
        yield
        self._look()
        if fails:
            raise OSError(errno.EIO, "injected")

    def _look(self) -> None:
        self._seen.update(frozenset(image.items()) for image in self._simulated.images())


def started_from(states: Collection[Image]) -> Iterator[Store]:
    """Yield a store with the remaining data, for each of the states."""
    disk = fsspec.filesystem("memory")
    for image in states:
        root = f"/{uuid.uuid4().hex}"
        disk.pipe({f"{root}/{name}": content for name, content in image.items()})
        yield open_store(f"memory:/{root}")
        if disk.exists(root):
            disk.rm(root, recursive=True)


def heads(states: Collection[Image], allowed: Collection[CommitRecord]) -> Counter[int]:
    """Restart from every state: the head is complete and allowed, nothing newer looks damaged, and training continues.

    Returns the number of states for each step of the head.
    """
    steps: Counter[int] = Counter()
    for store in started_from(states):
        found = discover(store)
        assert found.skipped == ()
        assert found.head in allowed, "a third thing"
        assert found.head is not None
        assert read_state(store, found.head)["scheduler"] == {"last_epoch": found.head.step}
        (following,) = commit_steps(store, found.head.step + 1, parent=found.head)
        assert discover(store).head == following
        steps[found.head.step] += 1
    return steps


def heads_only(states: Collection[Image]) -> set[int]:
    """Return the steps of the states' heads, none of which skips a newer commit; 0 for no head."""
    found = [discover(store) for store in started_from(states)]
    assert all(each.skipped == () for each in found), "a record without its files"
    return {each.head.step if each.head else 0 for each in found}


def open_commits(machine: Machine) -> CommitWriter:
    """Open a writer; its term is not claimed, so that the claim's operations are not watched."""
    return CommitWriter(machine.store, StoreFence(machine.store), 1, None)


def saved_once(machine: Machine) -> tuple[CommitWriter, CommitRecord]:
    """Publish a commit and start watching."""
    commits = open_commits(machine)
    first = commits.save(small_state(1), facts(1))
    machine.watch()
    return commits, first


def test_every_crash_state_of_a_save_yields_the_old_commit_or_the_new(tmp_path: Path) -> None:
    """Never a mixture, never nothing, and always the new one once `save` has returned."""
    machine = Machine(tmp_path)
    commits, first = saved_once(machine)
    second = commits.save(small_state(2), facts(2))
    assert machine.num_operations >= 12
    assert heads(machine.states(), (first, second)).keys() == {1, 2}
    machine.watch()
    assert heads(machine.states(), (second,)).keys() == {2}


def test_every_crash_state_of_a_save_in_pieces_yields_the_old_commit_or_the_new(tmp_path: Path) -> None:
    """A commit with only some of its parts does not exist."""
    machine = Machine(tmp_path)
    commits, first = saved_once(machine)
    whole, written = torch.arange(20.0), [[(0, 7)], [(7, 20)]]
    states: list[State] = [{**small_state(2), "optimizer": {"moment": cut(whole, written, spans)}} for spans in written]
    second = save_by(machine.store, commits, states, step=2)
    assert {"__0_0.distcp", "__1_0.distcp"} < second.files.keys()
    assert heads(machine.states(), (first, second)).keys() == {1, 2}
    assert torch.equal(read_state(machine.store, second)["optimizer"]["moment"], whole)  # type: ignore[index]


def test_the_first_save_leaves_nothing_or_itself(tmp_path: Path) -> None:
    """A crash before the first commit leaves an empty run, not a damaged one."""
    machine = Machine(tmp_path)
    machine.watch()
    first = open_commits(machine).save(small_state(1), facts(1))
    found = [discover(store).head for store in started_from(machine.states())]
    assert all(head in (None, first) for head in found)
    assert None in found
    assert first in found


@pytest.mark.parametrize(
    ("num_failing", "is_done"), [(1, False), (1, True), (4, False), (1000, False)], ids=["one", "done", "some", "all"]
)
def test_a_crash_after_failed_operations_yields_the_old_commit_or_the_new(
    tmp_path: Path, num_failing: int, is_done: bool
) -> None:
    """Cleaning up after errors also survives a crash, and a save that returned despite an error is durable.

    A failed operation may have been done. Four failures in a row also hit the undoing of the first and second try.
    """
    for failing in range(1, 100):
        root = tmp_path / str(failing)
        root.mkdir()
        machine = Machine(root)
        commits, _ = saved_once(machine)
        machine.watch(range(failing, failing + num_failing), is_done=is_done)
        allowed, second = {1, 2}, None
        with contextlib.suppress(StorageError):
            second = commits.save(small_state(2), facts(2))
        num_operations = machine.num_operations
        if second is not None:
            assert heads_only(machine.states()) <= {1, 2}
            machine.watch()
            allowed = {2}
        assert heads_only(machine.states()) <= allowed, f"operation {failing} failed"
        if num_operations < failing:
            break
    assert failing > 12, "hardly anything failed"


def test_every_crash_state_of_a_deletion_keeps_the_head(tmp_path: Path) -> None:
    """Deletions leave complete commits and abandoned attempts, in whatever order they become durable."""
    machine = Machine(tmp_path)
    commits = open_commits(machine)
    last = [commits.save(small_state(step), facts(step)) for step in (1, 2, 3)][-1]
    machine.watch()
    prune(machine.store, Retention.of(last=1))
    assert heads(machine.states(), (last,)).keys() == {3}
    for store in started_from(machine.states()):
        assert all(damage_of(store, key) is None for key in commit_keys(store)), "a record outlived its files"


def test_every_crash_state_of_a_sweep_leaves_a_late_record_whole_or_impossible(tmp_path: Path) -> None:
    """However much of an attempt was deleted, its late writer finds the record's name taken."""
    machine = Machine(tmp_path)
    commits, first = saved_once(machine)
    late = commits.save(small_state(2), facts(2))
    machine.store.delete(late.key)  # not created yet
    machine.watch()
    assert sweep(machine.store, term=2).attempts == (late.attempt,)
    created = set()
    for store in started_from(machine.states()):
        created.add(is_created := create_once(store, late.key, late.encode()))
        assert discover(store) == Discovery(late if is_created else first, ())
    assert created == {True, False}
    machine.watch()
    assert not any(create_once(store, late.key, late.encode()) for store in started_from(machine.states()))


def test_folders_that_a_dead_process_has_made_become_durable(tmp_path: Path) -> None:
    """A folder's creator may have died before syncing it, so a save below it relies on no other process's syncs."""
    machine = Machine(tmp_path)
    commits, _ = saved_once(machine)
    machine.disk.make_directory(tmp_path / "data" / "step-000000000002")
    second = commits.save(small_state(2), facts(2))
    machine.watch()
    assert heads(machine.states(), (second,)).keys() == {2}


KEPT: dict[str, Callable[[Sequence[BinaryIO], Sequence[Path]], tuple[Sequence[BinaryIO], Sequence[Path]]]] = {
    "files": lambda files, folders: ([], folders),
    "folders": lambda files, folders: (files, []),
    "folders above": lambda files, folders: (files, folders[:1]),
}


@pytest.mark.parametrize("omitted", KEPT)
def test_the_enumeration_detects_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omitted: str) -> None:
    """The check can fail: without syncing files, folders, or a file's ancestors, the promise is broken."""
    sync, keep = MirroredDisk.sync, KEPT[omitted]
    monkeypatch.setattr(MirroredDisk, "sync", lambda self, files, folders: sync(self, *keep(files, folders)))
    machine = Machine(tmp_path)
    second = open_commits(machine).save(small_state(2), facts(2))
    with pytest.raises((AssertionError, CommitError)):
        heads(machine.states(), (second,))


def test_the_enumeration_detects_files_deleted_before_their_record(tmp_path: Path) -> None:
    """The check can fail: deleting in the wrong order leaves a record without its files."""
    machine = Machine(tmp_path)
    _, first = saved_once(machine)
    for entry in machine.store.list(f"{first.attempt}/"):
        machine.store.delete(entry.key)
    machine.store.delete(first.key)
    whole = [damage_of(store, key) is None for store in started_from(machine.states()) for key in commit_keys(store)]
    assert not all(whole)
