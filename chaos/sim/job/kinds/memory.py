"""Faults of what a worker computes with, or tells: unreadable data, a flipped weight, a loss of NaN, a lost tracker."""

from __future__ import annotations

import torch

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process
from chaos.sim.modelled.state import ModelledState
from chaos.sim.modelled.training_data import EVERYWHERE
from elastic_train.job.state import AppliedState


def tracker_outage(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Take the tracker down; requests sent meanwhile may still be executed, at once or late."""
    if fleet.around.tracking is None:
        return []
    fleet.around.tracking.server.down_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


def bad_row_group(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Make a row group unreadable, from one node or all; for a while, or for good."""
    group = fault.other % len(fleet.shape.rows)
    node = EVERYWHERE if fault.node < 0 else fleet.node(fault)
    hit = fleet.all_workers() if node == EVERYWHERE else fleet.nodes[node].live_workers()
    if not hit:
        return []
    fleet.around.data.spoil(group, node)
    if fault.for_s:
        fleet.kernel.after(fault.for_s, lambda: fleet.around.data.mend(group, node))
    return hit


def flip_memory(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Flip a bit of a weight on one worker; before the next commit the others detect it, and all end.

    Detection needs another holder of the same weight. A value with one holder is correct by definition, and with
    sharded weights a rank may hold them during a step only.
    """
    if fleet.shape.copies == 1 or (fleet.shape.copies and fleet.shape.shards == "parameters"):
        return []
    if fleet.shape.cell > 1 and fleet.shape.cells_of(len(node.live_workers()) for node in fleet.nodes) < 2:
        return []
    everybody = fleet.all_workers()
    states = [fleet.worker_of(process).state for process in fleet.worker(fault)]
    if len(everybody) < 2 or not states or states[0] is None:
        return []
    _flip(states[0], fault.other)
    return everybody


def _flip(state: ModelledState | AppliedState, bit: int) -> None:
    if isinstance(state, ModelledState):
        state.model.words[0] ^= 1 << bit % 32
        return
    first = next(one for one in state.model.parameters() if one.numel())  # some may be empty
    weights = first.data.view(torch.int32)
    weights.view(-1)[bit % weights.numel()] ^= 1


def nan_loss(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Make the loss of one worker's next lane NaN, as a kernel that fails once."""
    hit = fleet.worker(fault)
    for process in hit:
        fleet.worker_of(process).is_loss_spoilt = True
    return hit


ACTS = (bad_row_group, flip_memory, nan_loss, tracker_outage)
