"""Checksums of files: computed while the bytes are written, checked on exactly the bytes that are read.

A file has one SHA-256, which clears it as a whole, and a CRC-32 for every block of 1 MiB, so that a reader who needs a
part can check that part alone.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from elastic_train.checkpoint.stores import Sink, Store
from elastic_train.errors import CommitError

BLOCK_BYTES = 1 << 20
_RUN_BYTES = 8 * BLOCK_BYTES  # what is handed on at once, so that threads meet rarely
_MOST_RUNS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a commit knows of one of its files; `blocks` are CRC-32 values, the last block may be short."""

    size: int
    sha256: str
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block checksums for {self.size} bytes")


class HashingSink:
    """Pass bytes on in whole blocks and keep their checksums; `close` passes on the last, short block.

    A long file is hashed on a thread of its own, beside the writing; neither holds the interpreter's lock. What is
    written must not change until `close` has returned.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending = bytearray()
        self._sha256 = hashlib.sha256()
        self._hasher: ThreadPoolExecutor | None = None
        self._hashing: deque[Future[None]] = deque()
        self._blocks: list[int] = []
        self._size = 0
        self._is_closed = False

    def __enter__(self) -> HashingSink:
        return self

    def __exit__(self, *error: object) -> None:
        if self._hasher is not None:
            self._hasher.shutdown()

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
        while self._hashing:
            self._hashing.popleft().result()
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
        self._blocks += [zlib.crc32(run[at : at + BLOCK_BYTES]) for at in range(0, len(run), BLOCK_BYTES)]
        self._sink.write(run)

    def _hash(self, run: memoryview) -> None:
        if len(run) < BLOCK_BYTES and self._hasher is None:
            self._sha256.update(run)
            return
        self._hasher = self._hasher or ThreadPoolExecutor(1, "hashing")
        self._hashing.append(self._hasher.submit(self._sha256.update, run))
        if len(self._hashing) > _MOST_RUNS_AHEAD:
            self._hashing.popleft().result()


class CheckedFile(io.RawIOBase):
    """Read a file whose every touched block is compared with its checksum; CommitError before a bad byte is returned.

    A whole block goes straight to where it is wanted, and is compared there.
    """

    def __init__(self, file: BinaryIO, record: FileRecord, where: str) -> None:
        self._file = file
        self._record = record
        self.where = where
        self._position = 0
        self._block: tuple[int, memoryview] = (-1, memoryview(b""))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._record.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # any buffer
        wanted = min(len(view), max(0, self._record.size - self._position))
        done = 0
        while done < wanted:
            index, start = divmod(self._position, BLOCK_BYTES)
            if start == 0 and wanted - done >= BLOCK_BYTES:
                piece = self._read_block(index, view[done : done + BLOCK_BYTES])
            else:
                piece = self._held_block(index)[start : start + wanted - done]
                view[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def close(self) -> None:
        self._file.close()
        super().close()

    def _held_block(self, index: int) -> memoryview:
        """Return a block that is needed in parts, keeping it for the next part."""
        if self._block[0] != index:
            block = memoryview(bytearray(min(BLOCK_BYTES, self._record.size - index * BLOCK_BYTES)))
            self._block = (index, self._read_block(index, block))
        return self._block[1]

    def _read_block(self, index: int, block: memoryview) -> memoryview:
        start = index * BLOCK_BYTES
        self._file.seek(start)
        done = 0
        while done < len(block) and (num_read := self._file.readinto(block[done:])):  # type: ignore[attr-defined]
            done += num_read
        if zlib.crc32(block[:done]) != self._record.blocks[index] or done < len(block):
            where = f"bytes [{start}, {start + len(block)})"
            raise CommitError(f"{self.where}: {where} do not match their checksum; the file was damaged")
        return block


def open_checked(store: Store, key: str, record: FileRecord) -> CheckedFile:
    """Open a file of a commit so that damaged bytes raise CommitError in place of being read."""
    return CheckedFile(store.open(key), record, f"{store.url}/{key}")


def find_damage(store: Store, key: str, record: FileRecord) -> str | None:
    """Read a whole file and say what is wrong with it, None if its size and SHA-256 are as recorded."""
    digest, size = hashlib.sha256(), 0
    with store.open(key) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    if size != record.size:
        return f"{key} has {size} bytes, its record says {record.size}"
    if digest.hexdigest() != record.sha256:
        return f"{key} does not match its SHA-256"
    return None
