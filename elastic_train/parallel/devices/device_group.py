"""Exchanges between devices, whose operations run after the calls have returned.

NCCL's `wait` blocks a stream, not the process, and an operation with a dead or frozen peer never ends: the process
would block uninterruptibly when it next reads a value from the device. So all waits here poll the device, and check in
between if the world is broken. An exchange returns only when the device has finished it, so no update is enqueued after
an unfinished one.

A broken exchange leaves arbitrary values in its outputs. Only `abort` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from elastic_train.parallel.devices.device import Communicator, Device
from elastic_train.parallel.point_to_point import Work
from rendezvous.waiting import LOOK_EVERY_S, Call, GivenUp, begin

T = TypeVar("T")
ABORT_S = 10.0
"""Time limit in seconds for an abort and for the device to become idle after it."""
_SUCCESS, _FAILURES = 0, {1: "it took too long", 2: "a peer or the connection to it is gone"}
"""torch's values of WorkResult."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class Guard(Protocol):
    """A group's way to wait: it gives up when the world is broken, and turns failures into PeerLostError."""

    def guard(self, call: Callable[[], T]) -> T:
        """Make a call that may not return, on another thread."""

    def polling(self, wait: Callable[[Callable[[], bool]], T]) -> T:
        """Call a function that returns by itself, given a function that says if the world is broken."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An operation enqueued on a device."""

    work: Any

    def wait(self) -> object:
        """Make later work on the device wait for this operation; returns at once."""
        return self.work.wait()


class DeviceGroup:
    """The ranks' devices, connected by one communicator; `guard` is their group's.

    All sends and receives are part of one operation of the whole communicator. Otherwise torch would make a
    communicator per pair of ranks at the first send, and aborts of several can wait for one another.
    """

    def __init__(self, device: Device, store: Store, rank: int, size: int, timeout: timedelta, guard: Guard) -> None:
        assert device.connect is not None, "a device without a transport of its own has no group"
        self._device, self._guard, self._connect = device, guard, device.connect
        self._timeout_s = timeout.total_seconds()
        self._communicator = guard.guard(lambda: self._connect(store, rank, size, timeout))

    def connect(self) -> None:
        """Make all connections now: otherwise the first operation would wait for every peer."""
        device = self._device.torch_device
        self._guard.guard(lambda: self._communicator.eager_connect_single_device(device))
        self.finish([self.begin(lambda communicator: communicator.allreduce([torch.zeros(1, device=device)]))])

    def begin(self, operation: Callable[[Communicator], Work]) -> OnDevice:
        """Enqueue an operation, in the calling thread's queue."""
        queue = self._device.queue()

        def ask() -> Work:
            with queue.entered():
                return operation(self._communicator)

        return OnDevice(self._guard.guard(ask))

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> OnDevice:
        """Enqueue sends and receives as one operation; separately, they could deadlock."""

        def together(communicator: Communicator) -> Work:
            communicator._start_coalescing()
            for rank, part in receives:
                communicator.recv([part], rank, tag)
            for rank, part in sends:
                communicator.send([part], rank, tag)
            return communicator._end_coalescing()

        return self.begin(together)

    def finish(self, operations: Sequence[OnDevice]) -> None:
        """Wait until the device has finished the operations and all work enqueued before."""
        for operation in operations:
            operation.wait()
        is_done, works = self._device.queue().mark(), [operation.work for operation in operations]
        self._guard.polling(lambda is_broken: _await(is_done, works, is_broken, self._timeout_s))

    def begin_abort(self) -> Call[None]:
        """Begin to abort this group's work on the device."""
        return begin("abort", self._communicator.abort)

    def is_free(self) -> Callable[[], bool]:
        """Return a function that says if the device has finished, or ended, all work enqueued so far."""
        return self._device.queue().mark()


def abort_all(groups: Sequence[DeviceGroup]) -> bool:
    """Abort the groups' work on their device; return True if the device is idle in time.

    Aborts run concurrently, because each may wait for the device, which the other groups' operations block. An NCCL
    group call around them would not help: torch aborts on its own thread, and group calls are per thread. Groups are
    never destroyed otherwise; torch's destructor waits for peers unless aborted.
    """
    deadline = time.monotonic() + ABORT_S
    calls = [group.begin_abort() for group in groups]
    if not all(call.ended.wait(max(0.0, deadline - time.monotonic())) for call in calls):
        return False
    are_free = [group.is_free() for group in groups]
    for pause_s in _pauses():
        if all(is_free() for is_free in are_free):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return False


def _await(is_done: Callable[[], bool], works: Sequence[Any], is_broken: Callable[[], bool], timeout_s: float) -> None:
    """Wait until the work is done; raise GivenUp if the world is broken.

    Raises RuntimeError if an operation has failed, and TimeoutError after `timeout_s`, as gloo does.
    """
    deadline = time.monotonic() + timeout_s
    look_at = time.monotonic() + LOOK_EVERY_S
    for pause_s in _pauses():
        if is_done():
            break
        if time.monotonic() >= look_at:
            _check(works)
            if is_broken():
                raise GivenUp
            if look_at > deadline:
                raise TimeoutError(f"the device has waited {timeout_s:.0f} s for its peers")
            look_at = time.monotonic() + LOOK_EVERY_S
        time.sleep(pause_s)
    _check(works)  # an aborted operation is not a finished one


def _check(works: Sequence[Any]) -> None:
    """Raise RuntimeError if torch's own thread has found a failed operation.

    NCCL's `exception` and `is_success` cannot be used: the first always raises TypeError, the second is deprecated.
    `is_completed` is also True for failed operations.
    """
    for work in works:
        found = work.get_future_result()
        if found.done() and found.value() != _SUCCESS:
            what = _FAILURES.get(found.value(), "why is not known")
            raise RuntimeError(f"an operation between devices has failed ({what})")


def _pauses() -> Iterator[float]:
    """Yield the seconds to sleep between polls, endlessly, short at first."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
