"""Faults between nodes: links that are cut one way or both, messages that are late, or lost and sent again."""

from __future__ import annotations

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process


def cut_link(fleet: Fleet, fault: SimFault, *, is_one_way: bool = False) -> list[Process]:
    """Two nodes do not reach each other."""
    a = fleet.node(fault)
    b = fault.other % len(fleet.nodes)
    for link in [(a, b)] if is_one_way else [(a, b), (b, a)]:
        fleet.around.net.cuts.add(link)
        fleet.kernel.after(fault.for_s, lambda link=link: fleet.around.net.cuts.discard(link))  # type: ignore[misc]
    return [*fleet.nodes[a].live_workers(), *(fleet.nodes[b].live_workers() if b != a else [])]


def cut_one_way(fleet: Fleet, fault: SimFault) -> list[Process]:
    return cut_link(fleet, fault, is_one_way=True)


def sever_link(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Two nodes do not reach each other for longer than it takes to form worlds without one."""
    return cut_link(fleet, fault)


def refuse_address(fleet: Fleet, fault: SimFault) -> list[Process]:
    """A node and all others refuse each other's connections, as a firewall does that rejects."""
    return _mislead(fleet, fault, fleet.around.net.refusing)


def same_address(fleet: Fleet, fault: SimFault) -> list[Process]:
    """A node is given an address that every machine has, as a bridge's: whoever uses it meets himself."""
    return _mislead(fleet, fault, fleet.around.net.shared)


def _mislead(fleet: Fleet, fault: SimFault, misled: set[int]) -> list[Process]:
    number = fleet.node(fault)
    misled.add(number)
    fleet.kernel.after(fault.for_s, lambda: misled.discard(number))
    return fleet.nodes[number].live_workers()


def block_ports(fleet: Fleet, fault: SimFault) -> list[Process]:
    """A firewall lets agents answer, and no connection between workers through; those that stand are cut."""
    fleet.around.net.blocked_until = fleet.kernel.now + fault.for_s
    hit = fleet.all_workers()
    for process in hit:
        fleet.kernel.kill(process)
    return hit


def slow_network(fleet: Fleet, fault: SimFault) -> list[Process]:
    """All that nodes send to one another takes a hundred times as long."""
    fleet.around.net.slow_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


def lose_packets(fleet: Fleet, fault: SimFault) -> list[Process]:
    """One packet in three is lost between nodes, and sent again after ever longer pauses, as TCP does."""
    fleet.around.net.lossy_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


ACTS = (cut_link, cut_one_way, sever_link, refuse_address, same_address, block_ports, slow_network, lose_packets)
