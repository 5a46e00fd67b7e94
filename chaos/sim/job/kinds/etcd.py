"""Faults of etcd: unreachable, slow, partly or fully down, data loss, broken leases and watches."""

from __future__ import annotations

from chaos.scenario.kinds import ALIEN_RECORDS
from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.job.kinds.machines import kill_job
from chaos.sim.job.live_node import RUN_ID
from chaos.sim.machine.etcd import REFUSALS
from chaos.sim.machine.kernel import Process
from rendezvous.membership.records import Keys
from rendezvous.membership.store import Put


def cut_off_etcd(fleet: Fleet, fault: SimFault, *, ways: str = "both") -> list[Process]:
    """Drop a node's requests to etcd, the answers, or both."""
    number, etcd = fleet.node(fault), fleet.around.etcd
    for place in [place for name, place in (("out", etcd.deaf), ("in", etcd.mute)) if ways in (name, "both")]:
        place.add(number)
        fleet.kernel.after(fault.for_s, lambda place=place: place.discard(number))  # type: ignore[misc]
    return [*fleet.nodes[number].live_workers(), *(fleet.nodes[number].live_agent() if fleet.restarts else [])]


def lose_requests(fleet: Fleet, fault: SimFault) -> list[Process]:
    return cut_off_etcd(fleet, fault, ways="out")


def lose_answers(fleet: Fleet, fault: SimFault) -> list[Process]:
    return cut_off_etcd(fleet, fault, ways="in")


def slow_etcd(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Slow etcd down a hundredfold, often beyond a call's deadline."""
    fleet.around.etcd.slow_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


def etcd_outage(fleet: Fleet, fault: SimFault) -> list[Process]:
    fleet.around.etcd.outage(fault.for_s)
    return fleet.all_workers()


def kill_etcd_leader(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Let no member of etcd answer during an election; the new leader renews all leases."""
    fleet.around.etcd.outage(min(fault.for_s, 2.0))
    return fleet.all_workers()


def kill_etcd_member(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Remove one of three members: its clients lose answers and watches, and move to another."""
    fleet.around.etcd.lose_member(fault.other % 3, min(fault.for_s, 2.0))
    return fleet.all_workers()


def lose_etcd_data(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart etcd without its data under a running job; every other time the job restarts as well."""
    if fleet.around.storage.private:
        return []  # nothing but etcd says which store is the job's
    hit = kill_job(fleet, fault) if fault.other % 2 else fleet.all_workers()
    fleet.around.etcd.forget()
    fleet.around.etcd.outage(fault.for_s)
    return hit


def etcd_refuses(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Let etcd raise an alarm or reject the job's user, until its operator has fixed that."""
    fleet.around.etcd.refuse(REFUSALS[_drawn(fault, len(REFUSALS))], fault.for_s)
    return fleet.all_workers()


def alien_record(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Write an invalid record, or a member record in a newer format, below the job's prefix."""
    key, text = ALIEN_RECORDS[_drawn(fault, len(ALIEN_RECORDS))]
    fleet.around.etcd.core.swap({Keys(RUN_ID).prefix + key: Put(text)}, {})
    fleet.around.etcd.notify()
    return fleet.all_workers()


def _drawn(fault: SimFault, count: int) -> int:
    """Choose one of several, derived from values already drawn for the fault."""
    return round(fault.at_s * 1000 + fault.for_s * 1000) % count


def lose_lease(fleet: Fleet, fault: SimFault) -> list[Process]:
    """End a lease that its holder has renewed in time."""
    hit = fleet.member(fault)
    for lease in [lease for lease in fleet.around.etcd.leases if lease.process in hit]:
        fleet.around.etcd.end(lease)
    return hit


def break_watch(fleet: Fleet, fault: SimFault) -> list[Process]:
    hit = fleet.member(fault)
    for watch in fleet.around.etcd.watches:
        if watch.process in hit:
            watch.fall_silent()
    return hit


ACTS = (
    *(cut_off_etcd, lose_requests, lose_answers, slow_etcd, etcd_outage, kill_etcd_leader, kill_etcd_member),
    *(lose_etcd_data, lose_lease, break_watch, etcd_refuses, alien_record),
)
