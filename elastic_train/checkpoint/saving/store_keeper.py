"""Keep a world's store complete: detect removed files during training, and write them again.

A folder that is deleted, moved or cleaned raises no error: the next write recreates it, without the keys that identify
store and term. So before a save writes anything, rank 0 opens these keys, and the parent commit. Missing keys are
reported and written again, unless the file system has changed (unmounted, or mounted over): a commit there would be in
the wrong place, so the save fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from elastic_train.checkpoint.commits.reader import exists, sizes_of, wrong_sizes
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.store import KeyMissing, Store, create_once, read
from elastic_train.errors import StorageError
from elastic_train.system.atomic_files import write_atomically
from elastic_train.system.file_systems import Location, location_of
from elastic_train.tracking.background_files import BackgroundFiles

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
