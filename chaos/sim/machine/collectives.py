"""Communication between the ranks of one world: collectives, and letters from rank to rank.

A collective is complete when every rank has called it; the result then travels to each rank separately. So a rank that
dies, or a link that is cut, at that moment leaves some ranks with the result and others without: survivors are then at
steps s and s+1.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch import Tensor

from chaos.sim.machine.kernel import Process, Task
from chaos.sim.machine.network import Net

T = TypeVar("T")

RESET_S, RESENT_S = 0.05, 0.2


@dataclass(slots=True)
class Letter:
    """A tensor on its way from one rank to another, or arrived."""

    tensor: Tensor
    is_here: bool = False


@dataclass(slots=True)
class Post:
    """Letters from one rank to another: the n-th is for the n-th receive, however late."""

    letters: dict[int, Letter] = field(default_factory=dict)
    num_sent: int = 0
    num_asked: int = 0

    def send(self, letter: Letter) -> None:
        self.letters[self.num_sent] = letter
        self.num_sent += 1

    def ask(self) -> int:
        """Return the number of the letter that the next receive gets."""
        self.num_asked += 1
        return self.num_asked - 1

    def is_here(self, number: int) -> bool:
        return number in self.letters and self.letters[number].is_here


class Hub:
    """Communication state of one world."""

    def __init__(self, net: Net, *, is_part: bool = False) -> None:
        self.net, self.is_part = net, is_part
        self.members: dict[int, Process] = {}
        self.places: dict[Process, int] = {}
        self.collectives: dict[int, Collective] = {}
        self.letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], Post] = defaultdict(Post)
        """Letters of exchanges, which are sent without waiting."""
        self.lost: set[int] = set()
        """Ranks known to be gone."""
        self.waiting: dict[int, Task] = {}
        self.has_dead = False
        self._parts: dict[str, Hub] = {}

    def join(self, rank: int, process: Process) -> None:
        """Add a rank; a subgroup's ranks have their own numbers, and the world announces their deaths."""
        self.members[rank], self.places[process] = process, rank
        if not self.is_part:
            process.at_death["world"] = lambda: self.leave(rank)

    def part(self, name: str) -> Hub:
        """Return the hub of a subgroup; all its ranks use the same name."""
        if name not in self._parts:
            self._parts[name] = Hub(self.net, is_part=True)
        return self._parts[name]

    def leave(self, rank: int) -> None:
        """Reset the connections of a dead rank, in subgroups as well; those of a lost machine stay silent.

        Data sent before a process's own exit arrive before its connections end.
        """
        process = self.members[rank]
        if process.code is not None:
            self.flush()
        else:
            self.has_dead = True
        if process.node not in self.net.silent:
            self.net.kernel.after(RESET_S * self.net.draws.random(), lambda: self._reset(rank))
        for part in self._parts.values():
            if (place := part.places.get(process)) is not None:
                part.leave(place)

    def _reset(self, rank: int) -> None:
        self.lost.add(rank)
        self.wake()

    def flush(self) -> None:
        """Deliver everything that all ranks have given, where no link is cut."""
        for collective in self.collectives.values():
            if len(collective.given) == collective.size:
                collective.has_result.update(rank for rank in collective.given if self.is_whole_for(rank))
        self.wake()

    def wake(self, rank: int | None = None) -> None:
        """Let one rank (default: all) check again for what it waits for."""
        for other in list(self.waiting) if rank is None else [rank]:
            if other in self.waiting:
                self.net.kernel.wake(self.waiting[other])

    def is_whole_for(self, rank: int) -> bool:
        """Return True if all links between a rank and its peers are open."""
        if self.net.is_whole:
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
    """One collective call: each rank's value, and the ranks that have the result."""

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
        """Return the result made from all ranks' values, by rank; computed once, as it is the same for all."""
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
            self.hub.net.kernel.after(RESENT_S, lambda: self._arrive(rank))  # retransmit over a cut link
            return
        if self.hub.has_dead and self.hub.net.draws.random() < 0.5:
            return  # in flight when its sender died
        self.has_result.add(rank)
        self.hub.wake(rank)
