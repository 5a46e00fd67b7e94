"""Split rows by content, so equal rows are never in both parts."""

from __future__ import annotations

import hashlib

TRAIN, VALIDATION = "train", "validation"
SHARE = 0.1


def part_of(content: bytes, share: float, seed: int) -> str:
    """Return the part of a row with this content: about `share` of all contents are for validation."""
    word = int.from_bytes(hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")
    return VALIDATION if word < share * 2.0**64 else TRAIN
