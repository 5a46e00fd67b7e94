"""A store with deadlines: it answers or raises, and reports progress.

A file system whose server is away, or a frozen disk, does not answer, and a call that hangs there cannot be ended, not
even by killing the process. So short calls run on abandonable threads; long ones, reading and writing files, report
every piece: a watchdog sees when progress stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, TypeVar, cast

from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.store import (
    Entry,
    KeepsUnfinished,
    ReadFile,
    Sink,
    Store,
    Uncertain,
    no_listener,
)
from elastic_train.errors import StorageError
from rendezvous.waiting import GivenUp, begin

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
