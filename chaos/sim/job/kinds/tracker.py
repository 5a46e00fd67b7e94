"""Faults of the tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.job.fault import SimFault
from chaos.sim.machine.kernel import Process

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


def tracker_outage(job: Job, fault: SimFault) -> list[Process]:
    """The tracker answers nobody; what it is asked meanwhile may still be done, at once or late."""
    if job.tracking is None:
        return []
    job.tracking.server.down_until = job.kernel.now + fault.for_s
    return job.all_workers()


ACTS = (tracker_outage,)
