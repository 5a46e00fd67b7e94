"""Pins and holds: small objects beside the commits that keep retention from deleting one.

A pin (`pins/<term>-<step>`) stays until it is taken off. A hold (`holds/<term>-<step>/<until>-<unique>`) is a reader's:
it names the unix second at which it ends by itself, by the reader's clock, so that a reader that died does not keep a
commit for ever. Whoever reads longer holds again in time.

Held, then looked at: a reader that sees the record after it has created its hold has the files until the hold ends,
because retention deletes a record first, looks for holds after that, and leaves the files of a held commit alone.
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
    """Keep a commit until `unpin`; nothing changes if it is pinned already."""
    with contextlib.suppress(KeyTaken):
        store.create(f"{PINS}{_name(key)}", _whose())


def unpin(store: Store, key: str) -> None:
    """Let retention have a commit again."""
    store.delete(f"{PINS}{_name(key)}")


def pinned(store: Store) -> set[str]:
    """Return the keys of the pinned commits."""
    return {_key(entry.key.removeprefix(PINS)) for entry in store.list(PINS)}


@contextlib.contextmanager
def holding(store: Store, key: str, ttl_s: float = HOLD_TTL_S) -> Iterator[None]:
    """Keep a commit's files while it is read, for `ttl_s` seconds at most.

    `key` is the record's (`CommitRecord.key`). Raises KeyMissing, a StorageError, if the commit is not there. A store
    that cannot be written to is read without a hold.
    """
    marker = f"{HOLDS}{_name(key)}/{int(time.time() + ttl_s)}-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as undo:
        try:
            store.create(marker, _whose())
            undo.callback(_let_go, store, marker)
        except StorageError as error:
            log.warning("%s is read without a hold, so retention may delete it meanwhile: %s", key, error)
        if read(store, key) == VOID:
            raise KeyMissing(f"{store.url}/{key}: was swept before it became a commit")
        yield


def held(store: Store, now: float | None = None) -> set[str]:
    """Return the keys of the commits that readers hold, deleting the holds that have ended where that may be done."""
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
        log.warning("a hold stays, and counts until its time is over: %s", error)


def _name(key: str) -> str:
    assert place_of(key), f"{key} is no commit's key"
    return key.removeprefix(COMMITS).removesuffix(".json")


def _key(name: str) -> str:
    return f"{COMMITS}{name}.json"


def _whose() -> bytes:
    return f"{socket.gethostname()} process {os.getpid()}\n".encode()
