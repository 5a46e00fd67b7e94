"""Compute a file's checksums while it is written, and compare them while it is read.

No byte is used whose block does not match its checksum.

Bytes pass in runs of some megabytes, which stay in the processor's cache for all readers: a block's checksum is
computed just before the block is written, and the file's digest right after, on a separate thread. Small pieces
(frames, plain values) are copied together; large ones are passed on without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, TypeVar

from blake3 import blake3
from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores.store import BLOCK_BYTES, FileRecord, Sink, Store, no_listener
from elastic_train.errors import CommitError
from rendezvous.waiting import Bystander, Call


class CheckedFile:
    """Reads parts of a file, comparing each touched block with its checksum before any of its bytes are used.

    Bytes go straight to their destination, and are compared there while still in the processor's cache.
    """

    def __init__(self, file: BinaryIO, record: FileRecord, where: str) -> None:
        self._file, self._record, self._where = file, record, where
        self._spare = memoryview(bytearray())

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views consecutively with the bytes from `offset` on.

        Raise CommitError if the file is too short, or a touched block does not match its checksum; the views are then
        invalid.
        """
        end = offset + sum(len(view) for view in views)
        if end > self._record.size:
            raise CommitError(f"{self._where}: ends at byte {self._record.size} of {end}")
        lo = offset - offset % BLOCK_BYTES
        hi = min(self._record.size, end + -end % BLOCK_BYTES)
        self._file.seek(lo)
        position, checksum = lo, 0
        for view in (self._spared(offset - lo), *views, self._spared(hi - end)):
            done = 0
            while done < len(view):
                piece = view[done : done + BLOCK_BYTES - position % BLOCK_BYTES]
                self._read(piece, position)
                checksum = crc32(piece, checksum)
                done, position = done + len(piece), position + len(piece)
                if position % BLOCK_BYTES == 0 or position == self._record.size:
                    self._compare(checksum, position)
                    checksum = 0

    def _spared(self, num_bytes: int) -> memoryview:
        """Return scratch memory for bytes needed only for a block's checksum."""
        if len(self._spare) < num_bytes:
            self._spare = memoryview(bytearray(BLOCK_BYTES))
        return self._spare[:num_bytes]

    def _read(self, piece: memoryview, position: int) -> None:
        done = 0
        while done < len(piece):
            num_read = self._file.readinto(piece[done:])  # type: ignore[attr-defined]
            if not num_read:
                raise CommitError(f"{self._where}: ends at byte {position + done} of {self._record.size}")
            done += num_read

    def _compare(self, checksum: int, end: int) -> None:
        index = (end - 1) // BLOCK_BYTES
        if checksum != self._record.blocks[index]:
            where = f"bytes [{index * BLOCK_BYTES}, {end})"
            raise CommitError(f"{self._where}: {where} do not match their checksum; the file was damaged")


def open_checked(store: Store, key: str, record: FileRecord) -> CheckedFile:
    """Open a commit's file such that reading damaged bytes raises CommitError."""
    return CheckedFile(store.open(key), record, f"{store.url}/{key}")


def find_damage(
    store: Store, key: str, record: FileRecord, on_progress: Callable[[], None] = no_listener
) -> str | None:
    """Read a whole file and return what is wrong with it; None if size, digest and blocks match.

    Blocks are compared as well: a file that passes must not be refused later by a partial read. `on_progress` is called
    for each block.
    """
    digest, size, blocks = blake3(), 0, []
    with store.open(key) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            blocks.append(crc32(block))
            size += len(block)
            on_progress()
    if size != record.size:
        return f"{key} has {size} bytes, its record says {record.size}"
    if digest.hexdigest() != record.blake3:
        return f"{key} does not match its digest"
    if tuple(blocks) != record.blocks:
        return f"{key} does not match the checksums of its blocks"
    return None


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
