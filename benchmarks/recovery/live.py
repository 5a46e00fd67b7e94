"""Run live jobs with faults, ask them to leave after the last fault, and repeat the steps without faults.

A job has no fixed end: the number of steps between its faults depends on the machine and is not known beforehand. When
asked to leave, the last node commits and writes a result.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.beside import never
from benchmarks.recovery.jobs import TTL_S
from chaos.errors import RunError
from chaos.judge.evidence.run_files import Evidence, collect, whole
from chaos.real.forked_node.begin import launch
from chaos.real.job import Job
from chaos.scenario.model import Nodes, Scenario
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import Cable
from chaos.services.surroundings import Surroundings, folders
from rendezvous.etcd.server import EtcdServer

LEAVE = "stop_node"
COME_WITHIN_S = 30.0
"""Seconds that a process may need to reach a failpoint, even on a busy machine."""
NUM_LAST_LINES = 5
"""Lines of each node's log that a job without evidence shows."""


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
    is_over: Callable[[], bool] = never,
) -> Evidence:
    """Run a live job through its faults, ask its nodes to leave `leave_after_s` seconds later, and return its evidence.

    Without faults, the seconds count from the first step. Nodes are asked once all of them train again, as a node that
    waits for a world has no result. With `forked`, nodes are forks of a process with all imports, for cases where only
    their end counts. With a cable, the last node is at its other end. A fault at a failpoint that no process reaches is
    recorded as missed. All train again once there are as many replicas as the nodes' ranks can form. Once `is_over`, no
    further fault of `due` begins.
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
    leaving = [first, *(Due(LEAVE, node, None, 0.0) for node in reversed(range(num_nodes - 1)))]
    faults = itertools.chain(itertools.takewhile(lambda _: not is_over(), due), leaving)
    has_points = any(fault.point is not None for fault in due)
    around, ending = Surroundings(cable=laid, points=folders(folder, num_nodes) if has_points else []), ""
    with EtcdServer(host="0.0.0.0" if laid else "127.0.0.1") as server:
        endpoint = server.endpoint.replace("127.0.0.1", laid.address("etcd")) if laid else server.endpoint
        started = launch(scenario, endpoint, folder, ["--run.dir", str(folder)], folder.name, around)
        try:
            job = Job(folder, started, scenario, faults, 0, lambda _: None, lambda _: None, around=around)
            job.cell_size, job.come_within_s = cell_size, COME_WITHIN_S
            job.run()
        except RunError as error:  # expected: nodes that are asked to leave do not exit with 0
            ending = str(error)
    run = collect(folder)
    if run.result is None or not any(fault["kind"] == LEAVE for fault in run.of("fault")):
        raise SystemExit("\n".join([f"{folder}: {ending}", *map(_last_words, sorted(folder.glob("node-*.log")))]))
    return run


def _last_words(log: Path) -> str:
    """Return the end of a node's log; the folder may be removed with the error."""
    return f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:])


def repeat(
    folder: Path, config: str, run: Evidence, *overrides: str, ranks: int = 1, timeout_s: float | None = None
) -> Mapping[str, object]:
    """Repeat a run's number of steps without faults, in one process or in one replica of several ranks.

    Returns the result with its hash. `overrides` are options that must not change it, such as the pace of a task.
    Raises subprocess.TimeoutExpired after `timeout_s`.
    """
    assert run.result is not None, "every run leaves one"
    how = ["elastic_train"] if ranks == 1 else ["elastic_train.cli.main", "launch", "--ranks", str(ranks)]
    command = [*how, config, "--run.dir", str(folder), "--max_steps", str(whole(run.result, "step")), *overrides]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL, timeout=timeout_s)
    result = collect(folder).result
    assert result is not None, "it finished"
    return result
