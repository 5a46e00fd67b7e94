"""Faults of etcd: cut off from a node, slow, away in part or whole, without its data; leases and watches that break."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.job.fault import SimFault
from chaos.sim.job.kinds.machines import kill_job
from chaos.sim.machine.kernel import Process

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


def cut_off_etcd(job: Job, fault: SimFault, *, ways: str = "both") -> list[Process]:
    """A node's requests do not reach etcd, or the answers do not come back, or neither."""
    number, etcd = job.node(fault), job.etcd
    for place in [place for name, place in (("out", etcd.deaf), ("in", etcd.mute)) if ways in (name, "both")]:
        place.add(number)
        job.kernel.after(fault.for_s, lambda place=place: place.discard(number))  # type: ignore[misc]
    return [*job.nodes[number].live_workers(), *(job.nodes[number].live_agent() if job.restarts else [])]


def lose_requests(job: Job, fault: SimFault) -> list[Process]:
    return cut_off_etcd(job, fault, ways="out")


def lose_answers(job: Job, fault: SimFault) -> list[Process]:
    return cut_off_etcd(job, fault, ways="in")


def slow_etcd(job: Job, fault: SimFault) -> list[Process]:
    """Etcd takes a hundred times as long, often longer than a call's deadline."""
    job.etcd.slow_until = job.kernel.now + fault.for_s
    return job.all_workers()


def etcd_outage(job: Job, fault: SimFault) -> list[Process]:
    job.etcd.outage(fault.for_s)
    return job.all_workers()


def kill_etcd_leader(job: Job, fault: SimFault) -> list[Process]:
    """No member of etcd answers during an election; leases are all renewed by the new leader."""
    job.etcd.outage(min(fault.for_s, 2.0))
    return job.all_workers()


def kill_etcd_member(job: Job, fault: SimFault) -> list[Process]:
    """One member of three is gone: its clients lose answers and watches, and go to another."""
    job.etcd.lose_member(fault.other % 3, min(fault.for_s, 2.0))
    return job.all_workers()


def lose_etcd_data(job: Job, fault: SimFault) -> list[Process]:
    """Etcd comes back without its data under a job that goes on, or, every other time, that starts again, too."""
    hit = kill_job(job, fault) if fault.other % 2 else job.all_workers()
    job.etcd.forget()
    job.etcd.outage(fault.for_s)
    return hit


def lose_lease(job: Job, fault: SimFault) -> list[Process]:
    """Etcd ends a lease that its holder has renewed in time."""
    hit = job.member(fault)
    for lease in [lease for lease in job.etcd.leases if lease.process in hit]:
        job.etcd.end(lease)
    return hit


def break_watch(job: Job, fault: SimFault) -> list[Process]:
    hit = job.member(fault)
    for watch in job.etcd.watches:
        if watch.process in hit:
            watch.fall_silent()
    return hit


ACTS = (
    *(cut_off_etcd, lose_requests, lose_answers, slow_etcd, etcd_outage, kill_etcd_leader, kill_etcd_member),
    *(lose_etcd_data, lose_lease, break_watch),
)
