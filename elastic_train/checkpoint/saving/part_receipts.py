"""Done records: how rank 0 learns, from the store that the ranks share, that another rank has written its part.

A record is canonical JSON with a seal, like a commit's; it says what was written, or why nothing could be. A part is
whole when its record is there, since it is created last.
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
"""How long rank 0, its own part written, waits for another's."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class Done:
    """A part that was written, or why it could not be."""

    written: WrittenPart | None
    error: str | None


_ADAPTER = TypeAdapter(Done)


def post(store: Store, attempt: str, part: int, done: Done) -> None:
    """Say that a part is in the store, or that it will not be."""
    content = _ADAPTER.dump_json(done)
    create_once(store, _key(attempt, part), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def wait_for(store: Store, attempt: str, part: int, pause: Callable[[float], None]) -> WrittenPart:
    """Wait until another rank has written its part; `pause` sleeps so many seconds, and raises to give up.

    Raises StorageError if that rank could not, or says nothing for too long.
    """
    key, waited_s, look_s = _key(attempt, part), 0.0, _FIRST_LOOK_S
    while waited_s < STALLED_S:
        try:
            done = _decode(read(store, key), f"{store.url}/{key}")
        except KeyMissing:
            pause(look_s)
            waited_s, look_s = waited_s + look_s, min(1.5 * look_s, _LONGEST_LOOK_S)
            continue
        if done.written is None:
            raise StorageError(f"part {part} was not written: {done.error}")
        return done.written
    raise StorageError(f"{store.url}/{key}: part {part} was not written in {STALLED_S:.0f} s")


def _key(attempt: str, part: int) -> str:
    return f"{attempt}/done-{part:05d}.json"


def _decode(content: bytes, where: str) -> Done:
    seal, _, body = content.partition(b"\n")
    try:
        if hashlib.sha256(body).hexdigest().encode() != seal:
            raise StorageError(f"{where}: does not match its seal; it was damaged")
        return _ADAPTER.validate_python(json.loads(body))
    except (ValueError, ValidationError) as error:
        raise StorageError(f"{where}: is no done record: {error}") from error
