"""Checksums of files, as recorded in commits.

A file has one digest over the whole, and a CRC-32 per block of 1 MiB, so that parts can be checked alone. The digest is
BLAKE3, a cryptographic hash in a quarter of SHA-256's time; older commits have SHA-256, as the field's name says. The
CRC-32 is zlib's, computed by ISA-L in a sixth of the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

BLOCK_BYTES = 1 << 20


class Hash(Protocol):
    """An incremental hash, like hashlib's."""

    def update(self, content: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


HASHES: Mapping[str, Callable[[], Hash]] = {"blake3": blake3, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Record of one file: size in bytes, digest, and the CRC-32 of every block of `BLOCK_BYTES`.

    The last block may be shorter. The digest is `sha256` in commits of format 1, `blake3` in later ones.
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
        """Name of the digest's hash, as in HASHES."""
        return "sha256" if self.blake3 is None else "blake3"

    @property
    def digest(self) -> str:
        return str(getattr(self, self.algorithm))

    def is_digest_of(self, content: bytes) -> bool:
        """Return True if a complete file's bytes have this digest."""
        digest = HASHES[self.algorithm]()
        digest.update(content)
        return digest.hexdigest() == self.digest
