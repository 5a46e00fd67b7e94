"""The Slurm jobs of one training job: how they are submitted, and which of them runs on a node.

They are one allocation, by `train.sbatch`, or elements of arrays, by `elastic-array.sbatch`, or both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import elastic_train
from chaos.scenario.model import Scenario
from chaos.services.slurm.cluster import PATH, SlurmCluster
from chaos.services.slurm.machines import eventually
from rendezvous.etcd.server import find_binary

SCRIPTS = Path(elastic_train.__file__).parent / "cli" / "places" / "deploy" / "slurm"
LOOK_FOR_FIRST_S = 5
LOGS = "slurm*.log"


def environ_of_jobs() -> dict[str, str]:
    """Return the environment that lets a job find its programs, and leaves this machine's cores to others."""
    return {
        "PATH": f"{Path(find_binary()).parent}:{Path(sys.executable).parent}:{PATH}",
        "LOOK_S": f"{LOOK_FOR_FIRST_S}",
        "OMP_NUM_THREADS": "1",
    }


def start_etcd(cluster: SlurmCluster, host: str) -> str:
    """Submit etcd.sbatch for a node, and return its endpoint."""
    folder = cluster.folder / "etcd"
    folder.mkdir()
    endpoints = folder / "endpoints"
    where = {"ENDPOINTS": str(endpoints), "DATA": str(folder / "data")}
    script = str(SCRIPTS / "etcd.sbatch")
    cluster.submit("-w", host, "-o", str(folder / "log"), script, **where, **environ_of_jobs())
    eventually(lambda: endpoints.exists() and endpoints.read_text().strip(), f"an etcd answers; {folder}/log says why")
    return endpoints.read_text().strip()


@dataclass(slots=True)
class Submission:
    """One training job, as Slurm knows it."""

    cluster: SlurmCluster
    scenario: Scenario
    arguments: Sequence[str]
    folder: Path
    """Folder of logs."""
    etcd: str | None
    """Etcd endpoint; None if its first node starts an etcd."""
    run_id: str
    jobs: list[str] = field(default_factory=list)
    """Slurm numbers of jobs that must end well; for an array, of its elements."""
    submitted: set[str] = field(default_factory=set)
    """Numbers of all jobs ever submitted; for an array, the array's."""

    @property
    def hosts(self) -> list[str]:
        return self.cluster.nodes[: self.scenario.nodes.count]

    @property
    def allocation(self) -> str:
        assert not self.scenario.slurm.is_array, "an array has none"
        return self.jobs[0]

    def begin(self) -> None:
        """Submit the job with its initial nodes."""
        num_nodes = self.scenario.slurm.at_first or len(self.hosts)
        if self.scenario.slurm.is_array:
            self._submit_array(num_nodes)
        else:
            self._submit_allocation(num_nodes)

    def add(self, host: str) -> None:
        """Add a node, as an array of one element."""
        self._submit_array(1, "-w", host)

    def on(self, host: str) -> str | None:
        """Return the number of its job that runs on a node."""
        running = self.cluster.run("squeue", "-h", "-t", "RUNNING", "-w", host, "-o", "%i").split()
        return next((job for job in running if job in self.jobs), None)

    def cancel(self, host: str) -> None:
        """Cancel the job on a node, and stop waiting for its end."""
        if (job := self.on(host)) is not None:
            self.cluster.run("scancel", job)
            self.jobs.remove(job)

    def states(self) -> list[str]:
        return [self.cluster.state(job) for job in self.jobs]

    def owns(self, environ: dict[str, str]) -> bool:
        """Return True if a process with that environment belongs to one of its jobs."""
        return not self.submitted.isdisjoint((environ.get("SLURM_JOB_ID"), environ.get("SLURM_ARRAY_JOB_ID")))

    def said(self) -> str:
        lines = [line for path in sorted(self.folder.glob(LOGS)) for line in (path.name, *_tail(path))]
        return "\n".join(["the end of its log:", *lines])

    def _submit_allocation(self, num_nodes: int) -> None:
        nodes = self.scenario.nodes
        where = [f"--nodes={num_nodes}", "-o", str(self.folder / "slurm.log")]
        where += ["--oversubscribe"] if self.scenario.slurm.jobs > 1 else []
        met = {} if self.etcd is None else {"ETCD": self.etcd}
        named = [] if self.etcd is None else ["--id", self.run_id]
        size = ["--nodes", f"{nodes.min}:{nodes.count}", *named]
        self.jobs.append(self._submit("train", where, size, met))
        self.submitted.add(self.jobs[-1])

    def _submit_array(self, num_nodes: int, *where: str) -> None:
        assert self.etcd is not None, "they meet nowhere else"
        nodes = self.scenario.nodes
        log = str(self.folder / "slurm-%A_%a.log")
        met = {"ETCD": self.etcd, "RUN": self.run_id, "MIN": f"{nodes.min}", "MAX": f"{nodes.count}"}
        array = self._submit("elastic-array", [f"--array=0-{num_nodes - 1}", "-o", log, *where], [], met)
        self.jobs += [f"{array}_{number}" for number in range(num_nodes)]
        self.submitted.add(array)

    def _submit(self, script: str, where: Sequence[str], size: Sequence[str], met: dict[str, str]) -> str:
        nodes = self.scenario.nodes
        assert self.scenario.config is not None, "the command line has asked"
        size = [*size, "--ranks", f"{nodes.ranks}", "--ttl-s", f"{nodes.lease_ttl_s:g}"]
        command = [str(SCRIPTS / f"{script}.sbatch"), self.scenario.config, *size]
        command += ["--max-restarts", f"{nodes.max_restarts}", *self.arguments]
        return self.cluster.submit("-D", str(Path.cwd()), *where, *command, **met, **environ_of_jobs())


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-15:]
