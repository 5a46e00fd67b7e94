"""Planted bugs that show only with sharded weights: stale shards, copies that are not compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from chaos.sim.campaign.planted import faults
from chaos.sim.campaign.planted.hunt import SHAPE, SimBug
from chaos.sim.campaign.planted.shards import at_any_place
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import Pieces, Span
from elastic_train.job import reshard
from elastic_train.job.sharded.held_tree import HeldRun
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.sharded.zero3_share import Zero3Share
from elastic_train.parallel.group import Group
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Recut
from elastic_train.placement.table import Table

PARAMETERS = replace(SHAPE, copies=2, shards="parameters")

_GATHERING, _MOVE, _HELD_WEIGHTS = Zero3Share.gathering, reshard._move, Zero3Share.held_weights
_FIRST: WeakKeyDictionary[Zero3Share, dict[Run, Tensor]] = WeakKeyDictionary()
_LAST: WeakKeyDictionary[Zero3Share, dict[tuple[str, Span], Tensor]] = WeakKeyDictionary()


def gather_from_first_memory(self: Zero3Share, column: Group) -> UnitWeights | None:
    known = _FIRST.setdefault(self, {})
    for one in self.runs:
        known.setdefault(one.run, one.weights)
    units = _GATHERING(self, column)
    if units is not None:
        units._held = known.__getitem__
    return units


def move_all_but_a_joiners_weights(
    group: Group,
    shards: Zero1Share,
    table: Table,
    plan: Recut,
    runs: Sequence[HeldRun],
    old: Sequence[HeldRun],
) -> list[tuple[Tensor, Tensor]]:
    first = [one.weights.clone() for one in runs]
    arrived = _MOVE(group, shards, table, plan, runs, old)
    for one, weights in zip(runs, first, strict=True) if not shards.table.is_held else ():
        one.weights.copy_(weights)
    return arrived


def weights_of_the_last_commit(self: Zero3Share) -> State:
    found, known = _HELD_WEIGHTS(self), _LAST.get(self, {})
    now = {
        (name, span): tensor.clone()
        for name, pieces in found.items()
        if isinstance(pieces, Pieces)
        for span, tensor in pieces.held.items()
    }
    _LAST[self] = now
    stale = now | {place: tensor for place, tensor in known.items() if place in now}
    return {
        name: replace(pieces, held={span: stale[name, span] for span in pieces.held})
        if isinstance(pieces, Pieces)
        else pieces
        for name, pieces in found.items()
    }


SHARED_WEIGHTS = (
    SimBug(
        "gathers-an-old-share",
        "a rank that holds a share again gives others the weights that it had before",
        lambda: {"elastic_train.job.sharded.zero3_share:Zero3Share.gathering": gather_from_first_memory},
        ("hash", "weights"),
        faults.kills,
        PARAMETERS,
    ),
    SimBug(
        "joins-with-first-weights",
        "who joins keeps the weights that it began with, and ranks do not compare the copies of a share",
        lambda: {
            "elastic_train.job.reshard:_move": move_all_but_a_joiners_weights,
            "elastic_train.training.commits:check_same_weights": lambda *_: None,
        },
        ("hash", "weights"),
        faults.kills,
        PARAMETERS,
    ),
    SimBug(
        "joins-and-is-found-out",
        "who joins keeps the weights that it began with: holders of a share find that theirs differ",
        lambda: {"elastic_train.job.reshard:_move": move_all_but_a_joiners_weights},
        ("deaths",),
        faults.kills,
        PARAMETERS,
    ),
    SimBug(
        "weights-of-another-step",
        "a commit has the moments of its step, and the weights of the commit before",
        lambda: {"elastic_train.job.sharded.zero3_share:Zero3Share.held_weights": weights_of_the_last_commit},
        ("hash", "weights"),
        faults.kills,
        PARAMETERS,
    ),
    SimBug(
        "copies-unseen",
        "a rank that is behind brings its shares as if they were the furthest step's, and nobody compares copies",
        lambda: {
            "elastic_train.job.reshard:_arcs_at": at_any_place,
            "elastic_train.training.commits:check_same_weights": lambda *_: None,
        },
        ("hash", "weights"),
        faults.wakes,
        replace(PARAMETERS, epochs=12),
    ),
)
