"""A simulated device, and a communicator between devices: operations run in the order of the device's queue.

Outputs hold NaN until their operation is done. An operation with a dead or silent peer does not end by itself: only an
abort ends it, as NCCL's, and leaves NaN. A peer's connection reset is visible, but has no effect of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from chaos.sim.machine.collectives import Hub
from elastic_train.parallel.devices.device import Device, HostQueue, Mark

PostTo = Callable[[int, Sequence[Tensor]], None]
"""Sends tensors to a rank; they arrive together."""


COMM_ERROR = 2
"""torch's code (`WorkResult`) for a lost peer or connection."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of an operation: None while unknown, 0 without failure, else the failure."""

    result: int | None

    def done(self) -> bool:
        return self.result is not None

    def value(self) -> int:
        assert self.result is not None, "nothing is known yet"
        return self.result


@dataclass(slots=True, eq=False)
class Operation:
    """One operation; `take` returns the values of its outputs once `is_here` is true."""

    is_here: Callable[[], bool]
    take: Callable[[], Sequence[Tensor]]
    outputs: Sequence[Tensor]
    has_lost: Callable[[], bool]
    is_done: bool = False
    is_aborted: bool = False

    def end(self) -> bool:
        """Fill the outputs if the operation can complete; return True if it has ended."""
        if not self.is_aborted and self.is_here():
            for output, value in zip(self.outputs, self.take(), strict=True):
                output.copy_(value)
            self.is_done = True
        return self.is_done or self.is_aborted

    def wait(self) -> None:
        """The device has one queue, which is in order."""

    def is_completed(self) -> bool:
        return self.is_done or self.has_lost()

    def get_future_result(self) -> Found:
        """Return what torch's own thread has found, without delay here."""
        return Found(COMM_ERROR if not self.is_done and self.has_lost() else 0 if self.is_done else None)


@dataclass(slots=True)
class SimDevice(HostQueue):
    """One process's device, for all of its worlds."""

    queue: deque[Operation] = field(default_factory=deque)
    num_asked: int = 0

    def ask(self, operation: Operation) -> Operation:
        for output in operation.outputs:
            output.fill_(torch.nan)
        self.queue.append(operation)
        self.num_asked += 1
        return operation

    def mark(self) -> Mark:
        asked = self.num_asked
        return lambda: self._num_ended() >= asked

    def _num_ended(self) -> int:
        while self.queue and self.queue[0].end():
            self.queue.popleft()
        return self.num_asked - len(self.queue)


class SimCommunicator:
    """Stand-in for NCCL's backend in a product group."""

    def __init__(self, device: SimDevice, hub: Hub, rank: int, size: int, post: PostTo) -> None:
        self._device, self._hub, self._rank, self._size, self._post = device, hub, rank, size, post
        self._num_calls = 0
        self._asked: list[Operation] = []
        self._parts: tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the first operation of all ranks connects."""

    def allreduce(self, tensors: list[Tensor]) -> Operation:
        [tensor] = tensors
        self._num_calls += 1
        collective = self._hub.collective(-self._num_calls, "device", self._size)
        collective.give(self._rank, tensor.clone())

        def take() -> list[Tensor]:
            return [collective.made(lambda parts: torch.stack(parts).sum(0))]  # type: ignore[arg-type]

        return self._ask(lambda: self._rank in collective.has_result, take, [tensor], range(self._size))

    def _start_coalescing(self) -> None:
        assert self._parts is None, "an exchange within another"
        self._parts = [], []

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        assert self._parts is not None, "a send alone makes another communicator, with nobody to guard it"
        self._parts[0].append((rank, tensors[0]))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        assert self._parts is not None, "a receive alone makes another communicator, with nobody to guard it"
        self._parts[1].append((rank, tensors[0]))

    def _end_coalescing(self) -> Operation:
        assert self._parts is not None, "an exchange that was not begun"
        (sends, receives), self._parts = self._parts, None
        posts = [self._hub.posted[source, self._rank] for source, _ in receives]
        numbers = [post.ask() for post in posts]
        for rank in dict.fromkeys(rank for rank, _ in sends):
            self._post(rank, [part for other, part in sends if other == rank])
        arriving = list(zip(posts, numbers, strict=True))
        return self._ask(
            lambda: all(post.is_here(number) for post, number in arriving),
            lambda: [post.letters.pop(number).tensor for post, number in arriving],
            [tensor for _, tensor in receives],
            [source for source, _ in receives],
        )

    def abort(self) -> None:
        for operation in self._asked:
            operation.is_aborted = True

    def _ask(
        self,
        is_here: Callable[[], bool],
        take: Callable[[], Sequence[Tensor]],
        outputs: Sequence[Tensor],
        peers: Sequence[int],
    ) -> Operation:
        lost, others = self._hub.lost, set(peers) - {self._rank}
        operation = self._device.ask(Operation(is_here, take, outputs, lambda: not lost.isdisjoint(others)))
        self._asked = [*(old for old in self._asked if not old.is_done), operation]
        return operation


def device_of(device: SimDevice, hub: Hub, post: PostTo) -> Device:
    """Return a process's device as the product's groups see it; only the short lane vectors are on it."""

    def connect(store: object, rank: int, size: int, timeout: timedelta) -> SimCommunicator:
        return SimCommunicator(device, hub, rank, size, post)

    return Device(torch.device("cpu"), _is_vector, lambda: device, lambda: device, connect)  # type: ignore[arg-type]  # made for torch


def _is_vector(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.ndim == 1
