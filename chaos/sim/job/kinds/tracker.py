"""Faults of the tracker."""

from __future__ import annotations

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process


def tracker_outage(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Take the tracker down; requests sent meanwhile may still be executed, at once or late."""
    if fleet.around.tracking is None:
        return []
    fleet.around.tracking.server.down_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


ACTS = (tracker_outage,)
