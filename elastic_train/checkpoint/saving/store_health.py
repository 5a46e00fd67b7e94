"""A process's view of its job's store, across worlds: above all whether it can write there.

A node that can read but not write the store (read-only mount, permissions, expired credentials) would fail every save
of its world; as leader, no world could even start. So if others can write, such a process is *barred*: it keeps
training, registers again behind all others, so that it does not lead, and writes no part. It retries at the start of
every world. If nobody can write, all keep trying.

A try creates a small key, on a thread of its own, since storage may hang.
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
"""Consecutive saves that a rank may fail by itself before others are asked whether they can write."""
ANSWER_S = 1.0
"""Seconds that a world's start waits for a barred process to retry."""


@dataclass(slots=True)
class StoreHealth:
    """Access of a process to the store at a URL; `is_barred`: others can write, this process cannot."""

    url: str
    proven: set[str] = field(default_factory=set)
    """Words of the stores that this process has tested as leader."""
    last_term: int = 0
    """Newest term in which this process has trained; 0 before its first world."""
    location: Location | None = None
    """Location of the store in the last world; None before the first, and for URLs."""
    is_barred: bool = False
    why: str = ""
    """Why the last part could not be written."""
    is_refused: bool = False
    """True if the store refused access, which does not pass by itself."""
    num_unwritten: int = 0
    """Number of consecutive saves that failed because this process could not write."""
    _probe: Call[None] | None = None

    def note_written(self) -> None:
        """Record that this process has written its part of a save."""
        self.num_unwritten = 0

    def note_unwritten(self, error: StorageError, *, is_silent: bool) -> None:
        """Record a failed write; with `is_silent` even the receipt failed, and rank 0 waits in vain."""
        self.num_unwritten += MOST_UNWRITTEN if is_silent else 1
        self.why, self.is_refused = str(error), isinstance(error, NotAllowed)

    def begin_probe(self) -> None:
        """Start to test whether the store is writable from here, unless a test is running."""
        if self._probe is None:
            self._probe = begin("can this node write?", lambda: probe(self.url))

    def has_probed(self, timeout_s: float = 0.0) -> bool:
        """Return True if the running test is known to have succeeded; then another may begin."""
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
        """Return True if this process is known to be able to write; if unknown, start to find out."""
        if self.num_unwritten or self.is_barred:
            return False
        if self.has_probed():
            return True
        self.begin_probe()
        return False

    def try_again(self) -> bool:
        """Return True if this process can write again."""
        if self.is_barred:
            self.begin_probe()
            self.is_barred = not self.has_probed(ANSWER_S)
        return not self.is_barred

    def exclude(self) -> None:
        """Write nothing, and do not lead, until a retry succeeds."""
        self.is_barred, self.num_unwritten = True, 0


def probe(url: str) -> None:
    """Create and delete a small key; raise StorageError if that is impossible."""
    store = DeadlineStore(open_store(url), no_listener)
    key = f"{PROBES}{uuid.uuid4().hex}"
    try:
        store.create(key, b"")
    except KeyTaken:
        return  # from a store that its client asked twice: it accepts keys
    store.delete(key)
