"""Who is who in a world: its ranks, the replicas that they make up, and each rank's place in its replica.

A *cell* is the set of ranks that together hold one replica of the model and compute one lane's gradient; its shape is
fixed by the configuration. A world is as many cells as its ranks make. Lanes belong to replicas, never to ranks. Ranks
are dealt cell by cell, so a replica's ranks are neighbours: rank = replica * cell.size + place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Cell:
    """The shape of a replica: how many ranks it has along each axis; one rank holds a whole replica by default."""

    stage: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        degrees = (self.stage, self.shard, self.tensor, self.expert)
        assert min(degrees) >= 1, f"a degree below 1 in {degrees}"

    @property
    def size(self) -> int:
        """The number of ranks of a replica."""
        return self.stage * self.shard * self.tensor * self.expert

    @property
    def speaker(self) -> int:
        """The place that knows what a lane has come to: the first of the last stage."""
        return self.size - self.size // self.stage


class Coordinates(NamedTuple):
    """Where a rank is: its replica, and its coordinates within the replica's cell."""

    replica: int
    stage: int
    shard: int
    tensor: int
    expert: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's view of its world of `size` ranks, cut into cells of one shape."""

    rank: int
    size: int
    cell: Cell = Cell()

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
        """The ranks of this rank's place in all replicas, by replica: they sum gradients with one another."""
        return range(self.place, self.size, self.cell.size)

    def num_lanes(self, assigned: Sequence[Sequence[int]]) -> list[int]:
        """Return how many lanes each rank computes, by rank, of what each replica is assigned."""
        assert len(assigned) == self.num_replicas, f"lanes for {len(assigned)} of {self.num_replicas} replicas"
        return [len(lanes) for lanes in assigned for _ in range(self.cell.size)]

    @property
    def alike(self) -> list[list[int]]:
        """The ranks that compute the same modules, by stage: how long they take can be compared."""
        per_stage = self.cell.size // self.cell.stage
        return [
            [rank for rank in range(self.size) if rank % self.cell.size // per_stage == stage]
            for stage in range(self.cell.stage)
        ]

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates; the expert axis varies fastest, so tensor and expert neighbours share a node."""
        rest, expert = divmod(self.place, self.cell.expert)
        rest, tensor = divmod(rest, self.cell.tensor)
        stage, shard = divmod(rest, self.cell.shard)
        return Coordinates(self.replica, stage, shard, tensor, expert)
