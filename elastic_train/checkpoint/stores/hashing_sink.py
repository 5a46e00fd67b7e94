"""Compute a file's checksums while it is written.

Bytes pass in runs of some megabytes, which stay in the processor's cache for all readers: a block's checksum is
computed just before the block is written, and the file's digest right after, on a separate thread. Small pieces
(frames, plain values) are copied together; large ones are passed on without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from blake3 import blake3
from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores.checksums import BLOCK_BYTES, FileRecord
from elastic_train.checkpoint.stores.store import Sink, no_listener
from rendezvous.waiting import Bystander, Call

T = TypeVar("T")
_RUN_BYTES = 4 * BLOCK_BYTES  # large, so that threads synchronise rarely
_SMALL_BYTES = 64 << 10
_MOST_BEHIND = 2


class HashingThread:
    """A thread that hashes while the caller writes, at most `most_behind` calls behind; neither holds the GIL.

    The bytes must neither change nor be freed until it has ended.
    """

    def __init__(self, most_behind: int) -> None:
        self._most_behind = most_behind
        self._thread: Bystander | None = None
        self._behind: deque[Call[Any]] = deque()

    def __enter__(self) -> HashingThread:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.leave()
            for call in self._behind:
                call.ended.wait()

    def do(self, act: Callable[[], T]) -> Call[T]:
        """Queue a call after all earlier ones; wait while too many are pending."""
        self._thread = self._thread or Bystander("hashing")
        result = self._thread.begin(act)
        self._behind.append(result)
        if len(self._behind) > self._most_behind:
            self._behind.popleft().result()
        return result

    def wait(self) -> None:
        while self._behind:
            self._behind.popleft().result()


class HashingSink:
    """Passes bytes on in runs and keeps their checksums; `close` passes on the last.

    Written bytes must not change until `close` has returned, since a long file is hashed on another thread.
    `on_progress` is called for every piece.
    """

    def __init__(self, sink: Sink, on_progress: Callable[[], None] = no_listener) -> None:
        self._sink, self._on_progress = sink, on_progress
        self._small = bytearray()
        self._digest = blake3()
        self._undigested: list[memoryview] = []
        self._num_undigested = 0
        self._hashing = HashingThread(_MOST_BEHIND)
        self._blocks: list[int] = []
        self._checksum = self._size = 0
        self._is_closed = False

    def __enter__(self) -> HashingSink:
        return self

    def __exit__(self, *error: object) -> None:
        self._hashing.__exit__(*error)

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content).cast("B")
        if len(view) < _SMALL_BYTES:
            self._small += view
            if len(self._small) >= _RUN_BYTES:
                self._pass_small()
            return
        self._pass_small()
        for at in range(0, len(view), _RUN_BYTES):
            self._pass(view[at : at + _RUN_BYTES])

    def close(self) -> None:
        """Pass on the rest, and wait for the digest."""
        self._pass_small()
        if self._size % BLOCK_BYTES:
            self._blocks.append(self._checksum)
        self._set_digesting()
        self._hashing.wait()
        self._is_closed = True

    def record(self) -> FileRecord:
        """Return the file's checksums, once closed."""
        assert self._is_closed, "the last block is still pending"
        return FileRecord(self._size, tuple(self._blocks), blake3=self._digest.hexdigest())

    def _pass_small(self) -> None:
        if self._small:
            self._pass(memoryview(self._small))
            self._small = bytearray()

    def _pass(self, run: memoryview) -> None:
        done = 0
        while done < len(run):
            piece = run[done : done + BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._checksum = crc32(piece, self._checksum)
            self._sink.write(piece)
            self._on_progress()
            done, self._size = done + len(piece), self._size + len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._blocks.append(self._checksum)
                self._checksum = 0
        self._undigested.append(run)
        self._num_undigested += len(run)
        if self._num_undigested >= _RUN_BYTES:
            self._set_digesting()

    def _set_digesting(self) -> None:
        """Digest what has passed, on the thread unless it is the end of a short file."""
        runs, self._undigested, self._num_undigested = self._undigested, [], 0
        if self._size < BLOCK_BYTES:
            self._update(runs)
        else:
            self._hashing.do(partial(self._update, runs))

    def _update(self, runs: list[memoryview]) -> None:
        for run in runs:
            self._digest.update(run)
