"""Examine the store and the tracker of a job from this node, with the same requests as a job."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

from elastic_train.checkpoint.saving.store_health import PROBES, probe
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, Store, no_listener
from elastic_train.config.credentials import without_password
from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.file_systems import hazards, mount_of
from elastic_train.system.wording import first_line
from elastic_train.tracking.mlflow_run import (
    bound_requests,
    connect,
    is_no_tracker,
    sqlite_path,
    tracker_errors,
)
from elastic_train.world import one_store

PIECE, MOST_PIECES, MOST_S = 4 << 20, 16, 3.0
"""Bytes of a piece, maximum number of pieces, and maximum seconds of the write test."""
SLOW_MB_S = 20.0
FIRST_LOOK_S = 0.5


def open_for_doctor(url: str) -> Store:
    """Return the store at a URL; every short call of it ends."""
    return DeadlineStore(open_store(url), no_listener)


def examine_storage(url: str, *, has_peers: bool) -> Iterator[Finding]:
    """Say whether commits can be kept at a URL: writable, created once only, seen at once, quick, and seen by all.

    It leaves the key `store-id` there, as a job does.
    """
    for hazard in hazards(url):
        yield warn("storage", hazard, "docs/storage.md says what commits need")
    mount = None if "://" in url else mount_of(url)
    if has_peers and mount is not None and mount.is_local:
        found = f"{url} is on {mount.kind} of this machine alone"
        yield warn("storage", found, "several nodes need a folder that all mount, or an object store (checkpoint.url)")
    probe(url)
    store = open_for_doctor(url)
    word = one_store.identify(store)
    if one_store.proves_itself(store, word):
        yield ok("storage", f"{url}{f' ({mount.kind})' if mount else ''} is writable, and creates a key once only")
    else:
        yield fail("storage", f"{url} does not say whether it creates a key once only", "try again; is it reachable?")
    yield from _seen_and_quick(store)


def _seen_and_quick(store: Store) -> Iterator[Finding]:
    """Write a file, look for it, read it back, and take it away."""
    key, piece = f"{PROBES}{uuid.uuid4().hex}", b"\xa5" * PIECE
    began, num_written = time.monotonic(), 0
    with store.write(key) as sink:
        while num_written < MOST_PIECES and time.monotonic() - began < MOST_S:
            sink.write(piece)
            num_written += 1
    written_s = time.monotonic() - began
    try:
        yield from _seen(store, key)
        began = time.monotonic()
        with store.open(key) as file:
            num_read = sum(len(part) for part in iter(lambda: file.read(PIECE), b""))
        read_s = time.monotonic() - began
    finally:
        store.delete(key)
    if num_read != num_written * PIECE:
        found = f"{num_written * PIECE} bytes written, {num_read} read back"
        yield fail("storage's speed", found, "do not keep commits there")
        return
    written, again = (1e-6 * num_read / max(seconds, 1e-9) for seconds in (written_s, read_s))
    said = f"{written:.0f} MB/s written and synced, {again:.0f} MB/s read back"
    if written < SLOW_MB_S:
        yield warn("storage's speed", said, "saves take long: see checkpoint.near_dir, and quicker storage")
    else:
        yield ok("storage's speed", said)


def _seen(store: Store, key: str) -> Iterator[Finding]:
    """Look whether a listing has what has just been written."""
    began = time.monotonic()
    while not any(entry.key == key for entry in store.list(PROBES)):
        if time.monotonic() - began > FIRST_LOOK_S:
            found = "a listing does not show what was written just before"
            yield fail("storage", found, "commits need listings that are complete (docs/storage.md)")
            return
        time.sleep(0.05)


def examine_tracker(mlflow_uri: str) -> Iterator[Finding]:
    """Say whether MLflow answers; a sqlite database that is not there yet is not made."""
    bound_requests()
    shown, database = without_password(mlflow_uri), sqlite_path(mlflow_uri)
    if database is not None and not database.exists():
        if os.access(database.absolute().parent, os.W_OK):
            yield ok("mlflow", f"{shown} is not there yet; the job makes it")
        else:
            yield fail("mlflow", f"{database.absolute().parent} cannot be written", "set tracking.mlflow_uri")
        return
    try:
        connect(mlflow_uri).search_experiments(max_results=1)
    except tracker_errors() as error:
        if is_no_tracker(error):
            yield fail("mlflow", f"{shown}: {first_line(error)}", "tracking.mlflow_uri names something else")
        else:
            remedy = (
                "training continues without it, and values are sent later; set tracking.mlflow_uri or its credentials"
            )
            yield warn("mlflow", f"{shown}: {first_line(error)}", remedy)
    else:
        yield ok("mlflow", f"{shown} answers")
