"""Workers that start with their imports done: forked from a standby process that has done them already.

Starting a worker costs seconds of imports, at the expense of the node's other workers. One standby process per node
has imported what a worker needs, and a worker that takes a dead one's place is forked from it in milliseconds. The
standby process is the forkserver of multiprocessing; it holds no thread of Python's and no device.

A program names what to import in a module `preload` of its package; a program without one, or that is not a module, is
started in the ordinary way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
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
        """Find `-m MODULE ARGS…` in what follows the interpreter; None if it runs something else, such as a file."""
        options = list(itertools.takewhile(lambda part: part.startswith("-") and part != "-m", command))
        match command[len(options) :]:
            case ["-m", module, *arguments]:
                return Program(module, tuple(arguments))
        return None


class Standby:
    """The standby process of a node; create it in the thread with whose end it is to die."""

    def __init__(self, preload: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rendezvous.torchelastic.standby_process", preload])
        forkserver.ensure_running()
        self._is_ready = threading.Event()
        threading.Thread(target=self._find_out, name="standby", daemon=True).start()

    @staticmethod
    def preload_of(command: Sequence[str]) -> str | None:
        """Return the module that names a program's imports, None if there is none."""
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
        environ = {**os.environ, **env}
        process = self._context.Process(target=_become, args=(program, environ, stdout, stderr), daemon=True)
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
        """Signal the worker and all that it has started; no error if it has just ended or just begun."""
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(self.pid, death_sig or signal.SIGTERM)
                except ProcessLookupError:  # it has no group of its own yet
                    os.kill(self.pid, death_sig or signal.SIGTERM)


def _become(program: Program, env: dict[str, str], stdout: str | None, stderr: str | None) -> None:
    """In the forked process: become what the program's command line would have started."""
    from rendezvous.torchelastic.standby_process import dispositions  # not in the agent: importing it ignores signals

    os.setsid()
    die_with_parent()
    agent = multiprocessing.parent_process()
    if agent is None or not agent.is_alive():
        sys.exit("the agent that asked for this worker is gone")
    for number, before in dispositions.items():
        signal.signal(number, before)
    multiprocessing.current_process().daemon = False  # or it could have no children
    multiprocessing.set_start_method(None, force=True)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))  # as `-m` does
    os.environ.clear()
    os.environ.update(env)
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        if path:
            with Path(path).open("a") as file:  # after the last lines of its predecessor
                os.dup2(file.fileno(), stream.fileno())
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)  # as torchrun's `-u` does
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def _nothing() -> None:
    """Run in a fork, to show that the standby process works."""
