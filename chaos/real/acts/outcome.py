"""What an act leaves: what it hit, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.real.job import Job
    from chaos.scenario.schedule import Due
    from chaos.services.torchrun_node import Node

Undo = Callable[[], "list[int] | None"]
"""Undoes a fault and returns the processes that this started or ended; None if it has to be tried again."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was done: the processes and nodes that were hit, and what else is to be recorded of it."""

    pids: list[int]
    nodes: list[Node] = field(default_factory=list)
    signal: str | None = None
    undo: Undo | None = None
    told: dict[str, object] = field(default_factory=dict)


Act = Callable[["Job", "Due"], "Done | None"]


def targets(job: Job, fault: Due) -> list[Node]:
    """Return the nodes that a fault hits: by number, or by the role that they have now; none if nobody has it."""
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
