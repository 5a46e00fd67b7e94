"""The network between nodes: links that can be cut one way, ports that die with their process, and groups of ranks.

A collective is whole when every rank has come; its result then travels to each rank on its own, so a rank that dies, or
a link that is cut, at that moment leaves some ranks with the result and others without: the seam at which survivors are
at step s or at s+1. A dead process is known to its peers soon, a machine that is gone or frozen is not.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from chaos.sim.kernel import Kernel, Process, Task
from chaos.sim.virtual import host_of
from elastic_train.group import Group
from rendezvous.meeting import CALL_TIMEOUT_S

RESET_S = 0.05
SLOWNESS = 100.0
LOSS, RETRANSMIT_S, MOST_RETRANSMIT_S = 1 / 3, 0.2, 10.0
LOOK_S = (0.1, 0.5)
"""How often a rank that waits looks whether its world is broken; the product does every 0.02 s."""


class Net:
    """Which node reaches which, and who listens where."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float) -> None:
        self.kernel, self.draws, self.delay_s = kernel, draws, delay_s
        self.cuts: set[tuple[int, int]] = set()
        """Directed: what the first node sends to the second does not arrive."""
        self.silent: set[int] = set()
        """Machines that are gone: nothing refuses there, nothing answers."""
        self.ports: dict[int, MeetingStore] = {}
        self.slow_until = self.lossy_until = 0.0

    def delay(self) -> float:
        delay_s = self.draws.expovariate(1 / self.delay_s)
        if self.kernel.now < self.slow_until:
            delay_s *= SLOWNESS
        pause_s = RETRANSMIT_S
        while self.kernel.now < self.lossy_until and self.draws.random() < LOSS and pause_s < MOST_RETRANSMIT_S:
            delay_s, pause_s = delay_s + pause_s, 2 * pause_s
        return delay_s

    def reaches(self, sender: int, receiver: int) -> bool:
        return sender == receiver or (sender, receiver) not in self.cuts

    def is_connected(self, a: int, b: int) -> bool:
        return self.reaches(a, b) and self.reaches(b, a)

    def listen(self, store: MeetingStore) -> int:
        port = 10_000 + len(self.ports)
        self.ports[port] = store
        return port

    def connect(self, address: str, port: int) -> None:
        """Raise what a connection to a port would: refused where nobody listens, timed out where nothing answers."""
        store = self.ports.get(port)
        mine, node = self.kernel.process.node, _node_of(address)
        if node in self.silent or not self.is_connected(mine, node):
            self.kernel.sleep(1.0)
            raise TimeoutError(f"{address}:{port} does not answer")
        self.kernel.sleep(self.delay())
        if store is None or store.process.is_dead:
            raise ConnectionRefusedError(f"{address}:{port} refuses")

    def is_refused(self, endpoint: str) -> bool:
        """Say what `rendezvous.addresses.is_refused` does: nobody listens there any more, and the machine says so."""
        address, _, port = endpoint.rpartition(":")
        try:
            self.connect(address, int(port))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def is_reachable(self, endpoint: str) -> bool:
        """Say what `rendezvous.addresses.is_reachable` does: the machine answers, if only by a refusal."""
        address, _, port = endpoint.rpartition(":")
        try:
            self.connect(address, int(port))
        except TimeoutError:
            return False
        except ConnectionRefusedError:
            return True
        return True


def _node_of(address: str) -> int:
    return int(address.removeprefix("node-"))


class MeetingStore:
    """What stands for a TCPStore: it names the world that meets at it, and dies with its process."""

    def __init__(self, net: Net, address: str, port: int, *, is_master: bool, **options: object) -> None:
        self.net = net
        if is_master:
            self.process: Process = net.kernel.process
            self.port = net.listen(self)
            self.hub = Hub(net)
            return
        net.connect(address, port)
        hosted = net.ports[port]
        until = net.kernel.now + CALL_TIMEOUT_S
        while hosted.process.is_paused and net.kernel.now < until:
            net.kernel.sleep(LOOK_S[1])  # its machine has answered for it
        if not hosted.process.is_running:
            raise TimeoutError(f"{address}:{port} does not answer")
        self.process, self.port, self.hub = hosted.process, port, hosted.hub


class Hub:
    """What the ranks of one world send one another."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.members: dict[int, Process] = {}
        self.collectives: dict[int, Collective] = {}
        self.letters: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.lost: set[int] = set()
        """Ranks that are known to be gone."""
        self.waiting: dict[int, Task] = {}
        self.has_dead = False

    def join(self, rank: int, process: Process) -> None:
        self.members[rank] = process
        process.at_death.append(lambda: self.leave(rank))

    def leave(self, rank: int) -> None:
        """Reset the connections of a rank whose process has ended; those of a machine that is gone stay silent."""
        self.has_dead = True
        if self.members[rank].node not in self.net.silent:
            self.net.kernel.after(RESET_S * self.net.draws.random(), lambda: self._reset(rank))

    def _reset(self, rank: int) -> None:
        self.lost.add(rank)
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

    def give(self, rank: int, value: object) -> None:
        self.given[rank] = value
        source = int(self.kind.partition(":")[2] or -1)
        if source >= 0:
            if rank == source:
                self.has_result.add(rank)
                for other in self.given:
                    self._deliver(other)
            elif source in self.given:
                self._deliver(rank)
        elif len(self.given) == self.size:
            for other in self.given:
                self._deliver(other)

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
    ) -> None:
        self.rank, self.size = rank, size
        self._is_broken, self._timeout_s = is_broken, timeout_s
        self._num_calls = 0
        self._sent: dict[int, int] = defaultdict(int)
        self._got: dict[int, int] = defaultdict(int)
        if size == 1:
            return
        assert store is not None, "a world of several ranks meets at a store"
        self._hub = store.hub
        self._kernel = store.net.kernel
        self._hub.join(rank, self._kernel.process)
        self._collect("form", None)

    def exchange_objects(self, value: object) -> list[object]:
        """Return every rank's value, by rank: a gather of what is no tensor here."""
        return [value] if self.size == 1 else self._collect("exchange", value)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor.unsqueeze(0).clone()
        rows = self._collect("gather", tensor.clone())
        return torch.stack([row for row in rows if isinstance(row, Tensor)])

    def broadcast_object(self, value: object, source: int = 0) -> object:
        if self.size == 1:
            return value
        return self._collect(f"broadcast:{source}", value)[source]

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
        letters, place = hub.letters[source, self.rank], self._got[source]
        self._wait(lambda: len(letters) > place, source)
        self._got[source] += 1
        tensor.copy_(letters[place])

    def abandon(self) -> None:
        """Leave: whoever still waits for this rank learns of it."""
        if self.size > 1 and self.rank not in self._hub.lost:
            self._kernel.after(RESET_S, lambda: self._hub._reset(self.rank))

    def _collect(self, kind: str, value: object) -> list[object]:
        self._num_calls += 1
        collective = self._hub.collective(self._num_calls, kind, self.size)
        collective.give(self.rank, value)
        self._wait(lambda: self.rank in collective.has_result, None)
        return [collective.given.get(rank) for rank in range(self.size)]

    def _wait(self, has_come: Callable[[], bool], peer: int | None) -> None:
        """Wait for a peer, or for all, until one is lost, the world is broken, or the time is over."""
        kernel, hub = self._kernel, self._hub
        started, look_s, task = kernel.now, LOOK_S[0], kernel.current
        hub.waiting[self.rank] = task
        try:
            while not has_come():
                if hub.lost - {self.rank} if peer is None else peer in hub.lost:
                    raise self._lost("connection reset by peer")
                if self._is_broken is not None and self._is_broken(kernel.now - started):
                    raise self._lost("the world has changed")
                if kernel.now - started >= self._timeout_s:
                    raise self._lost("timed out")
                kernel.park(look_s)
                look_s = min(LOOK_S[1], 2 * look_s)
        finally:
            hub.waiting.pop(self.rank, None)


def agent_port(net: Net) -> str:
    """Open the port by which a node's agent is known to live; called by the agent."""
    store = MeetingStore(net, "", 0, is_master=True)
    return f"{host_of(net.kernel.process.node)}:{store.port}"
