"""Storage with faults: one set of keys for all, and per process a client whose calls take time and may fail.

A create is atomic, as every store promises; its answer may be lost, and a request may arrive long after its sender has
given up or died. A partly written file is visible, and stays so if its writer dies. Files of a commit may be damaged
silently.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import BinaryIO

from chaos.sim.machine.kernel import EPOCH_S, Kernel, Process
from elastic_train.checkpoint.stores.store import (
    Entry,
    KeyMissing,
    KeyTaken,
    NotAllowed,
    Sink,
    Uncertain,
)
from elastic_train.errors import StorageError

ANSWER_TIMEOUT_S = 5.0
Files = dict[str, tuple[bytes, float]]
"""Content and modification time, by key."""
SLOWNESS, SYNC_SLOWNESS = 100.0, 1000.0


class LateListing:
    """A stale listing: the keys at one moment, plus a node's own changes since.

    It behaves like an NFS client's cached folder; a key opened by name is always found.
    """

    def __init__(self, files: Files) -> None:
        self._before = {key: entry_of(key, *file) for key, file in files.items()}
        self._changed_by: dict[int, set[str]] = {}

    def note(self, key: str, node: int) -> None:
        self._changed_by.setdefault(node, set()).add(key)

    def seen_by(self, node: int, files: Files) -> list[Entry]:
        mine = self._changed_by.get(node, set())
        before = [entry for key, entry in self._before.items() if key not in mine]
        return [*before, *(entry_of(key, *files[key]) for key in mine if key in files)]


def entry_of(key: str, content: bytes, at: float) -> Entry:
    return Entry(key, len(content), at)


class Storage:
    """Stored data and current faults."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float) -> None:
        self.kernel, self.draws, self.delay_s = kernel, draws, delay_s
        self.files: Files = {}
        self._late: LateListing | None = None
        self._late_until = 0.0
        self.down_until = self.full_until = self.lossy_until = self.failing_until = 0.0
        self.conflict_until = self.taken_until = self.slow_until = self.slow_sync_until = 0.0
        self.num_lost_answers = 0
        self.is_unconditional = False
        """True if a key is created although it exists."""
        self.is_to_tear = False
        self.at_tear: Callable[[Process], None] = lambda process: None
        """Called with the process that dies in the middle of a file."""
        self.damaged: dict[str, str] = {}
        """Attempts with a damaged file, and the names of their records."""
        self.private: dict[int, Storage] = {}
        """Local folders that nodes see where the storage is not mounted."""
        self.ever_private: list[Storage] = []
        self.readonly_until: dict[int, float] = {}
        """Until when each node can read but not write."""

    def is_mended(self, node: int) -> bool:
        """Return True if a node has regained write access."""
        return 0.0 < self.readonly_until.get(node, 0.0) <= self.kernel.now

    def isolate(self, node: int) -> None:
        """Give a node a separate, empty folder from now on."""
        self.private[node] = Storage(self.kernel, self.draws, self.delay_s)
        self.ever_private.append(self.private[node])

    def seen_from(self, node: int) -> Storage:
        return self.private.get(node, self)

    def put(self, key: str, content: bytes, node: int | None = None) -> None:
        """Store a key; its writer sees it in listings at once."""
        self.files[key] = content, EPOCH_S + self.kernel.now
        self._note(key, node)

    def remove(self, key: str, node: int | None = None) -> None:
        if self.files.pop(key, None) is not None:
            self._note(key, node)

    def list_late(self, for_s: float) -> None:
        """Freeze listings at their current content for a while."""
        self._late, self._late_until = LateListing(self.files), self.kernel.now + for_s

    def listed(self, node: int, prefix: str) -> list[Entry]:
        """Return the keys below a prefix, as a node's listing shows them."""
        if self._late is not None and self.kernel.now < self._late_until:
            return [entry for entry in self._late.seen_by(node, self.files) if entry.key.startswith(prefix)]
        self._late = None
        return [entry_of(key, *file) for key, file in self.files.items() if key.startswith(prefix)]

    def _note(self, key: str, node: int | None) -> None:
        if self._late is not None and node is not None:
            self._late.note(key, node)

    def delay(self, *, is_write: bool = False) -> float:
        slowness = SLOWNESS if self.kernel.now < self.slow_until else 1.0
        if is_write and self.kernel.now < self.slow_sync_until:
            slowness = SYNC_SLOWNESS  # not combined with SLOWNESS: the product's store ends calls that take hours
        return slowness * self.draws.expovariate(1 / self.delay_s)

    def has_bad_luck(self, until: float, share: float = 0.5) -> bool:
        """Return True, with probability `share`, while the fault lasts."""
        return self.kernel.now < until and self.draws.random() < share


class StorageClient:
    """One process's `elastic_train.checkpoint.stores.store.Store`."""

    url = "sim://run"

    def __init__(self, storage: Storage, process: Process) -> None:
        self._mounted, self._process = storage, process

    @property
    def _storage(self) -> Storage:
        return self._mounted.seen_from(self._process.node)

    def create(self, key: str, content: bytes) -> None:
        """Create a key; with lossy storage the request or answer may be late or lost."""
        storage, kernel, node = self._storage, self._storage.kernel, self._process.node
        self._ask(is_write=True)
        if storage.has_bad_luck(storage.conflict_until):
            kernel.sleep(storage.delay())
            raise Uncertain(f"{key}: create met a conflict at every try")
        if storage.has_bad_luck(storage.lossy_until):
            storage.num_lost_answers += 1
            if storage.draws.random() < 0.8:
                delay_s = storage.draws.choice((0.0, 1.0, 3 * ANSWER_TIMEOUT_S))
                kernel.after(delay_s, lambda: None if key in storage.files else storage.put(key, content, node))
            kernel.sleep(ANSWER_TIMEOUT_S)
            raise Uncertain(f"{key}: create was not confirmed")
        if key in storage.files and not storage.is_unconditional:
            raise KeyTaken(f"{key}: exists already")
        storage.put(key, content, node)
        kernel.sleep(storage.delay(is_write=True))
        if storage.has_bad_luck(storage.taken_until):
            raise KeyTaken(f"{key}: exists already")  # the answer of a store whose SDK asked twice

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        storage, kernel, node = self._storage, self._storage.kernel, self._process.node
        self._ask(is_write=True)
        sink = io.BytesIO()
        try:
            yield sink
            content = sink.getvalue()
            storage.put(key, content[: storage.draws.randrange(len(content) + 1)], node)
            if storage.is_to_tear:
                storage.is_to_tear = False
                storage.at_tear(self._process)
                kernel.kill(self._process)
            self._ask(is_write=True)
        except Exception:
            storage.remove(key, node)
            raise
        storage.put(key, content, node)
        kernel.sleep(storage.delay(is_write=True))

    def open(self, key: str) -> BinaryIO:
        self._ask()
        if key not in self._storage.files:
            raise KeyMissing(f"{key}: does not exist")
        return io.BytesIO(self._storage.files[key][0])

    def list(self, prefix: str) -> list[Entry]:
        self._ask()
        return sorted(self._storage.listed(self._process.node, prefix), key=lambda entry: entry.key)

    def near(self, files: object, on_progress: object = None) -> StorageClient:
        return self

    def delete(self, key: str) -> None:
        self._ask()
        self._storage.remove(key, self._process.node)

    def _ask(self, *, is_write: bool = False) -> None:
        storage, kernel = self._storage, self._storage.kernel
        kernel.sleep(storage.delay())
        if storage.has_bad_luck(storage.failing_until, 1 / 3):
            raise StorageError("input/output error")
        if kernel.now < storage.down_until:
            kernel.sleep(1.0)
            raise StorageError("storage does not answer")
        if is_write and kernel.now < storage.full_until:
            raise StorageError("no space is left")
        if is_write and kernel.now < self._mounted.readonly_until.get(self._process.node, 0.0):
            raise NotAllowed("read-only file system")
