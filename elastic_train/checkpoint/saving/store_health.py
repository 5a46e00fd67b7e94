"""A process's view of its job's store: whether it can write there, across worlds, and whether the store stays complete.

A node that can read but not write the store (read-only mount, permissions, expired credentials) would fail every save
of its world; as leader, no world could even start. So if others can write, such a process is *barred*: it keeps
training, registers again behind all others, so that it does not lead, and writes no part. It retries at the start of
every world. If nobody can write, all keep trying.

A try creates a small key, on a thread of its own, since storage may hang.

A folder that is deleted, moved or cleaned raises no error: the next write recreates it, without the keys that identify
store and term. So before a save writes anything, rank 0 opens these keys, and the parent commit. Missing keys are
reported and written again, unless the file system has changed (unmounted, or mounted over): a commit there would be in
the wrong place, so the save fails.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_train.checkpoint.commits.reader import exists, sizes_of, wrong_sizes
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import (
    DeadlineStore,
    KeyMissing,
    KeyTaken,
    NotAllowed,
    Store,
    create_once,
    no_listener,
    read,
)
from elastic_train.errors import StorageError
from elastic_train.system.file_systems import Location, location_of
from elastic_train.system.files import write_atomically
from elastic_train.tracking.background_files import BackgroundFiles
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


log = logging.getLogger(__name__)


class StoreKeeper:
    """Checks `keys` and their content in the store that was at `location` when the world began.

    `files` writes histories and logs; `texts` are further files of the run's folder, with their content.
    """

    def __init__(
        self,
        store: Store,
        keys: Mapping[str, bytes],
        location: Location | None,
        files: BackgroundFiles,
        texts: Mapping[Path, str],
    ) -> None:
        self._store, self._keys, self._location = store, keys, location
        self._files, self._texts = files, texts
        self._said: list[str] = []
        self._known_lost: str | None = None

    def look(self, parent: CommitRecord | None) -> None:
        """Write missing keys again; raise StorageError if the store is not the one with which the world began.

        A store that does not answer is left to the save, which retries.
        """
        try:
            missing = [key for key, content in self._keys.items() if not self._has(key, content)]
            lost = None if parent is None else self._lost_of(parent)
        except _OtherContentError as error:
            raise StorageError(
                f"{self._store.url} is not where this job has kept its commits any more ({error} is another's): no "
                "commit is written there. Mount the job's folder again"
            ) from error
        except StorageError:
            return
        if not missing and (lost is None or lost == self._known_lost):
            return
        if missing and (here := location_of(self._store.url)) != self._location:
            raise StorageError(
                f"{self._store.url} {_moved(self._location, here)}, without its {' and '.join(missing)}: no commit is "
                "written there. Mount the job's folder again, or let its links lead there again"
            )
        for key in missing:
            create_once(self._store, key, self._keys[key])
        self._known_lost = lost
        self._say(missing, parent if lost else None, lost)

    def _has(self, key: str, content: bytes) -> bool:
        try:
            found = read(self._store, key)
        except KeyMissing:
            return False
        if found.strip() != content.strip():
            raise _OtherContentError(key)
        return True

    def _lost_of(self, commit: CommitRecord) -> str | None:
        """Return what is lost of a commit; None if record and files are there."""
        if not exists(self._store, commit.key):
            return f"{commit.key} is missing"
        return "; ".join(wrong_sizes(commit, sizes_of(self._store, commit.attempt, commit.files))) or None

    def _say(self, missing: list[str], parent: CommitRecord | None, lost: str | None) -> None:
        what = [f"{' and '.join(missing)} were removed, and are written again"] if missing else []
        if parent is not None:
            what.append(f"the commit of step {parent.step} is lost ({lost}), so until the next one a fault costs more")
        self._said.append(
            f"WARNING: {self._store.url} was changed while this job trains: {'; '.join(what)}. Training continues, and "
            "the next commit is complete; was the folder deleted, moved or cleaned?"
        )

    def take_said(self) -> list[str]:
        """Return what was noticed since the last call."""
        said, self._said = self._said, []
        return said

    def keep_files(self) -> None:
        """Restart removed files of the run's folder, in the background."""
        self._files.reopen_removed()
        for path, text in self._texts.items():
            self._files.attempt(path, lambda path=path, text=text: _write_again(path, text))  # type: ignore[misc]


def _moved(began: Location | None, here: Location | None) -> str:
    """Return what changed about a location: the folder that links lead to, or the file system."""
    if began is not None and here is not None and began[2] != here[2]:
        return f"leads to {here[2]}, and led to {began[2]} when this job began"
    return "is on another file system than when this job began"


class _OtherContentError(Exception):
    """Raised if a key that was written once has other content."""


def _write_again(path: Path, text: str) -> None:
    if not path.exists():
        log.warning("%s was removed while this job trains: it is written again", path)
        write_atomically(path, text)
