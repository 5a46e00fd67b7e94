"""Faults of the training data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.job.fault import SimFault
from chaos.sim.machine.kernel import Process
from chaos.sim.modelled.training_data import EVERYWHERE

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


def bad_row_group(job: Job, fault: SimFault) -> list[Process]:
    """A row group cannot be read, from one node or from all; for a while, or for good."""
    group = fault.other % len(job.shape.rows)
    node = EVERYWHERE if fault.node < 0 else job.node(fault)
    job.data.spoil(group, node)
    if fault.for_s:
        job.kernel.after(fault.for_s, lambda: job.data.mend(group, node))
    return job.all_workers() if node == EVERYWHERE else job.nodes[node].live_workers()


ACTS = (bad_row_group,)
