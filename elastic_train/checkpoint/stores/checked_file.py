"""Read a commit's files: no byte is used whose block does not match its checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO

from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores.checksums import BLOCK_BYTES, HASHES, FileRecord
from elastic_train.checkpoint.stores.store import Store, no_listener
from elastic_train.errors import CommitError


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
    digest, size, blocks = HASHES[record.algorithm](), 0, []
    with store.open(key) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            blocks.append(crc32(block))
            size += len(block)
            on_progress()
    if size != record.size:
        return f"{key} has {size} bytes, its record says {record.size}"
    if digest.hexdigest() != record.digest:
        return f"{key} does not match its digest ({record.algorithm})"
    if tuple(blocks) != record.blocks:
        return f"{key} does not match the checksums of its blocks"
    return None
