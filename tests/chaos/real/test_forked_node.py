"""Forked nodes are found by their marks, hit as a whole, and otherwise behave like started programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.real.forked_node import begin
from chaos.real.forked_node.begin import begin_fork
from chaos.services.torchrun_node import Node, clean_environ
from rendezvous.etcd.server import free_ports
from rendezvous.process_table import environ_of, is_alive, is_stopped, name_of
from tests.conftest import PATIENCE_S, eventually
from tests.processes import parent_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("forked nodes")]  # one process imports what the nodes need

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]


def sleeps() -> list[str]:
    """Return the command of a node with a sleeping worker, and a store on its own port."""
    return [*TORCHRUN, "--master-port", str(free_ports(1)[0]), "--no-python", "sleep", "600"]


def described(folder: Path, number: int, command: list[str] | None = None) -> Node:
    environ = {**clean_environ(os.environ), "OMP_NUM_THREADS": "1", "OF_NODE": str(number), "PET_LOG_DIR": str(folder)}
    return Node(number, command or sleeps(), folder / f"node-{number}.log", environ, begin_fork)


def has_worker(node: Node) -> bool:
    """Return True once the worker is a program: before that it is a copy of its agent, with the same command line."""
    return [name_of(pid) for pid in node.pids() if pid != node.agent] == ["sleep"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two forked nodes, each with an agent and a worker that is a separate program."""
    made = [described(tmp_path, number) for number in range(2)]
    for node in made:
        node.start()
        assert node.agent in node.pids(), "it carries its mark from the first moment"
    eventually(lambda: all(has_worker(node) for node in made))
    yield made
    for node in made:
        node.kill()


def test_every_process_of_a_forked_node_is_hit_and_none_of_another(nodes: list[Node]) -> None:
    """Frozen, killed, asked to stop and started again, by signals to all of its processes, like a program."""
    first, second = nodes
    mine, others = first.pids(), second.pids()
    assert not {*mine} & {*others}
    assert sorted(first.freeze()) == sorted(mine)
    eventually(lambda: all(is_stopped(pid) for pid in mine))
    assert not any(is_stopped(pid) for pid in others)
    assert sorted(first.kill()) == sorted(mine)
    assert (first.pids(), first.code) == ([], -signal.SIGKILL)
    assert not any(is_alive(pid) for pid in mine) and all(is_alive(pid) for pid in others)
    first.start()
    eventually(lambda: has_worker(first))
    assert sorted(second.stop()) == sorted(others)
    second.wait(PATIENCE_S)
    assert second.code == 1, "torchrun's own code for a SIGTERM"
    assert first.is_up


def test_a_forked_node_has_its_own_place(nodes: list[Node]) -> None:
    """It is the executor's child in its own session, with its own log, and its environment reaches its workers."""
    for node in nodes:
        assert node.agent is not None
        assert (parent_of(node.agent), os.getsid(node.agent)) == (os.getpid(), node.agent)
        (worker,) = set(node.pids()) - {node.agent}
        assert environ_of(worker)["OF_NODE"] == str(node.number)
        node.stop()
        node.wait(PATIENCE_S)
        assert "got signal: 15" in node.tail(100)


def test_what_cannot_be_forked_is_started_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is not torchrun's, and any command if the process that forks nodes was killed."""
    node = described(tmp_path, 0, ["sleep", "600"])
    node.start()
    eventually(lambda: len(node.pids()) == 1)
    assert node.kill()

    class Killed:
        def start(self, *_: object) -> None:
            raise ConnectionResetError

        def end(self) -> None: ...

    node = described(tmp_path, 1, [*TORCHRUN, "--help"])
    monkeypatch.setattr(begin, "_standbys", {})
    monkeypatch.setattr(begin, "_standby", lambda environ: begin._standbys.setdefault(begin._key(environ), Killed()))
    node.start()
    node.wait(PATIENCE_S)
    assert node.code == 0
    assert begin._standbys == {}, "the next node gets another one"


SHOWS = """
import os, sys
from chaos.real.forked_node.mark import show
from rendezvous.etcd.server import free_ports
from rendezvous.process_table import environ_of
show("MARKED", "by this")
assert environ_of(os.getpid()) == {**environ_of(os.getpid()), "BEFORE": "1", "MARKED": "by this", "NEXT": "2"}
if os.fork() == 0:
    assert environ_of(os.getpid())["MARKED"] == "by this"
    os._exit(0)
assert os.wait()[1] == 0
for name, value in (("MARKED", "x" * 11), ("UNKNOWN", "x")):
    try:
        show(name, value)
    except ValueError as error:
        print(error)
"""


def test_proc_shows_what_a_fork_writes_and_nothing_else_changes() -> None:
    """Forks of the fork show it as well; a value that does not fit is refused."""
    environ = {"BEFORE": "1", "MARKED": "-" * 10, "NEXT": "2", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-c", SHOWS], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "there is no room for MARKED=xxxxxxxxxxx in what this process was started with: 'by this'" in done.stdout
    assert "UNKNOWN=x" in done.stdout
