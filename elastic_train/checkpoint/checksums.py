"""Checksums of files: computed while the bytes are written, checked on exactly the bytes that are read.

A file has one SHA-256, which clears it as a whole, and a CRC-32 for every block of 1 MiB, so that a reader who needs a
part can check that part alone.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from elastic_train.checkpoint.stores import Sink, Store
from elastic_train.errors import CommitError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a commit knows of one of its files; `blocks` are CRC-32 values, the last block may be short."""

    size: int
    sha256: str
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block checksums for {self.size} bytes")


class HashingSink(io.RawIOBase):
    """Pass bytes on in whole blocks and keep their checksums; `close` passes on the last, short block.

    `failure` keeps the first error of the sink below: torch's own writers replace it by one that says nothing.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending = bytearray()
        self._sha256 = hashlib.sha256()
        self._blocks: list[int] = []
        self._size = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: object, /) -> int:
        view = memoryview(content).cast("B")  # type: ignore[arg-type]  # any buffer
        self._size += len(view)
        taken = min(len(view), -len(self._pending) % BLOCK_BYTES)
        if taken or self._pending:
            self._pending += view[:taken]
            self._pass_pending(BLOCK_BYTES)
        while len(view) - taken >= BLOCK_BYTES:
            self._pass(view[taken : taken + BLOCK_BYTES])
            taken += BLOCK_BYTES
        self._pending += view[taken:]
        return len(view)

    def close(self) -> None:
        if not self.closed:
            if self.failure is None:
                self._pass_pending(1)
            super().close()

    def record(self) -> FileRecord:
        """Return the file's checksums, once it is closed."""
        assert self.closed, "the last block is still pending"
        return FileRecord(self._size, self._sha256.hexdigest(), tuple(self._blocks))

    def _pass_pending(self, least: int) -> None:
        if len(self._pending) >= least:
            self._pass(memoryview(bytes(self._pending)))
            self._pending.clear()

    def _pass(self, block: memoryview) -> None:
        self._sha256.update(block)
        self._blocks.append(zlib.crc32(block))
        try:
            self._sink.write(block)
        except OSError as error:
            self.failure = self.failure or error
            raise


class CheckedFile(io.RawIOBase):
    """Read a file whose every touched block is compared with its checksum before a byte of it is given out."""

    def __init__(self, file: BinaryIO, record: FileRecord, name: str) -> None:
        self._file = file
        self._record = record
        self._name = name
        self._position = 0
        self._block: tuple[int, bytes] = (-1, b"")

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
            piece = memoryview(self._checked_block(index))[start : start + wanted - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def close(self) -> None:
        self._file.close()
        super().close()

    def _checked_block(self, index: int) -> bytes:
        if self._block[0] != index:
            self._file.seek(index * BLOCK_BYTES)
            block = self._file.read(min(BLOCK_BYTES, self._record.size - index * BLOCK_BYTES))
            if zlib.crc32(block) != self._record.blocks[index]:
                where = f"bytes [{index * BLOCK_BYTES}, {index * BLOCK_BYTES + len(block)})"
                raise CommitError(f"{self._name}: {where} do not match their checksum; the file was damaged")
            self._block = (index, block)
        return self._block[1]


def open_checked(store: Store, key: str, record: FileRecord) -> io.BufferedReader:
    """Open a file of a commit so that damaged bytes raise CommitError in place of being read."""
    return io.BufferedReader(CheckedFile(store.open(key), record, f"{store.url}/{key}"), BLOCK_BYTES)


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
