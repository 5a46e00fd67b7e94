"""Faults of storage: its weather, which everybody meets while it lasts, and damage to what was written.

A file of the newest commit is damaged only while the one that it continues is whole: so there always is one to resume
from, however often files are damaged.
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
"""What each kind turns on for a while; what that means is in `chaos.sim.machine.object_store.Storage`."""


def _weather(what: str) -> Act:
    def act(fleet: Fleet, fault: SimFault) -> list[Process]:
        setattr(fleet.around.storage, f"{what}_until", fleet.kernel.now + fault.for_s)
        return fleet.all_workers()

    return act


def stale_listing(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Listings lack what other nodes have written since, and still have what they have deleted."""
    fleet.around.storage.list_late(fault.for_s)
    return fleet.all_workers()


def readonly_dir(fleet: Fleet, fault: SimFault) -> list[Process]:
    """One node can read, and not write; what is deleted there, when nobody looks, is of no interest."""
    number, storage = fleet.node(fault), fleet.around.storage
    storage.readonly_until[number] = max(storage.readonly_until.get(number, 0.0), fleet.kernel.now + fault.for_s)
    return fleet.nodes[number].live_workers()


def tear_write(fleet: Fleet, fault: SimFault) -> list[Process]:
    """The process that writes a file next dies in the middle of it."""
    if fleet.around.storage.is_to_tear:
        return []  # one that waits for its writer is not yet another
    fleet.around.storage.is_to_tear = True
    return fleet.all_workers()


_DIGIT = re.compile(rb"[0-9]")
"""What a file of a commit has that holds anything: a rank without a share of the state writes an empty one."""


def _damage(change: Callable[[bytes], bytes | None]) -> Act:
    """Change a file of the newest commit, unnoticed by the job, if the one that it continues is whole."""

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
