"""Saves of ranks that hold pieces of the state: each writes its own pieces, copied during training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic_train.checkpoint.commits.reader import discover, load, read_state
from elastic_train.checkpoint.format.dcp import join_digests, tensor_digest
from elastic_train.checkpoint.format.layout import bytes_of, leaves_by_path, plan_attempt
from elastic_train.checkpoint.format.state_tree import Span
from elastic_train.checkpoint.saving import save_thread
from elastic_train.checkpoint.saving.background_saves import SaveMemory, Saves
from elastic_train.checkpoint.saving.staging import Snapshot
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import StorageError
from elastic_train.placement.grains import GRAIN
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.checkpoint.commit_samples import State, facts
from tests.elastic_train.checkpoint.commits.test_commits import assert_equal_trees
from tests.elastic_train.checkpoint.piece_samples import cut, numbered
from tests.elastic_train.checkpoint.save_samples import FullStore, HeldStore, all_still, open_saves, quick_retries

__all__ = ["quick_retries"]

WEIGHT_CUTS: list[list[Span]] = [[(0, GRAIN)], [(3 * GRAIN, 3 * GRAIN + 9)], [(GRAIN, 3 * GRAIN)]]
MOMENT_CUTS: list[list[Span]] = [[(0, 50)], [], [(50, 105)]]


def world_of(stores: list[Store]) -> list[Saves]:
    """Open the saves of a world's ranks."""
    term = StoreFence(stores[0]).claim()
    return [open_saves(store, term=term, place=place, of=len(stores)) for place, store in enumerate(stores)]


def whole_state() -> State:
    """Return the state that the ranks hold together; "scale" is replicated."""
    return {
        "model": {"w": numbered((3, GRAIN + 3)), "scale": numbered((3,))},
        "optimizer": {"m": numbered((5, 7, 3), seed=1)},
        "scheduler": {"last_epoch": 4},
    }


def pieces_of(rank: int) -> State:
    """Return a rank's pieces of it."""
    whole = whole_state()
    whole["model"]["w"] = cut(whole["model"]["w"], WEIGHT_CUTS, WEIGHT_CUTS[rank])  # type: ignore[index]
    whole["optimizer"]["m"] = cut(whole["optimizer"]["m"], MOMENT_CUTS, MOMENT_CUTS[rank])  # type: ignore[index]
    return whole


def memory_of(state: State) -> list[Tensor]:
    """Return all memory that a rank holds of tensors in pieces."""
    leaves = (state["model"]["w"], state["optimizer"]["m"])  # type: ignore[index]
    return [memory for leaf in leaves for memory in leaf.held.values()]


@pytest.mark.slow
def test_ranks_write_their_pieces_and_the_first_publishes(store: Store) -> None:
    """This holds for the smallest state, while every rank trains on; the receipts include the digests of grains."""
    ranks, states, whole = world_of([store] * 3), [pieces_of(rank) for rank in range(3)], whole_state()
    for step in (1, 2):
        for rank, state in zip(ranks, states, strict=True):
            rank.begin(state, facts(step), is_still=all_still)
        for rank, state in zip(ranks, states, strict=True):
            rank.await_staging()
            for memory in memory_of(state):
                memory.add_(1)
        ended = [rank.wait() for rank in reversed(ranks)][::-1]
        assert [end and end.error for end in ended] == [None] * 3
        commit = ended[0].commit if ended[0] else None
        assert commit is not None and discover(store).head == commit
        assert_equal_trees(read_state(store, commit), whole)
        weights: dict[str, Tensor] = whole["model"]  # type: ignore[assignment]
        digests = {name: tensor_digest(one.dtype, one.shape, bytes_of(one)) for name, one in weights.items()}
        assert commit.weights_sha256 == join_digests(digests)
        for name, leaves in (("w", whole["model"]), ("m", whole["optimizer"])):
            leaves[name].add_(1)  # type: ignore[index]
    resumed = pieces_of(2)
    load(store, commit, resumed)
    for found, since in zip(memory_of(resumed), memory_of(states[2]), strict=True):
        assert torch.equal(found, since - 1)


def test_pieces_that_a_forward_pass_may_change_are_cloned_at_the_boundary(tmp_path: Path) -> None:
    """Training may change the memory of a non-still tensor at once."""
    store = LocalStore(tmp_path)
    ranks, states = world_of([store] * 3), [pieces_of(rank) for rank in range(3)]
    for rank, state in zip(ranks, states, strict=True):
        rank.begin(state, facts(1))
        for memory in memory_of(state):
            memory.add_(1)
    ended, *_ = [rank.wait() for rank in ranks]
    assert ended is not None and ended.commit is not None
    assert_equal_trees(read_state(store, ended.commit), whole_state())


def test_a_piece_that_changes_before_it_is_copied_fails_the_save() -> None:
    """An update that does not wait is detected in every box of the memory that it changed."""
    state = pieces_of(2)
    part = plan_attempt(state, 3).parts[2]
    snapshot = Snapshot(part, leaves_by_path(state), all_still)
    state["optimizer"]["m"].held[50, 105][-1] = 7  # type: ignore[index]
    buffer = SaveMemory().staging.buffer(snapshot.num_bytes, None)
    with pytest.raises(StorageError, match=r"'optimizer\.m' changed while it was read"):
        snapshot.copy(buffer, lambda: None, lambda num_there: None)


def test_a_rank_that_cannot_write_its_pieces_fails_the_save(tmp_path: Path) -> None:
    """Nobody else has them: nothing is published."""
    full = FullStore(tmp_path, 3)
    ranks = world_of([LocalStore(tmp_path), LocalStore(tmp_path), full])
    for rank, saves in enumerate(ranks):
        saves.begin(pieces_of(rank), facts(1))
    first, _, third = (saves.wait() for saves in ranks)
    assert first is not None and third is not None and isinstance(third.error, StorageError)
    assert "part 2 was not written" in str(first.error) and discover(full).head is None


def test_rank_0_waits_as_long_as_the_largest_part_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has little to write itself, but must allow slow storage the time for another rank's pieces."""
    monkeypatch.setattr(save_thread, "LEAST_S", 0.05)
    monkeypatch.setattr(save_thread, "SLOWEST_BYTES_S", 1e4)
    slow = HeldStore(tmp_path)
    slow.may_create.set()
    ranks, size = world_of([LocalStore(tmp_path), slow]), 100_000
    written: list[list[Span]] = [[(0, 3)], [(3, size)]]
    for rank, spans in zip(ranks, written, strict=True):
        rank.begin({"optimizer": {"m": cut(torch.zeros(size), written, spans)}}, facts(1))
    threading.Timer(0.5, slow.may_write.set).start()
    ended = ranks[0].wait()
    assert ended is not None and ended.commit is not None
