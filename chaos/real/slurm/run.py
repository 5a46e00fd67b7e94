"""Run a scenario's jobs on a real Slurm, whose nodes are machines in namespaces, with one fault at a time.

Each of several jobs has a folder of its own, and no knowledge of the others' faults: its verdict is valid only if these
did not affect it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import elastic_train
from chaos.errors import RunError, ScenarioError
from chaos.real.slurm.job import LOOK_EVERY_S, SlurmJob
from chaos.real.slurm.submission import Submission, start_etcd
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.slurm.cluster import SlurmCluster, folder_of_a_cluster, why_no_slurm

FAULTS_ARE_OVER = "all faults are over"
BESIDE = "beside"
"""Folder of the second of two jobs, next to the first's."""


def run_on_slurm(
    scenario: Scenario,
    folder: Path,
    due: Sequence[Due],
    seed: int,
    arguments: Sequence[str],
    replay: str,
    say: Callable[[str], object],
    *,
    beside: Sequence[str] = (),
    shared: Sequence[Path] = (),
) -> None:
    """Run the scenario's jobs with these faults on a Slurm cluster of their own; raise RunError if one does not end
    well.

    Raise ScenarioError where Slurm cannot run. `beside` are additional arguments of a second job. In /tmp, machines
    share the folder, this one, the sources and `shared`.
    """
    if why := why_no_slurm():
        raise ScenarioError(f"{scenario.name}: {why}")
    folders = [folder.resolve(), folder_beside(folder.resolve())][: scenario.slurm.jobs]
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
    known = [*folders, Path.cwd(), Path(elastic_train.__file__).parents[1], Path(sys.prefix)]
    num_nodes = scenario.nodes.count + (not scenario.slurm.has_own_etcd)
    with folder_of_a_cluster() as own, SlurmCluster(own, num_nodes, shared=[*known, *shared]) as cluster:
        etcd = None if scenario.slurm.has_own_etcd else start_etcd(cluster, cluster.nodes[-1])
        jobs = []
        for number, each in enumerate(folders):
            name = f"{scenario.name}-{folder.name}" + (f"-{BESIDE}" if number else "")
            theirs = [*arguments, *(beside if number else ()), "--run.dir", str(each), "--run.name", name]
            submission = Submission(cluster, scenario, theirs, each, etcd, name)
            jobs.append(SlurmJob(each, cluster, submission, scenario, seed, replay))
        Run(jobs, scenario.timeout_s, say).run(due)


def folder_beside(folder: Path) -> Path:
    """Return the folder of the second of two jobs, given the first's."""
    return folder.parent / BESIDE / folder.name


@dataclass(slots=True)
class Run:
    """The jobs of a scenario, and their time limit."""

    jobs: list[SlurmJob]
    timeout_s: float
    say: Callable[[str], object]
    _deadline: float = 0.0

    def run(self, due: Sequence[Due]) -> None:
        """Submit the jobs, do each fault when due, and wait for their end."""
        self._deadline = time.monotonic() + self.timeout_s
        try:
            for job in self.jobs:
                job.begin()
            for fault in due:
                self._inject(self.jobs[fault.job], fault)
            self.say(FAULTS_ARE_OVER)
            while not all(job.has_ended() for job in self.jobs):
                self._wait_a_moment(self.jobs[0], "its end")
        except RunError as error:
            for job in self.jobs:
                job.record("stuck", why=str(error))
            raise
        for job in self.jobs:
            job.close()

    def _inject(self, job: SlurmJob, fault: Due) -> None:
        """Wait until a fault is due, do it, and return once it is proven and over."""
        moment = time.monotonic() + (fault.after_s or 0.0)
        self._wait(job, lambda: time.monotonic() >= moment and all(map(_trains, self.jobs)), f"training before {fault}")
        self._wait(job, lambda: job.has_come(fault), str(fault))
        self.say(f"{fault.kind} at step {job.followed.step}")
        undo = job.strike(fault)
        self._wait(job, lambda: job.has_bitten(fault), f"an effect of {fault.kind}")
        job.settle(fault, undo)
        self._wait(job, lambda: job.is_over(fault), f"steps after {fault.kind}")

    def _wait(self, job: SlurmJob, is_so: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; raise RunError if the job ends first, or its time is over."""
        self._look()
        while not is_so():
            self._wait_a_moment(job, what)
            if job.has_ended():
                raise RunError(f"the job has ended before {what}; {job.submission.said()}")

    def _wait_a_moment(self, job: SlurmJob, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise RunError(f"{what} did not come within {self.timeout_s:.0f} s; {job.submission.said()}")
        time.sleep(LOOK_EVERY_S)
        self._look()

    def _look(self) -> None:
        for job in self.jobs:
            job.look()


def _trains(job: SlurmJob) -> bool:
    return job.followed.step > 0
