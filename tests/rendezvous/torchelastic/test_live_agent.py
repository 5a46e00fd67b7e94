"""The live agent's look at its workers, with processes that end at the worst moment."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous import EtcdServer
from rendezvous.etcd.connection import GIVE_UP_AFTER_S
from rendezvous.torchelastic.entry_point import create_handler
from rendezvous.torchelastic.live_agent import STOPPED_FOR_GOOD_S, LiveAgent


class Dying:
    """A worker that lives at the first look and was killed at the second."""

    pid = 1 << 22

    def __init__(self) -> None:
        self.proc, self._codes = self, [None]

    def poll(self) -> int | None:
        return self._codes.pop() if self._codes else -int(signal.SIGKILL)


@pytest.mark.long
def test_a_node_starts_while_etcd_is_away(run_id: str) -> None:
    """One that comes back while the others ride out an outage waits with them for a while, and does not end."""
    with EtcdServer() as server:
        server.stop()
        threading.Timer(GIVE_UP_AFTER_S + 0.5, server.begin).start()
        parameters = RendezvousParameters("etcd", server.endpoint, run_id, min_nodes=1, max_nodes=1, recovery="live")
        handler = create_handler(parameters)
        assert not handler.is_closed()
        handler.shutdown()


class Started:
    """A real process, as a worker's handler."""

    def __init__(self) -> None:
        self.proc = subprocess.Popen(["sleep", "60"])


@pytest.fixture
def agent(etcd: EtcdServer, run_id: str) -> Iterator[tuple[LiveAgent, WorkerGroup, list[int]]]:
    """An agent that is about to look at its only worker, and the ranks that it will have replaced."""
    parameters = RendezvousParameters("etcd", etcd.endpoint, run_id, min_nodes=1, max_nodes=1, recovery="live")
    handler = create_handler(parameters)
    spec = WorkerSpec("default", 1, handler, entrypoint="python", args=("worker.py",), max_restarts=3)
    made = LiveAgent(spec=spec, logs_specs=DefaultLogsSpecs())
    made._pcontext = SubprocessContext.__new__(SubprocessContext)
    replaced: list[int] = []
    made._replace = lambda group, rank: replaced.append(rank)  # type: ignore[method-assign]
    yield made, WorkerGroup(spec), replaced
    made._pcontext = None
    handler.shutdown()


def test_a_worker_that_stays_stopped_is_replaced(
    agent: tuple[LiveAgent, WorkerGroup, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped for a moment is left alone; one that stays stopped is ended, and another is started.

    One that was stopped with its whole node, agent included, is left alone, too, whichever of them continues first.
    """
    looking, group, replaced = agent
    now, worker = [1000.0], Started()
    monkeypatch.setattr("rendezvous.torchelastic.live_agent.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert isinstance(looking._pcontext, SubprocessContext)
    looking._pcontext.subprocess_handlers = {0: worker}  # type: ignore[dict-item]

    def look(after_s: float) -> None:
        now[0] += after_s
        assert looking._monitor_workers(group).state is WorkerState.HEALTHY

    def watch(seconds: float) -> None:
        while seconds > 0.0:
            look(min(seconds, 5.0))
            seconds -= 5.0

    try:
        for _ in range(2):
            worker.proc.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, worker.proc.pid, os.WSTOPPED)
            look(0.0)
            watch(STOPPED_FOR_GOOD_S - 1.0)
            look(10.0 * STOPPED_FOR_GOOD_S)
            worker.proc.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, worker.proc.pid, os.WCONTINUED)
            look(2.0)
        worker.proc.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.proc.pid, os.WSTOPPED)
        look(0.0)
        watch(STOPPED_FOR_GOOD_S + 1.0)
        assert worker.proc.wait(10) == -signal.SIGKILL and replaced == []
        look(0.0)
        assert replaced == [0]
    finally:
        worker.proc.kill()


def test_a_worker_that_dies_during_a_check_is_found_by_the_next(
    agent: tuple[LiveAgent, WorkerGroup, list[int]],
) -> None:
    """It is buried and replaced then; the node does not fail over a death that it has not dealt with."""
    looking, group, replaced = agent
    assert isinstance(looking._pcontext, SubprocessContext)
    looking._pcontext.subprocess_handlers = {0: Dying()}  # type: ignore[dict-item]
    looks = [looking._monitor_workers(group).state for _ in range(2)]
    assert looks == [WorkerState.HEALTHY, WorkerState.HEALTHY]
    assert replaced == [0]


def test_a_standby_process_is_looked_after(agent: tuple[LiveAgent, WorkerGroup, list[int]]) -> None:
    """At every look: one that was killed is replaced before a worker needs it."""
    looking, group, _ = agent
    assert isinstance(looking._pcontext, SubprocessContext)
    looking._pcontext.subprocess_handlers = {0: Dying()}  # type: ignore[dict-item]
    looks: list[int] = []
    looking._renew_standby = lambda: looks.append(1)  # type: ignore[method-assign]
    for _ in range(2):
        looking._monitor_workers(group)
    assert len(looks) == 2
