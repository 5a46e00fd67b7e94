"""A store in a local or shared folder: whole files by link, made durable by syncing them and their parent folders.

All folders from the root down are synced with every file, even those that another writer made: it may have died before
its sync.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from elastic_train.checkpoint.stores.disk import Disk, RealDisk
from elastic_train.checkpoint.stores.store import (
    CHANGES,
    Entry,
    FileRecord,
    KeyMissing,
    KeyTaken,
    NotAllowed,
    ReadFile,
    Sink,
    Store,
    Uncertain,
    Unreadable,
    no_listener,
)
from elastic_train.errors import StorageError

_UNFINISHED = ".unfinished"  # suffix of a record being created; no key ends so
_FOLDER_TRIES = 3


class LocalStore:
    """Keys are paths below `root`, which is made on the first write."""

    def __init__(self, root: str | Path, disk: Disk | None = None) -> None:
        self._root = Path(root).absolute()
        self._disk: Disk = disk or RealDisk()

    @property
    def url(self) -> str:
        return str(self._root)

    def create(self, key: str, content: bytes) -> None:
        """Write a temporary file next to it, then link it to its key: the link is the moment of creation."""
        path = self._root / key
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
        with self._translating("create", key), contextlib.ExitStack() as undo:
            undo.callback(self._forget, unfinished)
            made, created = self._create_in_folder(unfinished)
            with created as file:
                file.write(content)
                self._disk.sync([file], self._folders_above(path.parent, made))
            self._name(unfinished, path)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        path = self._root / key
        with self._translating("write", key):
            made, created = self._create_in_folder(path)
            with created as file, self._removing_on_error(path):
                yield file
                self._disk.sync([file], [path.parent, *self._folders_above(path.parent, made)])

    def open(self, key: str) -> BinaryIO:
        with self._translating("read", key):
            file = self._opened(self._root / key)
            return cast(BinaryIO, ReadFile(file, lambda: self._translating("read", key)))

    def _opened(self, path: Path) -> BinaryIO:
        """Open a file; if it is missing, open its folder and try once more.

        An NFS client caches missing names for up to a minute, and revalidates when the folder is opened (close-to-open
        consistency).
        """
        try:
            return path.open("rb")
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
            return path.open("rb")

    def list(self, prefix: str) -> list[Entry]:
        with self._translating("list", prefix):
            return sorted(self._entries_in(self._root / prefix), key=lambda entry: entry.key)

    def _entries_in(self, folder: Path) -> Iterator[Entry]:
        """Yield the files below a folder, except those deleted during the listing."""
        try:
            with os.scandir(folder) as found:
                names = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if name.is_dir(follow_symlinks=False):
                yield from self._entries_in(Path(name.path))
            elif name.is_file() and not name.name.endswith(_UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    status = name.stat()
                    key = Path(name.path).relative_to(self._root).as_posix()
                    yield Entry(key, status.st_size, status.st_mtime)

    def delete(self, key: str) -> None:
        """Remove the file, and folders that become empty."""
        path = self._root / key
        with self._translating("delete", key), contextlib.suppress(FileNotFoundError):
            self._disk.unlink(path)
            self._disk.sync([], [path.parent])
            for folder in path.relative_to(self._root).parents[:-1]:
                try:
                    (self._root / folder).rmdir()
                except OSError:
                    break  # not empty, or in use again by another writer

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        return self

    def _name(self, unfinished: Path, path: Path) -> None:
        """Link a file to its name durably; after an error the name is durably not ours, or Uncertain is raised."""
        try:
            try:
                self._disk.link(unfinished, path)
            finally:
                self._disk.sync([], [path.parent])  # that a name is taken must be as durable as that it is free
        except FileExistsError:
            raise
        except OSError as error:
            if not self._is_taken_back(unfinished, path):
                raise Uncertain(f"{path}: it is unknown whether it was created: {error.strerror or error}") from error
            raise

    def _is_taken_back(self, unfinished: Path, path: Path) -> bool:
        """Remove a name that may exist, unless it is another writer's; return True if it is durably gone."""
        try:
            if path.exists():
                if not path.samefile(unfinished):
                    return False
                self._disk.unlink(path)
            self._disk.sync([], [path.parent])
        except OSError:
            return False
        return True

    def _create_in_folder(self, path: Path) -> tuple[Sequence[Path], BinaryIO]:
        """Create a file, and its folder if necessary; return the folders made, and the file.

        Whoever deletes the last key of a folder removes it, also between these two: then both are tried again.
        """
        for _ in range(_FOLDER_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._make_directory(path.parent), self._disk.create(path)
        return self._make_directory(path.parent), self._disk.create(path)

    def _make_directory(self, path: Path) -> Sequence[Path]:
        if path.is_dir():
            return []
        made = self._make_directory(path.parent)
        with contextlib.suppress(FileExistsError):
            self._disk.make_directory(path)
        return [*made, path]

    def _folders_above(self, path: Path, made: Sequence[Path]) -> Sequence[Path]:
        """Return the folders to sync to make a folder durable: all parents up to the root, or those just made."""
        within = [above for above in path.parents if above.is_relative_to(self._root)]
        return within + [folder.parent for folder in made if not folder.parent.is_relative_to(self._root)]

    def _advice(self, number: int) -> str:
        """Return advice on a file system error; a disk may be out of inodes with bytes to spare."""
        if number == errno.ENOSPC:
            with contextlib.suppress(OSError):
                place = next(path for path in (self._root, *self._root.parents) if path.exists())
                if has_no_inodes(os.statvfs(place)):
                    return "; no free inodes: delete files there (df -i), or have more of them made (mkfs -N)"
        return _ADVICE.get(number, "")

    def _forget(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(path)

    @contextlib.contextmanager
    def _removing_on_error(self, path: Path) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget, path)
            yield
            undo.pop_all()

    @contextlib.contextmanager
    def _translating(self, act: str, key: str) -> Iterator[None]:
        """Turn an OSError into a StorageError with location and advice."""
        where = f"{self._root / key}"
        try:
            yield
        except FileExistsError as error:
            raise KeyTaken(f"{where}: exists already") from error
        except FileNotFoundError as error:
            raise KeyMissing(f"{where}: does not exist") from error
        except OSError as error:
            message = f"{where}: cannot {act}: {error.strerror or error}{self._advice(error.errno or 0)}"
            raise _kind(act, error.errno)(message) from error


def has_no_inodes(found: os.statvfs_result) -> bool:
    """Return True if a file system with free bytes is out of inodes; Btrfs, which counts none, never is."""
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0


def _kind(act: str, number: int | None) -> type[StorageError]:
    if act == "read" and number == errno.EIO:
        return Unreadable
    return NotAllowed if act in CHANGES and number in (errno.EROFS, errno.EACCES, errno.EPERM) else StorageError


_ADVICE = {
    errno.ENOSPC: "; free some space, or set checkpoint.keep_last to a size",
    errno.EDQUOT: "; raise the quota, or set checkpoint.keep_last to a size",
    errno.EACCES: "; check who owns the folder",
    errno.EPERM: "; the file system must support hard links",
    errno.ENOTSUP: "; the file system must support hard links",
}
