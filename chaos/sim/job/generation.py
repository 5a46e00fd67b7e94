"""A node's workers as TorchElastic's agents see them: polled, asked to stop, and killed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.multiprocessing import ProcessFailure, RunProcsResult
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from chaos.sim.job.host import Host
from chaos.sim.machine.kernel import Process

LOOK_S = 0.1
"""Seconds until an agent notices that a worker has ended."""
STOP_GRACE_S = 30
"""Seconds that it waits for its workers when asked to stop, or after one has failed."""


class Started:
    """Stand-in for TorchElastic's handler of a started program."""

    def __init__(self, host: Host, worker: Process) -> None:
        self._host, self._worker = host, worker
        self.proc = SimpleNamespace(pid=worker.pid, poll=self._code)

    def _code(self) -> int | None:
        """Return the worker's exit code, negative for a signal; None while it runs."""
        if not self._worker.is_dead:
            return None
        return -signal.SIGKILL if self._worker.code is None else self._worker.code

    def close(self, death_sig: signal.Signals) -> None:
        if death_sig is signal.SIGKILL:
            self._host.kernel.kill(self._worker)
        elif not self._worker.is_dead:
            self._host.workers[self._worker].leave.ask(self._host.kernel.now)


class Generation(SubprocessContext):
    """Workers that were started together, and their replacements: one failure ends all."""

    def __init__(self, host: Host, workers: Mapping[int, Process]) -> None:
        """Skip TorchElastic's own initialisation: nothing is started, logged or written."""
        self._host = host
        started: dict[int, Any] = {rank: Started(host, worker) for rank, worker in workers.items()}
        self.subprocess_handlers = started
        self.entrypoint, self._running_local_ranks = "train", set(workers)
        self.args, self.envs = dict.fromkeys(workers, ()), {rank: {} for rank in workers}
        self.stdouts = self.stderrs = dict.fromkeys(workers, "")

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Return the workers' result; None while all run."""
        assert timeout == 0, "an agent looks and does not wait"
        if not self._failed() and any(handler.proc.poll() is None for handler in self._started()):
            return None
        self.close(signal.SIGTERM, STOP_GRACE_S)
        return RunProcsResult(return_values=dict.fromkeys(self.subprocess_handlers), failures=self._failed())

    def close(self, death_sig: signal.Signals | None = None, timeout: int = STOP_GRACE_S) -> None:
        """Ask all workers to stop, and kill those that have not ended in time."""
        kernel = self._host.kernel
        until = kernel.now + timeout
        for handler in self._started():
            handler.close(death_sig or signal.SIGTERM)
        while kernel.now < until and any(handler.proc.poll() is None for handler in self._started()):
            kernel.sleep(LOOK_S)
        for handler in self._started():
            handler.close(signal.SIGKILL)

    def _started(self) -> list[Started]:
        return [*self.subprocess_handlers.values()]  # type: ignore[list-item]

    def _failed(self) -> dict[int, ProcessFailure]:
        codes = {rank: (handler.proc.pid, handler.proc.poll()) for rank, handler in self.subprocess_handlers.items()}
        return {rank: ProcessFailure(rank, pid, code, "") for rank, (pid, code) in codes.items() if code}
