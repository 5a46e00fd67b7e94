"""Faults of processes and machines: killed, stopped, frozen, hung, slow, started twice, and with a clock that jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.job.fault import SimFault
from chaos.sim.machine.kernel import Process

if TYPE_CHECKING:
    from chaos.sim.job.job import Job


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
        job.kernel.after(2 * turn * fault.for_s, lambda: _flap(job, number, fault.for_s))
    return job.stop_node(number, fault.for_s)


def _flap(job: Job, number: int, for_s: float) -> None:
    if hit := job.stop_node(number, for_s):
        job.record("chaos", "undo", kind="flap_node", node=number, pids=[process.pid for process in hit])


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


def freeze_worker(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    job.freeze(hit, fault.for_s)
    return hit


def freeze_node(job: Job, fault: SimFault) -> list[Process]:
    hit = job.nodes[job.node(fault)].live_workers()
    job.freeze([*hit, *job.nodes[job.node(fault)].live_agent()], fault.for_s)
    return hit


def hang_worker(job: Job, fault: SimFault) -> list[Process]:
    """A worker computes no further for a while; its threads renew its lease, and its saves go on."""
    hit = job.worker(fault)
    for process in hit:
        process.hangs_until = job.kernel.now + fault.for_s
    return hit


def slow_worker(job: Job, fault: SimFault) -> list[Process]:
    hit = job.worker(fault)
    for process in hit:
        process.slowness = 10.0
        job.kernel.after(fault.for_s, lambda process=process: setattr(process, "slowness", 1.0))  # type: ignore[misc]
    return hit


def jump_clock(job: Job, fault: SimFault) -> list[Process]:
    """The wall clock of a node is set: by minutes, back or forth."""
    hit = job.nodes[job.node(fault)].live_workers()
    for process in hit:
        process.skew_s += 30.0 * (fault.for_s if fault.other % 2 else -fault.for_s)
    return hit


ACTS = (
    *(kill_worker, kill_node, lose_node, kill_rack, kill_job, stop_node, flap_node, scale_down),
    *(freeze_worker, freeze_node, hang_worker, slow_worker, jump_clock, start_twin),
)
