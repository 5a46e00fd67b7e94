"""`torchrun --rdzv_backend=etcd` as typed, with a foreign script, real processes and a real etcd.

Includes the three cases in which stock torchrun fails: a restarted worker, a joining node, a lost rank-0 node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rendezvous import EtcdServer
from rendezvous.membership.records import Keys, read_view
from rendezvous.process_table import is_alive
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, ROOT, begin, eventually
from tests.processes import parent_of
from tests.rendezvous.rendezvous_sides import patient

pytestmark = pytest.mark.slow

Node = subprocess.Popen[bytes] | ForkedWorker
SCRIPT = ROOT / "tests" / "rendezvous" / "foreign_ddp" / "__main__.py"


class Job:
    """Nodes of one run id, their workers' output, and a way to end them all.

    With `forks` the agents are forks of a process that has imported torch, and so are their workers; without, agents
    and workers are started as typed, the workers from a file.
    """

    forks = True

    def __init__(self, folder: Path, endpoint: str, run_id: str) -> None:
        self.folder, self.endpoint, self.run_id = folder, endpoint, run_id
        self.log, self.stop_file = folder / "log.jsonl", folder / "stop"
        self.nodes: list[Node] = []

    def node(self, *flags: str) -> Node:
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=etcd"]
        command += [f"--rdzv_endpoint={self.endpoint}", f"--rdzv_id={self.run_id}"]
        command += ["--nnodes=1:2", "--nproc_per_node=1"]
        script = ["-m", "tests.rendezvous.foreign_ddp"] if self.forks else [str(SCRIPT)]
        command += [*flags, *script, str(self.log), str(self.stop_file)]
        log = self.folder / f"node-{len(self.nodes)}.out"
        self.nodes.append(begin(command, log) if self.forks else begin_cold(command, log))
        return self.nodes[-1]

    def said(self, op: str) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        whole = self.log.read_text().rpartition("\n")[0]  # the last line may be incomplete
        return [line for line in map(json.loads, whole.splitlines()) if line["op"] == op]

    def await_world(self, size: int, *, above: int) -> list[dict[str, Any]]:
        """Return the output of the ranks of a world of `size` once all of them train in a term above `above`."""

        def ranks() -> list[dict[str, Any]]:
            new = [line for line in self.said("trains") if line["context"]["term"] > above and line["world"] == size]
            newest = max((line["context"]["term"] for line in new), default=0)
            return sorted((line for line in new if line["context"]["term"] == newest), key=lambda line: line["rank"])

        try:
            eventually(lambda: len(ranks()) == size, f"a world of {size} above term {above}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None
        return ranks()

    def output(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("node-*.out")))

    def finish(self, *nodes: Node) -> list[int]:
        self.stop_file.touch()
        return [node.wait(timeout=PATIENCE_S) for node in nodes]


def begin_cold(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PET_LOG_DIR": str(log.parent / "torchelastic")}
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)


def kill(node: Node) -> None:
    """SIGKILL a node's whole process group."""
    os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@pytest.fixture
def job(tmp_path: Path, etcd: EtcdServer, run_id: str) -> Iterator[Job]:
    started = Job(tmp_path, etcd.endpoint, run_id)
    yield started
    for node in started.nodes:
        if node.poll() is None:
            kill(node)


def test_workers_and_nodes_are_lost_leave_come_back_and_finish(job: Job) -> None:
    """One node pays for a killed worker, with the only restart it has; then a node leaves, and the rank-0 node dies.

    Worlds of 2, 2, 1, 2 and 2. Leases outlast the test, which ends the dead node's itself: nobody waits for one. No
    orphan survives its agent; all exit with 0, as does a node that comes too late.
    """
    flags = ("--max_restarts=1", "--rdzv_conf=ttl=600")
    nodes = [job.node(*flags), job.node(*flags)]
    workers = job.await_world(2, above=0)
    assert [worker["context"]["num_nodes"] for worker in workers] == [2, 2]
    os.kill(workers[1]["pid"], signal.SIGKILL)
    workers = job.await_world(2, above=workers[0]["context"]["term"])
    assert workers[0]["context"]["cause"] == "restart" and sorted(worker["restarts"] for worker in workers) == [0, 1]
    payer = next(node for node in nodes for worker in workers if worker["restarts"] and is_of(worker, node))
    leaver = next(node for node in nodes if node is not payer)
    leaver.terminate()
    (survivor,) = job.await_world(1, above=workers[0]["context"]["term"])
    assert is_of(survivor, payer) and survivor["restarts"] == 1
    nodes = [payer, job.node(*flags)]
    workers = job.await_world(2, above=survivor["context"]["term"])
    assert {worker["context"]["cause"] for worker in workers} == {"joined"}
    victim = next(node for node in nodes if is_of(workers[0], node))
    nodes = [node for node in nodes if node is not victim] + [job.node(*flags)]
    store, keys = patient(job.endpoint), Keys(job.run_id)
    eventually(lambda: len(store.get(keys.members).entries) == 3, "one that there is no room for")
    world = read_view(store.get(keys.prefix), keys).world
    assert world is not None
    kill(victim)
    store.swap({keys.member(world.seats[0].member): None}, {})
    store.close()
    again = job.await_world(2, above=workers[0]["context"]["term"])
    assert {worker["context"]["cause"] for worker in again} == {"lost"}
    assert not is_alive(workers[0]["pid"])
    assert job.finish(*nodes) == [0, 0], job.output()
    assert sorted(line["rank"] for line in job.said("done")) == [0, 1]
    assert job.node().wait(timeout=PATIENCE_S) == 0, "a late joiner of a finished job leaves with 0"


def is_of(worker: dict[str, Any], node: Node) -> bool:
    return parent_of(worker["pid"]) == node.pid


def test_a_command_line_for_torchs_own_backends_runs(job: Job) -> None:
    """With only the backend's name changed it trains, and lists in one line of output the keys without effect."""
    job.forks = False
    conf = (
        "is_host=1,join_timeout=60,last_call_timeout=1,read_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    node = job.node("--nnodes=1", f"--rdzv_conf={conf}")
    job.await_world(1, above=0)
    assert job.finish(node) == [0], job.output()
    (warning,) = (line for line in job.output().splitlines() if "have no effect" in line)
    assert "is_host (" in warning and "read_timeout (" in warning and "join_timeout" not in warning


def test_no_etcd_is_an_error_that_helps(tmp_path: Path) -> None:
    """Without an etcd torchrun says within seconds that it waits and how long; then it exits with an error. Both
    messages name the endpoint and what to do."""
    job = Job(tmp_path, "127.0.0.1:1", "nobody")
    assert job.node("--rdzv_conf=timeout=12").wait(timeout=PATIENCE_S) != 0
    lines = (tmp_path / "node-0.out").read_text().strip().splitlines()
    waiting = [line for line in lines if "waiting for etcd, giving up in" in line]
    assert waiting and "did not answer within 12 s" in lines[-1]
    for line in (waiting[0], lines[-1]):
        assert "no etcd answers at 127.0.0.1:1" in line and "Start etcd there" in line
