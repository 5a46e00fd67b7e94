"""Terms: claimed once, growing, in the store and in etcd together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_train.checkpoint import CommitWriter, Store, Unheard, discover
from elastic_train.errors import FencedError, StorageError
from elastic_train.world.fencing import JoinedFence, StoreFence
from rendezvous import errors as rendezvous_errors
from tests.elastic_train.checkpoint.commit_samples import facts, small_state


def test_claimed_terms_only_grow(store: Store) -> None:
    """A term is above every claim and every commit, and not below what the caller asks for."""
    fence = StoreFence(store)
    assert fence.head() is None
    assert [fence.claim(1), fence.claim(1), fence.claim(7), fence.claim(1)] == [1, 2, 7, 8]
    CommitWriter(store, fence, 12, None).save(small_state(), facts(3))
    head = fence.head()
    assert head is not None
    assert (head.term, head.commit) == (12, "commits/00000012-000000000003.json")
    assert fence.claim(1) == 13


def test_concurrent_claims_get_different_terms(store: Store) -> None:
    """No term is claimed twice, on any store."""
    with ThreadPoolExecutor(6) as pool:
        terms = list(pool.map(lambda _: StoreFence(store).claim(1), range(6)))
    assert len(set(terms)) == 6


class ControlPlane:
    """An etcd whose data may be lost, as a fence."""

    def __init__(self) -> None:
        self.term = 0
        self.commit: str | None = None
        self.error: Exception | None = None

    def claim(self, at_least: int) -> int:
        if self.error:
            raise self.error
        self.term = max(at_least, self.term + 1)
        return self.term

    def publish(self, term: int, commit: str) -> None:
        if self.error:
            raise self.error
        if term != self.term:
            raise rendezvous_errors.FencedError(f"the head is held by term {self.term}")
        self.commit = commit

    def head(self) -> ControlPlane:
        return self


def test_a_term_is_not_given_twice_when_etcd_loses_its_data(local_store: Store) -> None:
    """A zombie that has published nothing yet still holds its term in the store."""
    zombie_fence = JoinedFence(local_store, ControlPlane())
    zombie = CommitWriter(local_store, zombie_fence, zombie_fence.claim(5), None)
    fence = JoinedFence(local_store, ControlPlane())
    term = fence.claim(1)
    assert term == 6
    with pytest.raises(FencedError, match="term 6 was claimed"):
        zombie.save(small_state(1), facts(1))
    head = CommitWriter(local_store, fence, term, None).save(small_state(2), facts(2))
    assert discover(local_store).head == head


def test_etcd_errors_become_our_errors(local_store: Store) -> None:
    """A fence error of etcd is a FencedError; an unreachable etcd is a failed save."""
    control = ControlPlane()
    fence = JoinedFence(local_store, control)
    commits = CommitWriter(local_store, fence, fence.claim(1), None)
    control.term = 9
    with pytest.raises(FencedError, match="held by term 9"):
        commits.save(small_state(1), facts(1))
    control.error = rendezvous_errors.StoreUnavailableError("no member answered")
    with pytest.raises(StorageError, match="no member answered"):
        fence.claim(1)
    with pytest.raises(Unheard, match="no member answered") as unheard:
        commits.save(small_state(1), facts(2))
    assert unheard.value.commit == discover(local_store).head
