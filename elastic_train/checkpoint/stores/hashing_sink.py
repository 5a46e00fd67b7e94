"""Hashing while writing: every checksum of a file is made of bytes that are on their way to the store anyway.

Bytes go by in runs of some megabytes, and a run comes to all who read it from the processor's cache: a block's checksum
is made just before the block is written, and the file's digest right behind, on a thread of its own. What is small
(frames, plain values) is copied together; what is large is passed on from where it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from blake3 import blake3
from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores.checksums import BLOCK_BYTES, FileRecord
from elastic_train.checkpoint.stores.store import Sink

T = TypeVar("T")
_RUN_BYTES = 4 * BLOCK_BYTES  # what is handed on at once, so that threads meet rarely
_SMALL_BYTES = 64 << 10
_MOST_BEHIND = 2


class Aside:
    """A thread that hashes beside the writing, at most so many acts behind; neither holds the interpreter's lock.

    What it is given to read must not change, nor go, until it is through.
    """

    def __init__(self, most_behind: int) -> None:
        self._most_behind = most_behind
        self._thread: ThreadPoolExecutor | None = None
        self._behind: deque[Future[Any]] = deque()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def do(self, act: Callable[[], T]) -> Future[T]:
        """Do something behind all that was given before; wait while too much of that is left."""
        self._thread = self._thread or ThreadPoolExecutor(1, "hashing")
        result = self._thread.submit(act)
        self._behind.append(result)
        if len(self._behind) > self._most_behind:
            self._behind.popleft().result()
        return result

    def wait(self) -> None:
        while self._behind:
            self._behind.popleft().result()


class HashingSink:
    """Pass bytes on in runs and keep their checksums; `close` passes on the last.

    What is written must not change until `close` has returned, since a long file is hashed aside.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._small = bytearray()
        self._digest = blake3()
        self._undigested: list[memoryview] = []
        self._num_undigested = 0
        self._aside = Aside(_MOST_BEHIND)
        self._blocks: list[int] = []
        self._checksum = self._size = 0
        self._is_closed = False

    def __enter__(self) -> HashingSink:
        return self

    def __exit__(self, *error: object) -> None:
        self._aside.__exit__(*error)

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
        self._aside.wait()
        self._is_closed = True

    def record(self) -> FileRecord:
        """Return the file's checksums, once it is closed."""
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
            done, self._size = done + len(piece), self._size + len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._blocks.append(self._checksum)
                self._checksum = 0
        self._undigested.append(run)
        self._num_undigested += len(run)
        if self._num_undigested >= _RUN_BYTES:
            self._set_digesting()

    def _set_digesting(self) -> None:
        """Let what has gone by be digested, aside unless it is the end of a short file."""
        runs, self._undigested, self._num_undigested = self._undigested, [], 0
        if self._size < BLOCK_BYTES:
            self._update(runs)
        else:
            self._aside.do(partial(self._update, runs))

    def _update(self, runs: list[memoryview]) -> None:
        for run in runs:
            self._digest.update(run)
