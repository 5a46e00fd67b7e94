"""What befalls a job on Slurm: how each kind of fault is done by Slurm's commands, undone, and seen to have bitten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chaos.errors import ScenarioError
from chaos.scenario.kinds import KINDS
from chaos.scenario.schedule import Due
from chaos.services.slurm.cluster import SlurmCluster

LEAVE_MINUTES = 2
"""How long before its end train.sbatch has a job asked to leave (--signal)."""
LONG_MINUTES = 50


class JobOnSlurm(Protocol):
    """What an act needs to know of a job."""

    @property
    def cluster(self) -> SlurmCluster: ...

    @property
    def job(self) -> str: ...

    @property
    def num_starts(self) -> int:
        """How often it had been started again when the fault was done."""


Undo = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Act:
    """How a kind is done; `do` returns what undoes it, if anything does."""

    kind: str
    do: Callable[[JobOnSlurm, Due], Undo | None]
    has_bitten: Callable[[JobOnSlurm, Due], bool]
    proof: str

    @property
    def ends_world(self) -> bool:
        return KINDS[self.kind].ends_world

    @property
    def befalls_one(self) -> bool:
        return KINDS[self.kind].aim != "job"

    def hosts(self, job: JobOnSlurm, fault: Due) -> Sequence[str]:
        """Return the nodes that it befalls."""
        return [host_of(job, fault)] if self.befalls_one else job.cluster.nodes


def host_of(job: JobOnSlurm, fault: Due) -> str:
    """Return the name of a fault's node; ScenarioError for a role, which nobody has here."""
    if not isinstance(fault.target, int):
        raise ScenarioError(f"{fault.kind}: on Slurm, give the node's number")
    return job.cluster.nodes[fault.target]


def _power_off(job: JobOnSlurm, fault: Due) -> Undo | None:
    host = host_of(job, fault)
    job.cluster.machines.power_off(host)
    return None if fault.for_s is None else lambda: job.cluster.boot(host)


def _preempt(job: JobOnSlurm, fault: Due) -> Undo:
    nodes = f"--nodes={len(job.cluster.nodes)}"
    urgent = job.cluster.submit("-p", "urgent", nodes, "-o", "/dev/null", "--wrap", "sleep 100000")
    return lambda: job.cluster.run("scancel", urgent)


def _requeue(job: JobOnSlurm, fault: Due) -> None:
    job.cluster.run("scontrol", "requeue", job.job)


def _hold(job: JobOnSlurm, fault: Due) -> Undo:
    job.cluster.run("scontrol", "requeuehold", job.job)
    return lambda: job.cluster.run("scontrol", "release", job.job)


def _end_time_limit(job: JobOnSlurm, fault: Due) -> None:
    hours, minutes, _ = (int(part) for part in job.cluster.job(job.job)["RunTime"].split(":"))
    _set_limit(job, 60 * hours + minutes + LEAVE_MINUTES + 1)


def _set_limit(job: JobOnSlurm, minutes: int) -> None:
    job.cluster.run("scontrol", "update", f"jobid={job.job}", f"timelimit={minutes}")


def _drain(job: JobOnSlurm, fault: Due) -> Undo:
    host = host_of(job, fault)

    def update(*fields: str) -> None:
        job.cluster.run("scontrol", "update", f"nodename={host}", *fields)

    update("state=drain", "reason=elastic-chaos")
    return lambda: update("state=resume")


def _is_lost(job: JobOnSlurm, fault: Due) -> bool:
    """Say whether Slurm has noticed: srun waits for the tasks of a node that is back before."""
    return "down" in _node_state(job, fault)


def _has_left(job: JobOnSlurm, fault: Due) -> bool:
    """Say whether the job has left its nodes, since it was requeued."""
    shown = job.cluster.job(job.job)
    if int(shown["Restarts"]) <= job.num_starts or shown["JobState"] == "COMPLETING":
        return False
    if fault.kind == "end_time_limit":
        _set_limit(job, LONG_MINUTES)
    return True


def _is_draining(job: JobOnSlurm, fault: Due) -> bool:
    return "drain" in _node_state(job, fault)


def _node_state(job: JobOnSlurm, fault: Due) -> str:
    return job.cluster.run("sinfo", "-h", "-p", "main", "-n", host_of(job, fault), "-o", "%T")


_LEFT = "the job has left its nodes, and was requeued"
ACTS = {
    act.kind: act
    for act in (
        Act("kill_node", _power_off, _is_lost, "Slurm says that the node is down"),
        Act("preempt_job", _preempt, _has_left, _LEFT),
        Act("requeue_job", _requeue, _has_left, _LEFT),
        Act("hold_job", _hold, _has_left, _LEFT),
        Act("end_time_limit", _end_time_limit, _has_left, _LEFT),
        Act("drain_node", _drain, _is_draining, "Slurm says that the node is draining"),
    )
}
