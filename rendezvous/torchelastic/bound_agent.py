"""Base of both modes' agents: workers start with their imports done, and die with their agent.

TorchElastic's own agent leaves its workers running when it is killed, and starts each as a program that must do all its
imports. Here they are forks of the node's standby process if the program supports it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as starting
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from rendezvous.agent.worker_end import Worker, await_notes, how_it_ended
from rendezvous.orphans import BoundFunction, bound_command
from rendezvous.torchelastic.standby import LOOK_EVERY_S, Program, Standby

FINAL_CODES = {2: "wrong input", 65: "damaged data", 71: "unfit machine", 93: "no progress"}
"""Exit codes of errors that a replacement worker would hit as well: bad input, damage, a machine that computes wrongly,
no progress.
"""
IMPORTED_WITHIN_S = 300.0
"""Seconds that the first workers wait for their imports, which they would otherwise do themselves."""
_HAS_GRACE = "timeout" in inspect.signature(LocalElasticAgent._shutdown).parameters
"""True if TorchElastic supports another shutdown time for workers than 30 s: torch 2.12 and later."""

_log = logging.getLogger("rendezvous")


class BoundAgent(LocalElasticAgent):
    """TorchElastic's agent with workers that die with it, and that start with their imports done."""

    def __init__(self, spec: WorkerSpec, *, shutdown_timeout: int = 30, **options: Any) -> None:
        if _HAS_GRACE:
            options["shutdown_timeout"] = shutdown_timeout
        super().__init__(spec, **options)
        self._grace_s = shutdown_timeout
        self._standby: Standby | None = getattr(spec.rdzv_handler, "standby", None)
        self._has_lost_standby = False
        self._program = self._program_of(spec)
        if self._standby is not None and self._program is not None and self._program.preload is not None:
            self._standby.preload(self._program.preload, *self._program.arguments)  # while the nodes meet
        elif self._standby is not None:
            self._standby.end()
            self._standby = None

    def run(self, role: str = "default") -> RunResult:
        """Like the stock method, which returns None, and crashes its caller, if the job is already done."""
        try:
            result: RunResult | None = super().run(role)
        finally:
            if self._standby is not None:
                self._standby.end()
            await_notes()
        if result is None:
            result = RunResult(state=WorkerState.SUCCEEDED)
        return result

    def worker_codes(self) -> list[int]:
        """Return the exit codes of the workers that have ended, a signal negated."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        return [code for handler in handlers if (code := handler.proc.poll()) is not None]

    def end_at_once(self, number: int, within_s: float) -> bool:
        """Send workers a signal to end at once; return True if all have ended within `within_s` seconds."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        for handler in handlers:
            if handler.proc.poll() is None:
                handler.close(signal.Signals(number))
        deadline = time.monotonic() + within_s
        while any(handler.proc.poll() is None for handler in handlers):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """End the workers; kill those that are left after `timeout` seconds."""
        if not _HAS_GRACE and self._pcontext is not None:
            self._pcontext.close(death_sig, self._grace_s if timeout is None else timeout)
        super()._shutdown(death_sig, **({} if timeout is None or not _HAS_GRACE else {"timeout": timeout}))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start each worker so that it dies with this agent, whatever program or function it is."""
        if self._standby is not None:
            self._standby.wait_until_ready(IMPORTED_WITHIN_S)
        spec = worker_group.spec
        entrypoint, args = spec.entrypoint, spec.args
        if isinstance(entrypoint, str):
            guard, *rest = bound_command(entrypoint)
            spec.entrypoint, spec.args = guard, (*rest, *args)
        elif entrypoint is not None:
            spec.entrypoint = BoundFunction(entrypoint)
        try:
            with self._starting_them():
                started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            spec.entrypoint, spec.args = entrypoint, args
        self._renew_standby()
        return started

    def _how_it_ended(self, local_rank: int, code: int) -> str:
        """Describe how a worker ended, as the predicate of a sentence."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return how_it_ended(handlers.get(local_rank), code)

    @contextlib.contextmanager
    def _starting_them(self) -> Iterator[None]:
        """Make TorchElastic start processes by `_start_worker`, and preserve signal handlers.

        TorchElastic sets its own handlers whenever it starts workers, replacing a launcher's, and even ignored signals
        (nohup).
        """
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        starting.get_subprocess_handler = self._start_worker  # type: ignore[assignment, attr-defined]
        try:
            yield
        finally:
            starting.get_subprocess_handler = get_subprocess_handler  # type: ignore[attr-defined]
            for number, handler in before.items():
                is_default = handler in (None, signal.SIG_DFL, signal.default_int_handler)
                if not is_default and handler is not signal.getsignal(number):
                    signal.signal(number, handler)

    def _start_worker(
        self, *, stdout: str, stderr: str, env: dict[str, str], local_rank_id: int, **ordinary: Any
    ) -> Any:
        """Fork a worker from the standby process, or start a program as TorchElastic does; return its handler."""
        return Worker(
            lambda more: self._handler(
                stdout=stdout, stderr=stderr, env={**env, **more}, local_rank_id=local_rank_id, **ordinary
            )
        )

    def _handler(self, *, stdout: str, stderr: str, env: dict[str, str], local_rank_id: int, **ordinary: Any) -> Any:
        if self._program is not None and self._standby is not None and self._standby.is_ready:
            try:
                return self._standby.start(self._program, {**os.environ, **env}, stdout, stderr)
            except OSError as error:
                self._standby, self._has_lost_standby = None, True
                _log.warning(
                    "the standby process failed, worker %d is started the ordinary way: %s", local_rank_id, error
                )
        return get_subprocess_handler(env=env, stdout=stdout, stderr=stderr, local_rank_id=local_rank_id, **ordinary)

    def _renew_standby(self) -> None:
        """Replace a standby process that was killed, or failed to fork."""
        if self._standby is not None and self._standby.has_ended:
            _log.warning("the standby process was killed: another is started")
            self._has_lost_standby = True
        if not self._has_lost_standby or self._program is None or self._program.preload is None:
            return
        self._has_lost_standby = False
        try:
            self._standby = Standby(forks=False)
        except OSError as error:
            self._standby = None
            _log.warning("no standby process, workers are started the ordinary way: %s", error)
        else:
            self._standby.preload(self._program.preload, *self._program.arguments)

    @staticmethod
    def _program_of(spec: WorkerSpec) -> Program | None:
        """Return the program that the workers run, if it can be forked."""
        is_this_python = spec.entrypoint == sys.executable and spec.numa_options is None
        return Program.of([str(part) for part in spec.args]) if is_this_python else None
