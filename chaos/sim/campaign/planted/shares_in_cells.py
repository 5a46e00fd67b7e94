"""Planted bugs of sharded moments within cells: a neighbour's shard, a diverging column, a missed loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from chaos.sim.campaign.planted.cells import IN_CELLS
from chaos.sim.campaign.planted.hunt import SimBug
from chaos.sim.job.fault import SimFault
from elastic_train.checkpoint.format.layout import State
from elastic_train.job import peer_states
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.peer_states import PeerState, comes_to
from elastic_train.job.sharded import held_tree
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.placement.table import Table

_FILLED, _ROLL_FORWARD, _NUM_MISSING = held_tree.filled_parts, peer_states.roll_forward, peer_states._num_missing
IN_SHARES = replace(IN_CELLS, nodes=3, ranks=2, copies=2)
"""Three cells; the moments of each parameter shard are held twice."""


def filled_from_the_neighbour(tree: State, fill: Callable[[State], None], cuts: Mapping[str, Cut], place: int) -> State:
    crossed = {name: replace(one, spans=(*one.spans[1:], one.spans[0])) for name, one in cuts.items()}
    alike = {name for name, one in crossed.items() if one.part_shape(place) == cuts[name].part_shape(place)}
    return _FILLED(tree, fill, {name: (crossed if name in alike else cuts)[name] for name in cuts}, place)


def rolled_forward_by_column(group: Group, state: AppliedState, brought: Sequence[PeerState]) -> Sequence[PeerState]:
    cell, furthest = state.shards.table.cell, max(one.place for one in brought)
    late = [rank for rank, one in enumerate(brought) if one.pending and comes_to(one) == furthest]
    if not late:
        return _ROLL_FORWARD(group, state, brought)
    ahead = [rank for rank, one in enumerate(brought) if one.place == furthest]
    parts = {cell.holder_of(rank)[0] for rank in ahead}
    near = [rank for rank in late if cell.holder_of(rank)[0] in parts]
    norm = torch.tensor(brought[ahead[0]].norm, dtype=torch.float64)
    return peer_states._apply(group, state, brought, near, norm, furthest)


def missing_in_the_first_group(table: Table, brought: Sequence[PeerState], place: Place) -> int:
    first = [
        one if one.seat is None or one.seat.group == 0 else replace(one, seat=None, retained=()) for one in brought
    ]
    return _NUM_MISSING(table, first, place)


def kills_of_everybody(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill all nodes once or twice, some time after a commit."""
    return tuple(SimFault("kill_job", at_s=at_s, for_s=1.0) for at_s in (draws.uniform(7, 12), draws.uniform(16, 24)))


def dies_half_way(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill ranks while a step's norm arrives, so that some have applied the step and others still hold it."""
    return tuple(
        SimFault("kill", point=draws.choice(("exchange", "apply", "applied")), nth=draws.randint(20, 160))
        for _ in range(3)
    )


def kills_one_by_one(draws: random.Random) -> tuple[SimFault, ...]:
    """Kill any workers, some seconds apart."""
    return tuple(
        SimFault(
            "kill_worker", at_s=7 + 8 * turn + draws.uniform(0, 4), node=draws.randrange(3), rank=draws.randrange(2)
        )
        for turn in range(3)
    )


SHARES_IN_CELLS = (
    SimBug(
        "neighbours-share",
        "a column reads its share of a commit from the part of the neighbour place",
        lambda: {"elastic_train.job.sharded.zero1_share:filled_parts": filled_from_the_neighbour},
        ("hash", "weights"),
        kills_of_everybody,
        IN_SHARES,
    ),
    SimBug(
        "column-behind",
        "a column drops a pending step that others have applied, and comes to another step than they",
        lambda: {"elastic_train.world.restore:roll_forward": rolled_forward_by_column},
        ("agreement", "deaths"),
        dies_half_way,
        IN_SHARES,
    ),
    SimBug(
        "copy-not-counted",
        "a share counts as lost, and steps are rolled back, although a copy of it lives",
        lambda: {"elastic_train.job.peer_states:_num_missing": missing_in_the_first_group},
        ("copies",),
        kills_one_by_one,
        IN_SHARES,
    ),
)
