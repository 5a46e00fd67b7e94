"""A node of a job on this machine: one torchrun in its own session, with all its child processes.

Agent and workers carry a mark in their environment. It identifies all of them, wherever they have moved, so that they
can be killed at once, like by a machine failure. A node dies with the executor that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from chaos.errors import RunError
from rendezvous.orphans import bound_command
from rendezvous.process_table import children_of, environ_of, name_of, pids
from rendezvous.torchelastic.standby import Process

MARK = "ELASTIC_CHAOS_NODE"
LONGEST_MARK = 64
_LAUNCHED = ("TORCHELASTIC_", "PET_", "MASTER_", "GROUP_", "ROLE_", "ELASTIC_RENDEZVOUS")
_RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
_RUN_ID = "--rdzv_id="
_GRACE_S = 45.0
_MOST_SCANS, _SCAN_EVERY_S = 200, 0.01
"""A killed process is still found until the kernel has removed it."""


Begun = Process | subprocess.Popen[bytes]
Begin = Callable[[list[str], dict[str, str], Path], Begun]


def begin_program(command: list[str], environ: dict[str, str], log: Path) -> Begun:
    """Start a command in its own session; it dies with this process and appends its output to the log."""
    with log.open("ab") as said:
        return subprocess.Popen(
            bound_command(*command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Node:
    """A torchrun that can be started, killed with all its processes, asked to stop, and restarted."""

    def __init__(
        self, number: int, command: list[str], log: Path, environ: dict[str, str], begin: Begin = begin_program
    ) -> None:
        self.number, self.command, self._log, self._begin = number, command, log, begin
        self._mark = f"{uuid.uuid4().hex}-{number}"
        self._environ = {**environ, MARK: self._mark}
        self._process: Begun | None = None

    def twin(self) -> Node:
        """Return another node with the same launch settings."""
        environ = {name: value for name, value in self._environ.items() if name != MARK}
        return Node(self.number, self.command, self._log.with_name(f"{self._log.stem}-twin.log"), environ, self._begin)

    def of_another_job(self) -> Node:
        """Return another node with the same launch settings and a new, unique run id."""
        other, run_id = self.twin(), f"other-{uuid.uuid4().hex[:8]}"
        other.command = [f"{_RUN_ID}{run_id}" if part.startswith(_RUN_ID) else part for part in other.command]
        return other

    @property
    def run_id(self) -> str:
        """The run id in its command; empty if there is none."""
        return next((part.removeprefix(_RUN_ID) for part in self.command if part.startswith(_RUN_ID)), "")

    @property
    def agent(self) -> int | None:
        """The agent's process id; None before it has run."""
        return None if self._process is None else self._process.pid

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> list[int]:
        self.wait(_GRACE_S)  # a node that was asked to stop must have ended before it restarts
        if self.is_up:
            raise RunError(f"node {self.number} cannot be started: it is still up after {_GRACE_S:.0f} s")
        self._process = self._begin(self.command, self._environ, self._log)
        return [self._process.pid]

    def kill(self) -> list[int]:
        """SIGKILL agent and workers, and any processes that they start meanwhile; return all of them."""
        killed: list[int] = []
        for _ in range(_MOST_SCANS):
            found = self.pids()
            if not found:
                break
            signal_all(found, signal.SIGKILL)
            killed += [pid for pid in found if pid not in killed]
            self.wait(_GRACE_S)
            time.sleep(_SCAN_EVERY_S)
        return killed

    def hit_worker(self, ranks: dict[int, int], number: signal.Signals) -> list[int]:
        """Signal the worker with the highest of the world's ranks on this node, but not the agent."""
        own = set(self.pids())
        victims = [pid for _, pid in sorted(ranks.items()) if pid in own][-1:]
        signal_all(victims, number)
        return victims

    def freeze(self) -> list[int]:
        """SIGSTOP agent and workers; return all of them."""
        found = self.pids()
        signal_all(found, signal.SIGSTOP)
        return found

    def stop(self) -> list[int]:
        """SIGTERM the agent, as a scheduler does before it reclaims a machine; return all processes that will end."""
        if self._process is None or not self.is_up:
            return []
        found = self.pids()
        self._process.terminate()
        return found

    @property
    def code(self) -> int | None:
        """The agent's exit code, negative for a signal; None while it runs and before it has run."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def pids(self) -> list[int]:
        """Return all live processes that carry this node's mark."""
        return [pid for pid in pids() if environ_of(pid).get(MARK) == self._mark]

    def standby(self) -> int | None:
        """Return the standby process that workers are forked from; None if there is none."""
        return next((pid for pid in children_of(self.agent) if name_of(pid) == "standby"), None)

    def tail(self, num_lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:]) if self._log.exists() else ""


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables from a launcher around this process."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHED) and name not in _RANKED}


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
