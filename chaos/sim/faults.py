"""What goes wrong, when and where: drawn from a seed, written as YAML, done to a running job.

Each seed draws first which kinds exist in its run at all, then how many of them (swarm testing: Groce, Zhang, Eide,
Chen, Regehr: Swarm Testing, ISSTA 2012): a run with three kinds of fault goes to places where one with all never does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chaos.sim.kernel import Process
from elastic_train.failpoints import POINTS

if TYPE_CHECKING:
    from chaos.sim.job import Job
    from chaos.sim.shape import Shape

REACHED = tuple(point for point in POINTS if point not in ("data", "forward", "backward", "validate"))
"""The failpoints that the modelled step comes by."""


@dataclass(frozen=True, slots=True)
class SimFault:
    """One fault: what, when (seconds, or the n-th time that anybody comes to a failpoint), where, and for how long."""

    kind: str
    at_s: float = 0.0
    point: str = ""
    nth: int = 0
    node: int = 0
    """The node, counted from 0; -1: that of the leader, whoever it is then."""
    rank: int = 0
    """The worker of that node."""
    other: int = 0
    """The other end of a cut."""
    for_s: float = 0.0


def kill_worker(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    for process in hit:
        job.kernel.kill(process)
    return hit


def kill_node(job: Job, fault: SimFault) -> list[Process]:
    """Agent and workers at once; it is started again after a while."""
    return job.kill_node(job.node(fault), fault.for_s)


def lose_node(job: Job, fault: SimFault) -> list[Process]:
    """The machine is gone, and says nothing: connections stay open, ports do not refuse."""
    number = job.node(fault)
    job.net.silent.add(number)
    return job.kill_node(number, fault.for_s)


def kill_job(job: Job, fault: SimFault) -> list[Process]:
    return [process for number in range(len(job.nodes)) for process in job.kill_node(number, fault.for_s)]


def stop_node(job: Job, fault: SimFault) -> list[Process]:
    """SIGTERM to all workers of a node; it is started again after a while."""
    return job.stop_node(job.node(fault), fault.for_s)


def freeze_worker(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    job.freeze(hit, fault.for_s)
    return hit


def freeze_node(job: Job, fault: SimFault) -> list[Process]:
    hit = job.nodes[job.node(fault)].live_workers()
    job.freeze([*hit, *job.nodes[job.node(fault)].live_agent()], fault.for_s)
    return hit


def slow_worker(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    for process in hit:
        process.slowness = 10.0
        job.kernel.after(fault.for_s, lambda process=process: setattr(process, "slowness", 1.0))  # type: ignore[misc]
    return hit


def cut_off_etcd(job: Job, fault: SimFault, *, ways: str = "both") -> list[Process]:
    """A node's requests do not reach etcd, or the answers do not come back, or neither."""
    number, etcd = job.node(fault), job.etcd
    for place in [place for name, place in (("out", etcd.deaf), ("in", etcd.mute)) if ways in (name, "both")]:
        place.add(number)
        job.kernel.after(fault.for_s, lambda place=place: place.discard(number))  # type: ignore[misc]
    return job.nodes[number].live_workers()


def lose_requests(job: Job, fault: SimFault) -> list[Process]:
    return cut_off_etcd(job, fault, ways="out")


def lose_answers(job: Job, fault: SimFault) -> list[Process]:
    return cut_off_etcd(job, fault, ways="in")


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
    """Two nodes do not reach each other for ten times as long: longer than it takes to form worlds without one."""
    return cut_link(job, replace(fault, for_s=10 * fault.for_s))


def etcd_outage(job: Job, fault: SimFault) -> list[Process]:
    job.etcd.outage(fault.for_s)
    return job.all_workers()


def lose_lease(job: Job, fault: SimFault) -> list[Process]:
    """Etcd ends a lease that its holder has renewed in time."""
    hit = job.worker(fault)
    for lease in [lease for lease in job.etcd.leases if lease.process in hit]:
        job.etcd.end(lease)
    return hit


def break_watch(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    for watch in job.etcd.watches:
        if watch.process in hit:
            watch.fall_silent()
    return hit


def jump_clock(job: Job, fault: SimFault) -> list[Process]:
    """The wall clock of a node is set: by minutes, back or forth."""
    hit = job.nodes[job.node(fault)].live_workers()
    for process in hit:
        process.skew_s += 30.0 * (fault.for_s if fault.other % 2 else -fault.for_s)
    return hit


def storage_outage(job: Job, fault: SimFault) -> list[Process]:
    job.storage.down_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_full(job: Job, fault: SimFault) -> list[Process]:
    job.storage.full_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_slow(job: Job, fault: SimFault) -> list[Process]:
    job.storage.slow_until, job.storage.slowness = job.kernel.now + fault.for_s, 100.0
    return job.all_workers()


def storage_lossy(job: Job, fault: SimFault) -> list[Process]:
    """Answers to creates are lost; what was sent may arrive late."""
    job.storage.lossy_until = job.kernel.now + fault.for_s
    return job.all_workers()


def damage_file(job: Job, fault: SimFault) -> list[Process]:
    """A file of the newest commit is flipped, cut or deleted; only one commit in a run, since some must be left."""
    files, newest = job.storage.files, job.newest_files()
    if not newest or job.is_damaged:
        return []
    job.is_damaged = True
    key = newest[fault.other % len(newest)]
    content = files[key][0]
    if fault.rank % 3 == 0:
        place = next(place for place, byte in enumerate(content) if chr(byte).isdigit())
        job.storage.put(key, content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif fault.rank % 3 == 1:
        job.storage.put(key, content[:-1])
    else:
        del files[key]
    return job.all_workers()


KINDS: Mapping[str, Callable[[Job, SimFault], list[Process]]] = {
    act.__name__: act
    for act in (
        kill_worker,
        kill_node,
        lose_node,
        kill_job,
        stop_node,
        freeze_worker,
        freeze_node,
        slow_worker,
        cut_off_etcd,
        lose_requests,
        lose_answers,
        cut_link,
        cut_one_way,
        sever_link,
        etcd_outage,
        lose_lease,
        break_watch,
        jump_clock,
        storage_outage,
        storage_full,
        storage_slow,
        storage_lossy,
        damage_file,
    )
}
AT_POINTS = ("kill", "stop", "raise")


def draw(draws: random.Random, shape: Shape, most: int) -> tuple[SimFault, ...]:
    """Draw a run's faults, at most so many, in the order of time; those at failpoints come last."""
    names = [*KINDS, *(f"{how}@{point}" for how in AT_POINTS for point in REACHED)]
    chosen = draws.sample(names, draws.randint(1, 6))
    faults = []
    for _ in range(draws.randint(1, most)):
        name = draws.choice(chosen)
        kind, _, point = name.partition("@")
        where = {
            "node": draws.choice([-1, *range(shape.nodes)]),
            "rank": draws.randrange(shape.ranks),
            "other": draws.randrange(shape.nodes),
            "for_s": round(draws.choice((0.2, 0.6, 1.5, 4.0)) * shape.ttl_s * draws.uniform(0.5, 1.5), 3),
        }
        if point:
            faults.append(SimFault(kind, point=point, nth=draws.randint(1, 4 * most), for_s=where["for_s"]))
        else:
            faults.append(SimFault(kind, at_s=round(draws.uniform(0.0, 1.5 * shape.span_s), 3), **where))
    return tuple(sorted(faults, key=lambda fault: (bool(fault.point), fault.at_s)))
