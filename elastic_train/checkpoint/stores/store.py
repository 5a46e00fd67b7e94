"""Stores: where commits are kept, a local folder or any fsspec URL, behind six methods.

StorageError
├── KeyTaken         a conditional create lost: the key exists
│   └── KeyClaimed   or somebody else is about to create it
├── KeyMissing       the key does not exist
├── NotAllowed       the store lets this process write nothing: a read-only mount, permissions, credentials
├── Unreadable       the medium does not return the bytes (a bad sector)
└── Uncertain        a create was sent and not answered: the key may exist or come to exist

Invariant: a key is whole or absent. `create` is durable when it returns and succeeds for one caller only; a file of
`write` appears, durable, when its context ends without an error.

A commit records a file's checksums.

A file has one digest over the whole, and a CRC-32 per block of 1 MiB, so that parts can be checked alone. The digest is
BLAKE3, a cryptographic hash in a quarter of SHA-256's time. The CRC-32 is zlib's, computed by ISA-L in a sixth of the
time.

A `DeadlineStore` answers or raises, and reports progress.

A file system whose server is away, or a frozen disk, does not answer, and a call that hangs there cannot be ended, not
even by killing the process. So short calls run on abandonable threads; long ones, reading and writing files, report
every piece: a watchdog sees when progress stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, Self, TypeVar, cast, runtime_checkable

from elastic_train.errors import StorageError
from rendezvous.waiting import GivenUp, begin

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Record of one file: size in bytes, digest, and the CRC-32 of every block of `BLOCK_BYTES`.

    The last block may be shorter.
    """

    size: int
    blocks: tuple[int, ...]
    blake3: str

    def __post_init__(self) -> None:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block checksums for {self.size} bytes")


class KeyTaken(StorageError):  # noqa: N818 - a state of the store, which the caller expects
    """The key exists already."""


class KeyClaimed(KeyTaken):
    """Another writer is about to create the key; this call has not created it, and nobody may."""


class KeyMissing(StorageError):  # noqa: N818 - as above
    """The key does not exist."""


class Unreadable(StorageError):  # noqa: N818 - as above
    """The medium fails to read a key that exists."""


CHANGES = ("create", "write", "delete")
"""Operations that change a store, as named in messages."""


class NotAllowed(StorageError):  # noqa: N818 - as above
    """Raised if the store refuses all writes of this process permanently: read-only, permissions, credentials."""


class Uncertain(StorageError):  # noqa: N818 - as above
    """Raised if it is unknown whether the key was created."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its size in bytes, and its last change in unix seconds if known (for clean-up only)."""

    key: str
    size: int
    modified_at: float | None


class Sink(Protocol):
    """Takes the bytes of one file."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Write all of the bytes; return their number."""


class ReadFile:
    """The read interface of a file; every access runs inside a `guard()`, which may translate errors."""

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

    def __exit__(self, *_: object) -> None:
        self.close()


def no_listener() -> None:
    """Do nothing: a default progress callback."""


class Store(Protocol):
    """Keys are relative, with slashes; every method raises StorageError where the medium fails."""

    @property
    def url(self) -> str:
        """Location of the store, for messages and `open_store`."""

    def create(self, key: str, content: bytes) -> None:
        """Create a key durably and atomically; raise KeyTaken if it exists."""

    def write(self, key: str) -> AbstractContextManager[Sink]:
        """Write a file under a fresh key; durable when the context ends, removed if it ends with an error."""

    def open(self, key: str) -> BinaryIO:
        """Open a key for seekable reading; raise KeyMissing if there is none. Reads may raise StorageError."""

    def list(self, prefix: str) -> list[Entry]:
        """Return every key below a folder (a prefix ending in a slash), sorted, including every finished create."""

    def delete(self, key: str) -> None:
        """Remove a key durably, if it exists."""

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        """Return the store to read these files from: this one, or one that reads intact copies on this node.

        Finding intact copies reads them to their ends; `on_progress` is called for every piece.
        """


@runtime_checkable
class KeepsUnfinished(Protocol):
    """A store that keeps a killed process's partial uploads, which listings do not show."""

    def drop_unfinished(self, prefix: str, before: float, *, is_rehearsal: bool = False) -> Sequence[str]:
        """Remove unfinished files below a folder that were begun before a time (unix seconds); return their keys.

        A writer still at work on one fails. A rehearsal removes nothing. Raise StorageError if the store cannot list
        them.
        """


def read(store: Store, key: str) -> bytes:
    """Return the whole content of a small key."""
    with store.open(key) as file:
        return file.read()


def create_once(store: Store, key: str, content: bytes) -> bool:
    """Create a key whose content is unique to this call; return False if another writer's content is there.

    A store's own retry may be refused because its first try got through, as may the retry of an unanswered create: it
    is sent a second time, and the content decides. Reading alone would not do: visible content need not be durable.
    Raise Uncertain if the outcome stays unknown, and KeyClaimed if there is no content yet that could decide.
    """
    unknown: Uncertain | None = None
    for _ in range(2):
        try:
            store.create(key, content)
        except KeyClaimed:
            if unknown is None:
                raise
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


T = TypeVar("T")
ANSWER_S = 20.0
"""Deadline in seconds, far above any working disk or object store, even a slow one."""


class DeadlineStore:
    """A store whose short calls raise StorageError after `ANSWER_S` seconds without an answer.

    `on_progress` is called for every answer and piece of a file, on the thread that got it.
    """

    def __init__(self, store: Store, on_progress: Callable[[], None]) -> None:
        self._store, self._on_progress = store, on_progress

    @property
    def url(self) -> str:
        return self._store.url

    def create(self, key: str, content: bytes) -> None:
        """Create a key; raise Uncertain without an answer, since the key may still appear."""
        self._ask(f"create {key}", lambda: self._store.create(key, content), Uncertain)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with self._store.write(key) as sink:
            self._on_progress()
            yield _ReportingSink(sink, self._on_progress)
        self._on_progress()

    def open(self, key: str) -> BinaryIO:
        file = self._ask(f"open {key}", lambda: self._store.open(key))
        return cast(BinaryIO, ReadFile(file, lambda: _reporting(self._on_progress)))

    def list(self, prefix: str) -> list[Entry]:
        return self._ask(f"list {prefix}", lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        self._ask(f"delete {key}", lambda: self._store.delete(key))

    def drop_unfinished(self, prefix: str, before: float, *, is_rehearsal: bool = False) -> Sequence[str]:
        store = self._store
        if not isinstance(store, KeepsUnfinished):
            return []
        what = f"abort unfinished uploads below {prefix}"
        return self._ask(what, lambda: store.drop_unfinished(prefix, before, is_rehearsal=is_rehearsal))

    def near(self, files: Mapping[str, FileRecord], on_progress: Callable[[], None] = no_listener) -> Store:
        return DeadlineStore(self._store.near(files, self._on_progress), self._on_progress)

    def _ask(self, what: str, act: Callable[[], T], error: type[StorageError] = StorageError) -> T:
        try:
            return begin(f"store: {what}", act).result(ANSWER_S)
        except GivenUp:
            raise error(
                f"{self.url}: cannot {what}: no answer in {ANSWER_S:.0f} s; is the storage reachable?"
            ) from None
        finally:
            self._on_progress()


class _ReportingSink:
    def __init__(self, sink: Sink, on_progress: Callable[[], None]) -> None:
        self._sink, self._on_progress = sink, on_progress

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = self._sink.write(content)
        self._on_progress()
        return num_bytes


@contextlib.contextmanager
def _reporting(on_progress: Callable[[], None]) -> Iterator[None]:
    yield
    on_progress()
