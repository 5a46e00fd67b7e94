"""Saves of several ranks: a part each, done records, and ranks that are lost or cannot write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.format import layout
from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.checkpoint.saving import save_thread
from elastic_train.checkpoint.saving.background_saves import SaveMemory, Saves
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import PeerLostError, StorageError
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.checkpoint.commit_samples import State, facts, small_state, trained
from tests.elastic_train.checkpoint.commits.test_commits import assert_equal_trees, odd_state
from tests.elastic_train.checkpoint.save_samples import DEADLINE_S, FullStore, HeldStore, open_saves, quick_retries

__all__ = ["quick_retries"]


def test_nobody_waits_for_the_part_of_a_lost_rank(tmp_path: Path) -> None:
    """Rank 0 has written its part, the other never will: rank 0 learns that the world is broken, and stops waiting."""
    memory = SaveMemory()
    background = open_saves(LocalStore(tmp_path), memory, of=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LEAST_PART_BYTES", 1)
        background.begin(small_state(), facts(3))
    asked: list[float] = []

    def look(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 2:
            raise PeerLostError("the world has changed")

    with pytest.raises(PeerLostError):
        background.wait(look)
    assert asked == sorted(asked)
    assert background.abandon() is None and memory.is_owed
    assert discover(LocalStore(tmp_path)).head is None


def world_of(stores: list[Store], patch: pytest.MonkeyPatch) -> list[Saves]:
    """Open the saves of a world's ranks, whatever the state's size."""
    patch.setattr(layout, "LEAST_PART_BYTES", 1)
    term = StoreFence(stores[0]).claim()
    return [open_saves(store, term=term, place=place, of=len(stores)) for place, store in enumerate(stores)]


def test_ranks_write_a_part_each_and_the_first_publishes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without communication, W ranks write every tensor once, balanced by bytes; the whole is bit-equal."""
    ranks = world_of([store] * 3, monkeypatch)
    model, optimizer = trained(2)
    states: list[State] = [
        odd_state(),
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": torch.randn(50_000).split(9_999)},
    ]
    states[1]["more"] = list(states[1]["more"])  # type: ignore[call-overload]
    for step, state in enumerate(states, start=1):
        for rank in reversed(ranks):
            rank.begin(state, facts(step))
        ended = [rank.wait() for rank in ranks]
        assert [end and end.error for end in ended] == [None] * 3
        commit = ended[0].commit if ended[0] else None
        assert commit is not None and discover(store).head == commit
        assert_equal_trees(read_state(store, commit), state)
        sizes = [file.size for name, file in commit.files.items() if name != ".metadata"]
        assert len(sizes) == 3
    assert max(sizes) < 1.5 * sum(sizes) / 3
    assert commit.weights_sha256 == weights_digest(model, {})


def test_a_rank_that_cannot_write_its_part_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 learns the reason from the done record, publishes nothing, and the next save is complete."""
    full = FullStore(tmp_path, 3)
    ranks = world_of([LocalStore(tmp_path), full], monkeypatch)
    for step in (1, 2):
        for rank in ranks:
            rank.begin(odd_state(), facts(step))
        first, second = (rank.wait() for rank in ranks)
        if step == 1:
            assert first is not None and second is not None
            assert "part 1 was not written" in str(first.error) and "No space left" in str(first.error)
            assert isinstance(second.error, StorageError)
            assert discover(full).head is None
    assert first is not None and discover(full).head == first.commit


@pytest.mark.parametrize(("num_failures", "is_saved"), [(2, True), (3, False)])
def test_a_receipt_that_cannot_be_read_at_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int, is_saved: bool
) -> None:
    """Reading is tried as often as writing: all parts exist by then."""
    left = [OSError("input/output error")] * num_failures

    class Failing(LocalStore):
        def open(self, key: str) -> BinaryIO:
            if "/done-" in key and Path(tmp_path, key).exists() and left:
                raise StorageError(f"{key}: {left.pop()}")
            return super().open(key)

    ranks = world_of([Failing(tmp_path), LocalStore(tmp_path)], monkeypatch)
    for rank in ranks:
        rank.begin(odd_state(), facts(1))
    first, _ = (rank.wait() for rank in ranks)
    assert first is not None and (first.commit is not None) == is_saved


def test_a_dead_writer_does_not_disturb_the_next_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a missing part until its world ends; the next world's first save starts clean."""
    is_waiting = threading.Event()

    class Watched(LocalStore):
        def open(self, key: str) -> BinaryIO:
            if "/done-" in key:
                is_waiting.set()
            return super().open(key)

    store = Watched(tmp_path)
    ranks = world_of([store, store], monkeypatch)
    ranks[0].begin(odd_state(), facts(1))
    flight = ranks[0]._flight
    assert is_waiting.wait(DEADLINE_S)
    ranks[0].abandon()
    assert flight is not None and flight.ended.wait(DEADLINE_S)
    assert flight.commit is None and store.list("commits/") == []
    survivor = world_of([store], monkeypatch)[0]
    state = odd_state()
    survivor.begin(state, facts(1))
    ended = survivor.wait()
    assert ended is not None and ended.commit is not None
    assert_equal_trees(read_state(store, ended.commit), state)
    assert {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")} == {ended.commit.attempt}


@pytest.mark.parametrize(
    "harm", [lambda content: content[:-1], lambda content: bytes([content[0] ^ 1]) + content[1:], lambda content: b""]
)
def test_a_damaged_done_record_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[bytes], bytes]
) -> None:
    """Rank 0 does not publish if it cannot read a record."""

    class Harmed(LocalStore):
        def create(self, key: str, content: bytes) -> None:
            super().create(key, harm(content) if "/done-" in key else content)

    ranks = world_of([LocalStore(tmp_path), Harmed(tmp_path)], monkeypatch)
    for rank in ranks:
        rank.begin(odd_state(), facts(1))
    ended = ranks[0].wait()
    assert ended is not None and ended.commit is None
    assert isinstance(ended.error, StorageError) and "done-00001.json" in str(ended.error)


def test_a_rank_hanging_in_its_part_does_not_block_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it no longer than for its own write; then both are free for the next save."""
    monkeypatch.setattr(save_thread, "LEAST_S", 0.2)
    hung = HeldStore(tmp_path)
    ranks = world_of([LocalStore(tmp_path), hung], monkeypatch)
    for rank in ranks:
        rank.begin(odd_state(), facts(1))
    first, second = (rank.wait() for rank in ranks)
    assert first is not None and second is not None and {type(first.error), type(second.error)} == {StorageError}
    monkeypatch.setattr(save_thread, "LEAST_S", DEADLINE_S)
    hung.may_create.set()
    hung.may_write.set()
    for rank in ranks:
        rank.begin(odd_state(), facts(2))
    first = [rank.wait() for rank in reversed(ranks)][-1]
    assert first is not None and discover(hung).head == first.commit


def test_rank_0_learns_of_an_abandoned_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's deadline may be far longer than a new rank's; it does not wait for a part that will not come."""
    monkeypatch.setattr(save_thread, "LEAST_S", 0.2)
    ranks = world_of([LocalStore(tmp_path), HeldStore(tmp_path)], monkeypatch)
    ranks[0]._memory.timeout.learn(10 * DEADLINE_S)
    for rank in ranks:
        rank.begin(odd_state(), facts(1))
    flight = ranks[0]._flight
    given_up = ranks[1].wait()
    assert given_up is not None and isinstance(given_up.error, StorageError)
    assert flight is not None and flight.ended.wait(DEADLINE_S)
    ended = ranks[0].wait()
    assert ended is not None and "made no progress" in str(ended.error) and "part 1" in str(ended.error)
