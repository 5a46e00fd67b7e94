"""The network between nodes: links that can be cut one way, and ports that die with their process.

Peers notice a dead process soon, but not a lost or frozen machine.
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
    """A listener on a port, which closes with its process."""

    process: Process
    node: str
    """The node that it identifies; empty if it is no agent."""


class Net:
    """Reachability between nodes, and listeners by port."""

    def __init__(self, kernel: Kernel, draws: random.Random, delay_s: float) -> None:
        self.kernel, self.draws, self.delay_s = kernel, draws, delay_s
        self.cuts: set[tuple[int, int]] = set()
        """Directed links that are cut: (sender, receiver)."""
        self.silent: set[int] = set()
        """Lost machines: they neither refuse nor answer."""
        self.refusing: set[int] = set()
        """Machines that refuse connections from other machines."""
        self.shared: set[int] = set()
        """Machines with an address that every machine has: connections to it reach the caller itself."""
        self.ports: dict[int, Listener] = {}
        self.slow_until = self.lossy_until = self.blocked_until = 0.0
        """When delays, packet loss and the block of world connections end."""
        self._waits: list[float] | None = None
        """Waits of concurrent connections, collected instead of slept."""

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
        """True if all nodes reach each other."""
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
        """Raise what a connection would: refused where nothing listens, timeout where nothing answers."""
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
        """Return a stand-in for a thread pool that only connects."""
        return AtOnce(self, num_threads)

    def collect_waits(self, act: Callable[[], T]) -> tuple[T, list[float]]:
        """Connect without advancing time; return the result, and the wait of each connection."""
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
    """A stand-in for a thread pool that connects: concurrent waits overlap."""

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
