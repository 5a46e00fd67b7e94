"""The nodes of a user's torchrun command: several agents on this machine with the same command line.

Node settings (number of nodes, rendezvous) are passed in torchrun's environment variables PET_<OPTION>, which apply to
options that the command line omits. So a command needs no placeholders, and its own options are kept. `{dir}` stands
for a private folder of the run.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from chaos.errors import ScenarioError
from chaos.hook import VARIABLE
from chaos.scenario.model import Nodes
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import Node, clean_environ
from rendezvous.etcd.server import free_ports

SPOOL = "ids"
"""Folder below a run's folder in which the hook of each process writes."""
_BACKEND = re.compile(r"""--rdzv[-_]backend['"]?[= ]+['"]?([\w-]+)""")
_ENDPOINT = re.compile(r"--rdzv[-_]endpoint\b|--master[-_]addr\b")
_STANDALONE = re.compile(r"--standalone\b")


def check(command: str) -> None:
    """Raise ScenarioError for a command that cannot be started on several nodes."""
    problems = []
    try:
        if not shlex.split(command):
            problems.append("--command is empty: give the line that starts one node, torchrun and all")
    except ValueError as error:
        problems.append(f"--command cannot be read: {error}")
    if _STANDALONE.search(command):
        problems.append("--command has --standalone, which makes each node a separate job: leave it out")
    if problems:
        raise ScenarioError(*problems)


def uses_etcd(command: str) -> bool:
    """Return True if a command uses `--rdzv-backend=etcd` without its own endpoint."""
    return _meets_by_etcd(command) and not _ENDPOINT.search(command)


def _meets_by_etcd(command: str) -> bool:
    """Return True if a command uses our rendezvous, on any etcd."""
    backend = _BACKEND.search(command)
    return backend is not None and backend[1] == "etcd"


def nodes_of(command: str, shape: Nodes, folder: Path, run_id: str, around: Surroundings) -> list[Node]:
    """Describe the nodes, all with the same command; creates `folder`, which holds logs, spool and `{dir}`.

    Their rendezvous is the scenario's etcd or, with c10d, a free port that the first node opens.
    """
    (folder / SPOOL).mkdir(parents=True, exist_ok=True)
    (folder / "dir").mkdir(exist_ok=True)
    line = shlex.split(command.replace("{dir}", shlex.quote(str(folder / "dir"))))
    shared = _environ(os.environ, shape, run_id) | {VARIABLE: str((folder / SPOOL).absolute())}
    is_etcd, host = uses_etcd(command), around.cable.address("nodes") if around.cable else "localhost"
    opened = f"{host}:{free_ports(1)[0]}"
    described = []
    for number in range(shape.count):
        meets = {
            "PET_RDZV_ENDPOINT": (around.endpoint(number) or "") if is_etcd else opened,
            "PET_RDZV_CONF": f"ttl={shape.lease_ttl_s:g}" if _meets_by_etcd(command) else f"is_host={int(number == 0)}",
        }
        own = {**shared, **meets, **around.environ(number)}
        if around.cable is not None:
            is_inside = number == shape.count - 1
            own["PET_LOCAL_ADDR"] = around.cable.address("inside" if is_inside else "nodes")
            if not _meets_by_etcd(command):  # by default, torchrun lets gloo bind the host name's address
                own["GLOO_SOCKET_IFNAME"] = around.cable.inside if is_inside else around.cable.outside
        placed = around.command(number, shape.count, line)
        described.append(Node(number, placed, folder / f"node-{number}.log", own))
    return described


def _environ(outer: Mapping[str, str], shape: Nodes, run_id: str) -> dict[str, str]:
    """Return the environment shared by all nodes; the folder of this Python comes last on PATH."""
    environ = clean_environ(outer)
    beside = os.path.dirname(sys.executable)  # noqa: PTH120 - a venv's python is a link that must not be followed
    return {
        "OMP_NUM_THREADS": "1",
        **environ,
        "PATH": f"{environ.get('PATH', os.defpath)}{os.pathsep}{beside}",
        "PYTHONUNBUFFERED": "1",
        "PET_NNODES": f"{shape.min}:{shape.count}",
        "PET_NPROC_PER_NODE": str(shape.ranks),
        "PET_MAX_RESTARTS": str(shape.max_restarts),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": run_id,
    }
