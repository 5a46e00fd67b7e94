"""Planted bugs in cells: a lane computed twice, a wrong or unnoticed missing parameter shard, an incomplete stage."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaos.sim.campaign.planted.hunt import SHAPE, SimBug
from chaos.sim.job.fault import SimFault
from elastic_train.core.mesh import Mesh
from elastic_train.job import reshard
from elastic_train.job.peer_states import PeerState
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Weights
from elastic_train.parallel.group import Group
from elastic_train.placement.table import Table
from rendezvous.membership.records import Member
from rendezvous.membership.rules import cells
from rendezvous.membership.rules.cells import Arrangement, CellShape
from rendezvous.membership.worlds import World

_ARRANGE, _TAKE_PLACE = cells.arrange, reshard.take_place
IN_CELLS = replace(SHAPE, nodes=2, ranks=3, cell=2, rows=(60, 60, 41), epochs=6, lane_s=0.15)
IN_STAGES = replace(IN_CELLS, nodes=4, ranks=2, cell=4, stages=2)
"""Two cells; each stage consists of two workers of one node."""


def owner_before(self: Mesh) -> int:
    """Let the last of several cells compute the previous cell's lanes."""
    return min(self.replica, max(0, self.num_replicas - 2))


def arrange_crossed(
    members: tuple[Member, ...], shape: CellShape, last: World | None, most: int | None = None
) -> Arrangement:
    found = _ARRANGE(members, shape, last, most)
    if last is None:
        return found
    crossed = [cell if all(last.rank_of(one.id) is not None for one in cell) else cell[::-1] for cell in found.cells]
    return replace(found, cells=tuple(crossed))


def keep_part(state: AppliedState, mesh: Mesh, cell: Group | None, first: Callable[[], Weights]) -> bool:
    if state.shards.cut.place is not None:
        state.shards.cut.place = mesh.place
    return _TAKE_PLACE(state, mesh, cell, first)


def nothing_is_missing(table: Table, brought: Sequence[PeerState]) -> tuple[list[PeerState], int]:
    furthest = max(one.place for one in brought)
    parts = [table.cell.holder_of(rank)[0] for rank in range(len(brought))]
    there = {part for part, one in zip(parts, brought, strict=True) if one.place == furthest}
    pairs = zip(parts, brought, strict=True)
    return [one if part in there else replace(one, place=furthest) for part, one in pairs], 0


def arrange_without_a_stage(
    members: tuple[Member, ...], shape: CellShape, last: World | None, most: int | None = None
) -> Arrangement:
    found = _ARRANGE(members, shape, last, most)
    if last is None or not found.spares:
        return found
    num_left = len(found.spares) // shape.stage_size * shape.stage_size
    return replace(found, cells=(*found.cells, found.spares[:num_left]), spares=found.spares[num_left:])


def arrange_across_nodes(
    members: tuple[Member, ...], shape: CellShape, last: World | None, most: int | None = None
) -> Arrangement:
    found, at = _ARRANGE(members, shape, last, most), shape.size - shape.stage_size
    if len(found.cells) < 2:
        return found
    one, other = (list(cell) for cell in found.cells[:2])
    one[at], other[at] = other[at], one[at]
    return replace(found, cells=(tuple(one), tuple(other), *found.cells[2:]))


def kills_in_cells(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill any workers, one after another."""
    return tuple(
        SimFault("kill_worker", at_s=draws.uniform(6, 16), node=draws.randrange(2), rank=draws.randrange(3))
        for _ in range(4)
    )


def loses_a_place(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill the same worker on both nodes in short succession: often these hold the same parameter shard."""
    at_s, rank = draws.uniform(6, 12), draws.randrange(2)
    return tuple(
        SimFault("kill_worker", at_s=at_s + node * draws.uniform(0.0, 0.2), node=node, rank=rank) for node in (0, 1)
    )


IN_CELLS_PLANTED = (
    SimBug(
        "cells-share-a-lane",
        "the last of several cells computes the lanes of the one before it",
        lambda: {
            "elastic_train.core.mesh:Mesh.owner": property(owner_before),
            "elastic_train.training.loop:check_epoch": lambda *_: None,
        },
        ("partition",),
        kills_in_cells,
        IN_CELLS,
    ),
    SimBug(
        "neighbours-part",
        "a place that is filled keeps the part of the place that its rank had before",
        lambda: {
            "rendezvous.membership.rules.admission:arrange": arrange_crossed,
            "elastic_train.training.open_session:take_place": keep_part,
        },
        ("deaths",),
        kills_in_cells,
        IN_CELLS,
    ),
    SimBug(
        "part-not-missed",
        "a world continues a step of which every cell has lost the same part",
        lambda: {"elastic_train.world.restore:leave_out_unfinished": nothing_is_missing},
        ("agreement",),
        loses_a_place,
        replace(IN_CELLS, ranks=2),
    ),
    SimBug(
        "stage-is-missing",
        "a world is sealed with a cell that has lost its last stage",
        lambda: {"rendezvous.membership.rules.admission:arrange": arrange_without_a_stage},
        ("cells",),
        kills_in_cells,
        IN_STAGES,
    ),
    SimBug(
        "stage-across-nodes",
        "the ranks of a stage are of two nodes",
        lambda: {"rendezvous.membership.rules.admission:arrange": arrange_across_nodes},
        ("cells",),
        kills_in_cells,
        IN_STAGES,
    ),
)
