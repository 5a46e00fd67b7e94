"""Faults of a job on Slurm: how each kind is done with Slurm's commands, undone, and proven."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chaos.errors import RunError, ScenarioError
from chaos.judge.evidence.run_files import Line, whole
from chaos.real.slurm.submission import Submission
from chaos.scenario.kinds import KINDS
from chaos.scenario.schedule import Due
from chaos.services.slurm.cluster import SlurmCluster
from rendezvous.process_table import environ_of, is_alive

LEAVE_MINUTES = 2
"""Minutes before its end at which train.sbatch has a job asked to leave (--signal)."""
LONG_MINUTES = 50


class JobOnSlurm(Protocol):
    """Parts of a job that an act needs."""

    @property
    def cluster(self) -> SlurmCluster: ...

    @property
    def submission(self) -> Submission: ...

    @property
    def struck(self) -> Sequence[Line]:
        """The `form` lines of the members that the newest fault hits."""

    @property
    def num_starts(self) -> int:
        """Restarts of the allocation when the fault was done."""


Undo = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Act:
    """Implementation of a kind; `do` returns its undo, if there is one."""

    kind: str
    do: Callable[[JobOnSlurm, Due], Undo | None]
    has_bitten: Callable[[JobOnSlurm, Due], bool]
    proof: str

    @property
    def ends_world(self) -> bool:
        return KINDS[self.kind].ends_world

    @property
    def affects_one(self) -> bool:
        return KINDS[self.kind].aim != "job"

    def hosts(self, job: JobOnSlurm, fault: Due) -> Sequence[str]:
        return [host_of(job, fault)] if self.affects_one else job.submission.hosts

    def hit(self, members: Sequence[Line]) -> Sequence[Line]:
        return members[:1] if KINDS[self.kind].aim == "worker" else members


def host_of(job: JobOnSlurm, fault: Due) -> str:
    """Return the name of a fault's node; raise ScenarioError for a role, which Slurm nodes do not have."""
    if not isinstance(fault.target, int):
        raise ScenarioError(f"{fault.kind}: on Slurm, give the node's number")
    return job.submission.hosts[fault.target]


def _kill_worker(job: JobOnSlurm, fault: Due) -> None:
    found = _processes(job)
    if not found:
        raise RunError(f"{fault.kind}: no process of the newest world is on {host_of(job, fault)}")
    for pid, _ in found:
        os.kill(pid, signal.SIGKILL)


def _power_off(job: JobOnSlurm, fault: Due) -> Undo | None:
    host = host_of(job, fault)
    job.cluster.machines.power_off(host)
    return None if fault.for_s is None else lambda: job.cluster.boot(host)


def _cancel(job: JobOnSlurm, fault: Due) -> Undo | None:
    host = host_of(job, fault)
    if job.submission.on(host) is None:
        raise RunError(f"{fault.kind}: no job of it runs on {host}")
    job.submission.cancel(host)
    return None if fault.for_s is None else lambda: job.submission.add(host)


def _add(job: JobOnSlurm, fault: Due) -> None:
    job.submission.add(host_of(job, fault))


def _preempt_job(job: JobOnSlurm, fault: Due) -> Undo:
    return _submit_urgent(job, f"--nodes={len(job.submission.hosts)}")


def _preempt_node(job: JobOnSlurm, fault: Due) -> Undo:
    return _submit_urgent(job, "--nodes=1", "-w", host_of(job, fault))


def _submit_urgent(job: JobOnSlurm, *where: str) -> Undo:
    urgent = job.cluster.submit("-p", "urgent", *where, "-o", "/dev/null", "--wrap", "sleep 100000")
    return lambda: job.cluster.run("scancel", urgent)


def _requeue(job: JobOnSlurm, fault: Due) -> None:
    job.cluster.run("scontrol", "requeue", job.submission.allocation)


def _hold(job: JobOnSlurm, fault: Due) -> Undo:
    held = job.submission.allocation
    job.cluster.run("scontrol", "requeuehold", held)
    return lambda: job.cluster.run("scontrol", "release", held)


def _end_time_limit(job: JobOnSlurm, fault: Due) -> None:
    shown = job.cluster.job(job.submission.allocation)
    hours, minutes, _ = (int(part) for part in shown["RunTime"].split(":"))
    _set_limit(job, 60 * hours + minutes + LEAVE_MINUTES + 1)


def _set_limit(job: JobOnSlurm, minutes: int) -> None:
    job.cluster.run("scontrol", "update", f"jobid={job.submission.allocation}", f"timelimit={minutes}")


def _drain(job: JobOnSlurm, fault: Due) -> Undo:
    host = host_of(job, fault)

    def update(*fields: str) -> None:
        job.cluster.run("scontrol", "update", f"nodename={host}", *fields)

    update("state=drain", "reason=elastic-chaos")
    return lambda: update("state=resume")


def _is_killed(job: JobOnSlurm, fault: Due) -> bool:
    return not any(is_alive(pid, born) for pid, born in _processes(job))


def _processes(job: JobOnSlurm) -> list[tuple[int, int]]:
    """Return pid on this machine and birth time of each process that the fault hits and that still lives."""
    there = [(job.cluster.machines[str(m["host"])].process(whole(m, "pid")), whole(m, "born")) for m in job.struck]
    return [(pid, born) for pid, born in there if pid is not None and is_alive(pid, born)]


def _is_lost(job: JobOnSlurm, fault: Due) -> bool:
    """Return True if Slurm has noticed: if a node is back before, srun waits for its tasks."""
    return "down" in _node_state(job, fault)


def _has_left(job: JobOnSlurm, fault: Due) -> bool:
    shown = job.cluster.job(job.submission.allocation)
    if int(shown["Restarts"]) <= job.num_starts or shown["JobState"] == "COMPLETING":
        return False
    if fault.kind == "end_time_limit":
        _set_limit(job, LONG_MINUTES)
    return True


def _has_come(job: JobOnSlurm, fault: Due) -> bool:
    return job.submission.on(host_of(job, fault)) is not None


def _is_gone(job: JobOnSlurm, fault: Due) -> bool:
    """Return True if nothing of the job runs on the node, and Slurm agrees."""
    host = host_of(job, fault)
    running = job.cluster.machines[host].processes()
    return job.submission.on(host) is None and not any(job.submission.owns(environ_of(pid)) for pid in running)


def _is_taken(job: JobOnSlurm, fault: Due) -> bool:
    taken = ("squeue", "-h", "-p", "urgent", "-t", "RUNNING", "-w", host_of(job, fault), "-o", "%i")
    return bool(job.cluster.run(*taken).split())


def _is_draining(job: JobOnSlurm, fault: Due) -> bool:
    return "drain" in _node_state(job, fault)


def _node_state(job: JobOnSlurm, fault: Due) -> str:
    return job.cluster.run("sinfo", "-h", "-p", "main", "-n", host_of(job, fault), "-o", "%T")


_LEFT = "the job has left its nodes, and was requeued"
ACTS = {
    act.kind: act
    for act in (
        Act("kill_worker", _kill_worker, _is_killed, "the process has ended"),
        Act("kill_node", _power_off, _is_lost, "Slurm says that the node is down"),
        Act("stop_node", _cancel, _is_gone, "no process of it is on the node"),
        Act("start_node", _add, _has_come, "Slurm says that a job of it runs on the node"),
        Act("preempt_node", _preempt_node, _is_taken, "Slurm says that an urgent job runs on the node"),
        Act("preempt_job", _preempt_job, _has_left, _LEFT),
        Act("requeue_job", _requeue, _has_left, _LEFT),
        Act("hold_job", _hold, _has_left, _LEFT),
        Act("end_time_limit", _end_time_limit, _has_left, _LEFT),
        Act("drain_node", _drain, _is_draining, "Slurm says that the node is draining"),
    )
}
