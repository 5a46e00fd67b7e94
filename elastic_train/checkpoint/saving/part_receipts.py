"""Part receipts: through the shared store, rank 0 learns that another rank has written its part.

A receipt is canonical JSON with a seal, like a commit record; it says what was written, or why not. It is created last,
so a part with a receipt is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.format.dcp import WrittenPart
from elastic_train.checkpoint.stores.store import (
    KeyMissing,
    Store,
    create_once,
    read,
)
from elastic_train.errors import StorageError

STALLED_S = 600.0
"""Seconds that rank 0 waits for another part, once its own is written."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """A written part, or the error that prevented it."""

    written: WrittenPart | None
    error: str | None


_ADAPTER = TypeAdapter(PartReceipt)


def post(store: Store, attempt: str, part: int, receipt: PartReceipt) -> None:
    """Record that a part is in the store, or will not be."""
    content = _ADAPTER.dump_json(receipt)
    create_once(store, _key(attempt, part), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def wait_for(store: Store, attempt: str, part: int, pause: Callable[[float], None]) -> WrittenPart:
    """Wait until another rank has written its part; `pause` sleeps, or raises to give up.

    Raise StorageError if that rank could not write it, or posts no receipt within `STALLED_S`.
    """
    key, waited_s, look_s = _key(attempt, part), 0.0, _FIRST_LOOK_S
    while waited_s < STALLED_S:
        try:
            receipt = _decode(read(store, key), f"{store.url}/{key}")
        except KeyMissing:
            pause(look_s)
            waited_s, look_s = waited_s + look_s, min(1.5 * look_s, _LONGEST_LOOK_S)
            continue
        if receipt.written is None:
            raise StorageError(f"part {part} was not written: {receipt.error}")
        return receipt.written
    raise StorageError(f"{store.url}/{key}: part {part} was not written in {STALLED_S:.0f} s")


def _key(attempt: str, part: int) -> str:
    return f"{attempt}/done-{part:05d}.json"


def _decode(content: bytes, where: str) -> PartReceipt:
    seal, _, body = content.partition(b"\n")
    try:
        if hashlib.sha256(body).hexdigest().encode() != seal:
            raise StorageError(f"{where}: does not match its seal; it was damaged")
        return _ADAPTER.validate_python(json.loads(body))
    except (ValueError, ValidationError) as error:
        raise StorageError(f"{where}: is not a valid part receipt: {error}") from error
