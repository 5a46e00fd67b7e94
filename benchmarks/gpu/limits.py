"""The time that a part may take: it ends with what it has, and what still runs at its limit is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rendezvous.orphans import adopting
from rendezvous.process_table import children_of

P = ParamSpec("P")
T = TypeVar("T")
ENDING_S = 5.0
"""Seconds before its limit at which a measurement ends with the turns that it has."""
KILLED_WITHIN_S = 10.0
LOOK_EVERY_S = 0.1
MEMORY = Path("/dev/shm")
_OWN_FOLDERS = "elastic-train-gpu-"


class OutOfTimeError(Exception):
    """A measurement was killed at its limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The moment by which a measurement has to end, by a clock that all processes of this machine share."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - self.clock())

    def is_near(self) -> bool:
        """Return True if a measurement should end with what it has."""
        return self.left_s < ENDING_S

    def first(self, fraction: float) -> Limit:
        """Return the limit of something that may take this fraction of the time left."""
        return Limit(self.clock() + fraction * self.left_s, self.clock)

    def run(self, measure: Callable[Concatenate[Limit, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Run a measurement, which is given this limit, in a fresh process with exclusive use of the device.

        Raises OutOfTimeError if it does not end in time, and RuntimeError if it fails.
        """
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        with nothing_left():
            process = context.Process(target=_begin, args=(sender, measure, (self, *args), named))
            process.start()
            sender.close()
            try:
                while not receiver.poll(LOOK_EVERY_S):
                    if self.left_s == 0.0:
                        raise OutOfTimeError(f"{measure.__name__} was killed at its limit")
                found: T | None
                found, failure = receiver.recv()
            except EOFError:
                raise RuntimeError(f"{measure.__name__}: its process has died") from None
        if failure is not None:
            raise RuntimeError(f"{measure.__name__}: {failure}")
        return found


def _begin(sender: Connection, measure: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        sender.send((measure(*args, **named), None))
    except Exception as error:  # noqa: BLE001 - told to the process that waits
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}"))


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Kill, at the end, every process that was begun meanwhile below this one, and remove its folders.

    They would keep the device's memory from the next part. Those whose parent has ended are included.
    """
    resource_tracker.ensure_running()
    before = set(_below(os.getpid()))
    with adopting():
        try:
            yield
        finally:
            _kill_all_but(before)
            for folder in [*MEMORY.glob(f"{_OWN_FOLDERS}*"), *Path(tempfile.gettempdir()).glob(f"{_OWN_FOLDERS}*")]:
                if folder.name.startswith(f"{_OWN_FOLDERS}{os.getpid()}-"):
                    shutil.rmtree(folder, ignore_errors=True)


def job_folder(num_bytes: int) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, in memory if it has room, as a disk would distort the figures.

    `nothing_left` removes it if the process of a measurement, whose parent waits for it, is killed.
    """
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > num_bytes
    return tempfile.TemporaryDirectory(prefix=f"{_OWN_FOLDERS}{os.getppid()}-", dir=MEMORY if has_room else None)


def _below(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from _below(child)


def _kill_all_but(before: Collection[int]) -> None:
    """Kill the other processes below this one, and wait until they are gone: a device frees memory only then."""
    deadline = time.monotonic() + KILLED_WITHIN_S
    while (found := [pid for pid in _below(os.getpid()) if pid not in before]) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
