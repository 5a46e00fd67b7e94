"""The product's group over the simulated network; see `chaos.sim.machine.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from chaos.sim.machine.collectives import RESENT_S, RESET_S, Collective, Hub, Letter
from chaos.sim.machine.device import SimDevice, device_of
from chaos.sim.machine.kernel import Process
from chaos.sim.machine.meeting import MeetingStore
from chaos.sim.machine.network import Net
from elastic_train.errors import PeerLostError
from elastic_train.parallel.devices.device import DeviceGroup
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import OnDevice, Work

T = TypeVar("T")
BLOCKED_S = 10.0
"""Seconds that a rank tries to connect where connections are blocked."""


@dataclass(slots=True)
class Receipt:
    """A receive of letter `number` from `source`; without one, a send that is already copied."""

    source: int | None
    tensor: Tensor
    number: int = 0


@dataclass(frozen=True, slots=True)
class PartStore:
    """Meeting point of a subgroup: its ranks are connected already."""

    net: Net
    hub: Hub


class SimGroup(Group):
    """The ranks of a world over the simulated network; waits end as in the real group."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: MeetingStore | PartStore | None,
        timeout_s: float,
        device: torch.device | None = None,
        *,
        address: str | None = None,
        is_broken: Callable[[float], bool] | None = None,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
        look_s: float = 1.0,
        has_device: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self._is_broken, self._timeout_s, self._look_s = is_broken, timeout_s, look_s
        self._resting, self._num_calls = resting, 0
        self._bystander, self._device, self._parts = None, None, []
        self.begun = {}
        if size == 1:
            return
        assert store is not None, "a world of several ranks meets at a store"
        self._hub = store.hub
        self._kernel = store.net.kernel
        if self._kernel.now < store.net.blocked_until:
            self._kernel.sleep(BLOCKED_S)
            raise self.lost("no connection to any peer")
        self._hub.join(rank, self._kernel.process)
        self._collect("form", None)
        if has_device:
            seen = device_of(_device_of(self._kernel.process), self._hub, self._post)
            self._holds, timeout = seen.holds, timedelta(seconds=timeout_s)
            self._device = DeviceGroup(seen, store, rank, size, timeout, self)  # type: ignore[arg-type]
            try:
                self._device.connect()
            except PeerLostError:
                self.abandon()
                raise

    def part(self, name: str, ranks: Sequence[int]) -> SimGroup:
        place, size = ranks.index(self.rank), len(ranks)
        store = PartStore(self._hub.net, self._hub.part(name))
        made = SimGroup(
            place, size, store, self._timeout_s, is_broken=self._is_broken, resting=self._resting, look_s=self._look_s
        )
        self._parts.append(made)
        return made

    def fold(self, value: object, make: Callable[[list[object]], T]) -> T:
        """Return `make` of every rank's value, by rank; all ranks share the result and must not change it."""
        return make([value]) if self.size == 1 else self._collect("fold", value).made(make)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        return self._collect("gather", tensor.clone()).made(_stack)  # shared by all, and read only

    def broadcast_object(self, value: object, source: int = 0) -> object:
        if self.size == 1:
            return value
        return self._collect(f"broadcast:{source}", value).given[source]

    def barrier(self) -> None:
        if self.size > 1:
            self._collect("barrier", None)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.is_on_device(tensor):
            super().all_reduce(tensor)
        elif self.size > 1:
            tensor.copy_(self._collect("reduce", tensor.clone()).made(_sum))

    def send(self, rank: int, tensor: Tensor) -> Receipt:  # type: ignore[override]  # torch makes other works
        """Send without waiting: it arrives if no link is cut, even if this rank dies."""
        self._post(rank, [tensor])
        return Receipt(None, tensor)

    def _post(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to one rank; they arrive together, as on one connection."""
        hub, net = self._hub, self._hub.net
        mine, other = self._kernel.process.node, hub.members[rank].node
        letters = [Letter(tensor.clone()) for tensor in tensors]
        for letter in letters:
            hub.posted[self.rank, rank].send(letter)

        def arrive() -> None:
            if net.is_connected(mine, other):
                for letter in letters:
                    letter.is_here = True
                hub.wake(rank)
            else:
                net.kernel.after(RESENT_S, arrive)

        net.kernel.after(net.delay(), arrive)

    def receive(self, rank: int, tensor: Tensor) -> Receipt:  # type: ignore[override]
        return Receipt(rank, tensor, self._hub.posted[rank, self.rank].ask())

    def begin_exchange(  # type: ignore[override]
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[list[Work], list[Work]] | tuple[list[Receipt], list[Receipt]]:
        if self._device is not None and any(self.is_on_device(part) for _, part in (*sends, *receives)):
            return super().begin_exchange(sends, receives)
        receipts = [self.receive(rank, part) for rank, part in receives]
        by_rank: dict[int, list[Tensor]] = {}
        for rank, part in sends:
            by_rank.setdefault(rank, []).append(part)
        for rank, parts in by_rank.items():
            self._post(rank, parts)
        return receipts, []

    def wait(self, works: Iterable[Receipt | OnDevice]) -> None:  # type: ignore[override]
        for work in works:
            if isinstance(work, OnDevice):
                super().wait([work])
                continue
            if work.source is None:
                continue
            post, number = self._hub.posted[work.source, self.rank], work.number
            if not post.is_here(number):
                self._wait(lambda post=post, number=number: post.is_here(number), work.source)  # type: ignore[misc]
            work.tensor.copy_(post.letters.pop(number).tensor)

    def transfer(self, tensor: Tensor, *, to: int | None = None, source: int | None = None) -> None:
        hub, net = self._hub, self._hub.net
        if to is not None:
            letters, mine, other = hub.letters[self.rank, to], self._kernel.process.node, hub.members[to].node
            self._wait(lambda: net.is_connected(mine, other), to)
            letters.append(tensor.clone())
            self._kernel.sleep(net.delay())
            hub.wake(to)
            return
        assert source is not None, "a transfer has one other end"
        letters = hub.letters[source, self.rank]
        self._wait(lambda: len(letters) > 0, source)
        tensor.copy_(letters.popleft())

    def _let_go(self) -> list[DeviceGroup]:
        """Leave: ranks that wait for this one get a connection reset."""
        if self.size > 1 and self.rank not in self._hub.lost:
            self._kernel.after(RESET_S, lambda: self._hub._reset(self.rank))
        found = [one for part in self._parts for one in part._let_go()]
        device, self._device = self._device, None
        return found if device is None else [*found, device]

    def _collect(self, kind: str, value: object) -> Collective:
        self._num_calls += 1
        collective = self._hub.collective(self._num_calls, kind, self.size)
        collective.give(self.rank, value)
        self._wait(lambda: self.rank in collective.has_result, None)
        collective.num_left -= 1
        if collective.num_left == 0:
            del self._hub.collectives[self._num_calls]
        return collective

    def _wait(self, has_come: Callable[[], bool], peer: int | None) -> None:
        """Wait for a peer, or all, until one is lost, the world is broken, or time is over.

        It checks again on arrivals, lost peers and membership changes, and otherwise every `look_s`, because
        reachability checks depend on how long it has waited.
        """
        if not has_come():
            with self._resting():
                self._wait_at_rest(has_come, peer)

    def _wait_at_rest(self, has_come: Callable[[], bool], peer: int | None) -> None:
        kernel, hub = self._kernel, self._hub
        started, task, process = kernel.now, kernel.current, kernel.process
        hub.waiting[self.rank] = process.listening = task
        try:
            while not has_come():
                if hub.lost - {self.rank} if peer is None else peer in hub.lost:
                    raise self.lost("connection reset by peer")
                if self._is_broken is not None and self._is_broken(kernel.now - started):
                    raise self.lost("the world has changed")
                if kernel.now - started >= self._timeout_s:
                    raise self.lost("timed out")
                kernel.park(min(self._look_s, self._timeout_s))
        finally:
            process.listening = None
            hub.waiting.pop(self.rank, None)


def _device_of(process: Process) -> SimDevice:
    if not isinstance(process.device, SimDevice):
        process.device = SimDevice()
    return process.device


def _sum(parts: list[object]) -> Tensor:
    return torch.stack([part for part in parts if isinstance(part, Tensor)]).sum(0)


def _stack(rows: list[object]) -> Tensor:
    return torch.stack([row for row in rows if isinstance(row, Tensor)])
