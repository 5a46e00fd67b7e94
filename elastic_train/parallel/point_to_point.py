"""Sends and receives between ranks: on a group's own thread, or on another thread that overlaps with it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.errors import PeerLostError

T = TypeVar("T")
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""This rank's device errors: torch makes them RuntimeErrors, but no peer is lost, and a new world would not help."""
_ASIDE = 1


class Work(Protocol):
    """A started operation; only `PointToPoint.wait` waits for it."""

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class OnDevice:
    """An operation enqueued on a device."""

    work: Any

    def wait(self) -> object:
        """Make later work on the device wait for this operation; returns at once."""
        return self.work.wait()


class Guard(Protocol):
    """A group waits through it: a wait ends when the world is broken, and every failure is a PeerLostError."""

    def guard(self, call: Callable[[], T]) -> T:
        """Make a call that may not return, on another thread."""

    def polling(self, wait: Callable[[Callable[[], bool]], T]) -> T:
        """Call a function that returns by itself, given a function that says if the world is broken."""


class Backend(Protocol):
    """The operations used of a torch.distributed backend, which torch's stubs lack."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> Work: ...
    def allreduce(self, tensors: list[Tensor]) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Work: ...
    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> Work: ...


class DeviceExchanges(Protocol):
    """The operations of ranks whose devices are connected (`devices.device.DeviceGroup`)."""

    def beside(self, guard: Guard) -> DeviceExchanges: ...
    def begin(self, operation: Callable[[Any], Work]) -> OnDevice: ...
    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> OnDevice: ...
    def finish(self, operations: Sequence[OnDevice]) -> None: ...


@dataclass(slots=True)
class Operation:
    """An operation, its size, and its start and end in unix nanoseconds.

    It ends when a wait for it returns, so waiting for a late peer is included. On a device, the end is unknown.
    """

    kind: str
    num_bytes: int
    began_ns: int
    ended_ns: int | None = None


@dataclass(slots=True)
class Traffic:
    """The recorded operations of a group, at most `most`."""

    most: int = 100_000
    operations: list[Operation] = field(default_factory=list)
    num_left_out: int = 0

    def note(self, kind: str, num_bytes: int) -> Operation:
        """Record the start of an operation."""
        operation = Operation(kind, num_bytes, time.time_ns())
        if len(self.operations) < self.most:
            self.operations.append(operation)
        else:
            self.num_left_out += 1
        return operation


class _Timed:
    """A work that records its end when waited for."""

    def __init__(self, work: Work, operation: Operation) -> None:
        self._work, self._operation = work, operation

    def wait(self) -> object:
        found = self._work.wait()
        self._operation.ended_ns = time.time_ns()
        return found


class PointToPoint(ABC):
    """`size` ranks; this process is `rank`.

    `num_bytes` counts the bytes that this rank gave to exchanges, `waited_s` the seconds that its own thread waited for
    peers, and `beside_s` the seconds in which exchanges overlapped with computation.
    """

    rank: int
    size: int
    num_bytes = 0
    waited_s = 0.0
    beside_s = 0.0
    traffic: Traffic | None = None
    """Recorder of operations, if any."""
    is_abandoned = False
    _tag = 0
    _device: DeviceExchanges | None = None
    begun: dict[int, Work]
    """Works that nobody has waited for to their end, by identity.

    gloo never reads past a message whose receive was dropped: it would not even see that the peer has ended, and other
    waits for that peer would never end. So an exchange that failed keeps the rest of its works until the group is gone.
    """

    def send(self, rank: int, tensor: Tensor) -> Work:
        """Begin to send a contiguous tensor to a rank; it must not change until the work was waited for."""
        if self.is_on_device(tensor):
            return self.begin_exchange([(rank, tensor)], [])[0][0]
        return self.begin(lambda group: group.send([tensor], rank, self._tag), tensor, "send")

    def receive(self, rank: int, tensor: Tensor) -> Work:
        """Begin to receive into a contiguous tensor; tensors from one rank arrive in the order of its sends.

        Post receives early: a peer's send does not start before its receive is posted.
        """
        if self.is_on_device(tensor):
            return self.begin_exchange([], [(rank, tensor)])[0][0]
        return self.begin(lambda group: group.recv([tensor], rank, self._tag), tensor, "receive")

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send to and receive from several ranks at once; pairs are (rank, contiguous tensor)."""
        arriving, leaving = self.begin_exchange(sends, receives)
        self.wait(arriving + leaving)

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[Work], list[Work]]:
        """Begin an exchange.

        Return the works to wait for before reading received tensors, and before changing sent ones. Receives have one
        work each, in order; a device's exchange has a single work, which includes the sends.
        """
        to, source = [[one for one in pairs if self.is_on_device(one[1])] for pairs in (sends, receives)]
        arriving = [self.receive(rank, part) for rank, part in receives if not self.is_on_device(part)]
        leaving = [self.send(rank, part) for rank, part in sends if not self.is_on_device(part)]
        if to or source:
            self._note("exchange", sum(tensor.nbytes for _, tensor in (*to, *source)))
            arriving.append(self._known_device.begin_exchange(to, source, self._tag))
        return arriving, leaving

    def begin(self, operation: Callable[[Backend], Work], tensor: Tensor, kind: str) -> Work:
        """Begin an operation of a kind on a tensor; raises PeerLostError if it cannot begin."""
        noted = self._note(kind, tensor.nbytes)
        if self.is_on_device(tensor):
            return self._known_device.begin(operation)
        try:
            work = operation(self.backend(tensor))
            work = work if noted is None else _Timed(work, noted)
            self.begun[id(work)] = work
            return work
        except OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    def _note(self, kind: str, num_bytes: int) -> Operation | None:
        """Count an operation's bytes, and record its start if there is a recorder."""
        self.num_bytes += num_bytes
        return self.traffic.note(kind, num_bytes) if self.traffic is not None else None

    @property
    def _known_device(self) -> DeviceExchanges:
        device = self._device
        if device is None:
            raise self.lost("the group was abandoned")
        return device

    def _finish_on_device(self, works: Iterable[Work]) -> list[Work]:
        """Wait for the works on a device; return the others."""
        pending, on_device = list[Work](), list[OnDevice]()
        for work in works:
            on_device.append(work) if isinstance(work, OnDevice) else pending.append(work)
        if on_device:
            self._known_device.finish(on_device)
        return pending

    @abstractmethod
    def wait(self, works: Iterable[Work]) -> None:
        """Wait until all works are done; raises PeerLostError."""

    @abstractmethod
    def backend(self, tensor: Tensor) -> Backend:
        """Return the backend for a tensor's device."""

    def finish(self, work: Work) -> None:
        """Wait for one work in host memory; raises RuntimeError if it fails."""
        work.wait()
        self.begun.pop(id(work), None)

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return True if a device exchanges the tensor; it runs operations in the order of the calls."""
        return False

    def lost(self, why: str) -> PeerLostError:
        """Return the PeerLostError for a failed operation."""
        return PeerLostError(f"rank {self.rank} of {self.size}: a collective failed: {why.splitlines()[0]}")


class Aside(PointToPoint):
    """A group's sends and receives for one other thread, which its own thread may give up on (`Group.join`).

    They use a separate tag, so they do not mix with the group's. Collectives would, as these are matched by count, and
    so would all operations of devices: the group's own thread begins none of those before it has joined the other.
    """

    _tag = _ASIDE

    def __init__(self, group: PointToPoint) -> None:
        self.rank, self.size, self._group, self.begun = group.rank, group.size, group, group.begun

    @property
    def _device(self) -> DeviceExchanges | None:  # type: ignore[override]
        """The group's devices, for this thread; not kept, since they refer to this object."""
        device = self._group._device
        return None if device is None else device.beside(self)

    @property
    def traffic(self) -> Traffic | None:  # type: ignore[override]
        """The group's recorder."""
        return self._group.traffic

    def wait(self, works: Iterable[Work]) -> None:
        pending = self._finish_on_device(works)

        def finish() -> None:
            for work in pending:
                self.finish(work)

        self.guard(finish)

    def guard(self, call: Callable[[], T]) -> T:
        """Make a call here: this thread may be stuck in it."""
        return self.polling(lambda is_broken: call())

    def polling(self, wait: Callable[[Callable[[], bool]], T]) -> T:
        """Wait until the peers have come or are gone: the group's own thread looks whether the world is broken.

        What an abandoned group's device has ended looks finished, until torch's own thread has seen the abort.
        """
        try:
            found = wait(lambda: False)
            if self._group.is_abandoned:
                raise self.lost("the group was abandoned")
            return found
        except OWN_ERRORS:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.lost(str(error)) from error

    def is_on_device(self, tensor: Tensor) -> bool:
        return self._group.is_on_device(tensor)

    def backend(self, tensor: Tensor) -> Backend:
        return self._group.backend(tensor)


class Returning:
    """An operation on host copies; `wait` copies the results to the device."""

    def __init__(self, work: Work, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class ThroughHost:
    """A backend for device tensors, on top of one for host memory: for ranks that share a device, or have no NCCL.

    gloo does this for some operations; here it is done for all that ranks use.
    """

    def __init__(self, host: Backend) -> None:
        self._host = host

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Returning:
        return Returning(self._host.send([tensor.cpu() for tensor in tensors], rank, tag), ())

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Returning:
        copies = [tensor.new_empty(tensor.shape, device="cpu") for tensor in tensors]
        return Returning(self._host.recv(copies, rank, tag), list(zip(tensors, copies, strict=True)))

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> Returning:
        copies = [[part.new_empty(part.shape, device="cpu") for part in parts] for parts in gathered]
        work = self._host.allgather(copies, [tensor.cpu() for tensor in tensors])
        return Returning(work, [pair for pairs in map(zip, gathered, copies) for pair in pairs])

    def allreduce(self, tensors: list[Tensor]) -> Returning:
        copies = [tensor.cpu() for tensor in tensors]
        return Returning(self._host.allreduce(copies), list(zip(tensors, copies, strict=True)))

    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> Returning:
        copies = [[part.new_empty(part.shape, device="cpu") for part in parts] for parts in gathered]
        work = self._host.gather(copies, [tensor.cpu() for tensor in tensors], options)
        return Returning(work, [pair for pairs in map(zip, gathered, copies) for pair in pairs])

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Returning:
        copies = [tensor.cpu() for tensor in tensors]
        return Returning(self._host.broadcast(copies, options), list(zip(tensors, copies, strict=True)))
