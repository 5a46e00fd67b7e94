"""What ranks send one another: on a group's own thread, or aside, on another thread that makes exchanges beside it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.errors import PeerLostError

OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Of this rank's device: torch makes them RuntimeErrors, but no peer is lost, and no other world would mend them."""
_ASIDE = 1


class Work(Protocol):
    """An operation that was begun; only `PointToPoint.wait` waits for it."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """What is used of a backend of torch.distributed, whose stubs do not say that it has it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...
    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> Work: ...
    def allreduce(self, tensors: list[Tensor]) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Work: ...


@dataclass(slots=True)
class Operation:
    """What was sent, received or shared, and between which unix nanoseconds; a device does not say when it had done it.

    From where it was begun to where somebody had waited for it, so a peer that came late is in it.
    """

    kind: str
    num_bytes: int
    began_ns: int
    ended_ns: int | None = None


@dataclass(slots=True)
class Traffic:
    """The operations of a group and of those beside it, while somebody listens; no more than `most` of them."""

    most: int = 100_000
    operations: list[Operation] = field(default_factory=list)
    num_left_out: int = 0

    def note(self, kind: str, num_bytes: int) -> Operation:
        """Note that an operation begins."""
        operation = Operation(kind, num_bytes, time.time_ns())
        if len(self.operations) < self.most:
            self.operations.append(operation)
        else:
            self.num_left_out += 1
        return operation


class _Timed:
    """A work whose end is noted when somebody has waited for it."""

    def __init__(self, work: Work, operation: Operation) -> None:
        self._work, self._operation = work, operation

    def wait(self) -> object:
        found = self._work.wait()
        self._operation.ended_ns = time.time_ns()
        return found


class PointToPoint(ABC):
    """`size` ranks, of which this process is `rank`.

    `num_bytes` counts what this rank has given to exchanges, `waited_s` the seconds that its own thread has waited for
    peers, and `beside_s` those in which exchanges were under way while it computed.
    """

    rank: int
    size: int
    num_bytes = 0
    waited_s = 0.0
    beside_s = 0.0
    traffic: Traffic | None = None
    """Where operations are noted, if anybody listens."""
    _tag = 0

    def send(self, rank: int, tensor: Tensor) -> Work:
        """Begin to send a contiguous tensor to a rank; it must not change until the work was waited for."""
        return self.begin(lambda group: group.send([tensor], rank, self._tag), tensor, "send")

    def receive(self, rank: int, tensor: Tensor) -> Work:
        """Begin to receive into a contiguous tensor; tensors from one rank arrive in the order of its sends.

        Post receives early: a peer's send does not start before it knows where to.
        """
        return self.begin(lambda group: group.recv([tensor], rank, self._tag), tensor, "receive")

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send to and receive from several ranks, all at once; pairs are (rank, contiguous tensor)."""
        arriving, leaving = self.begin_exchange(sends, receives)
        self.wait(arriving + leaving)

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[Work], list[Work]]:
        """Begin an exchange; return what to wait for before what comes is read, and before what is sent may change.

        What comes has a work for each receive, in their order; a device's exchange is one work there, sends and all.
        """
        arriving = [self.receive(rank, part) for rank, part in receives]
        return arriving, [self.send(rank, part) for rank, part in sends]

    def begin(self, operation: Callable[[Backend], Work], tensor: Tensor, kind: str) -> Work:
        """Begin an operation of a kind on a tensor; raises PeerLostError if it cannot begin."""
        self.num_bytes += tensor.nbytes
        noted = self.traffic.note(kind, tensor.nbytes) if self.traffic is not None else None
        try:
            work = operation(self.backend(tensor))
            return work if noted is None else _Timed(work, noted)
        except OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    @abstractmethod
    def wait(self, works: Iterable[Work]) -> None:
        """Return when all works are done; raises PeerLostError."""

    @abstractmethod
    def backend(self, tensor: Tensor) -> Backend:
        """Return the backend for a tensor's device."""

    def is_on_device(self, tensor: Tensor) -> bool:
        """Say whether a device exchanges the tensor: operation after operation, in the order in which it is asked."""
        return False

    def lost(self, why: str) -> PeerLostError:
        """Return the error that a failed operation is."""
        return PeerLostError(f"rank {self.rank} of {self.size}: a collective failed: {why.splitlines()[0]}")


class Aside(PointToPoint):
    """A group's sends and receives for one other thread, which its own thread may give up (`Group.join`).

    They have a tag of their own, so they do not meet the group's. Collectives would: ranks count these.
    """

    _tag = _ASIDE

    def __init__(self, group: PointToPoint) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    @property
    def traffic(self) -> Traffic | None:  # type: ignore[override]
        """The group's: who listens to it hears this, too."""
        return self._group.traffic

    def wait(self, works: Iterable[Work]) -> None:
        try:
            for work in works:
                work.wait()
        except OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    def backend(self, tensor: Tensor) -> Backend:
        return self._group.backend(tensor)
