"""The agent that torchrun runs under our rendezvous: the stock one, minus what makes a lost node expensive.

The stock agent charges `max_restarts` whenever workers fail, also when they failed because a node was lost; waits
30 s for workers that cannot stop, and 300 s at the end for peers that are gone; and leaves its workers behind when it
is killed. Each is one overridden method here. With another backend `make_agent` returns the stock agent.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from rendezvous.orphans import bound_command
from rendezvous.torchelastic.entry_point import EtcdRendezvousHandler

_log = logging.getLogger("rendezvous")


def install() -> None:
    """Let the launcher make our agent; it looks the name up right after it has made the handler."""
    launcher.LocalElasticAgent = make_agent  # type: ignore[attr-defined, assignment]


def make_agent(spec: WorkerSpec, **options: Any) -> LocalElasticAgent:
    """Return our agents for our handlers, the stock one for every other."""
    from rendezvous.torchelastic.live_agent import LiveAgent, LiveRendezvousHandler

    if isinstance(spec.rdzv_handler, LiveRendezvousHandler):
        return LiveAgent(spec=spec, **options)
    kind = ElasticAgent if isinstance(spec.rdzv_handler, EtcdRendezvousHandler) else LocalElasticAgent
    return kind(spec=spec, **options)


class BoundAgent(LocalElasticAgent):
    """TorchElastic's agent with workers that die with it."""

    def run(self, role: str = "default") -> RunResult:
        """Like the stock method, which returns None, and crashes its caller, for a job that is done already."""
        result: RunResult | None = super().run(role)
        if result is None:
            result = RunResult(state=WorkerState.SUCCEEDED)
        return result

    def worker_codes(self) -> list[int]:
        """Return the exit codes of the workers that have ended, a signal negated."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        return [code for handler in handlers if (code := handler.proc.poll()) is not None]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start each worker so that it dies with this agent, whatever program it is."""
        spec = worker_group.spec
        entrypoint, args = spec.entrypoint, spec.args
        if isinstance(entrypoint, str):
            guard, *rest = bound_command(entrypoint)
            spec.entrypoint, spec.args = guard, (*rest, *args)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            spec.entrypoint, spec.args = entrypoint, args


class ElasticAgent(BoundAgent):
    """The agent of `restart` mode, told by membership whose fault a failure was."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        assert isinstance(spec.rdzv_handler, EtcdRendezvousHandler)
        self._membership = spec.rdzv_handler
        self._membership.num_workers = spec.local_world_size

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Report workers that failed because of another node as healthy: the next look restarts them for free."""
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and self._membership.is_restart_free():
            _log.warning("workers failed because of another node: restarting them, max_restarts is not spent")
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the workers by the sealed world alone: no exchange that a dying node could block."""
        world = self._membership.node.world
        assert world is not None, "ranks are assigned in a world"
        sizes = [seat.num_workers for seat in world.seats]
        lo, total = sum(sizes[:group_rank]), sum(sizes)
        return [
            Worker(local_rank=i, global_rank=lo + i, role_rank=lo + i, world_size=total, role_world_size=total)
            for i in range(spec.local_world_size)
        ]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=max(1, round(self._membership.stop_grace_s)))

    def _exit_barrier(self) -> None:
        """Wait for the others of this world to finish or to be gone, and close the job with the last."""
        self._membership.node.finish(self._exit_barrier_timeout)
