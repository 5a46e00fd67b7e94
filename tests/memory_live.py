"""Complete live jobs in memory: ranks are lost, survivors continue in the same processes, and newcomers replace ranks.

The loop over worlds, the claims of terms, the restores and the rules that form a world are the product's; the members'
knowledge of one another is modelled. A member without a place waits and joins at a step's end. Each lost rank has a
newcomer, which starts when the rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest import mock

from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.training import run as product
from elastic_train.training import supervisor
from elastic_train.world.forming import Formed
from rendezvous.membership.records import Member
from rendezvous.membership.rules.admission import Policy, admitted
from rendezvous.membership.rules.cells import CellShape, is_a_part_left_behind
from rendezvous.membership.worlds import Seat, World
from tests.conftest import Finished
from tests.memory_job import Loss, exchanges, installed
from tests.memory_machine import Machine, rank_here
from tests.memory_world import group_of


def start(arguments: list[str], *, num_ranks: int, losses: Sequence[Loss], on_devices: bool = False) -> Finished:
    """Run a live job of `num_ranks` members that loses one per `Loss`; newcomers get the next higher numbers.

    `on_devices` gives ranks fake devices, as in `tests.memory_world`.
    """
    path, *overrides = arguments
    places = [*range(num_ranks), *(lose.rank for lose in losses)]
    environments = [{"LOCAL_RANK": str(place)} for place in places]
    with installed(losses) as output:
        machine = Machine(len(places), exchanges(losses), on_devices=on_devices, environments=environments)
        membership = Membership(machine, places, num_ranks, sources.load(Path(path), environ={}, arguments=overrides))

        def live(who: int) -> int:
            if who >= num_ranks:
                membership.await_place(who)
            return product.run(Path(path), overrides)

        with mock.patch.object(supervisor, "open_worlds", lambda *_: MemoryWorlds(membership)):
            codes = machine.run(live)
    found = tuple(-9 if code is None else code for code in codes)
    return Finished(max(found), output.getvalue(), found)


class Membership:
    """The members that are present, waiting, or in the world; the product's rules choose the next world."""

    def __init__(self, machine: Machine, places: Sequence[int], num_members: int, config: Config) -> None:
        """`places` are the members' local ranks; the first `num_members` members are present from the start."""
        parallel, cell = config.parallel, config.parallel.cell
        copies = parallel.copies if parallel.shards != "none" else None
        shape = CellShape(cell.stage, cell.stage_size, copies, alike=cell.context)
        self._policy = Policy(1, 1, 0.0, cell.most_ranks(config.batch.num_lanes), cell=shape)
        self._machine, self._places, self._num_members = machine, places, num_members
        self._waiting: list[int] = []
        self._held: dict[int, tuple[int, int]] = {}
        self.world: World | None = None
        self.is_done = False

    def await_place(self, who: int) -> None:
        """Wait until the member that a newcomer replaces is gone, or until the job ends."""
        first = range(self._num_members)
        self._machine.wait(
            f"the end of rank {self._places[who]}",
            lambda: self._machine.has_ended(self._places[who]) or all(map(self._machine.has_ended, first)),
        )

    def next_world(self, who: int) -> World | None:
        """Wait for a world that includes this member; None if there will be none."""
        self._waiting.append(who)

        def is_in_one() -> bool:
            self._form()
            return self.is_done or who not in self._waiting

        self._machine.wait("the next world", is_in_one)
        return None if who in self._waiting else self.world

    def note_state(self, who: int, *, is_there: bool) -> None:
        """Note that a member has the state of its rank, or has dropped what it had."""
        assert self.world is not None, "asked by a member of it"
        self._held.pop(who, None)
        if is_there:
            self._held[who] = cast(int, self.world.rank_of(str(who))), self.world.term

    def can_grow(self) -> bool:
        assert self.world is not None, "asked by a member of it"
        now = [int(seat.member) for seat in self.world.seats]
        return len(self._chosen(sorted([*now, *self._waiting]))) > len(now)

    def _form(self) -> None:
        """Form a world if every member of the last one has returned or is gone."""
        last = range(self._num_members) if self.world is None else [int(seat.member) for seat in self.world.seats]
        if self.is_done or any(one not in self._waiting and not self._machine.has_ended(one) for one in last):
            return
        chosen = self._chosen(sorted(self._waiting))
        ready = [self._member(who) for who in sorted(self._waiting)]
        if not chosen or (self._is_anybody_to_come() and self._loses_a_part(chosen, ready)):
            return
        term = 1 if self.world is None else self.world.term + 1
        self.world = World(term, tuple(Seat(one.id, len(self._places), "") for one in chosen), "start", "", 0, 0.0)
        self._waiting = [who for who in self._waiting if self.world.rank_of(str(who)) is None]

    def _chosen(self, there: Sequence[int]) -> tuple[Member, ...]:
        return admitted(tuple(map(self._member, there)), self._policy, self.world)

    def _loses_a_part(self, chosen: Sequence[Member], ready: Sequence[Member]) -> bool:
        return self._policy.cell.size > 1 and is_a_part_left_behind(chosen, ready, self._policy.cell, self.world)

    def _member(self, who: int) -> Member:
        """Return a member's record once it has left the last world."""
        rank, rank_in = self._held.get(who, (-1, 0))
        after = 0 if self.world is None else self.world.term
        return Member(str(who), "node", "", 1, after, node="node", rank=rank, rank_in=rank_in)

    def _is_anybody_to_come(self) -> bool:
        return any(
            self._machine.has_ended(self._places[who]) and not self._machine.has_ended(who) and who not in self._waiting
            for who in range(self._num_members, len(self._places))
        )


class MemoryWorlds:
    """A member's successive worlds, with the interface of the product's `Worlds`."""

    is_live = is_launched = True

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def form(self, *, as_last: bool = False) -> Formed | None:
        who = rank_here()
        if (world := self._membership.next_world(cast(int, who))) is None:
            return None
        group = group_of(f"live-{world.term}", cast(int, world.rank_of(str(who))), len(world.seats))
        group.is_watched = True
        return Formed(group, None)

    def note_state(self, *, is_there: bool) -> None:
        self._membership.note_state(cast(int, rank_here()), is_there=is_there)

    def wants_to_grow(self) -> bool:
        return self._membership.can_grow()

    def published(self) -> str | None:
        return None

    def drop(self, rank: int) -> str:
        return "kept: nobody leaves"

    def leave(self, *, is_job_done: bool) -> None:
        self._membership.is_done |= is_job_done
