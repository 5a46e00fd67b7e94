"""The nodes of a user's torchrun command: several agents on this machine, one command line for all of them.

What a node needs to know (how many there are, where they meet) reaches torchrun by its own environment variables
PET_<OPTION>, which it takes for options that the command line leaves out: a command needs no placeholder, and what it
says itself is left alone. `{dir}` stands for a folder of the run's own.
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
"""Where the hook of every process writes, below a run's folder."""
_BACKEND = re.compile(r"--rdzv[-_]backend[= ]+(\S+)")
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
    """Say whether a command meets by `--rdzv-backend=etcd`, at an etcd that is not its own."""
    return _meets_by_etcd(command) and not _ENDPOINT.search(command)


def _meets_by_etcd(command: str) -> bool:
    """Say whether a command meets by our rendezvous, whichever etcd that is."""
    backend = _BACKEND.search(command)
    return backend is not None and backend[1] == "etcd"


def nodes_of(command: str, shape: Nodes, folder: Path, run_id: str, around: Surroundings) -> list[Node]:
    """Describe the nodes, each the same command; logs, spool and `{dir}` are below `folder`, which is made.

    They meet at the etcd around them or, under c10d, at a free port, which the first of them opens.
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
            if not _meets_by_etcd(command):  # torchrun by itself leaves gloo to bind what the machine's name means
                own["GLOO_SOCKET_IFNAME"] = around.cable.inside if is_inside else around.cable.outside
        placed = around.command(number, shape.count, line)
        described.append(Node(number, placed, folder / f"node-{number}.log", own))
    return described


def _environ(outer: Mapping[str, str], shape: Nodes, run_id: str) -> dict[str, str]:
    """Return the environment of every node; the programs beside this Python come last on the path."""
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
