"""Faults between nodes: links cut one way or both, messages delayed or lost and retransmitted."""

from __future__ import annotations

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.machine.kernel import Process


def cut_link(fleet: Fleet, fault: SimFault, *, is_one_way: bool = False) -> list[Process]:
    """Cut the link between two nodes."""
    a = fleet.node(fault)
    b = fault.other % len(fleet.nodes)
    for link in [(a, b)] if is_one_way else [(a, b), (b, a)]:
        fleet.around.net.cuts.add(link)
        fleet.kernel.after(fault.for_s, lambda link=link: fleet.around.net.cuts.discard(link))  # type: ignore[misc]
    return [*fleet.nodes[a].live_workers(), *(fleet.nodes[b].live_workers() if b != a else [])]


def cut_one_way(fleet: Fleet, fault: SimFault) -> list[Process]:
    return cut_link(fleet, fault, is_one_way=True)


def sever_link(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Cut a link for longer than it takes to form worlds without one of its nodes."""
    return cut_link(fleet, fault)


def refuse_address(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Let a node and all others refuse each other's connections, as a rejecting firewall."""
    return _mislead(fleet, fault, fleet.around.net.refusing)


def same_address(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Give a node an address that every machine has, such as a bridge's: whoever uses it reaches itself."""
    return _mislead(fleet, fault, fleet.around.net.shared)


def _mislead(fleet: Fleet, fault: SimFault, misled: set[int]) -> list[Process]:
    number = fleet.node(fault)
    misled.add(number)
    fleet.kernel.after(fault.for_s, lambda: misled.discard(number))
    return fleet.nodes[number].live_workers()


def block_ports(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Block connections between workers, but not between agents; open connections are cut."""
    fleet.around.net.blocked_until = fleet.kernel.now + fault.for_s
    hit = fleet.all_workers()
    for process in hit:
        fleet.kernel.kill(process)
    return hit


def slow_network(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Slow all messages between nodes down a hundredfold."""
    fleet.around.net.slow_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


def lose_packets(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Lose one packet in three; retransmit with growing pauses, as TCP does."""
    fleet.around.net.lossy_until = fleet.kernel.now + fault.for_s
    return fleet.all_workers()


ACTS = (cut_link, cut_one_way, sever_link, refuse_address, same_address, block_ports, slow_network, lose_packets)
