"""The live agent's checks of its workers, with processes that end at the worst moment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous import EtcdServer
from rendezvous.torchelastic import bound_agent
from rendezvous.torchelastic.bound_agent import BoundAgent
from rendezvous.torchelastic.entry_point import create_handler
from rendezvous.torchelastic.live_agent import (
    LONGEST_PAUSE_S,
    PER_S,
    SHORT_LIFE_S,
    STATE_LOST_CODE,
    STOPPED_FOR_GOOD_S,
    TOGETHER_S,
    Budget,
    LiveAgent,
)
from tests.conftest import PATIENCE_S


class Dying:
    """A worker that is alive at the first check and killed by the second."""

    pid = 1 << 22

    def __init__(self) -> None:
        self.proc, self._codes = self, [None]

    def poll(self) -> int | None:
        return self._codes.pop() if self._codes else -int(signal.SIGKILL)


class Started:
    """A real process, in place of a worker."""

    def __init__(self) -> None:
        self.proc = subprocess.Popen(["sleep", "600"])


@pytest.fixture
def agent(etcd: EtcdServer, run_id: str, tmp_path: Path) -> Iterator[tuple[LiveAgent, WorkerGroup, list[int]]]:
    """An agent that is about to check its only worker, and the ranks that it will have replaced."""
    parameters = RendezvousParameters("etcd", etcd.endpoint, run_id, min_nodes=1, max_nodes=1, recovery="live")
    handler = create_handler(parameters)
    spec = WorkerSpec("default", 1, handler, entrypoint="python", args=("worker.py",), max_restarts=3)
    made = LiveAgent(spec=spec, logs_specs=DefaultLogsSpecs(str(tmp_path)))
    made._pcontext = SubprocessContext.__new__(SubprocessContext)
    replaced: list[int] = []
    made._replace = lambda group, rank: replaced.append(rank)  # type: ignore[method-assign]
    yield made, WorkerGroup(spec), replaced
    made._pcontext = None
    handler.shutdown()


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_replaced(
    agent: tuple[LiveAgent, WorkerGroup, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was stopped briefly is left alone; one that stays stopped is killed and replaced.

    A worker that was stopped with its whole node, agent included, is left alone, whichever continues first.
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
        assert worker.proc.wait(PATIENCE_S) == -signal.SIGKILL and replaced == []
        look(0.0)
        assert replaced == [0]
    finally:
        worker.proc.kill()


@pytest.mark.slow
def test_a_worker_that_dies_during_a_check_is_found_by_the_next(
    agent: tuple[LiveAgent, WorkerGroup, list[int]],
) -> None:
    """It is reaped and replaced then; the node does not fail because of an unhandled death."""
    looking, group, replaced = agent
    assert isinstance(looking._pcontext, SubprocessContext)
    looking._pcontext.subprocess_handlers = {0: Dying()}  # type: ignore[dict-item]
    looks = [looking._monitor_workers(group).state for _ in range(2)]
    assert looks == [WorkerState.HEALTHY, WorkerState.HEALTHY]
    assert replaced == [0]


@pytest.mark.slow
def test_a_standby_process_is_looked_after(agent: tuple[LiveAgent, WorkerGroup, list[int]]) -> None:
    """Every check replaces a killed standby process before a worker needs it."""
    looking, group, _ = agent
    assert isinstance(looking._pcontext, SubprocessContext)
    looking._pcontext.subprocess_handlers = {0: Dying()}  # type: ignore[dict-item]
    looks: list[int] = []
    looking._renew_standby = lambda: looks.append(1)  # type: ignore[method-assign]
    for _ in range(2):
        looking._monitor_workers(group)
    assert len(looks) == 2


class Numbered:
    """A worker with a given pid, which runs until it gets an exit code."""

    def __init__(self, pid: int) -> None:
        self.proc, self.pid = self, pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class Workers:
    """An agent's workers, with a fake clock and given pids."""

    def __init__(self, agent: LiveAgent, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
        self.agent, self.group, self.pids, self.now = agent, group, list(pids), 1e6
        monkeypatch.setattr("rendezvous.torchelastic.live_agent.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("rendezvous.torchelastic.live_agent.stopped_by", lambda pid: None)
        del agent.__dict__["_replace"]
        agent._fail = lambda group, rank, code: RunResult(WorkerState.FAILED)  # type: ignore[method-assign]
        agent._start_worker = lambda **_: Numbered(self.pids.pop(0))  # type: ignore[method-assign]
        context = agent._context()
        context.entrypoint, context._running_local_ranks = "python", set()
        context.args = context.envs = context.stdouts = context.stderrs = dict.fromkeys(range(8))  # type: ignore[assignment]
        self.handlers: dict[int, Numbered] = {}
        context.subprocess_handlers = self.handlers  # type: ignore[assignment]

    def look(self, after_s: float = 0.1) -> WorkerState:
        self.now += after_s
        return self.agent._monitor_workers(self.group).state

    def die(self, rank: int, code: int, after_s: float = 0.1) -> WorkerState:
        self.handlers[rank].code = code
        return self.look(after_s)


@pytest.fixture
def workers(agent: tuple[LiveAgent, WorkerGroup, list[int]], monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Two workers, 7 and 8, of a node that may restart three times; the next ones are 7, 8, 9, and so on."""
    made = Workers(agent[0], agent[1], monkeypatch, *range(7, 40))
    made.handlers.update({0: Numbered(8), 1: Numbered(7)})
    assert made.look() is WorkerState.HEALTHY
    return made


@pytest.mark.slow
def test_a_worker_with_a_dead_ones_number_is_replaced_too(workers: Workers) -> None:
    """Pids are reused: here that of a worker that died young twice, whose place stays empty for a while."""
    workers.agent._budget, workers.pids = Budget(100), [9, 10, 10, 11, 12]
    workers.look(2 * SHORT_LIFE_S)
    workers.die(0, 1)
    workers.die(0, 1)
    workers.handlers[0].code = workers.handlers[1].code = 1
    workers.look()
    assert [worker.pid for worker in workers.handlers.values()] == [10, 10]
    workers.look(1.0)
    workers.die(1, 1)
    assert [worker.pid for worker in workers.handlers.values()] == [11, 12]


@pytest.mark.slow
def test_a_worker_that_cannot_be_started_costs_no_other_of_its_node(workers: Workers) -> None:
    """Memory or processes may run out for a moment. The start is retried within the restart budget."""
    dead, other, agent = workers.handlers[0], workers.handlers[1], workers.agent
    start, agent._start_worker = agent._start_worker, unstartable  # type: ignore[method-assign]
    assert workers.die(0, -9) is WorkerState.HEALTHY
    assert (workers.handlers[0], workers.handlers[1]) == (dead, other)
    assert workers.look(LONGEST_PAUSE_S) is WorkerState.HEALTHY
    agent._start_worker = start  # type: ignore[method-assign]
    assert workers.look(LONGEST_PAUSE_S) is WorkerState.HEALTHY
    assert workers.handlers[0].pid == 7 and not agent._due_at
    agent._start_worker = unstartable  # type: ignore[method-assign]
    workers.die(0, -9)
    assert workers.look(LONGEST_PAUSE_S) is WorkerState.HEALTHY
    assert workers.look(LONGEST_PAUSE_S) is WorkerState.FAILED, "the fourth time within an hour"


def unstartable(**_: object) -> NoReturn:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.slow
def test_a_worker_that_others_have_left_without_a_state_is_replaced_at_no_charge(workers: Workers) -> None:
    """Each time, at once; the node's restarts remain for its own failures."""
    for _ in range(10):
        before = workers.handlers[0]
        assert workers.die(0, STATE_LOST_CODE) is WorkerState.HEALTHY
        assert workers.handlers[0] is not before
    for _ in range(3):
        assert workers.die(0, 1, 60.0) is WorkerState.HEALTHY
    assert workers.die(0, 1, 60.0) is WorkerState.FAILED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"), [(2, "a restart would not change that (wrong input)"), (1, "no restart is left (--max-restarts)")]
)
def test_an_agent_says_why_it_leaves(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, why: str
) -> None:
    ended = RunResult(WorkerState.FAILED)
    monkeypatch.setattr(BoundAgent, "_monitor_workers", lambda agent, group: ended)
    assert LiveAgent._fail(workers.agent, workers.group, 0, code) is ended
    assert caplog.messages == [f"worker 0 ended with code {code}, and {why}: this node leaves"]


@pytest.mark.slow
def test_the_first_worker_of_a_place_may_die_young(workers: Workers) -> None:
    """It counts as the first of a series: the next one in its place that dies young is not replaced at once."""
    workers.die(0, 1, SHORT_LIFE_S / 2)
    second = workers.handlers[0]
    assert second.pid == 7
    workers.die(0, 1, SHORT_LIFE_S / 2)
    assert workers.handlers[0] is second
    workers.look(1.0)
    assert workers.handlers[0].pid == 8


def test_workers_that_die_together_cost_one_restart() -> None:
    """Each dies once, of one cause; a second death of the same worker, or a later one, costs another restart."""
    budget = Budget(2)
    assert all(budget.take("signal", rank, 0.1 * rank) for rank in range(8))
    assert budget.take("error", 0, 1.0)
    assert budget.take("signal", 0, TOGETHER_S)
    assert not budget.take("signal", 0, TOGETHER_S)
    assert not budget.take("signal", 1, 3 * TOGETHER_S)
    assert budget.take("signal", 1, PER_S + 1.0)


def test_workers_have_their_grace_from_an_agent_that_knows_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 TorchElastic had no such option, and gave all workers 30 s."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(bound_agent, "_HAS_GRACE", False)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda agent, number: asked.append((number, 30)))
    agent = BoundAgent.__new__(BoundAgent)
    agent._grace_s, agent._pcontext = 7, SimpleNamespace(close=lambda *how: asked.append(how))  # type: ignore[assignment]
    agent._shutdown(signal.SIGINT)
    agent._shutdown(timeout=3)
    assert asked == [(2, 7), (2, 30), (15, 3), (15, 30)]
