"""Checksums of files: what a commit records of each, and how exactly the bytes that are read are checked.

A file has one digest, which clears it as a whole, and a CRC-32 for every block of 1 MiB, so that a reader who needs a
part can check that part alone. The digest is BLAKE3, a cryptographic hash that takes a quarter of SHA-256's time; older
commits have SHA-256, and the field's name says which. The CRC-32 is zlib's, computed by ISA-L in a sixth of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from blake3 import blake3
from isal.isal_zlib import crc32

from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError

BLOCK_BYTES = 1 << 20


class Hash(Protocol):
    """A hash in the making, as hashlib's are."""

    def update(self, content: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


HASHES: Mapping[str, Callable[[], Hash]] = {"blake3": blake3, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a commit knows of one of its files: one digest, and the CRC-32 of every block; the last may be short.

    The digest is `sha256` in commits of format 1, `blake3` in later ones.
    """

    size: int
    blocks: tuple[int, ...]
    blake3: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block checksums for {self.size} bytes")
        if (self.blake3 is None) == (self.sha256 is None):
            raise ValueError("a file has one digest")

    @property
    def algorithm(self) -> str:
        """The name of the hash that made the digest, as in HASHES."""
        return "sha256" if self.blake3 is None else "blake3"

    @property
    def digest(self) -> str:
        return str(getattr(self, self.algorithm))

    def is_digest_of(self, content: bytes) -> bool:
        """Say whether a whole file's bytes have this digest."""
        digest = HASHES[self.algorithm]()
        digest.update(content)
        return digest.hexdigest() == self.digest


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


def find_damage(store: Store, key: str, record: FileRecord, heard: Callable[[], None] = lambda: None) -> str | None:
    """Read a whole file and say what is wrong with it, None if size, digest and blocks are as recorded.

    The blocks, too: what is found whole here must not be refused by who reads a part of it. `heard` is called for each.
    """
    digest, size, blocks = HASHES[record.algorithm](), 0, []
    with store.open(key) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            blocks.append(crc32(block))
            size += len(block)
            heard()
    if size != record.size:
        return f"{key} has {size} bytes, its record says {record.size}"
    if digest.hexdigest() != record.digest:
        return f"{key} does not match its digest ({record.algorithm})"
    if tuple(blocks) != record.blocks:
        return f"{key} does not match the checksums of its blocks"
    return None
