"""Start a node as a fork."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from chaos.errors import RunError
from chaos.scenario.model import Scenario
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import LONGEST_MARK, MARK, Begun, Node, begin_program, clean_environ
from rendezvous.process_table import environ_of
from rendezvous.torchelastic.standby import Process, Program, Standby, loaded_with

_TORCHRUN, _OWN = "torch.distributed.run", "chaos.real.forked_node"
_IMPORTED_WITHIN_S = 120.0
_MARKED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.001

_standbys: dict[frozenset[tuple[str, str]], Standby] = {}
"""Processes to fork nodes from, by the environment that their libraries read; for all runs of this process."""


def begin_fork(command: list[str], environ: dict[str, str], log: Path) -> Begun:
    """Start a node, and return when it carries its mark.

    Start a program instead if a fork is impossible: for commands that are not this Python's torchrun, such as a node's
    at the other end of a cable, and if the process to fork from was killed.
    """
    program = Program.of(command[1:])
    if command[0] != sys.executable or program is None or program.module != _TORCHRUN:
        return begin_program(command, environ, log)
    try:
        node = _standby(environ).start(Program(_OWN, program.arguments), environ, str(log), str(log))
    except OSError:
        _standbys.pop(_key(environ)).end()
        return begin_program(command, environ, log)
    _await_mark(node, environ[MARK], log)
    return node


def _standby(environ: dict[str, str]) -> Standby:
    """Return the process from which nodes with this environment are forked."""
    if _key(environ) not in _standbys:
        made = Standby(forks=False, environ={**environ, MARK: "-" * LONGEST_MARK})
        made.preload(f"{_OWN}.preload")
        if not made.wait_until_ready(_IMPORTED_WITHIN_S):
            made.end()
            raise RunError(f"nodes cannot be forked: their imports failed, or took over {_IMPORTED_WITHIN_S:.0f} s")
        _standbys[_key(environ)] = made
    return _standbys[_key(environ)]


def _key(environ: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(loaded_with(environ).items())


def _await_mark(node: Process, mark: str, log: Path) -> None:
    """Wait until a node has its mark, or has ended."""
    deadline = time.monotonic() + _MARKED_WITHIN_S
    while node.poll() is None and environ_of(node.pid).get(MARK) != mark:
        if time.monotonic() > deadline:
            node.kill()
            raise RunError(f"a forked node took no mark within {_MARKED_WITHIN_S:.0f} s; see {log}")
        time.sleep(_LOOK_EVERY_S)


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
            *(f"--max-restarts={nodes.max_restarts}", f"--log-dir={folder / 'torchelastic'}"),
            *("-m", "elastic_train", scenario.config, *overrides),
        ]
        own = {**environ, **around.environ(number)}
        log = folder / f"node-{number}.log"
        described.append(Node(number, around.command(number, nodes.count, command), log, own, begin))
    return described
