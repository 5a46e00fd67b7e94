"""A store that answers, or raises: no short call is waited for longer than `ANSWER_S`, and all that it does is heard.

A file system whose server is away, or a disk that has frozen, answers neither yes nor no, and what hangs in it cannot
be ended, not even by killing the process. So short calls run on threads that can be left behind. Long ones, a file's
reading and writing, are heard piece by piece instead: whoever watches over progress sees that they get no further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, TypeVar, cast

from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.node_copy import NearStore
from elastic_train.checkpoint.stores.store import (
    Entry,
    ReadFile,
    Sink,
    Store,
    Uncertain,
)
from elastic_train.errors import StorageError
from elastic_train.system.threads import begin

T = TypeVar("T")
ANSWER_S = 20.0
"""Far longer than a disk or an object store takes that works, or that is merely slow."""


class PromptStore:
    """Another store; `heard` is called, on whatever thread, for every answer and every piece."""

    def __init__(self, store: Store, heard: Callable[[], None]) -> None:
        self._store, self._heard = store, heard

    @property
    def url(self) -> str:
        return self._store.url

    def create(self, key: str, content: bytes) -> None:
        """Create a key; without an answer it may come to exist at any time."""
        self._ask(f"create {key}", lambda: self._store.create(key, content), Uncertain)

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with self._store.write(key) as sink:
            self._heard()
            yield _HeardSink(sink, self._heard)
        self._heard()

    def open(self, key: str) -> BinaryIO:
        return cast(BinaryIO, _HeardFile(self._ask(f"open {key}", lambda: self._store.open(key)), self._heard))

    def list(self, prefix: str) -> list[Entry]:
        return self._ask(f"list {prefix}", lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        self._ask(f"delete {key}", lambda: self._store.delete(key))

    @property
    def patient(self) -> Store:
        """The store beneath, for threads that are watched themselves."""
        return self._store

    def preferring(self, files: Mapping[str, FileRecord]) -> Store:
        """Return this store for reading; see `NearStore.preferring`."""
        if isinstance(self._store, NearStore):
            return PromptStore(self._store.preferring(files, self._heard), self._heard)
        return self

    def _ask(self, what: str, act: Callable[[], T], error: type[StorageError] = StorageError) -> T:
        answer = begin(f"store: {what}", act)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            if answer.done():
                raise
            raise error(f"{self.url}: cannot {what}: no answer in {ANSWER_S:.0f} s; is the storage away?") from None
        finally:
            self._heard()


class _HeardSink:
    def __init__(self, sink: Sink, heard: Callable[[], None]) -> None:
        self._sink, self._heard = sink, heard

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = self._sink.write(content)
        self._heard()
        return num_bytes


class _HeardFile(ReadFile):
    def __init__(self, file: BinaryIO, heard: Callable[[], None]) -> None:
        super().__init__(file, lambda: _hearing(heard))


@contextlib.contextmanager
def _hearing(heard: Callable[[], None]) -> Iterator[None]:
    yield
    heard()
