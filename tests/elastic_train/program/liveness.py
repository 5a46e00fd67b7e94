"""A check that the ranks of any world end their programs; nothing is executed.

Each rank's program becomes events: messages that it begins, and messages that it waits for. Nothing is buffered, so a
message is complete once both ends have begun it; and messages have no tags, so of two ranks' messages the first sent
matches the first awaited. Programs are wrong if ranks deadlock, if two different messages match, or if an action comes
before one that it needs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic_train.core.lanes import Assignment
from elastic_train.core.mesh import Axis, Cell, Mesh
from elastic_train.planning.arithmetic.memory import by_unit
from elastic_train.program.schedules import (
    REST,
    AddExperts,
    Begin,
    Close,
    Direction,
    End,
    Enter,
    Exchange,
    Kind,
    Open,
    Pass,
    Pipeline,
    UnitAction,
    filling_turn,
    gathering_turn,
    reducing_turn,
    step_program,
)

Shards = Literal["none", "gradients", "parameters"]
"""The sharded state; `none` covers every mode in which gradients are whole until their last leaf."""


class StuckError(AssertionError):
    """Some ranks deadlock, or would mistake one message for another."""


class Message(NamedTuple):
    """One end of a message to or from a peer; `links` is its group, in which messages keep their order."""

    links: str
    peer: int
    is_sent: bool
    name: Hashable


class Post(NamedTuple):
    """Begin messages."""

    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """Wait until all begun messages of a name are complete."""

    name: Hashable


Event = Post | Wait


@dataclass(frozen=True, slots=True)
class World:
    """The parameters of the programs of a world's ranks.

    `lanes` are those of each owner, and `groups` the replicas of each group, whose ranks compute in turns together.
    """

    cell: Cell
    lanes: Assignment
    groups: tuple[tuple[int, ...], ...]
    kind: Kind = "1f1b"
    num_chunks: int = 1
    shards: Shards = "none"
    num_blocks: int = 2
    is_after: bool = False
    """True if gradients are exchanged after passes, as between the devices of cells."""

    @property
    def size(self) -> int:
        return self.cell.size * sum(map(len, self.groups))

    def mesh(self, rank: int) -> Mesh:
        return Mesh(rank, self.size, self.cell)

    def events(self) -> list[list[Event]]:
        """Return each rank's events."""
        return [list(_Rank(self, rank).events()) for rank in range(self.size)]


class _Rank:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.mesh = world, rank, world.mesh(rank)
        cell = world.cell
        self.stage, self.has_experts = self.mesh.coordinates.stage, cell.expert > 1
        keeps = cell.stage * cell.expert > 1
        self.gathers = world.shards == "parameters" and not keeps
        self.keeps = world.shards == "parameters" and keeps
        replicas = next(group for group in world.groups if self.mesh.replica in group)
        every = range(self.mesh.num_replicas)
        self.group, self.column = self._alike(replicas, "context"), self._alike(every, "context")
        """The ranks that hold shards of the same state, in this rank's group and in all."""
        adding: Axis = "expert" if self.has_experts else "context"
        self.owners, self.adders = self._alike(replicas, adding), self._alike(every, adding)
        """The ranks that add the same gradients, except experts', in this rank's group and in all."""
        self.num_lanes, self.num_turns = self._count(rank), self._turns_of_cell(self.mesh.replica)
        first = self.mesh.replica * cell.size
        axes: list[Axis] = ["tensor", "context", "expert"]
        self.along = {axis: [first + place for place in cell.along(self.mesh.place, axis)] for axis in axes}
        self.done, self.awaited = set[Pass](), set[Pass]()
        """The passes that have run, and those with requested messages."""
        self.leaf: tuple[int, int] | None = None
        """The turn and chunk with the open leaf."""
        self.reducing: dict[Hashable, deque[Hashable]] = defaultdict(deque)
        """The names of reductions in flight, by chunk; experts' have their own."""
        self.sent: Hashable = None
        """The name of the last message to another stage."""

    def _alike(self, replicas: Iterable[int], axis: Axis) -> list[int]:
        """Return the ranks of replicas whose places differ from this rank's along an axis only."""
        places = self.world.cell.along(self.mesh.place, axis)
        return [replica * self.world.cell.size + place for replica in replicas for place in places]

    def _count(self, rank: int) -> int:
        return len(self.world.lanes[self.world.cell.owner_of(rank)])

    def _turns_of_cell(self, replica: int) -> int:
        expert = self.world.cell.expert
        return max(map(len, self.world.lanes[replica * expert : (replica + 1) * expert]))

    def events(self) -> Iterator[Event]:
        world, cell = self.world, self.world.cell
        pipeline = Pipeline(world.kind, cell.stage, max(map(len, world.lanes)), world.num_chunks)
        stage = self.stage
        if self.keeps:
            yield from self._all("weights", "gather", self.group)
        program = step_program(pipeline, stage, has_experts=self.has_experts)
        for action, of_units in by_unit(program, world.num_blocks, self._turn):
            match action:
                case Exchange():
                    yield from self._neighbours(action, pipeline, stage)
                case Pass():
                    yield from self._pass(action, of_units)
                case Open():
                    self._need(self.leaf is None, action, "another leaf is open")
                    self.leaf = (action.number, action.chunk)
                case Close():
                    self._need(self.leaf == (action.number, action.chunk), action, "its leaf is not open")
                    self._need(self._has_run("backward", action), action, "its pass has not run")
                    for of_unit in of_units:
                        yield from self._unit(of_unit, action)
                    self.leaf = None
                case AddExperts():
                    self._need(self._has_run("backward", action), action, "its pass has not run")
                    yield from self._experts(action)
        yield Wait(self.sent)
        yield from self._all("world", "tables", range(world.size))
        yield from self._finish()

    def _finish(self) -> Iterator[Event]:
        """Yield how the ranks' sums are combined, tree by tree; for whole gradients it began with a last leaf."""
        chunks = range(self.world.num_chunks)
        yield from (Wait(name) for names in self.reducing.values() for name in names)
        for chunk in chunks if self.world.shards == "none" else ():
            if self.world.is_after:
                yield from self._all("column", ("sum", chunk), self.adders)
            for unit in (REST, *range(self.world.num_blocks)):
                yield Wait(("sum", unit, chunk))
        for chunk in reversed(chunks) if self.has_experts else ():
            yield from self._all("column", ("sum of experts", chunk), self.column)
        for chunk in reversed(chunks) if self.world.shards != "none" else ():
            yield from self._all("column", ("sums", chunk), self.adders)

    # The actions of a turn.

    def _turn(self, action: Open) -> tuple[UnitAction, ...]:
        if self.world.shards == "none":
            is_due = action.number == self.num_lanes - 1 and not self.world.is_after
            return filling_turn(self.world.num_blocks + 1) if is_due else ()
        if not any(action.number < self._count(rank) for rank in self.owners):
            return ()
        is_first = action.number == 0
        if self.gathers:
            return gathering_turn(self.world.num_blocks, has_rest=not is_first, trains=True, reduces=True)
        reduced = reducing_turn(self.world.num_blocks + 1, is_first=is_first)
        return (Enter("backward", REST), *reduced) if self.has_experts or self.world.is_after else reduced

    def _pass(self, one: Pass, of_units: Sequence[UnitAction]) -> Iterator[Event]:
        """Yield the exchanges of a pass: of units, and within each block."""
        self._check(one)
        yield Wait((self.stage, one))  # its input from the previous piece
        for action in of_units:
            if not isinstance(action, Enter):
                yield from self._unit(action, one)
            elif action.unit != REST:
                yield from self._block(one, action.unit)
        self.done.add(one)

    def _block(self, one: Pass, block: int) -> Iterator[Event]:
        computes = one.number < self.num_lanes
        if self.gathers and computes:
            yield Wait(("gather", block, one.number, one.chunk))
        for axis in ("tensor", "context") if computes else ():
            if len(self.along[axis]) > 1:
                yield from self._all(axis, (axis, one, block), self.along[axis])
        if self.has_experts and one.number < self.num_turns:
            yield from self._all("expert", ("tokens", one, block), self.along["expert"])

    def _check(self, one: Pass) -> None:
        is_opened = self.leaf == (one.number, one.chunk)
        self._need(is_opened or (one.direction == "forward" and self.world.cell.stage > 1), one, "its leaf is not open")
        self._need(one.direction == "forward" or self._has_run("forward", one), one, "its forward pass has not run")
        pipeline = Pipeline(self.world.kind, self.world.cell.stage, 0, self.world.num_chunks)
        is_fed = pipeline.needs(one, self.stage) is None or one.number >= self.num_lanes or one in self.awaited
        self._need(is_fed, one, "what it needs was not asked for")

    def _has_run(self, direction: Direction, of: Pass | Close | AddExperts) -> bool:
        return Pass(direction, of.number, of.chunk) in self.done

    def _need(self, is_so: bool, action: object, why: str) -> None:
        if not is_so:
            raise StuckError(f"rank {self.rank} in {action}: {why}")

    def _unit(self, action: UnitAction, at: Pass | Close) -> Iterator[Event]:
        if not isinstance(action, Begin | End):
            return
        name = (action.what, action.unit, at.number, at.chunk)
        if isinstance(action, End):
            yield Wait(self.reducing[at.chunk].popleft() if action.what == "reduce" else name)
        elif self.world.shards == "none":
            yield self._begin("beside", ("sum", action.unit, at.chunk), self.adders)
        elif action.what == "gather":
            yield self._give("units", name, self.group, to=self._computing(self.group, at.number), sources=self.group)
        else:
            computing = self._computing(self.owners, at.number)
            self.reducing[at.chunk].append(name)
            yield self._give("units", name, self.owners, to=self.owners, sources=computing)

    def _computing(self, ranks: Iterable[int], number: int) -> list[int]:
        return [rank for rank in ranks if number < self._count(rank)]

    def _experts(self, one: AddExperts) -> Iterator[Event]:
        """Yield the exchanges of a turn's leaves of experts; whole cells send theirs at once."""
        if self.world.shards == "none":
            return
        computing = [rank for rank in self.group if one.number < self._turns_of_cell(rank // self.world.cell.size)]
        name, in_flight = ("experts", one.number, one.chunk), self.reducing["experts", one.chunk]
        yield self._give("column", name, self.group, to=self.group, sources=computing)
        if in_flight:
            yield Wait(in_flight.popleft())
        in_flight.append(name)

    # The messages.

    def _neighbours(self, action: Exchange, pipeline: Pipeline, stage: int) -> Iterator[Event]:
        yield Wait(self.sent)
        messages = []
        if action.sends is not None and action.sends.number < self.num_lanes:
            follower = pipeline.follower(action.sends, stage)
            assert follower is not None, "somebody goes on with it"
            self._need(action.sends in self.done, action, "what it sends was not made")
            self.sent = follower
            messages.append(Message("stage", self._at_stage(follower[0]), True, follower))
        for one in action.takes:
            if one.number < self.num_lanes:
                needs = pipeline.needs(one, stage)
                assert needs is not None, "somebody has made it"
                self.awaited.add(one)
                messages.append(Message("stage", self._at_stage(needs[2] % pipeline.num_stages), False, (stage, one)))
        yield Post(tuple(messages))

    def _at_stage(self, stage: int) -> int:
        return self.rank + (stage - self.stage) * self.world.cell.stage_size

    def _all(self, links: str, name: Hashable, ranks: Iterable[int]) -> Iterator[Event]:
        """Yield a rank's events in an exchange in which all ranks send to all others."""
        yield self._begin(links, name, ranks)
        yield Wait(name)

    def _begin(self, links: str, name: Hashable, ranks: Iterable[int]) -> Post:
        ranks = list(ranks)
        return self._give(links, name, ranks, to=ranks, sources=ranks)

    def _give(
        self, links: str, name: Hashable, ranks: Iterable[int], *, to: Sequence[int], sources: Sequence[int]
    ) -> Post:
        others = [rank for rank in ranks if rank != self.rank]
        sends = [Message(links, rank, True, name) for rank in others if self.rank in sources and rank in to]
        takes = [Message(links, rank, False, name) for rank in others if self.rank in to and rank in sources]
        return Post((*sends, *takes))


def check(events: Sequence[Sequence[Event]]) -> int:
    """Run all ranks' events; return the number of messages. Raises StuckError."""
    lines: dict[tuple[str, int, int, bool], list[Hashable]] = defaultdict(list)
    begun: list[dict[Hashable, list[tuple[tuple[str, int, int], int]]]] = [defaultdict(list) for _ in events]
    at = [0] * len(events)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, mine in enumerate(events):
            while at[rank] < len(mine):
                event = mine[at[rank]]
                if isinstance(event, Post):
                    for one in event.messages:
                        ends = (rank, one.peer) if one.is_sent else (one.peer, rank)
                        line = lines[one.links, *ends, one.is_sent]
                        begun[rank][one.name].append(((one.links, *ends), len(line)))
                        line.append(one.name)
                elif any(
                    number >= min(len(lines[*link, True]), len(lines[*link, False]))
                    for link, number in begun[rank][event.name]
                ):
                    break
                else:
                    begun[rank].pop(event.name, None)
                at[rank] += 1
                is_moving = True
    stuck = [f"rank {rank} in {mine[at[rank]]}" for rank, mine in enumerate(events) if at[rank] < len(mine)]
    if stuck:
        raise StuckError("; ".join(stuck))
    return _check_names(lines)


def check_in_turn(events: Sequence[Sequence[Event]]) -> None:
    """Run all ranks' events on devices, whose messages have no host; raises StuckError.

    A device runs what each `Post` begins one after another, and each until all peers run or have run its other end.
    """
    lines: dict[tuple[str, int, int, bool], list[int]] = defaultdict(list)
    queues: list[list[list[tuple[tuple[str, int, int, bool], int]]]] = [[] for _ in events]
    begun: list[dict[Hashable, int]] = [{} for _ in events]
    """The last operation of each name."""
    at, num_done = [0] * len(events), [0] * len(events)

    def step(rank: int) -> bool:
        """Let the host, or the device, of a rank do one thing; return False if neither can."""
        queue, event = queues[rank], events[rank][at[rank]] if at[rank] < len(events[rank]) else None
        if num_done[rank] < len(queue) and all(
            number < len(lines[other]) and lines[other][number] <= num_done[other[1] if other[3] else other[2]]
            for other, number in queue[num_done[rank]]
        ):
            num_done[rank] += 1
            return True
        if isinstance(event, Post):
            queue.append([])
            for one in event.messages:
                ends = (rank, one.peer) if one.is_sent else (one.peer, rank)
                queue[-1].append(((one.links, *ends, not one.is_sent), len(lines[one.links, *ends, one.is_sent])))
                lines[one.links, *ends, one.is_sent].append(len(queue) - 1)
                begun[rank][one.name] = len(queue) - 1
        elif event is None or begun[rank].get(event.name, -1) >= num_done[rank]:
            return False
        at[rank] += 1
        return True

    while any(step(rank) for rank in range(len(events))):
        pass
    stuck = [f"rank {rank} in {mine[at[rank]]}" for rank, mine in enumerate(events) if at[rank] < len(mine)]
    if stuck:
        raise StuckError("; ".join(stuck))


def _check_names(lines: dict[tuple[str, int, int, bool], list[Hashable]]) -> int:
    """Raise StuckError unless matching messages are the same; return their number."""
    count = 0
    for (links, sender, taker, is_sent), names in list(lines.items()):
        others = lines[links, sender, taker, not is_sent]
        if len(names) != len(others):
            raise StuckError(f"of {links}, rank {sender} sends rank {taker} {len(names)} messages, not {len(others)}")
        for name, other in zip(names, others, strict=True):
            if name != other:
                raise StuckError(f"of {links}, rank {taker} takes {name} of rank {sender} for {other}")
        count += is_sent * len(names)
    return count
