"""A copy on the node, on tmpfs or a local disk: what was saved here is read from here, if its digest matches.

Files are written to both places; what exists is decided by the far store alone. The near copy survives a worker's
restart, not the node's, so nothing of it is synced. It is a convenience: what is lost, damaged, or was written
elsewhere is read from the far store, and no save fails because of it. Few attempts are kept, since tmpfs is memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from elastic_train.checkpoint.stores.checked_file import find_damage
from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Entry, Sink, Store
from elastic_train.core.lineage import ATTEMPTS
from elastic_train.errors import StorageError

log = logging.getLogger(__name__)

NUM_KEPT = 2
"""Attempts kept near: the newest commit's, and the one that is being written."""


class NearStore:
    """The far store, with a near copy of the files that are written through it; `matching` keys are read near."""

    def __init__(self, far: Store, folder: str | Path, matching: Collection[str] = ()) -> None:
        self._far, self._folder, self._matching = far, Path(folder), matching
        self._root = self._folder / hashlib.sha256(far.url.encode()).hexdigest()[:12]
        self._near = LocalStore(self._root)

    @property
    def url(self) -> str:
        return self._far.url

    def create(self, key: str, content: bytes) -> None:
        self._far.create(key, content)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with contextlib.closing(_Copy(self._root / key)) as copy:
            self._make_room(key.rpartition("/")[0])
            copy.begin()
            with self._far.write(key) as far:
                yield _Both(far, copy)
            copy.keep()

    def open(self, key: str) -> BinaryIO:
        return (self._near if key in self._matching else self._far).open(key)

    def list(self, prefix: str) -> list[Entry]:
        return self._far.list(prefix)

    def delete(self, key: str) -> None:
        self._forget(key)
        self._far.delete(key)

    def preferring(self, files: Mapping[str, FileRecord], heard: Callable[[], None] = lambda: None) -> NearStore:
        """Return this store for reading: of these files, by key, those are read near whose near copy is as recorded.

        To know that, they are read to their ends; `heard` is called for every piece.
        """
        matching = {key for key, record in files.items() if self._has(key, record, heard)}
        return NearStore(self._far, self._folder, matching)

    def _has(self, key: str, record: FileRecord, heard: Callable[[], None]) -> bool:
        try:
            return find_damage(self._near, key, record, heard) is None
        except (StorageError, OSError):
            return False

    def _make_room(self, attempt: str) -> None:
        """Delete the near copies of all but the newest attempts; the one given is about to be the newest."""
        try:
            entries = self._near.list(ATTEMPTS)
        except StorageError:
            return
        touched: dict[str, float] = {}
        for entry in entries:
            other = entry.key.rpartition("/")[0]
            touched[other] = max(touched.get(other, 0.0), entry.modified_at or 0.0)
        touched.pop(attempt, None)
        old = sorted(touched, key=lambda other: touched[other], reverse=True)[NUM_KEPT - 1 :]
        for entry in entries:
            if entry.key.rpartition("/")[0] in old:
                self._forget(entry.key)

    def _forget(self, key: str) -> None:
        try:
            self._near.delete(key)
        except StorageError as error:
            log.warning("a near copy stays: %s", error)


class _Copy:
    """The near copy of one file, which gets its name when it is whole; its first error ends it, told in the log."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._file: BinaryIO | None = None

    def begin(self) -> None:
        with self._giving_up():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.write(content)

    def keep(self) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.close()
                self._partial.rename(self._path)

    def close(self) -> None:
        """Remove what was not kept."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("%s has no near copy: %s", self._path, error.strerror or error)
            self.close()
            self._file = None


class _Both:
    """Writes to the far file, and then to the near one."""

    def __init__(self, far: Sink, copy: _Copy) -> None:
        self._far, self._copy = far, copy

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = self._far.write(content)
        self._copy.write(content)
        return num_bytes
