"""Workers that begin where the imports end: forked from a standby process that has done them already.

Starting a worker costs seconds of imports, at the expense of the node's other workers. One standby process per node
has imported what a worker needs, and a worker that takes a dead one's place is forked from it in milliseconds. The
standby process is the forkserver of multiprocessing; it holds no thread of Python's and no device.

A program says what to import by a module `preload` in its package; a program without one, or that is no module, is
started as ever.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from rendezvous.orphans import die_with_parent


@dataclass(frozen=True, slots=True)
class Program:
    """A module that is run as a program, and its arguments."""

    module: str
    arguments: tuple[str, ...]

    @staticmethod
    def of(command: Sequence[str]) -> Program | None:
        """Find `-m MODULE ARGS…` in a worker's command line; None if it runs something else."""
        if "-m" not in command[:-1]:
            return None
        at = list(command).index("-m")
        return Program(command[at + 1], tuple(command[at + 2 :]))


class Standby:
    """The standby process of a node; make it in the thread whose end is the node's end."""

    def __init__(self, preload: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rendezvous.standby_process", preload])
        forkserver.ensure_running()
        self._is_ready = threading.Event()
        threading.Thread(target=self._find_out, name="standby", daemon=True).start()

    @staticmethod
    def preload_of(command: Sequence[str]) -> str | None:
        """Return the module that says what a program needs imported, None if there is none."""
        program = Program.of(command)
        name = f"{program.module}.preload" if program else ""
        try:
            return name if name and importlib.util.find_spec(name) else None
        except ImportError:
            return None

    @property
    def is_ready(self) -> bool:
        """Whether the imports are done; before, starting a worker in the ordinary way is as fast."""
        return self._is_ready.is_set()

    def start(self, program: Program, env: Mapping[str, str], stdout: str | None, stderr: str | None) -> ForkedWorker:
        """Start a worker; `stdout` and `stderr` are files to write to, the node's own if None or empty."""
        told = {**os.environ, **env}
        process = self._context.Process(target=_become, args=(program, told, stdout, stderr), daemon=True)
        process.start()
        return ForkedWorker(process)

    def _find_out(self) -> None:
        process = self._context.Process(target=_nothing, daemon=True)
        process.start()  # returns once the forkserver answers, which is after the imports
        process.join()
        if process.exitcode == 0:
            self._is_ready.set()


class ForkedWorker:
    """A forked worker, as TorchElastic sees one that it has started itself: a handler with a `proc` like Popen's."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.proc = self
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it has been started"
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the worker and all that it has started."""
        if self._process.exitcode is None:
            os.killpg(self.pid, death_sig or signal.SIGTERM)


def _become(program: Program, env: dict[str, str], stdout: str | None, stderr: str | None) -> None:
    """In the forked process: be what a process that was started with the program's command line would be."""
    os.setsid()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the standby process ignores them
    os.environ.clear()
    os.environ.update(env)
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        if path:
            with Path(path).open("w") as file:
                os.dup2(file.fileno(), stream.fileno())
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def _nothing() -> None:
    """Show that the standby process serves."""
