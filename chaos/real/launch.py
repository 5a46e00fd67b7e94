"""A scenario's nodes as users start them: each a `torchrun --rdzv_backend=etcd`, in its surroundings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chaos.real.forked_node.begin import begin_fork
from chaos.scenario.model import Scenario
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import Node, begin_program, clean_environ


def launch(
    scenario: Scenario,
    endpoint: str,
    folder: Path,
    overrides: list[str],
    run_id: str,
    around: Surroundings | None = None,
) -> list[Node]:
    """Return the scenario's nodes: each a `torchrun --rdzv_backend=etcd` as users type it."""
    nodes, around = scenario.nodes, around or Surroundings()
    assert scenario.config is not None, "the command line has asked"
    environ = {**clean_environ(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    conf = {"ttl": f"{nodes.lease_ttl_s:g}", "recovery": nodes.recovery, **around.tls}
    described, begin = [], begin_fork if nodes.forked else begin_program
    for number in range(nodes.count):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *around.flags(number, nodes.count)),
            *("--rdzv_backend=etcd", f"--rdzv_endpoint={around.endpoint(number) or endpoint}", f"--rdzv_id={run_id}"),
            f"--rdzv_conf={','.join(f'{key}={value}' for key, value in conf.items())}",
            *(f"--nnodes={nodes.min}:{nodes.count}", f"--nproc-per-node={nodes.ranks}"),
            f"--max-restarts={nodes.max_restarts}",
            *("-m", "elastic_train", scenario.config, *overrides),
        ]
        own = {**environ, **around.environ(number)}
        log = folder / f"node-{number}.log"
        described.append(Node(number, around.command(number, nodes.count, command), log, own, begin))
    return described
