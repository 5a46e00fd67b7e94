"""The live agent's look at its workers, with processes that end at the worst moment."""

from __future__ import annotations

import signal

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rendezvous import EtcdServer
from rendezvous.live_agent import LiveAgent
from rendezvous.torchrun import create_handler


class Dying:
    """A worker that lives at the first look and was killed at the second."""

    pid = 1 << 22

    def __init__(self) -> None:
        self.proc, self._codes = self, [None]

    def poll(self) -> int | None:
        return self._codes.pop() if self._codes else -int(signal.SIGKILL)


def test_a_worker_that_dies_during_a_look_is_found_by_the_next(etcd: EtcdServer, run_id: str) -> None:
    """It is buried and replaced then; the node does not fail over a death that it has not dealt with."""
    told = RendezvousParameters("etcd", etcd.endpoint, run_id, min_nodes=1, max_nodes=1, recovery="live")
    handler = create_handler(told)
    spec = WorkerSpec("default", 1, handler, entrypoint="python", args=("worker.py",), max_restarts=3)
    agent = LiveAgent(spec=spec, logs_specs=DefaultLogsSpecs())
    context = SubprocessContext.__new__(SubprocessContext)
    context.subprocess_handlers = {0: Dying()}  # type: ignore[dict-item]
    agent._pcontext = context
    replaced: list[int] = []
    agent._replace = lambda group, rank: replaced.append(rank)  # type: ignore[method-assign]
    try:
        looks = [agent._monitor_workers(WorkerGroup(spec)).state for _ in range(2)]
    finally:
        agent._pcontext = None
        handler.shutdown()
    assert looks == [WorkerState.HEALTHY, WorkerState.HEALTHY]
    assert replaced == [0]
