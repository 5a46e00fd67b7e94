"""Resolve a fault's target: by number, or by current role."""

from __future__ import annotations

from chaos.real.acts.job_view import JobView
from chaos.scenario.schedule import Due
from chaos.services.torchrun_node import Node


def targets(job: JobView, fault: Due) -> list[Node]:
    """Return the nodes that a fault hits: by number, or by current role; none if no node has it."""
    up = [node for node in job.nodes if node.is_up]
    if isinstance(fault.target, int):
        return [job.nodes[fault.target]]
    in_need = ("leader", "writer", "other")
    leader = next((n for n in up if fault.target in in_need and job.followed.pids.get(0) in n.pids()), None)
    if fault.target in ("leader", "writer"):
        return [leader] if leader else []
    if fault.target == "other":
        others = [node for node in reversed(up) if node is not leader]
        return others[:1] if leader else []
    if fault.target == "lost":
        return job.lost[:1]
    sizes = {"one": 1, "minority": max(1, (len(up) - 1) // 2), "majority": len(up) // 2 + 1}
    return sorted(
        job.draws.sample(up, min(len(up), sizes.get(str(fault.target), len(up)))), key=lambda node: node.number
    )
