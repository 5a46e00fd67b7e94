"""Workers that start with their imports done: forked from a standby process.

Importing what a worker needs takes seconds of a core, for every worker that a node starts and, when a dead one is
replaced, at the expense of those that train. One standby process per node imports it once, and forks a worker in
milliseconds. `standby_process` is its side.

The process is a fork of the agent if possible, to reuse the agent's imports: the agent must not have threads yet, and
libraries must have read the same environment as the workers'.

It may be stopped, or swapped out, and then does not fork. Callers wait at most `FORKS_WITHIN_S`; it is then killed, and
no worker depends on it.

A program lists its imports in a module `preload` of its package; a program without one, or that is not a module, is
started in the ordinary way. If that module has a function `prepare`, it is called with the program's arguments, and
imports what only some of them need.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rendezvous.orphans import adopting
from rendezvous.process_table import environ_of
from rendezvous.torchelastic import standby_process

FORKS_WITHIN_S = 5.0
"""Seconds to wait for a fork, which takes milliseconds; on slower machines, the ordinary way costs little more."""
AGAIN_AFTER_S = 60.0
"""Seconds from the start of a standby process that is killed before it is ready to the start of the next."""
LOOK_EVERY_S = 0.02
UNKNOWN_CODE = 255
"""Exit code of a process whose status somebody else has read."""
READ_WHEN_LOADED = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH_")
"""Prefixes of variables that libraries and the interpreter read once, when they are loaded."""


@dataclass(frozen=True, slots=True)
class Program:
    """A module that is run as a program, and its arguments."""

    module: str
    arguments: tuple[str, ...]

    @staticmethod
    def of(command: Sequence[str]) -> Program | None:
        """Parse `-m MODULE ARGS…` from the interpreter's arguments; None for anything else, such as a file."""
        options = list(itertools.takewhile(lambda part: part.startswith("-") and part != "-m", command))
        match command[len(options) :]:
            case ["-m", module, *arguments]:
                return Program(module, tuple(arguments))
        return None

    @property
    def preload(self) -> str | None:
        """The module that lists the program's imports; None if there is none."""
        name = f"{self.module}.preload"
        try:
            return name if importlib.util.find_spec(name) else None
        except ImportError:
            return None


class Standby:
    """The standby process of a node, which dies with the thread that creates it.

    `forks` is True if this process may be forked for it: no Python thread runs yet. Otherwise it is started, with
    `environ` if that is not this process's own.
    """

    def __init__(self, *, forks: bool, environ: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _forked(self._control, theirs) if forks and may_fork() else _started(theirs, environ)
        self._is_ready = self._has_ended = False
        self._began_at = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def preload(self, module: str, *arguments: str) -> None:
        """Make it import a module, and prepare for a program's arguments; `is_ready` turns True when done."""
        self._is_ready = False
        message = json.dumps([module, *arguments]).encode()
        if len(message) > standby_process.LONGEST_MESSAGE:  # the workers then do rarely needed imports themselves
            message = json.dumps([module]).encode()
        with contextlib.suppress(OSError):
            self._control.send(message)

    @property
    def is_ready(self) -> bool:
        """True if the imports are done."""
        self.wait_until_ready(0.0)
        return self._is_ready

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait for the imports; return False if they take longer, or have failed."""
        if not self._is_ready and not self._has_ended:
            self._control.settimeout(timeout_s)
            try:
                answer = self._control.recv(len(standby_process.READY))
            except OSError as error:
                self._has_ended = not isinstance(error, TimeoutError | BlockingIOError)
            else:
                self._is_ready, self._has_ended = bool(answer), not answer
        return self._is_ready

    @property
    def has_ended(self) -> bool:
        """True if it is gone and must be replaced, but not if its imports have failed, as the next one's would.

        Whoever kills it during its imports may be short of memory: it is then replaced later.
        """
        code = self._process.poll()
        if code is None:
            return False
        return self.is_ready or (code < 0 and time.monotonic() - self._began_at > AGAIN_AFTER_S)

    def start(self, program: Program, env: Mapping[str, str], stdout: str | None, stderr: str | None) -> ForkedWorker:
        """Start a worker with exactly this environment.

        `stdout` and `stderr` are files to write to, the node's own if None or empty. Raises OSError if the standby
        process is gone, or does not fork in time; then it is not used again.
        """
        if self._process.poll() is not None:
            raise ConnectionResetError("it has ended")
        wanted = {
            "module": program.module,
            "arguments": program.arguments,
            "env": dict(env),
            "stdout": stdout,
            "stderr": stderr,
        }
        try:
            return self._ask(json.dumps(wanted))
        except TimeoutError:
            self.end()
            raise TimeoutError(f"it did not fork within {FORKS_WITHIN_S:.0f} s: it is stopped or swapped out") from None

    def _ask(self, wanted: str) -> ForkedWorker:
        ours, theirs = socket.socketpair()
        self._control.settimeout(FORKS_WITHIN_S)
        ours.settimeout(FORKS_WITHIN_S)
        with ours, adopting():
            with theirs:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            ours.sendall(f"{wanted}\n".encode())
            answer = ours.recv(32)
            if not answer:
                raise ConnectionResetError("it could not fork")
            ours.sendall(b"begin\n")
            return ForkedWorker(int(answer))

    def end(self) -> None:
        """End the standby process, whatever it does; its workers stay."""
        self._control.close()
        self._has_ended = True
        self._process.kill()
        self._process.wait()


class Process:
    """A child process not started by subprocess, with the interface of a Popen that TorchElastic needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, a signal negated; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = UNKNOWN_CODE
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(LOOK_EVERY_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedWorker(Process):
    """A forked worker with TorchElastic's handler interface: its `proc` is like a Popen."""

    @property
    def proc(self) -> ForkedWorker:
        return self

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the worker and all its children; no error if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, death_sig or signal.SIGTERM)


def may_fork() -> bool:
    """Return True if a fork of this process is equivalent to a newly started one."""
    return threading.active_count() == 1 and loaded_with(environ_of(os.getpid())) == loaded_with(os.environ)


def loaded_with(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that libraries and the interpreter read only when they are loaded."""
    return {name: value for name, value in environ.items() if name.startswith(READ_WHEN_LOADED)}


def _forked(ours: socket.socket, theirs: socket.socket) -> Process | subprocess.Popen[bytes]:
    agent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads, which can be forked
        # the agent's signal handlers are not for the other process, which starts with them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, standby_process.IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                standby_process.serve(theirs, agent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Process(pid)


def _started(theirs: socket.socket, environ: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    command = standby_process.command(theirs, os.getpid())
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)
