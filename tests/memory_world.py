"""Ranks as threads of one process, one of which runs at a time, with the product's code down to the exchange.

A rank runs until it waits for a peer; then the next rank runs that can. A run is therefore deterministic, takes at most
one core, and starts in a millisecond. Messages are not buffered: as with gloo, a send ends when its receive is posted.
If no rank can run, the test fails at once and names what each rank waits for. A rank can be lost at any exchange; its
peers then see a reset connection.

Every rank has its own torch, numpy and Python random generators.

Ranks may have fake devices. A rank's device runs the operations of all its groups one after another, in the order of
the requests. An operation's output holds NaN until it is done, as in `fake_device`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.utils._python_dispatch import _disable_current_modes as unseen  # network copies are no operations

from elastic_train.parallel.devices.device import HOST, Device, DeviceGroup
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Guard, OnDevice
from rendezvous.waiting import Call
from tests.conftest import PATIENCE_S
from tests.memory_machine import Machine, machine_here, rank_here


def group_of(name: str, rank: int, size: int) -> MemoryGroup:
    """Return the group of the world whose ranks meet under this name."""
    device = DEVICE if size > 1 and machine_here().on_devices else HOST  # one rank needs no machine
    return MemoryGroup(rank, size, name, PATIENCE_S, device)  # type: ignore[arg-type]  # a name is where they meet


@dataclass(slots=True)
class Posted:
    """One end of a message."""

    tensor: Tensor
    is_done: bool = False


@dataclass(slots=True)
class Collective:
    """The contributions of the ranks to a collective operation."""

    kind: str
    given: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None


class Hub:
    """The messages that the ranks of one group have posted."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it there
        self.members: dict[int, int] = {}
        """The machine's rank, by rank of the group."""
        self.gone: set[int] = set()
        self.sends: dict[tuple[int, int, int], deque[Posted]] = {}
        self.receives: dict[tuple[int, int, int], deque[Posted]] = {}
        self.collectives: dict[int, Collective] = {}

    def leave(self, *ranks: int) -> None:
        self.gone.update(ranks)
        if len(self.gone) == self.size:  # nobody reads them any more
            for posted in (self.sends, self.receives, self.collectives):
                posted.clear()

    def leave_as(self, who: int) -> None:
        """Leave the group, given the rank of the machine."""
        self.leave(*(rank for rank, other in self.members.items() if other == who))

    def match(self, source: int, to: int, tag: int) -> None:
        """Copy each posted send to its matching receive, in the order of both."""
        sends, receives = (posted.setdefault((source, to, tag), deque()) for posted in (self.sends, self.receives))
        while sends and receives:
            sent, wanted = sends.popleft(), receives.popleft()
            assert sent.tensor.nbytes == wanted.tensor.nbytes and sent.tensor.dtype == wanted.tensor.dtype, (
                f"{self.name}: rank {source} sends {tuple(sent.tensor.shape)} of {sent.tensor.dtype} to rank {to}, "
                f"which expects {tuple(wanted.tensor.shape)} of {wanted.tensor.dtype}"
            )
            with unseen():
                wanted.tensor.detach().view(-1).copy_(sent.tensor.detach().reshape(-1))
            sent.is_done = wanted.is_done = True


class MemoryWork:
    """A pending operation."""

    def __init__(self, backend: MemoryBackend, why: str, is_done: Callable[[], bool], peers: set[int]) -> None:
        self._backend, self._why, self.is_done, self._peers = backend, why, is_done, peers

    def wait(self) -> None:
        self._backend.machine.wait(self._why, lambda: self.is_done() or bool(self.missed()))
        if not self.is_done():
            raise RuntimeError(f"connection reset by peer {sorted(self.missed())}")

    def missed(self) -> set[int]:
        """Return the ranks that take part in the operation and are gone."""
        return self._peers & self._backend.hub.gone


class MemoryBackend:
    """The part of a torch.distributed backend that a group uses."""

    def __init__(self, machine: Machine, hub: Hub, rank: int) -> None:
        self.machine, self.hub, self.rank = machine, hub, rank
        self._num_collectives = 0

    def count(self) -> None:
        self.machine.count(self.hub.members[self.rank])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> MemoryWork:
        return self._post(self.hub.sends, tensors[0], (self.rank, rank, tag), rank)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> MemoryWork:
        return self._post(self.hub.receives, tensors[0], (rank, self.rank, tag), rank)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> MemoryWork:
        def finish(given: dict[int, Tensor]) -> None:
            for rank, place in enumerate(gathered[0]):
                place.copy_(given[rank])

        return self._collect("all_gather", tensors[0], finish)

    def allreduce(self, tensors: list[Tensor]) -> MemoryWork:
        def finish(given: dict[int, Tensor]) -> None:
            tensors[0].detach().copy_(sum((given[rank] for rank in range(1, self.hub.size)), given[0]))

        return self._collect("all_reduce", tensors[0], finish)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> MemoryWork:
        source = options.rootRank
        return self._collect(
            f"broadcast of {source}", tensors[0], lambda given: tensors[0].detach().copy_(given[source])
        )

    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> MemoryWork:
        def finish(given: dict[int, Tensor]) -> None:
            for rank, place in enumerate(gathered[0] if gathered else []):
                place.copy_(given[rank])

        return self._collect(f"gather at {options.rootRank}", tensors[0], finish)

    def _post(
        self, posted: dict[tuple[int, int, int], deque[Posted]], tensor: Tensor, key: tuple[int, int, int], peer: int
    ) -> MemoryWork:
        self.count()
        source, to, tag = key
        mine = Posted(tensor)
        with self.machine.changed:
            if peer in self.hub.gone:
                raise RuntimeError(f"connection reset by peer [{peer}]")
            posted.setdefault(key, deque()).append(mine)
            self.hub.match(source, to, tag)
            self.machine.changed.notify_all()
        why = f"a message from {source} to {to} of {self.hub.name}"
        return MemoryWork(self, why, lambda: mine.is_done, {peer})

    def _collect(self, kind: str, tensor: Tensor, finish: Callable[[dict[int, Tensor]], Any]) -> MemoryWork:
        self.count()
        number, hub = self._num_collectives, self.hub
        self._num_collectives += 1
        with self.machine.changed:
            one = hub.collectives.setdefault(number, Collective(kind))
            assert one.kind == kind, f"{hub.name}: rank {self.rank} begins {kind} where others begin {one.kind}"
            with unseen():
                one.given[self.rank] = tensor.detach().clone()
            self.machine.changed.notify_all()
        is_finished = False

        def is_done() -> bool:
            nonlocal is_finished
            if not is_finished and len(one.given) == hub.size:
                with unseen():
                    finish(one.given)
                is_finished = True
            return is_finished

        others = set(range(hub.size)) - {self.rank}
        why = f"{kind} {number} of {hub.name}"
        return MemoryWork(self, why, is_done, others - set(one.given) if is_done() else others)


class Asked:
    """A requested operation of a rank's device."""

    def __init__(
        self,
        device: MemoryDevice,
        kind: str,
        start: Callable[[], list[MemoryWork]],
        copies: list[tuple[Tensor, Tensor]],
    ) -> None:
        """`start` posts the operation; `copies` gives its output tensors and their contents."""
        self.device, self._kind, self._start, self._copies = device, kind, start, copies
        self.is_done, self._is_broken = False, False
        self._works: list[MemoryWork] | None = None
        with unseen():
            for place, _ in copies:
                place.detach().fill_(torch.nan)
        device.queue.append(self)

    def wait(self) -> None:
        """Return when the operation is done; RuntimeError if the device is blocked because a peer is gone."""
        queue = self.device.queue
        self.device.backend.machine.wait(
            f"{self._kind} of {self.device.backend.hub.name}", lambda: self._is_done() or queue[0].is_stuck()
        )
        if not self.is_done:
            raise RuntimeError("the device is held up by an operation that misses a peer")

    def is_stuck(self) -> bool:
        """Return True if a peer of the operation is gone; others may have ended after their own part in it."""
        return self._is_broken or any(not work.is_done() and work.missed() for work in self._works or ())

    def _is_done(self) -> bool:
        """Run the operations that the device can run; return True if this one is done."""
        queue = self.device.queue
        while queue and queue[0].ends():
            queue.popleft()
        return self.is_done

    def ends(self) -> bool:
        """Begin the operation, unless begun; return True once it is done."""
        if self._works is None and not self._is_broken:
            try:
                self._works = self._start()
            except RuntimeError:
                self._is_broken = True
        if self._works is None or not all(work.is_done() for work in self._works):
            return False
        with unseen():
            for place, value in self._copies:
                place.detach().copy_(value)
        self.is_done = True
        return True


class _Posting(MemoryBackend):
    """A group's backend for another message kind that does not count: messages are counted where they begin."""

    def count(self) -> None:
        """Do nothing: the message was counted."""


class MemoryDevice:
    """A rank's device in a group, the counterpart of the product's `DeviceGroup`."""

    def __init__(self, group: Guard, backend: MemoryBackend, name: str) -> None:
        self._group = group
        hub = backend.machine.hubs.setdefault(name, Hub(name, backend.hub.size))
        hub.members[backend.rank] = backend.hub.members[backend.rank]
        self.backend = _Posting(backend.machine, hub, backend.rank)
        self.queue = backend.machine.queues[hub.members[backend.rank]]
        self._count = backend.count

    def beside(self, guard: Any) -> MemoryDevice:
        made = copy.copy(self)
        made._group = guard
        return made

    def begin(self, operation: Callable[[Any], Any]) -> OnDevice:
        self._count()
        return OnDevice(operation(self))

    def begin_exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> OnDevice:
        """Begin one operation with all messages; as in NCCL, messages have no tags."""
        self._count()
        with unseen():
            given = [(rank, tensor.detach().clone()) for rank, tensor in sends]
            taken = [(rank, torch.empty_like(place), place) for rank, place in receives]

        def start() -> list[MemoryWork]:
            arriving = [self.backend.recv([memory], rank, 0) for rank, memory, _ in taken]
            return arriving + [self.backend.send([tensor], rank, 0) for rank, tensor in given]

        return OnDevice(Asked(self, "an exchange of devices", start, [(place, memory) for _, memory, place in taken]))

    def allreduce(self, tensors: list[Tensor]) -> Asked:
        with unseen():
            inside = tensors[0].detach().clone()
        return Asked(self, "all_reduce", lambda: [self.backend.allreduce([inside])], [(tensors[0], inside)])

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Asked:
        with unseen():
            inside = tensors[0].detach().clone()
        return Asked(self, "broadcast", lambda: [self.backend.broadcast([inside], options)], [(tensors[0], inside)])

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> Asked:
        with unseen():
            mine, inside = tensors[0].detach().clone(), [torch.empty_like(place) for place in gathered[0]]
        copies = list(zip(gathered[0], inside, strict=True))
        return Asked(self, "all_gather", lambda: [self.backend.allgather([inside], [mine])], copies)

    def finish(self, operations: Sequence[OnDevice]) -> None:
        for operation in operations:
            self._group.polling(lambda _, work=operation.work: work.wait())  # type: ignore[misc]

    def begin_abort(self) -> Call[None]:
        left = [asked for asked in self.queue if asked.device is not self]
        self.queue.clear()
        self.queue.extend(left)
        call = Call[None](lambda: None)
        call.run()
        return call

    def is_free(self) -> Callable[[], bool]:
        return lambda: not self.queue


DEVICE = Device(torch.device("cpu"), torch.is_floating_point, MagicMock, MagicMock, MagicMock())
"""The fake device, as groups see it."""


class MemoryGroup(Group):
    """The product's group on an in-memory machine; `store` is the name under which its ranks meet."""

    is_watched = False
    """True if a wait outside exchanges ends when a peer is gone, as it does with membership."""
    _name = "alone"

    def _connect(self, store: Store, timeout: timedelta, device: Device, address: str | None) -> None:
        machine, name = machine_here(), str(store)
        hub = machine.hubs.setdefault(name, Hub(name, self.size))
        assert hub.size == self.size and self.rank not in hub.members, f"two ranks are {self.rank} of {name}"
        who = rank_here()
        assert who is not None, "a rank forms a group"
        hub.members[self.rank] = who
        self._name, self.store = name, hub.store
        self._memory = MemoryBackend(machine, hub, self.rank)
        self._host = self._memory
        if device.connect is not None:
            self._device = MemoryDevice(self, self._memory, f"devices of {name}")  # type: ignore[assignment]

    def part(self, name: str, ranks: Any) -> MemoryGroup:
        place = ranks.index(self.rank)
        made = MemoryGroup(place, len(ranks), f"{self._name}/{name}", self._timeout_s, self.device)  # type: ignore[arg-type]
        self._parts.append(made)
        return made

    def check(self, waited_s: float) -> None:
        """Let others run: the caller waits outside an exchange; if `is_watched`, fail when a peer is gone."""
        if self.size > 1:
            self._memory.machine.yield_turn()
            if self.is_watched and self._memory.hub.gone:
                raise self.lost("the world has changed")

    def join(self) -> None:
        for call in self._expected:
            self._memory.machine.wait("a call of its own", call.ended.is_set)
        super().join()

    def _let_go(self) -> list[DeviceGroup]:
        if self._host is not None:
            with self._memory.machine.changed:
                self._memory.hub.leave(self.rank)
                if isinstance(self._device, MemoryDevice):
                    self._device.backend.hub.leave(self.rank)
                self._memory.machine.changed.notify_all()
        return super()._let_go()
