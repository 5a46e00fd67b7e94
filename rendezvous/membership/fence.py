"""The fence of a job's lineage: only the holder of the newest claimed term may publish.

Two worlds may compute at once, which cannot be prevented; two worlds may never both extend the lineage. A world claims
a term before it reads anything, and publishes only while the head still carries that term.

Invariant: the head's term only grows, and a world that is not the newest one cannot raise it.
"""

from __future__ import annotations

import uuid

from rendezvous.errors import FencedError, StoreUnavailableError
from rendezvous.membership.records import (
    Head,
    Keys,
    encode,
    read_head,
    read_view,
    refuse_newer,
)
from rendezvous.membership.rules.changes import Change
from rendezvous.membership.store import ABSENT, Put, Snapshot, Store

MAX_TRIES = 100


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
            term, change = raise_head(snapshot, self._keys, at_least, claim, self._world_term)
            if self._try(change):
                return term
        raise self._contended()

    def publish(self, term: int, commit: str) -> None:
        for _ in range(MAX_TRIES):
            if self._try(carry(self._store.get(self._keys.head), self._keys, term, commit)):
                return
        raise self._contended()

    def head(self) -> Head | None:
        return _head(self._store.get(self._keys.head), self._keys)

    def bind(self, word: str | None) -> str | None:
        """Bind the job to the store with this word, unless it is bound.

        Return the word in effect. None only reads it.
        """
        key = self._keys.store
        for _ in range(MAX_TRIES):
            bound = self._store.get(key).entries.get(key)
            if bound is not None or word is None:
                return bound.value if bound is not None else None
            if self._try(Change({key: word}, {key: ABSENT})):
                return word
        raise self._contended()

    def num_members(self, run_id: str) -> int:
        """Return the number of live members of a job, this or another one."""
        return len(self._store.get(Keys(run_id).members).entries)

    def close(self) -> None:
        self._store.close()

    def _try(self, change: Change) -> bool:
        writes = {key: None if text is None else Put(text) for key, text in change.writes.items()}
        return self._store.swap(writes, change.guards) is not None

    def _contended(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self._keys.prefix} changed during each of {MAX_TRIES} tries; does another job use the same run id?"
        )


def raise_head(snapshot: Snapshot, keys: Keys, at_least: int, claim: str, world_term: int | None) -> tuple[int, Change]:
    """Return the term that a claim would get, and the write that claims it.

    A world sealed between the read and the write must win, so the guard includes the world.
    """
    view = read_view(snapshot, keys)
    refuse_newer(view.newer)
    if world_term is not None and view.term != world_term:
        raise FencedError(
            f"the world of term {world_term} may not claim: the newest world in etcd has term {view.term} "
            f"({keys.world}). A newer world is training, or etcd has lost its data; stop this one."
        )
    old = view.head
    term = max(at_least, 1 if old is None else old.term + 1)
    head = Head(term, None if old is None else old.commit, claim)
    guards = {key: snapshot.revision_of(key) for key in (keys.head, keys.world)}
    return term, Change({keys.head: encode(head)}, guards)


def carry(snapshot: Snapshot, keys: Keys, term: int, commit: str) -> Change:
    """Return the write that makes `commit` the head, which must still carry `term`."""
    old = _head(snapshot, keys)
    if old is None or old.term != term:
        held = "nobody" if old is None else f"term {old.term}"
        raise FencedError(
            f"term {term} may not publish {commit}: the head is held by {held} ({keys.head}). "
            "A newer world is training; stop this one."
        )
    return Change({keys.head: encode(Head(term, commit, old.claim))}, {keys.head: snapshot.revision_of(keys.head)})


def _head(snapshot: Snapshot, keys: Keys) -> Head | None:
    entry = snapshot.entries.get(keys.head)
    return read_head(keys.head, None if entry is None else entry.value)
