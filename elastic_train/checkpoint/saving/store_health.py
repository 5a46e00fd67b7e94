"""What a process knows of its job's store, over all of its worlds: above all whether it can write there.

A node that sees the store and cannot write it (mounted read-only, other permissions, credentials that have ended) would
fail every save of its world, and if it leads, no world could even begin. So where others can write, a process that
cannot is *barred*: it trains on, registers again behind all others, so that it does not lead, and writes no part. At
the beginning of every world it tries again. Where nobody can write, all try on as before.

Trying is to create a small key, on a thread of its own: storage may hang.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from elastic_train.checkpoint.stores.deadline import DeadlineStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import KeyTaken, NotAllowed, no_listener
from elastic_train.errors import StorageError
from elastic_train.system.file_systems import Location
from rendezvous.waiting import Call, GivenUp, begin

PROBES = "probes/"
MOST_UNWRITTEN = 3
"""How many saves in a row a rank may fail by itself before others are asked whether they can write."""
ANSWER_S = 1.0
"""How long a world's beginning waits for a process that could not write, and tries again."""


@dataclass(slots=True)
class StoreHealth:
    """The use that a process can make of the store at a URL; `is_barred`: others can write, this one cannot."""

    url: str
    proven: set[str] = field(default_factory=set)
    """Words of the stores that this process has tested when it led."""
    last_term: int = 0
    """The newest term that this process has trained in; 0 before its first world."""
    location: Location | None = None
    """Where the store was in the last world; None before the first, and for URLs."""
    is_barred: bool = False
    why: str = ""
    """Why the last part could not be written."""
    is_refused: bool = False
    """Whether the store said that this process may not write there, which does not pass by itself."""
    num_unwritten: int = 0
    """How many saves in a row have failed because this process could not write."""
    _probe: Call[None] | None = None

    def note_written(self) -> None:
        """Record that this process has written what was its part of a save."""
        self.num_unwritten = 0

    def note_unwritten(self, error: StorageError, *, is_silent: bool) -> None:
        """Record that it could not; with `is_silent` it could not even say so, and rank 0 waits for it in vain."""
        self.num_unwritten += MOST_UNWRITTEN if is_silent else 1
        self.why, self.is_refused = str(error), isinstance(error, NotAllowed)

    def begin_probe(self) -> None:
        """Begin to find out whether the store can be written from here, unless that is on its way."""
        if self._probe is None:
            self._probe = begin("can this node write?", lambda: probe(self.url))

    def has_probed(self, timeout_s: float = 0.0) -> bool:
        """Say whether the probe that has begun is known to have succeeded; another one may begin then."""
        if self._probe is None:
            return False
        try:
            self._probe.result(timeout_s)
        except GivenUp:
            return False
        except StorageError as error:
            self.why, self._probe = str(error), None
            return False
        self._probe = None
        return True

    def confirm_writable(self) -> bool:
        """Say whether this process can write, for all that is known; if that is nothing yet, begin to find out."""
        if self.num_unwritten or self.is_barred:
            return False
        if self.has_probed():
            return True
        self.begin_probe()
        return False

    def try_again(self) -> bool:
        """Say whether this process can write, where it could not before."""
        if self.is_barred:
            self.begin_probe()
            self.is_barred = not self.has_probed(ANSWER_S)
        return not self.is_barred

    def exclude(self) -> None:
        """Write nothing, and do not lead, as long as trying again fails."""
        self.is_barred, self.num_unwritten = True, 0


def probe(url: str) -> None:
    """Create a small key and delete it; StorageError if that is impossible."""
    store = DeadlineStore(open_store(url), no_listener)
    key = f"{PROBES}{uuid.uuid4().hex}"
    try:
        store.create(key, b"")
    except KeyTaken:
        return  # says a store that was asked twice by its client: it takes keys
    store.delete(key)
