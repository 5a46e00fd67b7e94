"""A sweep deletes only attempts that can never be published, wherever a writer or a sweep is frozen."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import BinaryIO

import pytest

from elastic_train.checkpoint.commits import pruning
from elastic_train.checkpoint.commits.pruning import sweep
from elastic_train.checkpoint.commits.reader import Discovery, commit_keys, discover, verify
from elastic_train.checkpoint.commits.record import VOID, CommitRecord
from elastic_train.checkpoint.commits.retention_policies import holding
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Entry, KeyMissing, Sink, Store, read
from elastic_train.core.lineage import COMMITS, commit_key
from elastic_train.errors import ElasticTrainError, FencedError, StorageError
from elastic_train.world.fencing import StoreFence
from tests.conftest import PATIENCE_S
from tests.elastic_train.checkpoint.commit_samples import commit_steps, facts, small_state

DEADLINE_S = PATIENCE_S


def test_abandoned_attempts_of_older_terms_are_swept(store: Store) -> None:
    """An attempt without a record is deleted once its term is over; commits, and the newest term's attempts, stay."""
    (commit,) = commit_steps(store, 1)
    for attempt in ("data/step-000000000002/00000001-dead", "data/step-000000000002/00000002-live"):
        store.create(f"{attempt}/__0_0.distcp", b"half")
    swept = sweep(store, term=2)
    assert swept.attempts == ("data/step-000000000002/00000001-dead",)
    assert swept.num_bytes == 4
    assert discover(store).head == commit and discover(store).skipped == ()
    head = StoreFence(store).head()
    assert head is not None and head.commit == commit.key
    assert sweep(store, term=2).attempts == ()


def test_the_next_sweep_finishes_an_interrupted_one(local_store: Store) -> None:
    """The record's name may have been taken by another sweep, or by this one before it died."""
    attempt = "data/step-000000000002/00000001-dead"
    local_store.create(f"{attempt}/__0_0.distcp", b"half")
    local_store.create(commit_key(1, 2), VOID)
    assert sweep(local_store, term=2).attempts == (attempt,)
    assert local_store.list("data/") == []


def test_a_dry_run_blocks_no_record(local_store: Store) -> None:
    """It lists what would be deleted, and a writer may still publish."""
    local_store.create("data/step-000000000002/00000001-slow/__0_0.distcp", b"half")
    planned = sweep(local_store, term=2, is_rehearsal=True)
    assert (planned.attempts, planned.num_bytes) == (("data/step-000000000002/00000001-slow",), 4)
    assert local_store.list(COMMITS) == [] and len(local_store.list("data/")) == 1


def test_an_attempt_long_untouched_is_swept(local_store: Store) -> None:
    """An attempt of the running term is deleted once it is older than the safe age."""
    key = "data/step-000000000002/00000002-slow/__0_0.distcp"
    local_store.create(key, b"half")
    touched = local_store.list("data/")[0].modified_at
    assert touched is not None
    assert sweep(local_store, term=2, now=touched + 99, safe_age_s=100).attempts == ()
    assert sweep(local_store, term=2, now=touched + 101, safe_age_s=100).attempts == (key.rsplit("/", 1)[0],)


def test_the_files_of_an_unreadable_record_are_kept(local_store: Store) -> None:
    """A damaged record does not take its files with it: a user may rescue them."""
    (commit,) = commit_steps(local_store, 1)
    path = Path(local_store.url) / commit.key
    for left in (path.read_bytes()[:-2], b"", b"x" * len(VOID)):
        path.write_bytes(left)
        assert sweep(local_store, term=9).attempts == ()


def test_a_swept_commit_cannot_be_held(local_store: Store) -> None:
    """A late reader gets an error before it reads."""
    local_store.create(commit_key(1, 2), VOID)
    with pytest.raises(KeyMissing, match="swept"), holding(local_store, commit_key(1, 2)):
        pass


class InTurns:
    """A store whose every call waits until it is permitted."""

    def __init__(self, store: Store) -> None:
        self._store, self.url = store, store.url
        self.arrived, self.turn = threading.Semaphore(0), threading.Semaphore(0)

    def _wait(self) -> Store:
        self.arrived.release()
        assert self.turn.acquire(timeout=DEADLINE_S), "never let through"
        return self._store

    def create(self, key: str, content: bytes) -> None:
        self._wait().create(key, content)

    def write(self, key: str) -> AbstractContextManager[Sink]:
        return self._wait().write(key)

    def open(self, key: str) -> BinaryIO:
        return self._wait().open(key)

    def list(self, prefix: str) -> list[Entry]:
        return self._wait().list(prefix)

    def delete(self, key: str) -> None:
        self._wait().delete(key)


class Actor:
    """An action on a thread, one store call after another, as many as are permitted."""

    def __init__(self, store: Store, act: Callable[[Store], object]) -> None:
        self._store = InTurns(store)
        self.error: BaseException | None = None
        self.is_through = False
        threading.Thread(target=self._run, args=(act,), daemon=True).start()
        assert self._store.arrived.acquire(timeout=DEADLINE_S)

    def _run(self, act: Callable[[Store], object]) -> None:
        try:
            act(self._store)
        except ElasticTrainError as error:
            self.error = error
        finally:
            self.is_through = True
            self._store.arrived.release()

    def go_on(self, num_calls: int) -> None:
        """Permit the given number of calls, or as many as there are."""
        for _ in range(num_calls):
            if not self.is_through:
                self._store.turn.release()
                assert self._store.arrived.acquire(timeout=DEADLINE_S), "hangs"

    def go_on_to_the_end(self) -> None:
        while not self.is_through:
            self.go_on(1)


NUM_SAVING, NUM_SWEEPING = 4, 6
"""The number of store calls of a one-part save up to its record's creation, and of a sweep of its attempt."""


def endings() -> Iterator[tuple[bool, bool]]:
    """Interleave a late save, a frozen sweep, and a newer world that reads, at each of their calls.

    The save is stopped after some calls, the sweep after some of its calls, the save again; a newer world reads the
    store, and both may continue, the sweep first. Yields whether the commit exists in the end, and whether the newer
    world has read it.
    """
    store = open_store(f"memory://{uuid.uuid4().hex}/run")
    (first,) = commit_steps(store, 1)
    kept = {entry.key for entry in store.list("")}
    for before, swept, more in product(range(NUM_SAVING + 1), range(NUM_SWEEPING + 1), range(NUM_SAVING + 1)):
        if before + more > NUM_SAVING:
            continue
        late = Actor(store, functools.partial(save_second, first))
        late.go_on(before)
        StoreFence(store).claim(2)
        sweeper = Actor(store, lambda slow: sweep(slow, term=2))
        sweeper.go_on(swept)
        late.go_on(more)
        StoreFence(store).claim(3)
        found = discover(store)
        sweeper.go_on_to_the_end()
        late.go_on_to_the_end()
        assert found.skipped == () and discover(store).skipped == (), "a record without its files"
        assert found.head is not None
        verify(store, found.head)
        assert sweeper.error is None and isinstance(late.error, StorageError | FencedError)
        yield len(commit_keys(store)) == 2, found.head != first
        for entry in store.list(""):
            if entry.key not in kept:
                store.delete(entry.key)


def save_second(first: CommitRecord, store: Store) -> None:
    CommitWriter(store, StoreFence(store), first.term, first).save(small_state(2), facts(2))


@pytest.mark.heavy
def test_no_commit_loses_its_files_wherever_a_writer_or_a_sweep_is_frozen() -> None:
    """Either the late save or the sweep wins, wherever they were frozen; a commit that a newer world has read stays."""
    seen = list(endings())
    assert {*seen} == {(False, False), (True, False), (True, True)}


def test_the_enumeration_detects_a_sweep_that_only_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: checking the records right before the deletion is not enough."""
    monkeypatch.setattr(pruning, "create_once", lambda store, key, content: key not in commit_keys(store))
    with pytest.raises((AssertionError, ElasticTrainError), match=r"without its files|missing"):
        list(endings())


def test_a_commit_published_during_a_sweep_keeps_its_files(tmp_path: Path) -> None:
    """A writer of an older term wakes and publishes after the records were checked; a world may continue from it."""

    class Waking(LocalStore):
        late: tuple[str, bytes] | None = None

        def list(self, prefix: str) -> list[Entry]:
            found = super().list(prefix)
            if prefix == COMMITS and self.late is not None:
                self.late = self.create(*self.late)  # type: ignore[func-returns-value]
            return found

    store = Waking(tmp_path)
    (commit,) = commit_steps(store, 1)
    content = read(store, commit.key)
    store.delete(commit.key)
    store.late = (commit.key, content)
    assert sweep(store, term=2).attempts == ()
    assert discover(store).head == commit


def test_an_attempt_whose_step_another_one_has_committed_is_swept(local_store: Store) -> None:
    """The last step is saved again if storage fails, and it may fail to delete the first try as well."""
    (record,) = commit_steps(local_store, 5)
    again = f"{record.attempt.rpartition('-')[0]}-again"
    local_store.create(f"{again}/__0_0.distcp", b"a part")
    assert sweep(local_store, 1).attempts == (), "its writer may be at work"
    assert sweep(local_store, 2).attempts == (again,)
    assert discover(local_store) == Discovery(record, ())
