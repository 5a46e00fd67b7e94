"""Faults that a worker does not notice: a flipped bit in a weight, a loss that is not finite."""

from __future__ import annotations

import torch

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process
from chaos.sim.modelled.state import ModelledState
from elastic_train.job.state import AppliedState


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


ACTS = (flip_memory, nan_loss)
