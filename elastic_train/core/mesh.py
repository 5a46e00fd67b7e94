"""A world's ranks, the replicas that they form, and each rank's place in its replica.

A *cell* is the set of ranks that together hold one replica of the model and compute one lane's gradient; its shape is
fixed by the configuration. A world has as many cells as its ranks form. Lanes belong to replicas, never to ranks. Ranks
are assigned cell by cell, so a replica's ranks are consecutive: rank = replica * cell.size + place.

With expert parallelism, ranks with different experts compute lanes of their own, so a replica's lanes are dealt to
them: the *owner* of a lane is then such a rank with all its stages, otherwise a whole replica. Ranks that differ only
along the axis `context` hold the same *part* of the state, and compute some tokens of each row of their lanes.
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
"""From the axis with the most distant places to the one with consecutive places."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The shape of a replica: ranks along each axis; by default one rank holds a whole replica."""

    stage: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    size: int = field(init=False, repr=False, compare=False)
    """Number of ranks in a replica; precomputed, as it is needed for every rank of a world."""

    def __post_init__(self) -> None:
        assert min(self.degrees) >= 1, f"a degree below 1 in {self.degrees}"
        object.__setattr__(self, "size", math.prod(self.degrees))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Number of ranks along each axis, in axis order."""
        return self.stage, self.tensor, self.expert, self.context

    def along(self, place: int, axis: Axis) -> range:
        """Return the places that differ from one only along an axis, including it, by coordinate."""
        at = _AXES.index(axis)
        stride, degree = math.prod(self.degrees[at + 1 :]), self.degrees[at]
        first = place - place // stride % degree * stride
        return range(first, first + degree * stride, stride)

    def number_along(self, place: int, axis: Axis) -> tuple[int, int]:
        """Return a place's index along an axis, and the axis's size."""
        places = self.along(place, axis)
        return places.index(place), len(places)

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage: they communicate within every block, and so share a node; stages need not."""
        return self.size // self.stage

    @property
    def holds_parts(self) -> bool:
        """True if a rank holds a part of the model; context-parallel ranks hold all of it."""
        return self.num_parts > 1

    @property
    def num_parts(self) -> int:
        """Number of parts in which a replica's ranks hold its state."""
        return self.size // self.context

    def part_of(self, place: int) -> int:
        """Return the part of the state that a place holds."""
        return place // self.context

    def holder_of(self, rank: int) -> tuple[int, int]:
        """Return the part of the state that a rank of a world holds, and its index among the part's holders."""
        replica, place = divmod(rank, self.size)
        return self.part_of(place), replica * self.context + place % self.context

    @property
    def crew(self) -> int:
        """Number of ranks that compute a lane together."""
        return self.size // self.expert

    def most_ranks(self, num_lanes: int) -> int:
        """Return the largest world in which each rank has a lane to compute or take part in."""
        return num_lanes // self.expert * self.size

    @property
    def speaker(self) -> int:
        """Place that knows a lane's results: the first of the last stage."""
        return self.size - self.stage_size

    def owner_of(self, rank: int) -> int:
        """Return the owner of a rank's lanes, in [0, ranks / crew)."""
        replica, place = divmod(rank, self.size)
        return replica * self.expert + place // self.context % self.expert

    def speaker_of(self, owner: int) -> int:
        """Return the rank that knows an owner's results: the first of its last stage."""
        replica, expert = divmod(owner, self.expert)
        return replica * self.size + self.speaker + expert * self.context

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        """Return the lanes of every owner: consecutive per replica, and dealt round-robin to its ranks with experts."""
        by_replica = contiguous(num_replicas, num_lanes)
        return tuple(lanes[place :: self.expert] for lanes in by_replica for place in range(self.expert))


ALONE = Cell()
"""A rank that is a whole replica."""


class Coordinates(NamedTuple):
    """A rank's replica, and its coordinates within the cell."""

    replica: int
    stage: int
    tensor: int
    expert: int
    context: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's view of its world of `size` ranks, divided into cells of one shape."""

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
        return self.rank // self.cell.size

    @property
    def place(self) -> int:
        """Place of this rank in its replica, in [0, cell.size): equal for ranks with the same tensors."""
        return self.rank % self.cell.size

    @property
    def column(self) -> range:
        """Ranks at this rank's place in all replicas, by replica."""
        return range(self.place, self.size, self.cell.size)

    def across(self, axis: Axis) -> list[int]:
        """Return the ranks of all replicas whose places differ from this rank's only along an axis, by replica."""
        places = self.cell.along(self.place, axis)
        return [replica * self.cell.size + place for replica in range(self.num_replicas) for place in places]

    @property
    def by_part(self) -> Sequence[Sequence[int]]:
        """Holders of each part of the state, by part: the part is held while one of them is left."""
        return ranks_by_part(self.size, self.cell)

    @property
    def owner(self) -> int:
        """Owner of this rank's lanes, in [0, size / cell.crew)."""
        return self.cell.owner_of(self.rank)

    @property
    def speaks(self) -> bool:
        """True if this rank reports which samples its lanes have read."""
        return self.place in self.cell.along(0, "expert")

    def assigned(self, num_lanes: int) -> Assignment:
        """Return the lanes of every owner; see `Cell.assigned`."""
        return self.cell.assigned(self.num_replicas, num_lanes)

    def leaf(self, lane: int, num_lanes: int) -> int:
        """Return the leaf of a lane that this rank computes: it determines random numbers and the place in the sum."""
        return leaf_of(lane, self.place % self.cell.context, num_lanes)

    def num_lanes(self, assigned: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of lanes that each rank computes, given each owner's lanes."""
        crew = self.cell.crew
        assert len(assigned) * crew == self.size, f"lanes for {len(assigned)} of {self.size // crew} owners"
        return [len(assigned[self.cell.owner_of(rank)]) for rank in range(self.size)]

    @property
    def alike(self) -> list[list[int]]:
        """Ranks that compute the same modules, by stage: their times are comparable."""
        return [
            [rank for rank in range(self.size) if rank % self.cell.size // self.cell.stage_size == stage]
            for stage in range(self.cell.stage)
        ]

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates; context varies fastest, then experts; stages vary slowest."""
        return Coordinates(self.replica, *(self.cell.number_along(self.place, axis)[0] for axis in _AXES))


@lru_cache(8)
def ranks_by_part(num_ranks: int, cell: Cell) -> tuple[tuple[int, ...], ...]:
    """Return the holders of each part of the state in a world, by part."""
    return tuple(
        tuple(rank + at for rank in range(first, num_ranks, cell.size) for at in range(cell.context))
        for first in range(0, cell.size, cell.context)
    )
