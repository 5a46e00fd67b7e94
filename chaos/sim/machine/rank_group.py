"""Groups of ranks over the simulated network.

A collective is whole when every rank has come; its result then travels to each rank on its own, so a rank that dies, or
a link that is cut, at that moment leaves some ranks with the result and others without: the seam at which survivors are
at step s or at s+1.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from chaos.sim.machine.kernel import Process, Task
from elastic_train.parallel.group import Group

if TYPE_CHECKING:
    from chaos.sim.machine.network import MeetingStore, Net

T = TypeVar("T")

RESET_S = 0.05


class Hub:
    """What the ranks of one world send one another."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.members: dict[int, Process] = {}
        self.collectives: dict[int, Collective] = {}
        self.letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.lost: set[int] = set()
        """Ranks that are known to be gone."""
        self.waiting: dict[int, Task] = {}
        self.has_dead = False

    def join(self, rank: int, process: Process) -> None:
        self.members[rank] = process
        process.at_death["world"] = lambda: self.leave(rank)

    def leave(self, rank: int) -> None:
        """Reset the connections of a rank whose process has ended; those of a machine that is gone stay silent.

        What a process that ends by itself has sent arrives before the end of its connections.
        """
        if self.members[rank].code is not None:
            self.flush()
        else:
            self.has_dead = True
        if self.members[rank].node not in self.net.silent:
            self.net.kernel.after(RESET_S * self.net.draws.random(), lambda: self._reset(rank))

    def _reset(self, rank: int) -> None:
        self.lost.add(rank)
        self.wake()

    def flush(self) -> None:
        """Let all that every rank has given to arrive wherever no link is cut."""
        for collective in self.collectives.values():
            if len(collective.given) == collective.size:
                collective.has_result.update(rank for rank in collective.given if self.is_whole_for(rank))
        self.wake()

    def wake(self, rank: int | None = None) -> None:
        """Let a rank look again whether what it waits for has come; without one, all of them."""
        for other in list(self.waiting) if rank is None else [rank]:
            if other in self.waiting:
                self.net.kernel.wake(self.waiting[other])

    def is_whole_for(self, rank: int) -> bool:
        """Say whether every link between a rank and its peers is open."""
        if not self.net.cuts:
            return True
        mine = self.members[rank].node
        return all(self.net.is_connected(mine, peer.node) for peer in self.members.values())

    def collective(self, number: int, kind: str, size: int) -> Collective:
        if number not in self.collectives:
            self.collectives[number] = Collective(self, kind, size)
        found = self.collectives[number]
        assert found.kind == kind, f"one rank is in {kind}, another in {found.kind}: the ranks' ways have parted"
        return found


class Collective:
    """One collective call of all ranks: what each gave, and who has the result."""

    def __init__(self, hub: Hub, kind: str, size: int) -> None:
        self.hub, self.kind, self.size = hub, kind, size
        self.given: dict[int, object] = {}
        self.has_result: set[int] = set()
        self.num_left = size
        self._source = int(kind.partition(":")[2] or -1)
        self._made: list[object] = []

    def give(self, rank: int, value: object) -> None:
        self.given[rank] = value
        if self._source >= 0:
            if rank == self._source:
                self.has_result.add(rank)
                for other in self.given:
                    self._deliver(other)
            elif self._source in self.given:
                self._deliver(rank)
        elif len(self.given) == self.size:
            for other in self.given:
                self._deliver(other)

    def made(self, make: Callable[[list[object]], T]) -> T:
        """Return what is made of all ranks' values, by rank: it is the same for all, so the first one makes it."""
        if not self._made:
            self._made.append(make([self.given[rank] for rank in range(self.size)]))
        return cast(T, self._made[0])

    def _deliver(self, rank: int) -> None:
        if rank in self.has_result:
            return
        net = self.hub.net
        net.kernel.after(net.delay(), lambda: self._arrive(rank))

    def _arrive(self, rank: int) -> None:
        if not self.hub.is_whole_for(rank):
            self.hub.net.kernel.after(0.2, lambda: self._arrive(rank))  # what is cut is sent again
            return
        if self.hub.has_dead and self.hub.net.draws.random() < 0.5:
            return  # it was on its way when its sender died
        self.has_result.add(rank)
        self.hub.wake(rank)


class SimGroup(Group):
    """The ranks of a world, over the simulated network; waits end as those of the real group do."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: MeetingStore | None,
        timeout_s: float,
        device: torch.device | None = None,
        *,
        is_broken: Callable[[float], bool] | None = None,
        resting: Callable[[], AbstractContextManager[None]] = nullcontext,
        look_s: float = 1.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._is_broken, self._timeout_s, self._look_s = is_broken, timeout_s, look_s
        self._num_calls = 0
        if size == 1:
            return
        assert store is not None, "a world of several ranks meets at a store"
        self._hub = store.hub
        self._kernel = store.net.kernel
        self._hub.join(rank, self._kernel.process)
        self._collect("form", None)

    def fold(self, value: object, make: Callable[[list[object]], T]) -> T:
        """Return what `make` makes of every rank's value, by rank; all ranks get one object, and must not change it."""
        return make([value]) if self.size == 1 else self._collect("fold", value).made(make)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        return self._collect("gather", tensor.clone()).made(_stack)  # one for all: whoever gathers only reads

    def broadcast_object(self, value: object, source: int = 0) -> object:
        if self.size == 1:
            return value
        return self._collect(f"broadcast:{source}", value).given[source]

    def barrier(self) -> None:
        if self.size > 1:
            self._collect("barrier", None)

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

    def abandon(self) -> None:
        """Leave: whoever still waits for this rank learns of it."""
        if self.size > 1 and self.rank not in self._hub.lost:
            self._kernel.after(RESET_S, lambda: self._hub._reset(self.rank))

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
        """Wait for a peer, or for all, until one is lost, the world is broken, or the time is over.

        It looks again when something comes, a peer is lost, or its process hears of a change of membership; and else
        every `look_s`, as reach is asked for by how long has been waited.
        """
        kernel, hub = self._kernel, self._hub
        started, task, process = kernel.now, kernel.current, kernel.process
        hub.waiting[self.rank] = process.listening = task
        try:
            while not has_come():
                if hub.lost - {self.rank} if peer is None else peer in hub.lost:
                    raise self._lost("connection reset by peer")
                if self._is_broken is not None and self._is_broken(kernel.now - started):
                    raise self._lost("the world has changed")
                if kernel.now - started >= self._timeout_s:
                    raise self._lost("timed out")
                kernel.park(min(self._look_s, self._timeout_s))
        finally:
            process.listening = None
            hub.waiting.pop(self.rank, None)


def _stack(rows: list[object]) -> Tensor:
    return torch.stack([row for row in rows if isinstance(row, Tensor)])
