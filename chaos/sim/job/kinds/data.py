"""Faults of the training data."""

from __future__ import annotations

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process
from chaos.sim.modelled.training_data import EVERYWHERE


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


ACTS = (bad_row_group,)
