"""Agents that a program creates with functions as workers, as `torch.distributed.launcher` does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous import EtcdServer
from rendezvous.process_table import children_of, is_alive
from rendezvous.torchelastic.entry_point import create_handler, make_agent
from rendezvous.torchelastic.restart_agent import ElasticAgent
from tests.conftest import PATIENCE_S, begin, eventually
from tests.processes import command_line_of


class Program:
    """A running `functions_program`: a fork of a process that has imported torch; its functions' processes are not."""

    def __init__(self, folder: Path, function: str, endpoint: str, run_id: str) -> None:
        self.log, self._output, self.gate = folder / "log", folder / "output", folder / "gate"
        self.log.write_text("")
        module = "tests.rendezvous.torchelastic.functions_program"
        command = [sys.executable, "-m", module, function, endpoint, run_id, str(folder)]
        self.process = begin(command, self._output)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return the processes that multiprocessing has spawned for its functions."""
        children = children_of(self.process.pid)
        return [pid for pid in children if any("spawn_main" in word for word in command_line_of(pid))]


@pytest.fixture
def started(etcd: EtcdServer, run_id: str, tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs = []

    def start(function: str) -> Program:
        programs.append(Program(tmp_path, function, etcd.endpoint, run_id))
        return programs[-1]

    yield start
    for program in programs:
        program.process.close(signal.SIGKILL)


@pytest.mark.process
def test_functions_die_with_their_agent(started: Callable[[str], Program]) -> None:
    """This includes one that ignores SIGINT, which torch sends to end them, and one that has not begun: for that the
    kernel's death signal is not set yet, and it checks for its agent before it starts."""
    program = started("work_for_long")
    eventually(lambda: len(program.workers()) == 2, "both workers are started")
    workers = program.workers()
    eventually(lambda: len(begun_in(program)) == 1, "one worker is at work")
    program.process.kill()
    program.process.wait(PATIENCE_S)
    eventually(lambda: not is_alive(begun_in(program)[0]), "the one at work has not survived")
    program.gate.touch()
    eventually(lambda: not any(map(is_alive, workers)), "no worker has survived")
    assert len(begun_in(program)) == 1


def begun_in(program: Program) -> list[int]:
    """Return the processes whose functions have begun."""
    return [int(line) for line in program.log.read_text().splitlines()]


@pytest.mark.process
def test_a_program_can_fork_after_a_job(started: Callable[[str], Program]) -> None:
    """No object of the job may be finalised in a child, where its threads do not exist."""
    program = started("fork_after_a_job")
    assert program.process.wait(PATIENCE_S) == 0, program.output
    assert "{0: 0}" in program.output.splitlines(), program.output  # gRPC may log during a fork


Make = Callable[..., ElasticAgent]


@pytest.fixture
def make(etcd: EtcdServer, run_id: str, tmp_path: Path) -> Make:
    def made(number: int, of: int, **fields: object) -> ElasticAgent:
        conf = {"timeout": PATIENCE_S, "standby": 0, "ttl": PATIENCE_S}
        handler = create_handler(RendezvousParameters("etcd", etcd.endpoint, run_id, of, of, **conf))
        spec = WorkerSpec(
            **{"role": "default", "local_world_size": 1, "entrypoint": print, **fields}, rdzv_handler=handler
        )  # type: ignore[arg-type]
        logs = DefaultLogsSpecs(log_dir=str(tmp_path / str(number)))
        agent = make_agent(spec, logs_specs=logs, exit_barrier_timeout=0)
        assert isinstance(agent, ElasticAgent)
        return agent

    return made


@pytest.mark.process
@pytest.mark.parametrize(("how", "is_free"), [({"death_sig": signal.SIGTERM}, True), ({"timeout": 1}, False)])
def test_others_restart_for_free_when_a_node_is_asked_to_leave(
    make: Make, monkeypatch: pytest.MonkeyPatch, how: dict[str, int], is_free: bool
) -> None:
    """Its workers end before it has left, and with them those of other nodes; so not when it restarts its workers."""
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "")
    agents = [make(i, 2) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda agent: agent._rendezvous(agent.get_worker_group()), agents))
    agents[1]._shutdown(**how)  # type: ignore[arg-type]
    assert agents[0]._membership.is_restart_free() is is_free
    for agent in agents:
        agent.get_worker_group().spec.rdzv_handler.shutdown()


@pytest.mark.process
def test_ranks_are_numbered_within_roles(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of one world may have different --role: ROLE_RANK and ROLE_WORLD_SIZE count only their own role."""
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "")
    nodes = [("trainer", 2), ("server", 4), ("trainer", 1)]
    agents = [make(i, 3, role=role, local_world_size=size) for i, (role, size) in enumerate(nodes)]

    def workers(agent: ElasticAgent) -> list[Worker]:
        agent._rendezvous(agent.get_worker_group())
        return agent.get_worker_group().workers

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(workers, agents))
    assert [worker.role_world_size for each in found for worker in each] == [3, 3, 4, 4, 4, 4, 3]
    assert {worker.world_size for each in found for worker in each} == {7}
    assert sorted(worker.global_rank for each in found for worker in each) == list(range(7))
    assert sorted(worker.role_rank for worker in (*found[0], *found[2])) == [0, 1, 2]
    assert [worker.role_rank for worker in found[1]] == [0, 1, 2, 3]
    for agent in agents:
        agent.get_worker_group().spec.rdzv_handler.shutdown()
