"""Pins and holds: small objects next to the commits that protect one from retention.

A pin (`pins/<term>-<step>`) stays until it is removed. A hold (`holds/<term>-<step>/<until>-<unique>`) belongs to a
reader: it expires at the unix second in its name, by the reader's clock, so that a dead reader does not keep a commit
for ever. A reader that needs longer creates another hold in time.

The order makes it safe: a reader that sees the record after creating its hold has the files until the hold expires,
because retention deletes a record first, then looks for holds, and leaves the files of a held commit alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator

from elastic_train.checkpoint.commits.record import VOID
from elastic_train.checkpoint.stores.store import (
    KeyMissing,
    KeyTaken,
    Store,
    read,
)
from elastic_train.core.lineage import COMMITS, place_of
from elastic_train.errors import StorageError

log = logging.getLogger(__name__)

PINS = "pins/"
HOLDS = "holds/"
HOLD_TTL_S = 3600.0
_HOLD = re.compile(r"holds/(?P<name>\d+-\d+)/(?P<until>\d+)-[0-9a-f]+")


def pin(store: Store, key: str) -> None:
    """Keep a commit until `unpin`; idempotent."""
    with contextlib.suppress(KeyTaken):
        store.create(f"{PINS}{_name(key)}", _whose())


def unpin(store: Store, key: str) -> None:
    """Allow retention to delete a commit again."""
    store.delete(f"{PINS}{_name(key)}")


def pinned(store: Store) -> set[str]:
    return {_key(entry.key.removeprefix(PINS)) for entry in store.list(PINS)}


@contextlib.contextmanager
def holding(store: Store, key: str, ttl_s: float = HOLD_TTL_S) -> Iterator[None]:
    """Hold the commit of a key (`CommitRecord.key`) within this context: retention does not delete it.

    The hold ends with the context, or after `ttl_s` seconds; hold again before that to read longer. A store that cannot
    be written to is read without a hold, with a warning. Raise KeyMissing (a StorageError) if the commit does not
    exist.
    """
    marker = f"{HOLDS}{_name(key)}/{int(time.time() + ttl_s)}-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as undo:
        try:
            store.create(marker, _whose())
            undo.callback(_let_go, store, marker)
        except StorageError as error:
            log.warning("reading %s without a hold, so retention may delete it meanwhile: %s", key, error)
        if read(store, key) == VOID:
            raise KeyMissing(f"{store.url}/{key}: its attempt was swept before it became a commit")
        yield


def held(store: Store, now: float | None = None) -> set[str]:
    """Return the keys of held commits; expired holds are deleted if the store allows it."""
    moment, keys = time.time() if now is None else now, set()
    for entry in store.list(HOLDS):
        match = _HOLD.fullmatch(entry.key)
        if match and int(match["until"]) >= moment:
            keys.add(_key(match["name"]))
        elif match:
            _let_go(store, entry.key)
    return keys


def _let_go(store: Store, marker: str) -> None:
    try:
        store.delete(marker)
    except StorageError as error:
        log.warning("a hold could not be deleted, and counts until it ends: %s", error)


def _name(key: str) -> str:
    assert place_of(key), f"{key} is not a commit's key"
    return key.removeprefix(COMMITS).removesuffix(".json")


def _key(name: str) -> str:
    return f"{COMMITS}{name}.json"


def _whose() -> bytes:
    return f"{socket.gethostname()} process {os.getpid()}\n".encode()
