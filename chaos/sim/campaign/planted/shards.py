"""Planted bugs in sharded state: wrong cuts, wrong senders, steps applied twice or lost, shards dropped too soon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from chaos.sim.campaign.planted import faults
from chaos.sim.campaign.planted.hunt import SHAPE, SimBug
from elastic_train.job.peer_states import PeerState, all_arcs_of, comes_to, leave_out_unfinished
from elastic_train.job.sharded.held_tree import Retained
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState, Pending, StepFacts
from elastic_train.job.state_shards import Place
from elastic_train.parallel.devices import squares
from elastic_train.placement.arcs import Arc
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Seating
from elastic_train.placement.table import Table

ONE, TWO = (replace(SHAPE, copies=copies) for copies in (1, 2))


def runs_off_by_one(self: Seating) -> list[list[Run]]:
    return [[Run(run.flat, run.lo + 1, run.hi) for run in runs] for runs in _OWNED_RUNS(self)]


def at_any_place(one: PeerState, furthest: Place) -> tuple[Arc, ...]:
    return all_arcs_of(one)


_TOTAL_NORM = squares.total_norm


_MEASURED: WeakKeyDictionary[Zero1Share, Tensor] = WeakKeyDictionary()


def measure_and_remember(self: Zero1Share) -> Tensor:
    _MEASURED[self] = found = _MEASURE(self)
    return found


def apply_and_hold(self: AppliedState, facts: StepFacts, norm: Tensor) -> None:
    _APPLY(self, facts, norm)
    if isinstance(self.shards.share, Zero1Share):
        self.pending = Pending(facts, _MEASURED.get(self.shards.share, torch.zeros(1, dtype=torch.float64)))


_OWNED_RUNS, _MEASURE, _APPLY = Seating.owned_runs, Zero1Share.measure, AppliedState.apply


def furthest_or_nothing(table: Table, brought: Sequence[PeerState]) -> tuple[list[PeerState], int]:
    furthest = max(one.place for one in brought)
    there = [one for one in brought if furthest in (one.place, comes_to(one))]
    _, num_lost = leave_out_unfinished(table, there)
    nothing = [replace(one, place=Place(0, 0), seat=None, pending=0) for one in brought]
    return (nothing, num_lost) if num_lost else (list(brought), 0)


SHARDS = (
    SimBug(
        "run-off-by-one",
        "where shards begin, the sum over the lanes lacks an element",
        lambda: {"elastic_train.placement.seating:Seating.owned_runs": runs_off_by_one},
        ("hash", "weights"),
        faults.kills,
        ONE,
    ),
    SimBug(
        "given-at-any-step",
        "a rank that is behind brings its shards as if they were the furthest step's: ranks find that weights differ",
        lambda: {"elastic_train.job.reshard:_arcs_at": at_any_place},
        ("deaths",),
        faults.wakes,
        replace(TWO, epochs=12),
    ),
    SimBug(
        "given-by-a-dead-branch",
        "shards count whose lineage others have not continued, and have published",
        lambda: {"elastic_train.world.restore:_is_of": lambda published, state: True},
        ("durability", "heads"),
        faults.gives_up_its_branch,
        replace(SHAPE, nodes=2, commit_every=4, copies=2),
    ),
    SimBug(
        "applied-and-pending",
        "a step that was applied stays pending, and is made again in the next world",
        lambda: {
            "elastic_train.job.sharded.zero1_share:Zero1Share.measure": measure_and_remember,
            "elastic_train.job.state:AppliedState.apply": apply_and_hold,
        },
        ("coverage", "witness", "hash", "partition", "agreement"),
        faults.kills,
        TWO,
    ),
    SimBug(
        "norm-of-other-grains",
        "the norm by which gradients are clipped lacks a grain",
        lambda: {"elastic_train.job.state:total_norm": lambda squares: _TOTAL_NORM(squares[1:])},
        ("hash", "weights"),
        faults.kills,
        TWO,
    ),
    SimBug(
        "pending-dropped",
        "a pending step is dropped although a rank that is gone may have applied it",
        lambda: {"elastic_train.job.peer_states:_all_left": lambda *_: []},
        ("rpo",),
        faults.dies_ahead,
        TWO,
    ),
    SimBug(
        "seated-too-soon",
        "who has given shards away drops them before the taker is known to have its seat",
        lambda: {"elastic_train.job.reshard:Retained": lambda *_: Retained()},
        ("copies",),
        faults.breaks_while_seated,
        replace(TWO, nodes=4, epochs=4),
    ),
    SimBug(
        "follows-a-part",
        "a rank that was away is followed, although its peers' shares of what it holds are lost",
        lambda: {"elastic_train.world.restore:leave_out_unfinished": furthest_or_nothing},
        ("copies",),
        "away-while-shares-were-lost",
    ),
    SimBug(
        "charged-for-others",
        "a node pays for workers that begin again because others have taken shares along",
        lambda: {"rendezvous.torchelastic.live_agent:STATE_LOST_CODE": 0},
        ("deaths",),
        faults.kills_on_one_node,
        replace(ONE, commit_every=100, lane_s=0.8, max_restarts=2),
    ),
)
