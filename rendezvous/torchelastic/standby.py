"""Workers that start with their imports done: forked from a standby process that has done them already.

Starting a worker costs seconds of imports, at the expense of the node's other workers. One standby process per node
has imported what a worker needs, and a worker that takes a dead one's place is forked from it in milliseconds. The
standby process is the forkserver of multiprocessing; it holds no thread of Python's and no device.

It may be stopped, or swapped out, and then neither forks nor says that a fork has ended. So nobody waits for it for
longer than `FORKS_WITHIN_S`, and what has become of a fork is read from /proc if it does not say.

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from rendezvous.orphans import die_with_parent
from rendezvous.waiting import Bystander, Call, GivenUp

FORKS_WITHIN_S = 5.0
"""A fork takes milliseconds; on a machine that takes longer, the ordinary way costs little more."""
UNTOLD_S = 1.0
"""How long a worker may have ended without the standby process saying so."""
LOOK_EVERY_S = 0.02
UNKNOWN_CODE = 255
"""What multiprocessing reports, too, of a process whose end nobody has seen."""


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
        self._pid = _forkserver_pid()
        self._workers: list[ForkedWorker] = []
        # The forkserver dies with the thread that started it, and multiprocessing starts it again where it has died.
        self._forks = Bystander("forks")
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

    @property
    def has_ended(self) -> bool:
        """Whether it was ready and is gone, so that another is to be begun."""
        return self.is_ready and not is_alive(self._pid)

    def start(self, program: Program, env: Mapping[str, str], stdout: str | None, stderr: str | None) -> ForkedWorker:
        """Start a worker; `stdout` and `stderr` are files to write to, the node's own if None or empty.

        Raises OSError or EOFError if the standby process is gone, or does not fork in time; then it is not used again.
        """
        if not is_alive(self._pid):
            raise EOFError("it has ended")
        environ = {**os.environ, **env}
        call = self._forks.begin(lambda: self._fork(program, environ, stdout, stderr))
        try:
            worker = call.result(FORKS_WITHIN_S)
        except GivenUp:
            self._give_up(call)
            raise TimeoutError(f"it did not fork within {FORKS_WITHIN_S:.0f} s: it is stopped or swapped out") from None
        self._workers.append(worker)
        return worker

    def _fork(self, program: Program, environ: dict[str, str], stdout: str | None, stderr: str | None) -> ForkedWorker:
        process = self._context.Process(target=_become, args=(program, environ, stdout, stderr), daemon=True)
        process.start()
        return ForkedWorker(process)

    def _give_up(self, call: Call[ForkedWorker]) -> None:
        """End what a call may still start, and the standby process, unless workers would die with it."""

        def end_late_fork() -> None:
            with contextlib.suppress(OSError, EOFError):
                call.result().close(signal.SIGKILL)

        threading.Thread(target=end_late_fork, name="late fork", daemon=True).start()
        if all(worker.poll() is not None for worker in self._workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # multiprocessing looks whether it is there

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
        self._untold_since: float | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it has been started"
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.exitcode
        return self._untold() if code is None else code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(LOOK_EVERY_S)
        return code

    def _untold(self) -> int | None:
        """Return the code of a worker that has ended some time ago without the standby process saying so."""
        fields = _fields_of(self.pid)
        if fields and fields[0] not in "ZX":
            self._untold_since = None
            return None
        self._untold_since = self._untold_since or time.monotonic()
        if time.monotonic() - self._untold_since < UNTOLD_S:
            return None
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields else UNKNOWN_CODE

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


def is_alive(pid: int) -> bool:
    """Say whether a process is there, stopped or not."""
    fields = _fields_of(pid)
    return bool(fields) and fields[0] not in "ZX"


def _fields_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, the last of which is the exit status; [] without any."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _forkserver_pid() -> int:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no other way to learn it
    assert isinstance(pid, int), "it runs"
    return pid


def _nothing() -> None:
    """Run in a fork, to show that the standby process works."""
