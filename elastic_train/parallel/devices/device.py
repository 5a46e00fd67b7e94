"""An accelerator in a group of ranks: which tensors it holds, its queue, its transport, its times, and its exchanges.

This module has CUDA's devices. Tests use another whose work ends on command.

A device runs operations after the calls have returned. NCCL's `wait` blocks a stream, not the process, and an operation
with a dead or frozen peer never ends: the process would block uninterruptibly when it next reads a value from the
device. So all waits here poll the device, and check in between if the world is broken. They wait for exchanges, not for
computation: the device still runs a unit while the host enqueues the next. But computation that needs an exchange is
enqueued only after it has ended, so reading a value never blocks on a peer, and nothing is computed from the arbitrary
values that a broken exchange leaves: a wrong index would end the process. Only `abort` ends a broken exchange.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from elastic_train.parallel.point_to_point import Backend, Guard, OnDevice, Work
from rendezvous.waiting import LOOK_EVERY_S, Call, GivenUp, begin

_OWN_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""Settings of NCCL's threads in torch, which would end the process or abort operations when they find errors.

A broken group aborts by itself, and never uses the results of an aborted operation.
"""


_HANGS: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
    ((0,), (2, 22), "communicators are ended one after another, and may wait for each other (pytorch#119797)"),
    ((2, 31), (99,), "ending a communicator whose peer is gone has hung, when it was shrunk (pytorch#194679)"),
)
"""Known hangs of NCCL: first affected version, first unaffected version, description."""


class Communicator(Backend, Protocol):
    """A backend whose operations run on a device after the calls that enqueue them have returned."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def abort(self) -> None: ...


class Mark(Protocol):
    """A point in a queue."""

    def __call__(self) -> bool:
        """Return True, without waiting, if all work enqueued before it is done."""


class Queue(Protocol):
    """The order in which a device executes work: for CUDA, a stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which any calling thread's work is enqueued here."""

    def mark(self) -> Mark:
        """Return the point after all work enqueued so far."""

    def follow(self, mark: Mark) -> None:
        """Let work enqueued here from now on begin only after that before a mark of another queue."""

    def keep(self, tensor: Tensor) -> None:
        """Reuse the memory of a freed tensor of another queue only after the work enqueued here that used it."""


class HostQueue:
    """A host's processor has done all work when its calls return."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return lambda: True

    def follow(self, mark: Mark) -> None:
        """Do nothing: it is done."""

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: whoever uses a tensor refers to it."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as used by a group.

    `holds` returns True if a tensor is on it, `queue` returns the calling thread's queue, `beside` makes another one,
    and `connect` makes an unconnected backend from (store, rank, size, timeout); if it is None, tensors go through host
    memory.
    """

    torch_device: torch.device
    holds: Callable[[Tensor], bool]
    queue: Callable[[], Queue]
    beside: Callable[[], Queue]
    connect: Callable[[Store, int, int, timedelta], Communicator] | None


HOST = Device(torch.device("cpu"), lambda tensor: False, HostQueue, HostQueue, None)


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event of a stream."""

    event: torch.cuda.Event

    def __call__(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event)

    def follow(self, mark: Mark) -> None:
        self._stream.wait_event(cast(CudaMark, mark).event)

    def keep(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream)


def connect_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Return NCCL's backend with non-blocking calls: communicators are made in the background."""
    os.environ.update(_OWN_SETTINGS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return cast(Communicator, dist.ProcessGroupNCCL(store, rank, size, options))


def nccl_hazard() -> str | None:
    """Describe the known hang after faults of torch's NCCL version, and the remedy; None if there is none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    what = next((what for first, after, what in _HANGS if first <= version < after), None)
    if what is None:
        return None
    return (
        f"NCCL {'.'.join(map(str, version))}: {what}. A process that hangs so is replaced after some seconds; "
        "install a torch with another version of NCCL to spare it, or set parallel.transport to gloo"
    )


def device_of(device: torch.device, transport: str) -> Device:
    """Return a rank's accelerator, or its host."""
    if device.type != "cuda":
        return HOST

    def queue() -> CudaQueue:
        return CudaQueue(torch.cuda.current_stream(device))

    def beside() -> CudaQueue:  # high priority: peers wait for exchanges, which occupy few multiprocessors
        return CudaQueue(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]

    return Device(device, _is_cuda, queue, beside, connect_nccl if transport != "gloo" else None)


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


class DeviceTimes:
    """Measures a GPU's time per phase: points in the queue of the thread that creates it, and the time between them.

    A host's clock would measure only the enqueueing, and one wait at the end of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._noted: deque[tuple[str, torch.cuda.Event]] = deque()

    def note(self, phase: str) -> None:
        """Attribute the device work since the last call to a phase; returns at once."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._noted.append((phase, event))

    def take(self, phases: Collection[str]) -> dict[str, float]:
        """Return the seconds per phase since the last call, as far as the device has come; does not wait.

        A step whose lanes have no samples reads nothing from the device, which may still run the last update.
        """
        spent = dict.fromkeys(phases, 0.0)
        while len(self._noted) > 1 and self._noted[1][1].query():  # type: ignore[no-untyped-call]
            _, before = self._noted.popleft()
            phase, now = self._noted[0]
            if phase in spent:
                spent[phase] += 1e-3 * before.elapsed_time(now)
        return spent


def device_times_of(device: torch.device) -> DeviceTimes | None:
    """Return the timer of a device; None for a CPU, whose calls are synchronous."""
    return DeviceTimes(device) if device.type == "cuda" else None


T = TypeVar("T")
ABORT_S = 10.0
"""Time limit in seconds for an abort and for the device to become idle after it."""
_SUCCESS, _FAILURES = 0, {1: "it took too long", 2: "a peer or the connection to it is gone"}
"""torch's values of WorkResult."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class DeviceGroup:
    """The ranks' devices, connected by one communicator; `guard` is their group's.

    All sends and receives are part of one operation of the whole communicator. Otherwise torch would make a
    communicator per pair of ranks at the first send, and aborts of several can wait for one another.
    """

    def __init__(self, device: Device, store: Store, rank: int, size: int, timeout: timedelta, guard: Guard) -> None:
        assert device.connect is not None, "a device without a transport of its own has no group"
        self._device, self._guard, self._connect = device, guard, device.connect
        self._timeout_s = timeout.total_seconds()
        self._queues: dict[int, Queue] = {}
        """By thread, the queue of its last operation."""
        self._waits: dict[int, Queue] = {}
        """By thread, the queue that waits for its operations, and has no other work."""
        self._communicator = guard.guard(lambda: self._connect(store, rank, size, timeout))

    def beside(self, guard: Guard) -> DeviceGroup:
        """Return the same group for another thread with its own guard, which must take turns with this one."""
        made = copy.copy(self)
        made._guard = guard
        return made

    def connect(self) -> None:
        """Make all connections now: otherwise the first operation would wait for every peer."""
        device = self._device.torch_device
        self._guard.guard(lambda: self._communicator.eager_connect_single_device(device))
        self.finish([self.begin(lambda communicator: communicator.allreduce([torch.zeros(1, device=device)]))])

    def begin(self, operation: Callable[[Communicator], Work]) -> OnDevice:
        """Enqueue an operation, in the calling thread's queue."""
        queue = self._queues[threading.get_ident()] = self._device.queue()

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
        """Wait until the device has finished the operations, but not work enqueued after they were."""
        thread = threading.get_ident()
        if thread not in self._waits:
            self._waits[thread] = self._device.beside()
        waits = self._waits[thread]
        with waits.entered():
            for operation in operations:
                operation.wait()
        is_done, works = waits.mark(), [operation.work for operation in operations]
        try:
            self._guard.polling(lambda is_broken: _await(is_done, works, is_broken, self._timeout_s))
        finally:  # after a failure, memory that the operations use is given out again only once they have been aborted
            self._device.queue().follow(is_done)

    def begin_abort(self) -> Call[None]:
        """Begin to abort this group's work on the device."""
        return begin("abort", self._communicator.abort)

    def is_free(self) -> Mark:
        """Return a function that says if the device has finished, or ended, all work enqueued so far."""
        queues = [self._device.queue(), *self._queues.values(), *self._waits.values()]
        marks = [queue.mark() for queue in queues]
        return lambda: all(mark() for mark in marks)


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


def _await(is_done: Mark, works: Sequence[Any], is_broken: Callable[[], bool], timeout_s: float) -> None:
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
