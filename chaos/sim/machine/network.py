"""The network between nodes: links that can be cut one way, and ports that die with their process.

A dead process is known to its peers soon, a machine that is gone or frozen is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from chaos.sim.machine.kernel import Kernel, Process
from rendezvous.agent.identity import Answer

T = TypeVar("T")

SLOWNESS = 100.0
LOSS, RETRANSMIT_S, MOST_RETRANSMIT_S = 1 / 3, 0.2, 10.0


class Listener(Protocol):
    """What listens at a port: it is gone when its process is."""

    process: Process
    node: str
    """The node that it answers for; empty if it is no agent."""


class Net:
    """Which node reaches which, and what listens where."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float) -> None:
        self.kernel, self.draws, self.delay_s = kernel, draws, delay_s
        self.cuts: set[tuple[int, int]] = set()
        """Directed: what the first node sends to the second does not arrive."""
        self.silent: set[int] = set()
        """Machines that are gone: nothing refuses there, nothing answers."""
        self.refusing: set[int] = set()
        """Machines whose address refuses whoever comes from another one."""
        self.shared: set[int] = set()
        """Machines whose address every machine has: it leads whoever uses it to himself."""
        self.ports: dict[int, Listener] = {}
        self.slow_until = self.lossy_until = self.blocked_until = 0.0
        """Until when messages are late, packets lost, and the connections that make a world blocked."""
        self._waits: list[float] | None = None
        """What concurrent connections would wait, each by itself."""

    def delay(self) -> float:
        delay_s = self.draws.expovariate(1 / self.delay_s)
        if self.kernel.now < self.slow_until:
            delay_s *= SLOWNESS
        pause_s = RETRANSMIT_S
        while self.kernel.now < self.lossy_until and self.draws.random() < LOSS and pause_s < MOST_RETRANSMIT_S:
            delay_s, pause_s = delay_s + pause_s, 2 * pause_s
        return delay_s

    @property
    def is_whole(self) -> bool:
        """Whether all nodes reach each other."""
        return not (self.cuts or self.refusing or self.shared)

    def reaches(self, sender: int, receiver: int) -> bool:
        return sender == receiver or (sender, receiver) not in self.cuts

    def is_connected(self, a: int, b: int) -> bool:
        return self.reaches(a, b) and self.reaches(b, a) and (a == b or not {a, b} & (self.refusing | self.shared))

    def listen(self, listener: Listener) -> int:
        port = 10_000 + len(self.ports)
        self.ports[port] = listener
        return port

    def connect(self, address: str, port: int) -> None:
        """Raise what a connection to a port would: refused where nothing listens, timed out where nothing answers."""
        listener = self.ports.get(port)
        mine, node = self.kernel.process.node, _node_of(address)
        is_elsewhere = mine != node and bool({mine, node} & (self.refusing | self.shared))
        if node in self.silent or not (is_elsewhere or self.is_connected(mine, node)):
            self._wait(1.0)
            raise TimeoutError(f"{address}:{port} does not answer")
        self._wait(self.delay())
        if is_elsewhere or listener is None or listener.process.is_dead:
            raise ConnectionRefusedError(f"{address}:{port} refuses")

    def _wait(self, seconds: float) -> None:
        if self._waits is None:
            self.kernel.sleep(seconds)
        else:
            self._waits.append(seconds)

    def at_once(self, num_threads: int) -> AtOnce:
        """Return what stands for a pool of threads that connect, and do nothing else."""
        return AtOnce(self, num_threads)

    def collect_waits(self, act: Callable[[], T]) -> tuple[T, list[float]]:
        """Do something that connects, at one moment; return its result, and what each connection would have waited."""
        waits: list[float] = []
        self._waits = waits
        try:
            return act(), waits
        finally:
            self._waits = None

    def refuses(self, endpoint: str, timeout_s: float) -> bool:
        """Do what `rendezvous.agent.identity.refuses` does: say whether a port refuses a connection."""
        address, _, port = endpoint.rpartition(":")
        try:
            self.connect(address, int(port))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def ask(self, endpoint: str, node: str, timeout_s: float) -> Answer:
        """Do what `rendezvous.agent.identity.ask` does: ask who listens at an address."""
        address, _, port = endpoint.rpartition(":")
        try:
            self.connect(address, int(port))
        except ConnectionRefusedError:
            return "other" if self.shared & {_node_of(address), self.kernel.process.node} else "refused"
        except OSError:
            return "silent"
        listener = self.ports[int(port)]
        if listener.process.is_paused:
            self._wait(timeout_s)
            return "mute"
        return "itself" if listener.node == node else "other"


class AtOnce:
    """A pool of threads that connect: the caller waits once for all that are under way together."""

    def __init__(self, net: Net, num_threads: int) -> None:
        self._net, self._num_threads = net, num_threads

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[object], object], items: Iterable[object]) -> list[object]:
        answers, waits = self._net.collect_waits(lambda: [function(item) for item in items])
        places = range(0, len(waits), self._num_threads)
        self._net.kernel.sleep(sum(max(waits[place : place + self._num_threads]) for place in places))
        return answers


def _node_of(address: str) -> int:
    return int(address.removeprefix("node-"))
