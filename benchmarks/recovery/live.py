"""Live jobs with faults: one is run, asked to leave after its last fault, and repeated without any.

A job has no end of its own: how many steps fit between its faults is the machine's affair, so nothing here counts them
beforehand. The nodes are asked to leave, and the last of them commits and leaves a result.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.recovery.jobs import TTL_S
from chaos.errors import RunError
from chaos.judge.evidence.run_files import Evidence, collect, whole
from chaos.real.job import Job
from chaos.real.launch import launch
from chaos.scenario.model import Nodes, Scenario
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import Cable
from chaos.services.surroundings import Surroundings, folders
from rendezvous.etcd.server import EtcdServer

LEAVE = "stop_node"
COME_WITHIN_S = 30.0
"""How long a process may take to come to a failpoint, on a machine that is busy with other things, too."""


def run_job(
    folder: Path,
    config: str,
    due: list[Due],
    *,
    ranks: int,
    leave_after_s: float,
    timeout_s: float,
    num_nodes: int = 2,
    laid: Cable | None = None,
    forked: bool = False,
    cell_size: int = 1,
) -> Evidence:
    """Run a live job through its faults, ask its nodes to leave so many seconds later, and return what it left.

    Without a fault the seconds count from the first step. Nodes are asked once all train again: one waiting for a
    world has no result to leave.
    With `forked`, nodes are forks of a process that has imported what they need, where only their end counts.
    The last node is put at the other end of a cable, if one is laid. A fault at a failpoint to which no process comes
    is recorded as missed. All train again once there are as many cells as the nodes' ranks make.
    """
    nodes = Nodes(
        count=num_nodes, ranks=ranks, min=1, max_restarts=1000, lease_ttl_s=TTL_S, recovery="live", forked=forked
    )
    scenario = Scenario(name=folder.name, description="", config=config, nodes=nodes, timeout_s=timeout_s)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    after_s, at_s = (leave_after_s, None) if due else (None, leave_after_s)
    first = Due(LEAVE, num_nodes - 1, None, after_s, at_s=at_s, is_healed=True)
    faults = [*due, first, *(Due(LEAVE, node, None, 0.0) for node in reversed(range(num_nodes - 1)))]
    has_points = any(fault.point is not None for fault in due)
    around, ending = Surroundings(cable=laid, points=folders(folder, num_nodes) if has_points else []), ""
    with EtcdServer(host="0.0.0.0" if laid else "127.0.0.1") as server:
        endpoint = server.endpoint.replace("127.0.0.1", laid.address("etcd")) if laid else server.endpoint
        started = launch(scenario, endpoint, folder, ["--run.dir", str(folder)], folder.name, around)
        try:
            job = Job(folder, started, scenario, faults, 0, lambda _: None, lambda _: None, around=around)
            job.cell_size, job.come_within_s = cell_size, COME_WITHIN_S
            job.run()
        except RunError as error:  # expected: asked to leave, no node ends with 0
            ending = str(error)
    run = collect(folder)
    if run.result is None or len(run.of("fault")) + len(run.of("missed")) <= len(due):
        raise SystemExit(f"{folder}: {ending}")
    return run


def repeat(folder: Path, config: str, run: Evidence, *overrides: str, ranks: int = 1) -> Mapping[str, object]:
    """Take as many steps as a run has, without a fault and in one process, or in a cell of several ranks.

    Returns the result, hash and all. `overrides` are options for what must not change it, such as the pace of a task.
    """
    assert run.result is not None, "every run leaves one"
    how = ["elastic_train"] if ranks == 1 else ["elastic_train.cli.main", "launch", "--ranks", str(ranks)]
    command = [*how, config, "--run.dir", str(folder), "--max_steps", str(whole(run.result, "step")), *overrides]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    result = collect(folder).result
    assert result is not None, "it finished"
    return result
