"""Who is who in a world: its ranks, the replicas that they make up, and each rank's place in its replica.

A *cell* is the set of ranks that together hold one replica of the model and compute one lane's gradient; its shape is
fixed by the configuration. A world is as many cells as its ranks make. Lanes belong to replicas, never to ranks. Ranks
are dealt cell by cell, so a replica's ranks are neighbours: rank = replica * cell.size + place.

Ranks that hold some of the experts each compute lanes of their own, so their replica's lanes are dealt out among them:
the *owner* of a lane is then one of these, with all stages that compute it, and else a whole replica. Ranks that differ
along the axis `context` alone hold the same *part* of the state, and compute some tokens of each row of their lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from elastic_train.core.lanes import Assignment, contiguous, leaf_of

Axis = Literal["stage", "tensor", "expert", "context"]
_AXES: tuple[Axis, ...] = ("stage", "tensor", "expert", "context")
"""From the one along which places are furthest from one another to that of neighbours."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The shape of a replica: how many ranks it has along each axis; one rank holds a whole replica by default."""

    stage: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    size: int = field(init=False, repr=False, compare=False)
    """The number of ranks of a replica; worked out once, since much asks for it for each of a world's ranks."""

    def __post_init__(self) -> None:
        assert min(self.degrees) >= 1, f"a degree below 1 in {self.degrees}"
        object.__setattr__(self, "size", math.prod(self.degrees))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of ranks along each axis, in their order."""
        return self.stage, self.tensor, self.expert, self.context

    def along(self, place: int, axis: Axis) -> range:
        """Return the places that differ from one along an axis alone, and that one, by their coordinate."""
        at = _AXES.index(axis)
        stride, degree = math.prod(self.degrees[at + 1 :]), self.degrees[at]
        first = place - place // stride % degree * stride
        return range(first, first + degree * stride, stride)

    def number_along(self, place: int, axis: Axis) -> tuple[int, int]:
        """Return which of the places along an axis one is, and how many these are."""
        places = self.along(place, axis)
        return places.index(place), len(places)

    @property
    def stage_size(self) -> int:
        """The number of ranks of a stage: they exchange within every block, and so share a node; stages need not."""
        return self.size // self.stage

    @property
    def holds_parts(self) -> bool:
        """Whether a rank holds a part of the model; those that differ in their tokens alone hold all of it."""
        return self.num_parts > 1

    @property
    def num_parts(self) -> int:
        """In how many parts ranks of a replica hold its state."""
        return self.size // self.context

    def part_of(self, place: int) -> int:
        """Return which part of the state a place holds."""
        return place // self.context

    def holder_of(self, rank: int) -> tuple[int, int]:
        """Return which part of the state a rank of a world holds, and which of the ranks that hold it, by rank."""
        replica, place = divmod(rank, self.size)
        return self.part_of(place), replica * self.context + place % self.context

    @property
    def crew(self) -> int:
        """The number of ranks that compute a lane together."""
        return self.size // self.expert

    def most_ranks(self, num_lanes: int) -> int:
        """The number of ranks of a world in which each has a lane to compute or to take part in."""
        return num_lanes // self.expert * self.size

    @property
    def speaker(self) -> int:
        """The place that knows what a lane has come to: the first of the last stage."""
        return self.size - self.stage_size

    def owner_of(self, rank: int) -> int:
        """Return who computes a rank's lanes, in [0, ranks / crew)."""
        replica, place = divmod(rank, self.size)
        return replica * self.expert + place // self.context % self.expert

    def speaker_of(self, owner: int) -> int:
        """Return the rank that knows what an owner's lanes have come to: the first of its last stage."""
        replica, expert = divmod(owner, self.expert)
        return replica * self.size + self.speaker + expert * self.context

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        """Return the lanes of every owner: neighbours to a replica, and of these in turn to ranks with experts."""
        by_replica = contiguous(num_replicas, num_lanes)
        return tuple(lanes[place :: self.expert] for lanes in by_replica for place in range(self.expert))


ALONE = Cell()
"""A rank that is a replica by itself."""


class Coordinates(NamedTuple):
    """Where a rank is: its replica, and its coordinates within the replica's cell."""

    replica: int
    stage: int
    tensor: int
    expert: int
    context: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's view of its world of `size` ranks, cut into cells of one shape."""

    rank: int
    size: int
    cell: Cell = ALONE

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"no rank {self.rank} in a world of {self.size}"
        assert self.size % self.cell.size == 0, f"{self.size} ranks do not make whole cells of {self.cell.size}"

    @property
    def num_replicas(self) -> int:
        return self.size // self.cell.size

    @property
    def replica(self) -> int:
        """The replica that this rank is a part of, in [0, num_replicas)."""
        return self.rank // self.cell.size

    @property
    def place(self) -> int:
        """Where this rank is in its replica, in [0, cell.size): alike for the ranks that hold the same tensors."""
        return self.rank % self.cell.size

    @property
    def column(self) -> range:
        """The ranks of this rank's place in all replicas, by replica."""
        return range(self.place, self.size, self.cell.size)

    def across(self, axis: Axis) -> list[int]:
        """Return the ranks of all replicas whose places differ from this rank's along an axis alone, by replica."""
        places = self.cell.along(self.place, axis)
        return [replica * self.cell.size + place for replica in range(self.num_replicas) for place in places]

    @property
    def by_part(self) -> Sequence[Sequence[int]]:
        """The ranks that hold each part of the state, by part: as long as one of them is left, it is held."""
        return ranks_by_part(self.size, self.cell)

    @property
    def owner(self) -> int:
        """Who computes this rank's lanes, in [0, size / cell.crew)."""
        return self.cell.owner_of(self.rank)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of its lanes' that says which samples they have read."""
        return self.place in self.cell.along(0, "expert")

    def assigned(self, num_lanes: int) -> Assignment:
        """Return the lanes of every owner; see `Cell.assigned`."""
        return self.cell.assigned(self.num_replicas, num_lanes)

    def leaf(self, lane: int, num_lanes: int) -> int:
        """Return the leaf that this rank computes of a lane: whose random numbers it draws, and what it adds."""
        return leaf_of(lane, self.place % self.cell.context, num_lanes)

    def num_lanes(self, assigned: Sequence[Sequence[int]]) -> list[int]:
        """Return how many lanes each rank computes, by rank, of what each owner is assigned."""
        crew = self.cell.crew
        assert len(assigned) * crew == self.size, f"lanes for {len(assigned)} of {self.size // crew} owners"
        return [len(assigned[self.cell.owner_of(rank)]) for rank in range(self.size)]

    @property
    def alike(self) -> list[list[int]]:
        """The ranks that compute the same modules, by stage: how long they take can be compared."""
        return [
            [rank for rank in range(self.size) if rank % self.cell.size // self.cell.stage_size == stage]
            for stage in range(self.cell.stage)
        ]

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates; the context axis varies fastest, then that of experts; stages vary slowest."""
        return Coordinates(self.replica, *(self.cell.number_along(self.place, axis)[0] for axis in _AXES))


@lru_cache(8)
def ranks_by_part(num_ranks: int, cell: Cell) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of a world that hold each part of the state, by part."""
    return tuple(
        tuple(rank + at for rank in range(first, num_ranks, cell.size) for at in range(cell.context))
        for first in range(0, cell.size, cell.context)
    )
