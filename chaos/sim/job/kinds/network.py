"""Faults between nodes: links that are cut one way or both, messages that are late, or lost and sent again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.job.fault import SimFault
from chaos.sim.machine.kernel import Process

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


def cut_link(job: Job, fault: SimFault, *, is_one_way: bool = False) -> list[Process]:
    """Two nodes do not reach each other."""
    a = job.node(fault)
    b = fault.other % len(job.nodes)
    for link in [(a, b)] if is_one_way else [(a, b), (b, a)]:
        job.net.cuts.add(link)
        job.kernel.after(fault.for_s, lambda link=link: job.net.cuts.discard(link))  # type: ignore[misc]
    return [*job.nodes[a].live_workers(), *(job.nodes[b].live_workers() if b != a else [])]


def cut_one_way(job: Job, fault: SimFault) -> list[Process]:
    return cut_link(job, fault, is_one_way=True)


def sever_link(job: Job, fault: SimFault) -> list[Process]:
    """Two nodes do not reach each other for longer than it takes to form worlds without one."""
    return cut_link(job, fault)


def slow_network(job: Job, fault: SimFault) -> list[Process]:
    """All that nodes send to one another takes a hundred times as long."""
    job.net.slow_until = job.kernel.now + fault.for_s
    return job.all_workers()


def lose_packets(job: Job, fault: SimFault) -> list[Process]:
    """One packet in three is lost between nodes, and sent again after ever longer pauses, as TCP does."""
    job.net.lossy_until = job.kernel.now + fault.for_s
    return job.all_workers()


ACTS = (cut_link, cut_one_way, sever_link, slow_network, lose_packets)
