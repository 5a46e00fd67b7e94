"""The fence around a job's lineage: whoever has claimed the newest term may publish, nobody else.

Two worlds may compute at once, and nothing can prevent that; two worlds may never both extend the lineage. A world
claims a term before it reads anything, and publishes only while the head still carries that term.

Invariant: the head's term only grows, and a world that is not the newest one cannot raise it.
"""

from __future__ import annotations

import uuid
from typing import Protocol

from rendezvous.errors import FencedError, StoreUnavailableError
from rendezvous.records import Head, Keys, encode, read_head, read_view
from rendezvous.store import Put, Snapshot, Store

MAX_TRIES = 100


class Fence(Protocol):
    """What a trainer needs of membership: fence first, then restore."""

    def claim(self, at_least: int) -> int:
        """Claim a term above every claimed one, and at least `at_least`; FencedError if a newer world exists."""

    def publish(self, term: int, commit: str) -> None:
        """Make `commit` the head while it still carries `term`; FencedError otherwise."""

    def head(self) -> Head | None: ...


class EtcdFence:
    """A fence over a store; with `world_term`, only the world of that term can claim."""

    def __init__(self, store: Store, run_id: str, *, world_term: int | None = None) -> None:
        self._store = store
        self._keys = Keys(run_id)
        self._world_term = world_term

    def claim(self, at_least: int) -> int:
        claim = uuid.uuid4().hex
        for _ in range(MAX_TRIES):
            snapshot = self._store.get(self._keys.prefix)
            self._check_world(snapshot)
            old = read_view(snapshot, self._keys).head
            term = max(at_least, 1 if old is None else old.term + 1)
            new = Head(term, None if old is None else old.commit, claim)
            # A world that is sealed between the look and the claim must win: the guard covers it too.
            if self._swap(snapshot, new, self._keys.head, self._keys.world):
                return term
        raise self._contended()

    def publish(self, term: int, commit: str) -> None:
        for _ in range(MAX_TRIES):
            snapshot = self._store.get(self._keys.head)
            old = _head(snapshot, self._keys)
            if old is None or old.term != term:
                held = "nobody" if old is None else f"term {old.term}"
                raise FencedError(
                    f"term {term} may not publish {commit}: the head is held by {held} ({self._keys.head}). "
                    "A newer world trains on; stop this one."
                )
            if self._swap(snapshot, Head(term, commit, old.claim), self._keys.head):
                return
        raise self._contended()

    def head(self) -> Head | None:
        return _head(self._store.get(self._keys.head), self._keys)

    def close(self) -> None:
        self._store.close()

    def _check_world(self, snapshot: Snapshot) -> None:
        newest = read_view(snapshot, self._keys).term
        if self._world_term is not None and newest > self._world_term:
            raise FencedError(
                f"the world of term {self._world_term} may not claim: term {newest} was sealed since "
                f"({self._keys.world}). A newer world trains on; stop this one."
            )

    def _swap(self, snapshot: Snapshot, head: Head, *guarded: str) -> bool:
        guards = {key: snapshot.revision_of(key) for key in guarded}
        return self._store.swap({self._keys.head: Put(encode(head))}, guards) is not None

    def _contended(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"{self._keys.head} changed at each of {MAX_TRIES} tries; is the run id shared?")


def _head(snapshot: Snapshot, keys: Keys) -> Head | None:
    entry = snapshot.entries.get(keys.head)
    return None if entry is None else read_head(entry.value)
