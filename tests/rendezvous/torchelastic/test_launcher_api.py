"""Agents that a program creates with functions as workers, as `torch.distributed.launcher` does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
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
from tests.conftest import PATIENCE_S
from tests.processes import command_line_of
from tests.rendezvous.rendezvous_sides import eventually

PROGRAM = f"""
import gc, multiprocessing, os, signal, sys, threading, time
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

while __name__ != "__main__" and not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)  # a function has not begun before its process has imported this

def work(log):
    return int(os.environ["RANK"])

def work_without_end(log):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(600)

def collect():
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    gc.collect()

def launch(function, endpoint, run_id, log):
    conf = {{"timeout": {PATIENCE_S}, "last_call_s": 0.1, "ttl": {PATIENCE_S}}}
    config = LaunchConfig(1, 1, 2, run_id=run_id, rdzv_backend="etcd", rdzv_endpoint=endpoint, rdzv_configs=conf)
    return elastic_launch(config, function)(log)

def fork_after_a_job(*arguments):
    gc.disable()
    print(sorted(launch(work, *arguments)), flush=True)
    child = multiprocessing.get_context("fork").Process(target=collect)
    child.start()
    child.join()
    sys.exit(child.exitcode)

def work_for_long(*arguments):
    launch(work_without_end, *arguments)

if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
"""
"""A program that uses torch's launcher."""


class Program:
    """The running program, in a folder; its functions start once a gate file exists."""

    def __init__(self, folder: Path, function: str, endpoint: str, run_id: str) -> None:
        self.log, self._output, source = folder / "log", folder / "output", folder / "program.py"
        self.gate = folder / "gate"
        self.log.write_text("")
        source.write_text(PROGRAM)
        command = [sys.executable, str(source), function, endpoint, run_id, str(self.log)]
        with self._output.open("wb") as output:
            environ = {**os.environ, "GATE": str(self.gate)}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return the processes that multiprocessing has spawned for its functions."""
        children = children_of(self.process.pid)
        return [pid for pid in children if any("spawn_main" in word for word in command_line_of(pid))]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def started(etcd: EtcdServer, run_id: str, tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs = []

    def start(function: str) -> Program:
        programs.append(Program(tmp_path, function, etcd.endpoint, run_id))
        return programs[-1]

    yield start
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()


def words_of(program: Program) -> list[str]:
    return program.log.read_text().split()


def both_workers(program: Program) -> list[int]:
    found: list[int] = []

    def are_there() -> bool:
        found[:] = program.workers()
        return len(found) == 2

    eventually(are_there, "both workers are started")
    return found


@pytest.mark.slow
def test_functions_die_with_their_agent(started: Callable[[str], Program]) -> None:
    """This includes functions that ignore SIGINT, which torch sends to end them."""
    program = started("work_for_long")
    program.gate.touch()
    workers = both_workers(program)
    eventually(lambda: len(words_of(program)) == 2, "both workers are at work")
    program.kill()
    eventually(lambda: not any(map(is_alive, workers)), "no worker has survived")


@pytest.mark.slow
def test_functions_that_have_not_begun_die_with_their_agent(started: Callable[[str], Program]) -> None:
    """The kernel's death signal is not set yet: they check for their agent before they start."""
    program = started("work_for_long")
    workers = both_workers(program)
    program.kill()
    program.gate.touch()
    eventually(lambda: not any(map(is_alive, workers)), "no worker has survived")
    assert words_of(program) == []


@pytest.mark.slow
def test_a_program_can_fork_after_a_job(started: Callable[[str], Program]) -> None:
    """No object of the job may be finalised in a child, where its threads do not exist."""
    program = started("fork_after_a_job")
    program.gate.touch()
    assert program.process.wait(timeout=PATIENCE_S) == 0, program.output
    assert "[0, 1]" in program.output.splitlines(), program.output  # gRPC may log during a fork


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


@pytest.mark.slow
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
