"""What the agents of both modes share: workers that die with their agent.

TorchElastic's own agent leaves its workers running when it is killed.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from rendezvous.orphans import bound_command

FINAL_CODES = frozenset({2, 65, 93})
"""Codes of errors that another worker in a failed one's place would meet as well: bad input, damage, no progress."""


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
