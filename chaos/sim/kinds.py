"""What each kind of fault does to a running job; it returns the processes that it hits, by which it is told.

A kind that hits nobody has not happened, except to etcd and storage, which everybody meets sooner or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from chaos.sim.faults import SimFault
from chaos.sim.kernel import Process

if TYPE_CHECKING:
    from chaos.sim.job import Job


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


def kill_rack(job: Job, fault: SimFault) -> list[Process]:
    """Half of the machines are gone at once, without a sign."""
    first, num_nodes = job.node(fault), job.shape.nodes
    hit = []
    for number in range(first, first + -(-num_nodes // 2)):
        job.net.silent.add(number % num_nodes)
        hit += job.kill_node(number % num_nodes, fault.for_s)
    return hit


def stop_node(job: Job, fault: SimFault) -> list[Process]:
    """SIGTERM to all workers of a node; it is started again after a while."""
    return job.stop_node(job.node(fault), fault.for_s)


def flap_node(job: Job, fault: SimFault) -> list[Process]:
    """A node is told to leave, comes back, and again, three times."""
    number = job.node(fault)
    for turn in (1, 2):
        job.kernel.after(2 * turn * fault.for_s, lambda: job.stop_node(number, fault.for_s))
    return job.stop_node(number, fault.for_s)


def scale_down(job: Job, fault: SimFault) -> list[Process]:
    """Half of the nodes are told to leave, and come back long afterwards: the job shrinks, and grows again."""
    first, num_nodes = job.node(fault), job.shape.nodes
    hit = []
    for number in range(first, first + num_nodes // 2):
        hit += job.stop_node(number % num_nodes, 5 * fault.for_s)
    return hit


def start_twin(job: Job, fault: SimFault) -> list[Process]:
    """Somebody starts the same job once more under the same run id, and stops it after a while."""
    job.start_guests(5 * fault.for_s)
    return job.all_workers()


def hang_worker(job: Job, fault: SimFault) -> list[Process]:
    """A worker computes no further for a while; its threads renew its lease, and its saves go on."""
    hit = job.worker(fault)
    for process in hit:
        process.hangs_until = job.kernel.now + 4 * fault.for_s
    return hit


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


def slow_network(job: Job, fault: SimFault) -> list[Process]:
    """All that nodes send to one another takes a hundred times as long."""
    job.net.slow_until = job.kernel.now + fault.for_s
    return job.all_workers()


def lose_packets(job: Job, fault: SimFault) -> list[Process]:
    """One packet in three is lost between nodes, and sent again after ever longer pauses, as TCP does."""
    job.net.lossy_until = job.kernel.now + fault.for_s
    return job.all_workers()


def slow_etcd(job: Job, fault: SimFault) -> list[Process]:
    """Etcd takes a hundred times as long, often longer than a call's deadline."""
    job.etcd.slow_until = job.kernel.now + fault.for_s
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
    """Etcd is made anew, empty, and the job is started again: only the store still knows the terms."""
    hit = kill_job(job, fault)
    job.etcd.forget()
    return hit


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


def storage_errors(job: Job, fault: SimFault) -> list[Process]:
    """One call in three fails: EIO on a disk, 500 from S3."""
    job.storage.failing_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_slow(job: Job, fault: SimFault) -> list[Process]:
    job.storage.slow_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_lossy(job: Job, fault: SimFault) -> list[Process]:
    """Answers to creates are lost; what was sent may arrive late."""
    job.storage.lossy_until = job.kernel.now + fault.for_s
    return job.all_workers()


def slow_sync(job: Job, fault: SimFault) -> list[Process]:
    """What is written takes a thousand times as long to be durable."""
    job.storage.slow_sync_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_conflict(job: Job, fault: SimFault) -> list[Process]:
    """Half of the creates are refused as conflicts until their writer gives up: 409 from S3."""
    job.storage.conflict_until = job.kernel.now + fault.for_s
    return job.all_workers()


def storage_taken(job: Job, fault: SimFault) -> list[Process]:
    """Half of the creates happen, and are told to have been refused: 412 to the SDK's own second try."""
    job.storage.taken_until = job.kernel.now + fault.for_s
    return job.all_workers()


def tear_write(job: Job, fault: SimFault) -> list[Process]:
    """Whoever writes a file next dies in the middle of it."""
    job.storage.num_to_tear += 1
    return job.all_workers()


def _damage(job: Job, fault: SimFault, change: Callable[[bytes], bytes | None]) -> list[Process]:
    """Change a file of the newest commit, behind everybody's back; once in a run, since some commit must be left."""
    files, newest = job.storage.files, job.newest_files()
    if not newest or job.is_damaged:
        return []
    job.is_damaged = True
    key = newest[fault.other % len(newest)]
    changed = change(files[key][0])
    if changed is None:
        del files[key]
    else:
        job.storage.put(key, changed)
    return job.all_workers()


def flip_bit(job: Job, fault: SimFault) -> list[Process]:
    def flipped(content: bytes) -> bytes:
        place = next(place for place, byte in enumerate(content) if chr(byte).isdigit())
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return _damage(job, fault, flipped)


def truncate_file(job: Job, fault: SimFault) -> list[Process]:
    return _damage(job, fault, lambda content: content[:-1])


def delete_file(job: Job, fault: SimFault) -> list[Process]:
    return _damage(job, fault, lambda content: None)


KINDS: Mapping[str, Callable[[Job, SimFault], list[Process]]] = {
    act.__name__: act
    for act in (
        kill_worker,
        kill_node,
        lose_node,
        kill_rack,
        kill_job,
        stop_node,
        flap_node,
        scale_down,
        freeze_worker,
        freeze_node,
        hang_worker,
        slow_worker,
        jump_clock,
        start_twin,
        cut_link,
        cut_one_way,
        sever_link,
        slow_network,
        lose_packets,
        cut_off_etcd,
        lose_requests,
        lose_answers,
        slow_etcd,
        etcd_outage,
        kill_etcd_leader,
        kill_etcd_member,
        lose_etcd_data,
        lose_lease,
        break_watch,
        storage_outage,
        storage_full,
        storage_errors,
        storage_slow,
        slow_sync,
        storage_lossy,
        storage_conflict,
        storage_taken,
        tear_write,
        flip_bit,
        truncate_file,
        delete_file,
    )
}
