"""Faults of storage: outages and errors that affect all, and damage to stored files.

The newest commit is damaged only while its parent is intact, so that there is always a commit to resume from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from chaos.judge.evidence.run_files import is_void
from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process

Act = Callable[[Fleet, SimFault], list[Process]]
Record = dict[str, Any]

WEATHER: Mapping[str, str] = {
    "storage_outage": "down",
    "storage_full": "full",
    "storage_errors": "failing",
    "storage_slow": "slow",
    "slow_sync": "slow_sync",
    "storage_lossy": "lossy",
    "storage_conflict": "conflict",
    "storage_taken": "taken",
}
"""The condition that each kind turns on for a while; `chaos.sim.machine.object_store.Storage` implements it."""


def _weather(what: str) -> Act:
    def act(fleet: Fleet, fault: SimFault) -> list[Process]:
        setattr(fleet.around.storage, f"{what}_until", fleet.kernel.now + fault.for_s)
        return fleet.all_workers()

    return act


def stale_listing(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Make listings stale: they miss other nodes' writes, and still show what these deleted."""
    fleet.around.storage.list_late(fault.for_s)
    return fleet.all_workers()


def readonly_dir(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Make storage read-only for one node; a delete there is not simulated."""
    number, storage = fleet.node(fault), fleet.around.storage
    storage.readonly_until[number] = max(storage.readonly_until.get(number, 0.0), fleet.kernel.now + fault.for_s)
    return fleet.nodes[number].live_workers()


def tear_write(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Kill the next process that writes a file, in the middle of it."""
    if fleet.around.storage.is_to_tear:
        return []  # a fault that still waits for a writer is not followed by another
    fleet.around.storage.is_to_tear = True
    return fleet.all_workers()


_DIGIT = re.compile(rb"[0-9]")
"""Present in every non-empty file of a commit: a rank without a shard writes an empty one."""


def _damage(change: Callable[[bytes], bytes | None]) -> Act:
    """Silently damage a file of the newest commit, if its parent is intact."""

    def act(fleet: Fleet, fault: SimFault) -> list[Process]:
        files = fleet.around.storage.files
        newest = max((key for key in files if key.startswith("commits/") and not is_void(files[key][0])), default=None)
        record = None if newest is None else json.loads(files[newest][0])
        if record is None or not (_is_whole(fleet, record) and _is_whole(fleet, _parent_of(fleet, record))):
            return []
        attempt = record["attempt"]
        held = [name for name in sorted(record["files"]) if _DIGIT.search(files[f"{attempt}/{name}"][0])]
        key = f"{attempt}/{held[fault.other % len(held)]}"
        changed = change(files[key][0])
        if changed is None:
            del files[key]
        else:
            fleet.around.storage.put(key, changed)
        fleet.around.storage.damaged[attempt] = str(newest).removeprefix("commits/")
        return fleet.all_workers()

    return act


def _parent_of(fleet: Fleet, record: Record) -> Record | None:
    found = fleet.around.storage.files.get(str(record["parent_key"]))
    return None if found is None else json.loads(found[0])


def _is_whole(fleet: Fleet, record: Record | None) -> bool:
    if record is None or record["attempt"] in fleet.around.storage.damaged:
        return False
    files, found = record["files"], fleet.around.storage.files
    return all(len(found.get(f"{record['attempt']}/{name}", (b"",))[0]) == file["size"] for name, file in files.items())


def _flipped(content: bytes) -> bytes:
    found = _DIGIT.search(content)
    assert found is not None, "a file with numbers in it"
    place = found.start()
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


ACTS: Mapping[str, Act] = {
    **{name: _weather(what) for name, what in WEATHER.items()},
    "stale_listing": stale_listing,
    "readonly_dir": readonly_dir,
    "tear_write": tear_write,
    "flip_bit": _damage(_flipped),
    "truncate_file": _damage(lambda content: content[:-1]),
    "delete_file": _damage(lambda content: None),
}
