"""A live job with faults, run to its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import TTL_S
from chaos.evidence import Evidence, collect
from chaos.launched import launch
from chaos.local import Job
from chaos.network import Cable
from chaos.node import Node
from chaos.scenario import Nodes, Scenario
from chaos.schedule import Due
from rendezvous.server import EtcdServer


def run_job(
    folder: Path,
    config: str,
    due: list[Due],
    *,
    ranks: int,
    timeout_s: float,
    num_nodes: int = 2,
    place: Callable[[list[Node], Path], list[Node]] | None = None,
    laid: Cable | None = None,
) -> Evidence:
    """Run a live job with its faults to its end, and return what it left; `place` puts its nodes along a cable."""
    nodes = Nodes(count=num_nodes, ranks=ranks, min=1, max_restarts=1000, lease_ttl_s=TTL_S, recovery="live")
    scenario = Scenario(name=folder.name, description="", config=config, nodes=nodes, timeout_s=timeout_s)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with EtcdServer(host="0.0.0.0" if laid else "127.0.0.1") as server:
        endpoint = server.endpoint.replace("127.0.0.1", laid.address("etcd")) if laid else server.endpoint
        started = launch(scenario, endpoint, folder, ["--run.dir", str(folder)], folder.name)
        started = place(started, folder) if place else started
        Job(folder, started, scenario, due, 0, lambda _: None, lambda _: None).run()
    return collect(folder)
