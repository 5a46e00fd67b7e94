"""Checksums of files: computed while the bytes are written, checked on exactly the bytes that are read.

A file has one SHA-256, which clears it as a whole, and a CRC-32 for every block of 1 MiB, so that a reader who needs a
part can check that part alone. The CRC-32 is zlib's; ISA-L computes the same in a sixth of the time, where it is
installed (`pip install elastic-train[fast]`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar

from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores import Sink, Store
from elastic_train.errors import CommitError

T = TypeVar("T")
BLOCK_BYTES = 1 << 20
_RUN_BYTES = 8 * BLOCK_BYTES  # what is handed on at once, so that threads meet rarely
_MOST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a commit knows of one of its files; `blocks` are CRC-32 values, the last block may be short."""

    size: int
    sha256: str
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block checksums for {self.size} bytes")


class Aside:
    """A thread that hashes beside the writing, a little ahead of it; neither holds the interpreter's lock.

    What it is given to read must not change, nor go, until it is through.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Any]] = deque()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def do(self, act: Callable[[], T]) -> Future[T]:
        """Do something behind all that was given before; wait while too much of that is left."""
        self._thread = self._thread or ThreadPoolExecutor(1, "hashing")
        result = self._thread.submit(act)
        self._ahead.append(result)
        if len(self._ahead) > _MOST_AHEAD:
            self._ahead.popleft().result()
        return result

    def wait(self) -> None:
        while self._ahead:
            self._ahead.popleft().result()


class HashingSink:
    """Pass bytes on in whole blocks and keep their checksums; `close` passes on the last, short block.

    What is written must not change until `close` has returned, since a long file is hashed aside.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending = bytearray()
        self._sha256 = hashlib.sha256()
        self._aside = Aside()
        self._blocks: list[int] = []
        self._size = 0
        self._is_closed = False

    def __enter__(self) -> HashingSink:
        return self

    def __exit__(self, *error: object) -> None:
        self._aside.__exit__(*error)

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content).cast("B")
        self._size += len(view)
        taken = min(len(view), -len(self._pending) % BLOCK_BYTES)
        if taken or self._pending:
            self._pending += view[:taken]
            self._pass_pending(BLOCK_BYTES)
        while len(view) - taken >= BLOCK_BYTES:
            run = min(_RUN_BYTES, (len(view) - taken) // BLOCK_BYTES * BLOCK_BYTES)
            self._pass(view[taken : taken + run])
            taken += run
        self._pending += view[taken:]

    def close(self) -> None:
        """Pass on the rest, and wait for the hash."""
        self._pass_pending(1)
        self._aside.wait()
        self._is_closed = True

    def record(self) -> FileRecord:
        """Return the file's checksums, once it is closed."""
        assert self._is_closed, "the last block is still pending"
        return FileRecord(self._size, self._sha256.hexdigest(), tuple(self._blocks))

    def _pass_pending(self, least: int) -> None:
        if len(self._pending) >= least:
            self._pass(memoryview(bytes(self._pending)))
            self._pending.clear()

    def _pass(self, run: memoryview) -> None:
        self._hash(run)
        self._blocks += [crc32(run[at : at + BLOCK_BYTES]) for at in range(0, len(run), BLOCK_BYTES)]
        self._sink.write(run)

    def _hash(self, run: memoryview) -> None:
        if len(run) < BLOCK_BYTES and not self._aside.has_begun:
            self._sha256.update(run)
        else:
            self._aside.do(partial(self._sha256.update, run))


class CheckedFile:
    """Read parts of a file, each touched block of which is compared with its checksum before a byte of it is used.

    Bytes go straight to where they are wanted, and are compared there, while they are still in the processor's cache.
    """

    def __init__(self, file: BinaryIO, record: FileRecord, where: str) -> None:
        self._file, self._record, self._where = file, record, where
        self._spare = memoryview(bytearray())

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one behind the other, with the bytes from `offset` on.

        Raises CommitError if the file is too short, or a block that they touch does not match; the views are not to be
        used then.
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
        """Return room for bytes that are needed for their block's checksum alone."""
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
        """Compare the checksum of the block that ends at `end`."""
        index = (end - 1) // BLOCK_BYTES
        if checksum != self._record.blocks[index]:
            where = f"bytes [{index * BLOCK_BYTES}, {end})"
            raise CommitError(f"{self._where}: {where} do not match their checksum; the file was damaged")


def open_checked(store: Store, key: str, record: FileRecord) -> CheckedFile:
    """Open a file of a commit so that damaged bytes raise CommitError in place of being read."""
    return CheckedFile(store.open(key), record, f"{store.url}/{key}")


def find_damage(store: Store, key: str, record: FileRecord) -> str | None:
    """Read a whole file and say what is wrong with it, None if size, SHA-256 and blocks are as recorded.

    The blocks, too: what is found whole here must not be refused by who reads a part of it.
    """
    digest, size, blocks = hashlib.sha256(), 0, []
    with store.open(key) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            blocks.append(crc32(block))
            size += len(block)
    if size != record.size:
        return f"{key} has {size} bytes, its record says {record.size}"
    if digest.hexdigest() != record.sha256:
        return f"{key} does not match its SHA-256"
    if tuple(blocks) != record.blocks:
        return f"{key} does not match the checksums of its blocks"
    return None
