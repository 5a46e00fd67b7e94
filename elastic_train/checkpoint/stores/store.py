"""Stores: where commits are kept, a local folder or any fsspec URL, behind six methods.

StorageError
├── KeyTaken         a conditional create lost: the key exists
├── KeyMissing       the key does not exist
├── NotAllowed       the store lets this process write nothing: a read-only mount, permissions, credentials
├── Unreadable       the medium does not return the bytes (a bad sector)
└── Uncertain        a create was sent and not answered: the key may exist or come to exist

Invariant: a key is whole or absent. `create` is durable when it returns and succeeds for one caller only; a file of
`write` appears, durable, when its context ends without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol, Self, runtime_checkable

from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.errors import StorageError


class KeyTaken(StorageError):  # noqa: N818 - a state of the store, which the caller expects
    """The key exists already."""


class KeyMissing(StorageError):  # noqa: N818 - as above
    """The key does not exist."""


class Unreadable(StorageError):  # noqa: N818 - as above
    """The medium fails to read a key that exists."""


CHANGES = ("create", "write", "delete")
"""What changes a store, as its messages have it."""


class NotAllowed(StorageError):  # noqa: N818 - as above
    """The store lets this process write nothing, and will not by itself: read-only, permissions, credentials."""


class Uncertain(StorageError):  # noqa: N818 - as above
    """It is unknown whether the key was created."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its size in bytes, and its last change in unix seconds if the store knows (for clean-up only)."""

    key: str
    size: int
    modified_at: float | None


class Sink(Protocol):
    """Takes the bytes of one file."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Take all of the bytes; return their number."""


class ReadFile:
    """What readers use of a file; every access runs inside a `guard()`, which may translate errors."""

    def __init__(self, file: BinaryIO, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._guard = file, guard

    def read(self, size: int = -1) -> bytes:
        with self._guard():
            return self._file.read(size)

    def readinto(self, buffer: memoryview) -> int | None:
        with self._guard():
            num_bytes: int | None = self._file.readinto(buffer)  # type: ignore[attr-defined]
        return num_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        with self._guard():
            return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def no_listener() -> None:
    """Ignore progress."""


class Store(Protocol):
    """Keys are relative, with slashes; every method raises StorageError where the medium fails."""

    @property
    def url(self) -> str:
        """The store's location, for messages and for `open_store`."""

    def create(self, key: str, content: bytes) -> None:
        """Create a key durably and all at once; KeyTaken if it exists."""

    def write(self, key: str) -> AbstractContextManager[Sink]:
        """Write a file of a fresh key; durable when the context ends, removed if it ends with an error."""

    def open(self, key: str) -> BinaryIO:
        """Open a key for reading, seekable; KeyMissing if there is none. Reading raises StorageError, too."""

    def list(self, prefix: str) -> list[Entry]:
        """Return every key below a folder (a prefix that ends with a slash), sorted; sees every finished create."""

    def delete(self, key: str) -> None:
        """Remove a key, durably; nothing happens if there is none."""

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        """Return the store to read these files from, by key: this one, or one that reads intact copies on this node.

        To find out which copies are intact they are read to their ends; `on_progress` is called for every piece.
        """


@runtime_checkable
class KeepsUnfinished(Protocol):
    """A store that keeps what a killed process has sent of a file, where no listing shows it."""

    def drop_unfinished(self, prefix: str, before: float, *, is_rehearsal: bool = False) -> Sequence[str]:
        """Remove files below a folder that were begun before a time (unix seconds) and never finished; return keys.

        Whoever still writes one of them fails. A rehearsal removes nothing. StorageError if the store does not say
        what it keeps.
        """


def read(store: Store, key: str) -> bytes:
    """Return the whole content of a small key."""
    with store.open(key) as file:
        return file.read()


def create_once(store: Store, key: str, content: bytes) -> bool:
    """Create a key whose content is unique to this call; return False if another writer's content is there.

    A store that retries by itself may refuse the retry because its own first try got through, and so may an
    unanswered create: it is sent a second time, and the content decides. Only looking would not do: what can be seen
    need not be durable. Raises Uncertain if it stays unknown whether the key was created.
    """
    unknown: Uncertain | None = None
    for _ in range(2):
        try:
            store.create(key, content)
        except KeyTaken:
            return _is_content(store, key, content)
        except Uncertain as error:
            unknown = unknown or error
        except StorageError:
            if unknown is None:
                raise
            break  # a second failure does not undo the first try
        else:
            return True
    assert unknown is not None
    raise unknown


def _is_content(store: Store, key: str, content: bytes) -> bool:
    try:
        return read(store, key) == content
    except StorageError as error:
        raise Uncertain(f"{store.url}/{key}: exists, and cannot be read to see who created it: {error}") from error
