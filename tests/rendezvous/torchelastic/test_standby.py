"""A worker forked from a node's standby process behaves like one started with the same command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rendezvous.process_table import is_alive, name_of
from rendezvous.torchelastic import standby_process
from rendezvous.torchelastic.bound_agent import BoundAgent
from rendezvous.torchelastic.standby import UNKNOWN_CODE, Program, Standby
from tests.conftest import PATIENCE_S, eventually
from tests.processes import command_line_of, parent_of

pytestmark = pytest.mark.slow

PROGRAM = """
import json, multiprocessing, os, signal, sys
import neighbour

signals = {name: str(signal.getsignal(getattr(signal, name))) for name in sorted(vars(signal)) if name[:3] == "SIG"
           and name[3] != "_"}
child = multiprocessing.Process(target=int)
child.start()
child.join()
facts = {"argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "signals": signals, "child": child.exitcode,
         "method": multiprocessing.get_start_method(), "said": os.environ["SAID"],
         "group": os.getpgid(0) == os.getpid()}
print(json.dumps(facts))
sys.exit(3)
"""


SLEEPER = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Standby]]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    begun = []

    def one() -> Standby:
        begun.append(Standby(forks=False))
        begun[-1].preload("json")
        assert begun[-1].wait_until_ready(PATIENCE_S)
        return begun[-1]

    yield one
    for each in begun:
        each.end()


@pytest.fixture
def standby(begin: Callable[[], Standby]) -> Standby:
    return begin()


@pytest.fixture
def sleeper() -> Program:
    return Program("sleeper", ())


def test_a_forked_worker_is_what_its_command_line_would_have_started(standby: Standby, tmp_path: Path) -> None:
    """Imports, signals, children, streams and exit code are equal; a signal to a process tree spares its children."""
    command, said = ["-m", "program", "--one"], {"SAID": "it"}
    program = Program.of(command)
    assert program is not None
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2):
        os.kill(standby.pid, number)
    started = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **said},
        start_new_session=True,
        stdout=subprocess.PIPE,
        check=False,
    )
    out, err = tmp_path / "out", tmp_path / "err"
    err.write_text("the one before\n")
    forked = standby.start(program, said, str(out), str(err))
    assert (forked.wait(PATIENCE_S), started.returncode) == (3, 3), err.read_text()
    assert json.loads(out.read_text()) == json.loads(started.stdout)
    assert err.read_text() == "the one before\n"
    forked.close(signal.SIGTERM)  # no effect: it has ended


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("import sys; sys.exit('no: ' + sys.argv[1])", 1, r"no: é\udcff"),
        ("import sys; sys.exit(93)", 93, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
        ("import threading; threading.Timer(0.2, print, ['a thread']).start()", 0, "a thread"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_its_end_is_what_the_interpreter_would_have_made_of_it(
    standby: Standby, tmp_path: Path, body: str, code: int, said: str
) -> None:
    """Messages, codes, exit functions and running threads."""
    (tmp_path / "body.py").write_text(body)
    out = tmp_path / "out"
    worker = standby.start(Program("body", ("é\udcff",)), {"PYTHONIOENCODING": "utf-8"}, str(out), str(out))
    assert worker.wait(PATIENCE_S) == code
    assert said in out.read_text()


def test_which_command_lines_are_modules() -> None:
    """Only the interpreter's own `-m` counts, not one among a script's arguments."""
    assert Program.of(("-u", "-m", "a.b", "-m", "c")) == Program("a.b", ("-m", "c"))
    assert Program.of(("-u", "train.py", "-m", "bert")) is None
    assert Program.of(("-u", "-m")) is None
    assert Program.of(()) is None


def test_a_worker_is_its_agents_child_and_outlives_the_standby_process(standby: Standby, sleeper: Program) -> None:
    """The kernel reports its exit code to the agent, and killing a standby process affects no worker."""
    worker = standby.start(sleeper, {}, os.devnull, None)
    assert (parent_of(worker.pid), name_of(worker.pid), name_of(standby.pid)) == (os.getpid(), "worker", "standby")
    os.kill(standby.pid, signal.SIGKILL)
    eventually(lambda: standby.has_ended, "its end")
    with pytest.raises(ConnectionResetError, match="it has ended"):
        standby.start(sleeper, {}, os.devnull, None)
    assert worker.poll() is None
    worker.close()
    assert worker.wait(PATIENCE_S) == -signal.SIGTERM
    worker.close()


def test_a_workers_code_that_somebody_else_took_is_unknown(standby: Standby, sleeper: Program) -> None:
    """A library that waits for all children may take it, for example."""
    worker = standby.start(sleeper, {}, os.devnull, None)
    worker.kill()
    os.waitpid(worker.pid, 0)
    assert worker.wait(PATIENCE_S) == UNKNOWN_CODE


AGENT = f"""
import os, signal, sys, threading, time
from rendezvous.torchelastic.standby import Program, Standby
standby = Standby(forks=sys.argv[1] == "forked")
standby.preload("json")
assert standby.wait_until_ready({PATIENCE_S})
worker = standby.start(Program("sleeper", ()), {{}}, os.devnull, None)
print(standby.pid, worker.pid, flush=True)
time.sleep(600)
"""


def test_whatever_is_forked_after_cuda_began_becomes_a_program(
    standby: Standby, sleeper: Program, tmp_path: Path
) -> None:
    """`torchrun --nproc-per-node=auto` queries GPUs, and so may an import: a fork could not use them afterwards.

    Torch's own function says so; here a module of that name stands for torch, whose import takes seconds.
    """
    assert torch.cuda._is_in_bad_fork() is False
    (tmp_path / "torch.py").write_text("class cuda: _is_in_bad_fork = staticmethod(lambda: True)\n")
    poison = "import torch\n"
    (tmp_path / "poison.py").write_text(poison)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-c", poison + AGENT, "forked"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pid, worker_pid = (int(pid) for pid in agent.stdout.readline().split())
        assert "standby_process" in " ".join(command_line_of(pid))
        assert parent_of(worker_pid) == agent.pid and name_of(worker_pid) == "worker"
        agent.kill()
    eventually(lambda: not is_alive(worker_pid), "its end")
    poisoned = Standby(forks=False)
    poisoned.preload("poison")
    assert poisoned.wait_until_ready(PATIENCE_S)
    worker = poisoned.start(sleeper, {}, os.devnull, None)
    eventually(lambda: command_line_of(worker.pid)[-3:] == ["-u", "-m", "sleeper"], "the program")
    assert parent_of(worker.pid) == os.getpid()
    worker.close()
    assert worker.wait(PATIENCE_S) == -signal.SIGTERM
    poisoned.end()


@pytest.mark.parametrize("how", ["forked", "started"])
def test_standby_process_and_workers_die_with_their_agent(tmp_path: Path, sleeper: Program, how: str) -> None:
    """This holds however the standby process was created, and however the agent ends."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-c", AGENT, how]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        command_line = " ".join(command_line_of(pids[0]))
        assert ("standby_process" in command_line) == (how == "started")
        assert all(is_alive(pid) for pid in pids) and parent_of(pids[1]) == agent.pid
        agent.kill()
    eventually(lambda: not any(is_alive(pid) for pid in pids), "the end of both")


def test_a_process_is_forked_only_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with other threads is not forked, nor one in which a library has read another thread count."""
    program = "from rendezvous.torchelastic.standby import may_fork; import os, threading\n"
    program += "print(may_fork()); os.environ['OMP_NUM_THREADS'] = '7'; print(may_fork())\n"
    program += "del os.environ['OMP_NUM_THREADS']; os.environ['OTHER'] = '1'; print(may_fork())\n"
    program += "threading.Thread(target=threading.Event().wait, daemon=True).start(); print(may_fork())\n"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True", "False"]


def test_what_was_there_before_the_fork_is_not_taken_down_at_its_end(
    begin: Callable[[], Standby], tmp_path: Path
) -> None:
    """It is not garbage-collected either: both would copy shared memory. The worker's own objects are finalised."""
    (tmp_path / "loaded.py").write_text("import weakref\nclass Kept: ...\nweakref.finalize(Kept, print, 'shared')\n")
    program = "import gc, weakref, loaded\nclass Own: ...\nweakref.finalize(Own, print, 'own')\n"
    (tmp_path / "ends.py").write_text(f"{program}print(gc.get_freeze_count() > 1000 and gc.isenabled())\n")
    standby, out = begin(), tmp_path / "out"
    standby.preload("loaded")
    assert standby.wait_until_ready(PATIENCE_S)
    assert standby.start(Program("ends", ()), {}, str(out), None).wait(PATIENCE_S) == 0
    assert out.read_text().splitlines() == ["True", "own"]


def test_a_module_prepares_for_the_programs_arguments(begin: Callable[[], Standby], tmp_path: Path) -> None:
    """Its workers inherit those imports. If the arguments are too long to be sent, it gets none."""
    (tmp_path / "prepares.py").write_text("given = []\ndef prepare(arguments):\n    given.append(len(arguments))\n")
    (tmp_path / "shows.py").write_text("import prepares\nprint(prepares.given)\n")
    standby, out = begin(), tmp_path / "out"
    for arguments in (("é", "--key"), ("-" * standby_process.LONGEST_MESSAGE,)):
        standby.preload("prepares", *arguments)
        assert standby.wait_until_ready(PATIENCE_S)
    assert standby.start(Program("shows", ()), {}, str(out), None).wait(PATIENCE_S) == 0
    assert out.read_text() == "[2, 0]\n"


def test_a_frozen_standby_process_is_not_waited_for(
    begin: Callable[[], Standby], sleeper: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is killed after a timeout, the requested process does not start, and another standby process replaces it."""
    standby, late = begin(), tmp_path / "late"
    depending = standby.start(sleeper, {}, os.devnull, None)
    os.kill(standby.pid, signal.SIGSTOP)
    with monkeypatch.context() as hasty, pytest.raises(TimeoutError, match="stopped or swapped out"):
        hasty.setattr("rendezvous.torchelastic.standby.FORKS_WITHIN_S", 0.3)
        standby.start(sleeper, {}, str(late), None)
    assert standby.has_ended and not is_alive(standby.pid) and depending.poll() is None
    another = begin().start(sleeper, {}, os.devnull, None)
    assert not late.exists()
    for worker in (depending, another):
        worker.kill()
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL


def test_imports_that_fail_leave_no_standby_process(
    begin: Callable[[], Standby], sleeper: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is shown, and workers, which will have the same error, start without it."""
    standby = Standby(forks=False)
    standby.preload("rendezvous.nothing_of_that_name")
    assert not standby.wait_until_ready(PATIENCE_S) and not standby.is_ready and not standby.has_ended
    assert "No module named 'rendezvous.nothing_of_that_name'" in capfd.readouterr().err
    with pytest.raises(OSError):
        standby.start(sleeper, {}, os.devnull, None)
    standby.end()


def test_a_standby_process_that_is_killed_during_its_imports_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine short of memory would kill the next one as well; it is not asked for at once."""
    standby = Standby(forks=False)
    os.kill(standby.pid, signal.SIGKILL)
    assert not standby.wait_until_ready(PATIENCE_S) and standby._process.wait() == -signal.SIGKILL
    assert not standby.has_ended
    monkeypatch.setattr("rendezvous.torchelastic.standby.AGAIN_AFTER_S", 0.0)
    assert standby.has_ended
    standby.end()
    standby.preload("json")
    assert not standby.is_ready


class Lost:
    """A standby process that fails when a worker is requested."""

    is_ready, has_ended = True, False

    def start(self, *_: object) -> None:
        raise ConnectionResetError("it could not fork")


def test_a_failing_standby_process_costs_no_worker_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is started normally: an error would end the node with all of its workers."""
    agent, begun = agent_with(Lost(), monkeypatch)
    started = start_worker(agent)
    assert started.proc.wait(PATIENCE_S) == 0 and agent._standby is None
    for _ in range(2):
        BoundAgent._renew_standby(agent)
    assert begun == [("this.preload", "c.yaml")]


def test_a_standby_process_that_was_killed_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker that dies is forked again; a standby process that still imports, or lives, is left alone."""
    agent, begun = agent_with(SimpleNamespace(has_ended=False), monkeypatch)
    BoundAgent._renew_standby(agent)
    assert begun == []
    agent._standby = SimpleNamespace(has_ended=True)  # type: ignore[assignment]
    for _ in range(2):
        BoundAgent._renew_standby(agent)
    assert begun == [("this.preload", "c.yaml")]


def agent_with(standby: object, monkeypatch: pytest.MonkeyPatch) -> tuple[BoundAgent, list[tuple[str, ...]]]:
    """Return an agent whose workers run `-m this`, and the import lists of its later standby processes."""
    begun: list[tuple[str, ...]] = []
    made = SimpleNamespace(has_ended=False, is_ready=False, preload=lambda *asked: begun.append(asked))
    monkeypatch.setattr("rendezvous.torchelastic.bound_agent.Standby", lambda **_: made)
    program = SimpleNamespace(preload="this.preload", arguments=("c.yaml",))
    agent: Any = SimpleNamespace(_standby=standby, _has_lost_standby=False, _program=program)
    return agent, begun


def start_worker(agent: BoundAgent) -> Any:
    return BoundAgent._handler(
        agent,
        entrypoint=sys.executable,
        args=("-m", "this"),
        env={},
        stdout=os.devnull,
        stderr="",
        local_rank_id=0,
        numa_options=None,
    )


@pytest.mark.parametrize("asked", [b'{"module": "x"}\n', b"null\n", b""])
def test_a_worker_that_is_not_wanted_any_more_ends_in_silence(asked: bytes) -> None:
    """Its agent was signalled meanwhile: the worker's answer finds a closed connection, but prints no traceback."""
    ours, its = socket.socketpair()
    ours.sendall(asked)
    ours.close()
    if not (worker := os.fork()):
        try:
            standby_process._wanted(its, os.getppid())
        finally:
            os._exit(9)
    its.close()
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


@pytest.mark.parametrize("is_adopted", [True, False])
def test_a_worker_begins_only_as_its_agents_child(is_adopted: bool) -> None:
    """If the forking process has ended, however late, the worker exits: an agent that does not wait adopts nobody."""
    agent, between = os.getpid(), os.getpid() + 1
    if not (worker := os.fork()):
        standby_process._await_adoption(agent if is_adopted else between, between)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == (9 if is_adopted else 1)
