"""Faults of the network: between nodes and etcd by proxies, between nodes by the cable to a namespace; a tracker."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos.real.acts.effects import Effect, counted, unreachable, while_last
from chaos.real.acts.job_view import JobView, Struck, targets
from chaos.services.network.namespace import Cable

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.etcd_proxy import Way
    from chaos.services.torchrun_node import Node


def tracker_outage(job: JobView, fault: Due) -> Struck | None:
    """Kill the server, which then refuses, or freeze it, so that it does not answer; drawn at random."""
    server = job.around.tracker
    assert server is not None, "the scenario has one, since the kind needs it"
    if not server.is_answering:
        return None
    is_killed = job.draws.random() < 0.5
    pids = server.kill() if is_killed else server.freeze()
    started: list[int] = []

    def bring_back() -> list[int] | None:
        if not started:
            started.extend(server.begin() if is_killed else server.thaw())
        return started if server.is_answering else None

    return Struck(pids, signal="SIGKILL" if is_killed else "SIGSTOP", undo=bring_back)


_LATE_S = 0.3
_SLOW_S = 0.01
"""Delay per direction: many times the normal latency here, but never mistaken for a cut."""
_LOST = 0.2
_TRIES = 5
"""Most tries of an address before a fault: a cable that was just connected may drop a packet."""


def _hold(way: Way, *, requests: bool = False, answers: bool = False, delay_s: float = 0.0) -> None:
    way.requests_are_held, way.answers_are_held, way.delay_s = requests, answers, delay_s
    way.num_faults += 1


def cut_off_etcd(job: JobView, fault: Due) -> Struck | None:
    return _to_etcd(job, fault, lambda way: _hold(way, requests=True, answers=True))


def lose_requests(job: JobView, fault: Due) -> Struck | None:
    return _to_etcd(job, fault, lambda way: _hold(way, requests=True))


def lose_answers(job: JobView, fault: Due) -> Struck | None:
    return _to_etcd(job, fault, lambda way: _hold(way, answers=True))


def slow_etcd(job: JobView, fault: Due) -> Struck | None:
    return _to_etcd(job, fault, lambda way: _hold(way, delay_s=_LATE_S))


def _to_etcd(job: JobView, fault: Due, spoil: Callable[[Way], None]) -> Struck | None:
    assert job.around.proxies is not None, "the scenario's kinds have asked for it"
    nodes, proxies = targets(job, fault), job.around.proxies
    if not nodes:
        return None
    pids = _pids(nodes)
    for node in nodes:
        spoil(proxies.ways[node.number])

    mine = {node.number: proxies.ways[node.number].num_faults for node in nodes}

    def heal() -> list[int]:
        for number, fault_number in mine.items():
            if proxies.ways[number].num_faults == fault_number:  # else a later fault has replaced this one
                _hold(proxies.ways[number])
        return _pids(nodes)

    held = counted("chunks to or from etcd were held", lambda: sum(proxies.ways[number].num_held for number in mine))
    is_last = lambda: all(proxies.ways[number].num_faults == last for number, last in mine.items())  # noqa: E731
    return Struck(pids, nodes, undo=heal, effect=while_last(is_last, held))


def cut_node(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, Cable.pull, lambda laid: newly(_without(laid, "nodes"), _without(laid, "etcd")))


def cut_link(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, Cable.part)


def cut_one_way(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, Cable.silence)


def refuse_address(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, Cable.refuse)


def slow_network(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, lambda laid: laid.worsen(delay_s=_LATE_S), _counting("packets were late"))


def slow_link(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, lambda laid: laid.worsen(delay_s=_SLOW_S), _counting("packets were late"))


def lose_packets(job: JobView, fault: Due) -> Struck | None:
    return _cut(job, lambda laid: laid.worsen(loss=_LOST), _counting("packets were lost"))


def hosts_file(job: JobView, fault: Due) -> Struck | None:
    """Rename the last node's machine; the next world of its processes sees the new name."""
    laid, node = job.around.cable, job.nodes[-1]
    assert laid is not None, "the scenario's kinds have asked for it"
    if not node.is_up or laid.is_misnamed:
        return None
    before = own_addresses(node.agent)
    laid.misname()

    def name_again() -> list[int]:
        laid.name_as_outside()
        return node.pids()

    def look() -> str | None:
        now = own_addresses(node.agent)
        is_misled = now != before and all(address.startswith("127.") for address in now)
        return (
            f"there {socket.gethostname()} is {' '.join(now)}, and not {' '.join(before)}"
            if is_misled and now
            else None
        )

    return Struck(node.pids(), [node], undo=name_again, effect=look)


def own_addresses(pid: int | None) -> list[str]:
    """Return the addresses of the machine's name as a process resolves it, in its mounts and network."""
    inside = ("nsenter", f"--target={pid}", "--mount", "--net", "getent", "ahostsv4", socket.gethostname())
    found = subprocess.run(inside, capture_output=True, text=True, check=False)
    return sorted({line.split()[0] for line in found.stdout.splitlines()})


def _counting(what: str) -> Callable[[Cable], Effect]:
    """Count packets that the relay delayed or lost; outside faults it handles none."""

    def count(laid: Cable) -> Effect:
        assert laid.relay is not None, "the scenario's kinds have asked for it"
        relay = laid.relay
        return counted(what, lambda: relay.num_lost if "lost" in what else relay.num_passed)

    return count


def _silent(laid: Cable) -> Effect:
    """Return an effect: the node inside does not answer from outside."""
    return unreachable(laid.address("inside"))


def _without(laid: Cable, whose: str) -> Effect:
    """Return an effect: an address does not answer the node inside, whose only route is its cable."""
    address = laid.address(whose)
    return lambda: None if laid.answers_inside(whose) else f"{address} ({whose}) does not answer the node"


def newly(*looks: Effect) -> Effect:
    """Combine effects that were all absent just before the fault; the proof needs each of them."""
    is_new = all(any(look() is None for _ in range(_TRIES)) for look in looks)

    def see() -> str | None:
        seen = [proof for look in looks if (proof := look()) is not None] if is_new else []
        return "; ".join(seen) if seen and len(seen) == len(looks) else None

    return see


def _cut(
    job: JobView,
    spoil: Callable[[Cable], None],
    watch: Callable[[Cable], Effect] = lambda laid: newly(_silent(laid)),
) -> Struck | None:
    """Disturb the only cable, the last node's; either side may be left out. A later fault replaces this one."""
    laid = job.around.cable
    assert laid is not None, "the scenario's kinds have asked for it"
    if not job.nodes[-1].is_up:
        return None
    laid.mend()
    effect = watch(laid)
    spoil(laid)
    job.around.num_cut += 1
    mine = job.around.num_cut

    def mend() -> list[int]:
        if job.around.num_cut == mine:
            laid.mend()
        return _pids(job.nodes)

    seen = while_last(lambda: job.around.num_cut == mine, effect)
    return Struck(_pids(job.nodes), [job.nodes[-1]], undo=mend, effect=seen)


def _pids(nodes: list[Node]) -> list[int]:
    return [pid for node in nodes for pid in node.pids()]
