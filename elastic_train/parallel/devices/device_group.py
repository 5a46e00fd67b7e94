"""What ranks exchange between devices, by operations that a device does some time after the calls have returned.

NCCL's `wait` lets a stream wait, not the process, and an operation whose peer is dead or frozen never ends by itself:
the process would meet it at the next value that it reads from the device, in a call that nothing can interrupt. So all
that waits here asks the device whether it has come so far, and between two looks whether the world is broken. Only an
exchange that the device has finished returns, so no update is ever enqueued after one that has not.

A broken exchange leaves arbitrary values in what it was to fill. It is ended by `abort`, and by nothing else.
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
"""How long an abort may take, and the device to be free after it; waiting longer would not help then."""
_SUCCESS, _FAILURES = 0, {1: "it took too long", 2: "a peer or the connection to it is gone"}
"""What torch calls a WorkResult."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class Guard(Protocol):
    """How a group waits: both give up when its world is broken, and make a PeerLostError of a failure."""

    def __call__(self, call: Callable[[], T]) -> T:
        """Make a call that may not return, on another thread."""

    def polling(self, wait: Callable[[Callable[[], bool]], T]) -> T:
        """Call what returns by itself, with a function that says whether the world is broken."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An operation that a device has been asked for."""

    work: Any

    def wait(self) -> object:
        """Let what the device is asked for from now on begin after it; returns at once."""
        return self.work.wait()


class DeviceGroup:
    """The ranks' devices, connected by one communicator; `guard` is their group's.

    All sends and receives are parts of one operation of the whole communicator: torch makes another communicator for
    each pair of ranks otherwise, at the first send, and aborts of several can wait for one another.
    """

    def __init__(self, device: Device, store: Store, rank: int, size: int, timeout: timedelta, guard: Guard) -> None:
        assert device.connect is not None, "a device without a transport of its own has no group"
        self._device, self._guard, self._connect = device, guard, device.connect
        self._timeout_s = timeout.total_seconds()
        self._communicator = guard(lambda: self._connect(store, rank, size, timeout))

    def connect(self) -> None:
        """Make all connections now: later, the first operation would wait for every peer."""
        device = self._device.torch_device
        self._guard(lambda: self._communicator.eager_connect_single_device(device))
        self.finish([self.begin(lambda communicator: communicator.allreduce([torch.zeros(1, device=device)]))])

    def begin(self, operation: Callable[[Communicator], Work]) -> OnDevice:
        """Ask the device for an operation, in the calling thread's order."""
        queue = self._device.queue()

        def ask() -> Work:
            with queue.entered():
                return operation(self._communicator)

        return OnDevice(self._guard(ask))

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> OnDevice:
        """Ask for sends and receives at once; apart they would block one another in the order in which they come."""

        def together(communicator: Communicator) -> Work:
            communicator._start_coalescing()
            for rank, part in receives:
                communicator.recv([part], rank, tag)
            for rank, part in sends:
                communicator.send([part], rank, tag)
            return communicator._end_coalescing()

        return self.begin(together)

    def finish(self, operations: Sequence[OnDevice]) -> None:
        """Return when the device has done them, and all that it was asked before."""
        for operation in operations:
            operation.wait()
        is_done, works = self._device.queue().mark(), [operation.work for operation in operations]
        self._guard.polling(lambda is_broken: _await(is_done, works, is_broken, self._timeout_s))

    def begin_abort(self) -> Call[None]:
        """Begin to end what the device still does for this group."""
        return begin("abort", self._communicator.abort)

    def is_free(self) -> Callable[[], bool]:
        """Return what says whether the device has done, or ended, all that it has been asked by now."""
        return self._device.queue().mark()


def abort_all(groups: Sequence[DeviceGroup]) -> bool:
    """End what a device still does for some groups; say whether it is free of all of it, in time.

    The aborts run at once: each may wait for the device, which is held up by the other groups' operations, too. One
    group call of NCCL around all of them would not do, since torch aborts on a thread of its own, and groups of calls
    are a thread's. Nothing is ever destroyed, which waits for peers: torch's destructor does not after an abort.
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
    """Return when it is done; raise GivenUp if the world is broken.

    Raises RuntimeError if an operation has failed, and TimeoutError if it takes too long, as gloo does.
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
    _check(works)  # an operation that was ended is not one that was done


def _check(works: Sequence[Any]) -> None:
    """Raise RuntimeError if one has failed, by what torch's own thread has found when it last looked.

    On NCCL neither `exception` nor `is_success` can be asked for that: the first raises TypeError, whatever it has to
    return, and the other says that it is deprecated. `is_completed` is true of what has failed, too.
    """
    for work in works:
        found = work.get_future_result()
        if found.done() and found.value() != _SUCCESS:
            what = _FAILURES.get(found.value(), "why is not known")
            raise RuntimeError(f"an operation between devices has failed ({what})")


def _pauses() -> Iterator[float]:
    """Yield how long to sleep between two looks, in seconds, for ever: short at first."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
