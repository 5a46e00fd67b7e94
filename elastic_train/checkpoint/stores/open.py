"""Open a store by its URL: the one place that knows every kind of store, and the copies of commits on the node.

Copies are on tmpfs or a local disk: files that were saved here are loaded from here.

Files are written to both places; the far store alone decides what exists, and a copy is read only if its digest
matches. It survives a worker's restart, not the node's, so it is never synced. It is an optimisation: files that are
lost, damaged, or were written on another node are read from the far store, and no save fails because of a copy. Few
attempts are kept, since tmpfs is memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from elastic_train.checkpoint.stores.checksums import find_damage
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Entry, FileRecord, KeepsUnfinished, Sink, Store, no_listener
from elastic_train.core.lineage import ATTEMPTS
from elastic_train.errors import StorageError


def open_store(url: str, near_dir: str | None = None) -> Store:
    """Open the store of a run's commits: at a folder, a `file://` URL, or any fsspec URL (`s3://bucket/run`).

    Nothing is created before the first write. With `near_dir`, a folder on this node (best on tmpfs), saved files are
    also copied there, and commits are loaded from copies that match their checksums.

    Raise ConfigError if the URL's protocol is unknown, or its package is not installed. The store's methods raise
    StorageError if the medium fails, and block as long as the medium does.
    """
    store = _open(url)
    return NodeCopyStore(store, near_dir) if near_dir else store


def _open(url: str) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme in ("file", "local"):
        return LocalStore(rest)
    from elastic_train.checkpoint.stores.fsspec_store import FsspecStore  # fsspec is imported for URLs only

    return FsspecStore(url)


log = logging.getLogger(__name__)

NUM_KEPT = 2
"""Attempts kept on the node: the newest commit's, and the one being written."""


class NodeCopyStore:
    """The far store, with copies on this node of files written through it; `matching` keys are read from these."""

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

    def drop_unfinished(self, prefix: str, before: float, *, is_rehearsal: bool = False) -> Sequence[str]:
        if not isinstance(self._far, KeepsUnfinished):
            return []
        return self._far.drop_unfinished(prefix, before, is_rehearsal=is_rehearsal)

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        """Return this store for reading, using the intact copies of these files on this node."""
        matching = {key for key, record in files.items() if self._has(key, record, on_progress)}
        return NodeCopyStore(self._far, self._folder, matching)

    def _has(self, key: str, record: FileRecord, on_progress: Callable[[], None]) -> bool:
        try:
            return find_damage(self._near, key, record, on_progress) is None
        except (StorageError, OSError):
            return False

    def _make_room(self, attempt: str) -> None:
        """Delete the copies of all but the newest attempts, given the one about to be the newest."""
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
            log.warning("a copy on this node could not be deleted: %s", error)


class _Copy:
    """The copy of one file, renamed to its key when complete; the first error is logged and disables it."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._file: BinaryIO | None = None

    def begin(self) -> None:
        with self._disabling_on_error():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        if self._file is not None:
            with self._disabling_on_error():
                self._file.write(content)

    def keep(self) -> None:
        if self._file is not None:
            with self._disabling_on_error():
                self._file.close()
                self._partial.rename(self._path)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _disabling_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("%s: no copy is kept on this node: %s", self._path, error.strerror or error)
            self.close()
            self._file = None


class _Both:
    """Writes to the far file, then to the copy."""

    def __init__(self, far: Sink, copy: _Copy) -> None:
        self._far, self._copy = far, copy

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = self._far.write(content)
        self._copy.write(content)
        return num_bytes
