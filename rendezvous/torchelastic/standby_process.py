"""A node's standby process: it imports what the node's workers will need, and forks them.

It is a fork of the agent, or `python -m rendezvous.torchelastic.standby_process FD AGENT_PID`. A message on its socket
is a module to import and a program's arguments (JSON), answered with `READY`, or comes with another socket, which
requests a worker. It does not use that socket itself: it forks, and the worker reads its program there, confirms that
it is there, and begins once the agent has received that. So nothing starts for an agent that no longer waits.

A worker is the agent's child: it is forked by a process that ends at once, and the agent adopts it. It outlives the
standby process, and the agent itself reads its exit code.

A process that finds after a fork that CUDA had been initialized before re-executes itself as a program (exec).

A scheduler that signals a whole process tree, or a closing terminal, means the workers: the standby process ignores
such signals and ends with its agent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from rendezvous.orphans import die_with_parent, set_name

NAME = "standby"
READY = b"ready"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
LONGEST_MESSAGE = 65_536
"""Maximum length of a module and its arguments, in bytes."""
THREADS = "OMP_NUM_THREADS"


def serve(control: socket.socket, agent: int, unblocked: Iterable[int] | None = None) -> NoReturn:
    """Import and fork on request, until the agent ends.

    A fork of the agent begins with the ignored signals blocked, and passes the earlier mask as `unblocked`: the agent's
    signal handlers are neither for this process nor for the workers.
    """
    dispositions = {number: _inherited(number, signal.signal(number, signal.SIG_IGN)) for number in IGNORED}
    if unblocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    die_with_parent()
    set_name(NAME)
    if is_poisoned():
        control.set_inheritable(True)
        for number, how in dispositions.items():
            signal.signal(number, how)
        os.execv(sys.executable, command(control, agent))
    while os.getppid() == agent:
        message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, 1)
        if descriptors:
            if between := _forked_by(descriptors[0]):
                control.close()
                _become(socket.socket(fileno=descriptors[0]), agent, between, dispositions)
        elif message:
            _import(*json.loads(message))
            control.send(READY)
        else:
            break
    os._exit(0)


def _inherited(number: signal.Signals, before: Any) -> Any:
    """Return the disposition that a new program would have: ignored signals stay ignored, handlers are reset."""
    if before is signal.SIG_IGN:
        return before
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def command(control: socket.socket, agent: int) -> list[str]:
    """Return the command line that starts a standby process as a program."""
    return [sys.executable, "-m", "rendezvous.torchelastic.standby_process", str(control.fileno()), str(agent)]


def is_poisoned() -> bool:
    """Return True if a fork has made this process's GPUs unusable: CUDA was initialized before it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _import(module: str, *arguments: str) -> None:
    """Import a module as a program started with `-m` would, and let it prepare for these arguments."""
    gc.disable()  # imported objects stay: to look for garbage among them takes a fifth of the time
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = importlib.import_module(module)
        if hasattr(loaded, "prepare"):
            loaded.prepare(arguments)
    except BaseException:  # noqa: BLE001 - shown; workers are then started the ordinary way
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    if not sys.flags.safe_path:
        sys.path.pop(0)
    _settle()


def _settle() -> None:
    """Exclude existing objects from the workers' garbage collections and exits.

    Either would touch, and so copy, the memory that workers share with this process; torch alone has thousands of
    finalizers. They are never called, since this process ends without them.
    """
    gc.freeze()
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _forked_by(request: int) -> int | None:
    """Fork a process that forks a worker and ends; return its pid in the worker, and None here.

    If the fork fails, the request is closed without an answer.
    """
    try:
        between = os.fork()
    except OSError:
        os.close(request)
        return None
    if between:
        os.waitpid(between, 0)
        os.close(request)
        return None
    own = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return own


def _become(request: socket.socket, agent: int, between: int, dispositions: dict[signal.Signals, Any]) -> NoReturn:
    """Become the program that its command line would have started, if the agent still wants it."""
    os.setsid()
    set_name("worker")
    for number, before in dispositions.items():  # until the program runs, Ctrl-C ends this process without a traceback
        signal.signal(number, signal.SIG_DFL if before is signal.default_int_handler else before)
    _await_adoption(agent, between)
    die_with_parent()
    wanted = _wanted(request, agent)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))  # as `-m` does
    _set_environment(wanted["env"])
    for path, stream in ((wanted["stdout"], sys.stdout), (wanted["stderr"], sys.stderr)):
        if path:
            with Path(path).open("a") as file:  # after the last lines of its predecessor
                os.dup2(file.fileno(), stream.fileno())
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)  # as torchrun's `-u` does
    if is_poisoned():
        ordinary = [sys.executable, "-u", "-m", wanted["module"], *wanted["arguments"]]
        os.execve(sys.executable, ordinary, wanted["env"])
    sys.argv = [wanted["module"], *wanted["arguments"]]
    signal.signal(signal.SIGINT, dispositions[signal.SIGINT])
    _end(_run(wanted["module"]))


def _wanted(request: socket.socket, agent: int) -> dict[str, Any]:
    """Return the agent's request for this process; exit if there is none any more, or the agent is gone."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), request, request.makefile("rw") as lines:
        wanted: dict[str, Any] | None = json.loads(lines.readline() or "null")
        if wanted is not None and os.getppid() == agent:
            lines.write(f"{os.getpid()}\n")
            lines.flush()
            if lines.readline():
                return wanted
    os._exit(0)


def _await_adoption(agent: int, between: int) -> None:
    """Wait until the process that forked this one has ended; exit unless the agent is then its parent.

    That process only has to end, however long the machine takes, so there is no timeout.
    """
    while os.getppid() == between:
        time.sleep(0.001)
    if os.getppid() != agent:
        os._exit(1)


def _set_environment(env: dict[str, str]) -> None:
    """Set a worker's environment, and torch's number of threads, which was read from another one."""
    is_other = env.get(THREADS) != os.environ.get(THREADS)
    os.environ.clear()
    os.environ.update(env)
    torch = sys.modules.get("torch")
    if is_other and torch is not None and env.get(THREADS, "").isdecimal():
        torch.set_num_threads(int(env[THREADS]))


def _run(module: str) -> int:
    """Run a module as the program, and return the exit code that the interpreter would."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - shown as the interpreter would
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, without returning through the frames of the forked process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
