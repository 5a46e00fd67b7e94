"""Terms: claimed once, growing, consistent in the store and in etcd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.commits.record import VOID
from elastic_train.checkpoint.commits.writer import CommitWriter, FenceNotUpdated
from elastic_train.checkpoint.stores.store import KeyClaimed, Store, create_once
from elastic_train.errors import FencedError, StorageError
from elastic_train.world import fencing
from elastic_train.world.fencing import KEPT_TERMS, JoinedFence, StoreFence, forget_old_terms, newest_term
from rendezvous import errors as rendezvous_errors
from tests.elastic_train.checkpoint.commit_samples import facts, small_state


def test_claimed_terms_only_grow(store: Store) -> None:
    """A term is above every claim and every commit, and not below the requested one."""
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


@pytest.mark.parametrize("store", ["plain"], indirect=True)
def test_a_term_that_somebody_is_about_to_claim_is_left_to_them(store: Store) -> None:
    """Without conditional create each of two may see the other and give up: nothing is there to tell whose it is."""
    store.create("claims/terms/00000001.json/another", b"")
    assert StoreFence(store).claim(1) == 2
    with pytest.raises(KeyClaimed, match=r"terms/00000001\.json: another writer is claiming it"):
        create_once(store, "terms/00000001.json", b"mine")
    store.delete("claims/terms/00000001.json/another")
    assert create_once(store, "terms/00000001.json", b"mine")


def keys(store: Store, prefix: str) -> list[str]:
    return [entry.key for entry in store.list(prefix)]


def test_what_old_terms_left_is_forgotten(store: Store) -> None:
    """Only the newest terms' claims, configurations and tombstones are left; commits are not touched."""
    fence, newest = StoreFence(store), KEPT_TERMS + 5
    for term in (1, 2, 4, 5, newest):
        assert fence.claim(term) == term
        store.create(f"configs/{term:08d}.yaml", b"seed: 1")
    writer = CommitWriter(store, fence, newest, None)
    for term in (4, 5):
        store.create(f"commits/{term:08d}-000000000007.json", VOID)
    store.create("commits/00000002-000000000003.json", b"a record, if a damaged one")
    assert forget_old_terms(store, KEPT_TERMS) == 0
    assert forget_old_terms(store, newest) == 3 + 3, "no newer term has committed: the tombstones stay"
    writer.save(small_state(), facts(3))
    assert forget_old_terms(store, newest) == 1
    assert keys(store, "terms/") == [f"terms/{term:08d}.json" for term in (5, newest)]
    assert keys(store, "configs/") == [f"configs/{term:08d}.yaml" for term in (5, newest)]
    assert [key for key in keys(store, "commits/") if key.startswith("commits/00000004")] == []
    assert [key for key in keys(store, "commits/") if key.startswith(("commits/00000002", "commits/00000005"))] != []
    assert newest_term(store) == newest and forget_old_terms(store, newest) == 0
    assert fence.claim(1) == newest + 1


def test_a_claim_that_comes_after_its_term_was_forgotten_is_not_given(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process freezes between reading the terms and its claim, while others claim many and prune the old ones.

    The name that it creates was another's: it must get a different term.
    """
    monkeypatch.setattr(fencing, "KEPT_TERMS", 5)
    create_once, given = fencing.create_once, list[int]()

    def frozen(store: Store, key: str, content: bytes) -> bool:
        monkeypatch.setattr(fencing, "create_once", create_once)
        given.extend(StoreFence(store).claim() for _ in range(10))
        forget_old_terms(store, given[-1])
        assert "terms/00000001.json" not in keys(store, "terms/"), "the name is free again"
        return create_once(store, key, content)

    monkeypatch.setattr(fencing, "create_once", frozen)
    assert StoreFence(local_store).claim() == given[-1] + 1
    assert given[0] == 1


def test_whoever_is_of_a_forgotten_term_publishes_nothing_that_counts(local_store: Store) -> None:
    """A writer freezes before its record, is swept, and its tombstone pruned: it is fenced, and its commit skipped."""
    fence = StoreFence(local_store)
    old = CommitWriter(local_store, fence, fence.claim(), None)
    new = CommitWriter(local_store, fence, fence.claim(2 + KEPT_TERMS), None).save(small_state(), facts(3))
    local_store.create("commits/00000001-000000000009.json", VOID)
    assert forget_old_terms(local_store, 2 + KEPT_TERMS) == 2
    with pytest.raises(FencedError):
        old.save(small_state(), facts(9))
    assert local_store.open("commits/00000001-000000000009.json").read() != VOID, "the record came to exist"
    head = discover(local_store).head
    assert head is not None and head.key == new.key


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
    with pytest.raises(FenceNotUpdated, match="no member answered") as unheard:
        commits.save(small_state(1), facts(2))
    assert unheard.value.commit == discover(local_store).head
