"""Fencing: two worlds may compute at once, but never both extend the lineage.

A world claims a term before it reads anything, and publishes a commit under that term. Without etcd, a term is claimed
by a conditional create of `terms/<term>.json` in the store, so no term is claimed twice, and a term is fenced as soon
as a higher one is claimed. With etcd, a term is claimed there and in the store: etcd notices first, and the store still
knows if etcd's data is lost.

Invariant: `claim` returns a term above every term seen in the store, in a claim or in a commit, and never one that was
returned before, although old claims are deleted: a claim that comes that late is not returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_train.checkpoint.commits.pruning import tombstones
from elastic_train.checkpoint.commits.reader import commit_keys
from elastic_train.checkpoint.commits.writer import FenceNotUpdated
from elastic_train.checkpoint.stores.store import KeyClaimed, Store, create_once
from elastic_train.core.lineage import COMMITS, place_of
from elastic_train.errors import FencedError, StorageError, translated
from elastic_train.world.claims import (
    TERMS,
    HeadLike,
    Own,
    new_claim,
    nothing_to_check,
    read_claim,
    taken_over,
    term_key,
)

CONFIGS = "configs/"
KEPT_TERMS = 100
"""Number of terms whose traces are kept: claims, configurations, and tombstones of sweeps."""
_CLAIM_TRIES = 100
_KEY = re.compile(r"(?:terms|configs)/(\d{8,})\.(?:json|yaml)")


class Fence(Protocol):
    """The interface to membership that a trainer needs."""

    def claim(self, at_least: int) -> int:
        """Claim a term above every term claimed before, and not below `at_least`."""

    def publish(self, term: int, commit: str) -> None:
        """Make a commit the head, or raise FencedError if its term is not the newest.

        Raises FenceNotUpdated if only etcd failed.
        """

    def head(self) -> HeadLike | None:
        """Return the newest claim, None before the first."""

    def bind(self, word: str | None) -> str | None:
        """Bind the job to the store with this word, unless it is bound.

        Return the word in effect. None only reads it.
        """

    def num_members(self, run_id: str) -> int:
        """Return the number of live members of a job, this or another one; 0 without etcd."""

    def close(self) -> None:
        """Close connections."""


@dataclass(frozen=True, slots=True)
class StoreHead:
    """The newest claimed term, and the newest commit's key."""

    term: int
    commit: str | None


class StoreFence:
    """The fence of a store without etcd. Claims are permanent, and `publish` writes nothing: the record is enough.

    Between a record's creation and the check of the claims, a newer world may claim and read: it finds the record or
    not, and in both cases no later commit of the older term precedes one of its own.
    """

    def __init__(self, store: Store, own: Own | None = None, check: Callable[[int], None] = nothing_to_check) -> None:
        """`own` recognizes this job's claims; `check` is called with the newest term before the next one is claimed."""
        self._store, self._own, self._check = store, own or Own(), check
        self.nonce, self.claimed = "", b""
        """Nonce of the last claim, by which other ranks recognize it, and its content."""

    def claim(self, at_least: int = 1) -> int:
        return self.claim_from(lambda lowest: max(at_least, lowest))

    def claim_from(self, propose: Callable[[int], int]) -> int:
        """Claim the first proposed term that nobody else holds; `propose` gets the lowest free one."""
        self._check(max((term for term, _ in _of_terms(self._store, TERMS)), default=0))
        term, self.nonce, self.claimed = _claim_in(self._store, propose, self._own)
        return term

    def publish(self, term: int, commit: str) -> None:
        newest = newest_term(self._store)
        if newest > term:
            claim = read_claim(self._store, newest)
            if not self._own.has(claim):
                raise taken_over(self._store, term, claim)
            raise FencedError(
                f"{self._store.url}/{commit}: term {newest} was claimed, so term {term} may not extend the lineage"
            )

    def head(self) -> StoreHead | None:
        newest = newest_term(self._store)
        return StoreHead(newest, next(iter(commit_keys(self._store)), None)) if newest else None

    def bind(self, word: str | None) -> str | None:
        return word

    def num_members(self, run_id: str) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: the store is not the fence's to close."""


class JoinedFence:
    """The fence of etcd (`control`) and the store together; translates etcd's errors to this package's."""

    def __init__(
        self, store: Store, control: Fence, own: Own | None = None, check: Callable[[int], None] = nothing_to_check
    ) -> None:
        self._claims = StoreFence(store, own, check)
        self._control = control

    @property
    def nonce(self) -> str:
        return self._claims.nonce

    @property
    def claimed(self) -> bytes:
        return self._claims.claimed

    def claim(self, at_least: int = 1) -> int:
        with translated():
            return self._claims.claim_from(lambda lowest: self._control.claim(max(at_least, lowest)))

    def publish(self, term: int, commit: str) -> None:
        self._claims.publish(term, commit)
        try:
            with translated():
                self._control.publish(term, commit)
        except StorageError as error:
            raise FenceNotUpdated(str(error)) from error

    def head(self) -> HeadLike | None:
        with translated():
            return self._control.head()

    def bind(self, word: str | None) -> str | None:
        with translated():
            return self._control.bind(word)

    def num_members(self, run_id: str) -> int:
        with translated():
            return self._control.num_members(run_id)

    def close(self) -> None:
        self._control.close()


def _claim_in(store: Store, propose: Callable[[int], int], own: Own) -> tuple[int, str, bytes]:
    """Claim in the store the first proposed term that nobody else holds; return it, the claim's nonce and content.

    `propose` gets the lowest free term.
    """
    lowest = 1 + newest_term(store)
    for _ in range(_CLAIM_TRIES):
        term = propose(lowest)
        content, nonce = new_claim(own)
        try:
            is_first = create_once(store, term_key(term), content)
        except KeyClaimed:
            is_first = False  # if all who claim it see one another, nobody gets it
        newest = max(number for number, _ in [(term, ""), *_of_terms(store, TERMS)])
        # A process frozen since it proposed the term may re-create a claim that was made and deleted long ago.
        if is_first and newest <= term + KEPT_TERMS:
            return term, nonce, content
        lowest = max(term, newest) + 1
    raise StorageError(f"{store.url}/{TERMS}: {_CLAIM_TRIES} terms were claimed by others; is another job using it?")


def newest_term(store: Store) -> int:
    """Return the highest term in the store, in a claim or a commit; 0 if there is none."""
    claims = [term for term, _ in _of_terms(store, TERMS)]
    commits = [place[0] for entry in store.list(COMMITS) if (place := place_of(entry.key))]
    return max([*claims, *commits], default=0)


def forget_old_terms(store: Store, term: int) -> int:
    """Delete the traces, except commits, of terms more than `KEPT_TERMS` older than a claimed one; return their number.

    No deleted key can affect later decisions. A term's writer is fenced by the newest claim, which stays. A tombstone
    is deleted only if a newer term has committed, so discovery skips anything still created there.
    """
    oldest = term - KEPT_TERMS
    if oldest <= 0:
        return 0
    old = [key for prefix in (TERMS, CONFIGS) for number, key in _of_terms(store, prefix) if number < oldest]
    old += tombstones(store, below_term=oldest)
    for key in old:
        store.delete(key)
    return len(old)


def _of_terms(store: Store, prefix: str) -> list[tuple[int, str]]:
    """Return the keys in a folder that are named after a term, with the term."""
    return [(int(match[1]), entry.key) for entry in store.list(prefix) if (match := _KEY.fullmatch(entry.key))]
