"""Find what a job has left once all its processes have ended: leases, drafts of files, shared memory."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from chaos.scenario.kinds import ALIENS
from chaos.services.surroundings import Surroundings
from rendezvous.errors import RendezvousError
from rendezvous.etcd.connection import Connection, list_prefix
from rendezvous.etcd.options import EtcdOptions
from rendezvous.membership.records import Keys

_DRAFT = re.compile(r".*\.unfinished|\..+\.\d+")
"""Temporary file names of the trainer."""
_MEMORY = Path("/dev/shm")
_MARGIN_S, _ASK_S = 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Left:
    """Leftovers: keys that outlived their lease (None if etcd did not answer), drafts, shared memory."""

    leases: list[str] | None
    drafts: list[tuple[str, float]]
    shared_memory: list[str]


def look(folder: Path, pids: Collection[int], around: Surroundings, ttl_s: float) -> Left:
    """Find all leftovers; waits up to a lease's time to live if a member key is still there."""
    leases = None if around.etcd is None else leased(around.etcd.options, around.run_id, ttl_s)
    return Left(leases, drafts(folder), shared_memory(pids))


def leased(options: EtcdOptions, run_id: str, ttl_s: float) -> list[str] | None:
    """Return the job's member keys that outlive their leases; None if etcd does not answer."""
    deadline = time.monotonic() + ttl_s + _MARGIN_S
    try:
        connection = Connection(options)
        try:
            while keys := sorted(
                k for k in list_prefix(connection, Keys(run_id).members, _ASK_S).entries if not k.endswith(ALIENS)
            ):
                if time.monotonic() > deadline:
                    return keys
                time.sleep(0.1)
            return []
        finally:
            connection.close()
    except RendezvousError:
        return None


def drafts(folder: Path) -> list[tuple[str, float]]:
    """Return drafts below a run's folder, with their last modification (unix seconds)."""
    found = [path for path in folder.rglob("*") if _DRAFT.fullmatch(path.name) and path.is_file()]
    return sorted((str(path.relative_to(folder)), path.stat().st_mtime) for path in found)


def shared_memory(pids: Collection[int]) -> list[str]:
    """Return shared memory segments named after one of these processes, as torch names its own."""
    made = {str(pid) for pid in pids}
    names = [path.name for path in _MEMORY.iterdir()] if _MEMORY.is_dir() else []
    return sorted(name for name in names if made & set(re.split(r"\D+", name)))


class Enough(Exception):  # noqa: N818 - not a failure: the user wants no more faults
    """Raised when the user ends the soak."""


@contextlib.contextmanager
def on_first_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first Ctrl-C or SIGTERM; afterwards, and after the context, the previous handlers apply.

    A handler that was replaced meanwhile, because a second signal came, is left in place.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        take_back()
        act()

    def take_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        take_back()
