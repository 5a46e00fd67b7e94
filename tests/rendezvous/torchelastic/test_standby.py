"""A worker that is forked from a node's standby process is what the same command line would have started."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos.services.torchrun_node import children_of
from rendezvous.torchelastic.live_agent import LiveAgent
from rendezvous.torchelastic.standby import ForkedWorker, Program, Standby
from tests.processes import is_running
from tests.rendezvous.rendezvous_sides import eventually

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


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    forkserver._forkserver._stop()  # type: ignore[attr-defined] - one of other tests is somewhere else
    made = Standby("json")
    eventually(lambda: made.is_ready, "the imports")
    yield made
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGCONT)
    for child in children_of(pid):  # a test that failed leaves some, and the standby process waits for them
        os.kill(child, signal.SIGKILL)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload([])


def test_a_forked_worker_is_what_its_command_line_would_have_started(standby: Standby, tmp_path: Path) -> None:
    """Its imports, signals, children, streams and exit code are; what is said to a process tree spares them."""
    command, said = ["-m", "program", "--one"], {"SAID": "it"}
    program = Program.of(command)
    assert program is not None
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2):
        os.kill(forkserver._forkserver._forkserver_pid, number)  # type: ignore[attr-defined]
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
    assert (forked.wait(30.0), started.returncode) == (3, 3), err.read_text()
    assert json.loads(out.read_text()) == json.loads(started.stdout)
    assert err.read_text() == "the one before\n"
    forked.close(signal.SIGTERM)  # it has ended: nothing happens


def test_which_command_lines_are_modules() -> None:
    """Only the interpreter's own `-m` counts, not one among a script's arguments."""
    assert Program.of(("-u", "-m", "a.b", "-m", "c")) == Program("a.b", ("-m", "c"))
    assert Program.of(("-u", "train.py", "-m", "bert")) is None
    assert Program.of(("-u", "-m")) is None
    assert Program.of(()) is None


def test_signalling_a_worker_that_has_just_begun_or_ended_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first line a fork has no process group, and one that ended may not be known as such yet."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    worker = ForkedWorker(process)  # type: ignore[arg-type]
    worker.close(signal.SIGKILL)
    assert worker.wait(30.0) == -signal.SIGKILL
    monkeypatch.setattr(process, "_popen", type("Popen", (), {"poll": lambda *_: None, "pid": process.pid})())
    worker.close(signal.SIGTERM)


def test_a_failing_standby_process_costs_no_worker() -> None:
    """A worker is then started in the ordinary way: an error would end the node with all of its workers."""

    class Gone:
        is_ready = True

        def start(self, *_: object) -> None:
            raise EOFError("unexpected EOF")

    one = {0: ""}
    context = SimpleNamespace(
        entrypoint=sys.executable, args={0: ("-m", "this")}, envs={0: {}}, stdouts={0: os.devnull}, stderrs=one
    )
    agent = SimpleNamespace(_standby=Gone())
    spec = SimpleNamespace(args=("-m", "this"), numa_options=None)
    started = LiveAgent._start(agent, 0, context, spec)  # type: ignore[arg-type]
    assert started.proc.wait(30.0) == 0 and agent._standby is None


SLEEPER = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def sleeper(standby: Standby, tmp_path: Path) -> Program:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    return Program("sleeper", ())


def pid_of(standby: Standby) -> int:
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def test_a_frozen_standby_process_is_not_waited_for(
    standby: Standby, sleeper: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended after its time, so that another can be started; nothing that it forks late stays."""
    monkeypatch.setattr("rendezvous.torchelastic.standby.FORKS_WITHIN_S", 0.3)
    pid = pid_of(standby)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="stopped or swapped out"):
        standby.start(sleeper, {}, os.devnull, None)
    eventually(lambda: not is_running(pid), "its end")
    assert standby.has_ended
    with pytest.raises(EOFError, match="it has ended"):
        standby.start(sleeper, {}, os.devnull, None)
    another = Standby("json")
    eventually(lambda: another.is_ready, "another's imports")
    worker = another.start(sleeper, {}, os.devnull, None)
    worker.close(signal.SIGKILL)
    assert worker.wait(30.0) == -signal.SIGKILL


def test_a_frozen_standby_process_on_which_workers_depend_is_left_alone(
    standby: Standby, sleeper: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They would die with it. When it continues, the worker that it forks late is ended: another has its place."""
    monkeypatch.setattr("rendezvous.torchelastic.standby.FORKS_WITHIN_S", 0.3)
    pid, late = pid_of(standby), tmp_path / "late"
    depending = standby.start(sleeper, {}, os.devnull, None)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        standby.start(sleeper, {}, str(late), None)
    assert is_running(depending.pid) and is_running(pid)
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: not any(thread.name == "late fork" for thread in threading.enumerate()), "the late fork")
    eventually(lambda: children_of(pid) == [depending.pid], "the end of the late one")
    assert depending.poll() is None
    depending.close(signal.SIGKILL)
    assert depending.wait(30.0) == -signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_while_the_standby_process_is_frozen_is_seen(
    standby: Standby, sleeper: Program, how: signal.Signals, tmp_path: Path
) -> None:
    """With its true code, although the one that should say so does not."""
    out = tmp_path / "out"
    worker = standby.start(sleeper, {}, str(out), None)
    eventually(lambda: out.exists() and "begun" in out.read_text(), "its first line")
    os.kill(pid_of(standby), signal.SIGSTOP)
    assert worker.poll() is None
    os.kill(worker.pid, how)
    assert worker.wait(30.0) == -how
    os.kill(pid_of(standby), signal.SIGCONT)
    eventually(lambda: worker.poll() == -how, "the same from the standby process")


def test_a_frozen_or_killed_standby_process_is_replaced_by_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is started the ordinary way meanwhile."""
    begun: list[object] = []
    agent = SimpleNamespace(
        _context=lambda: SimpleNamespace(subprocess_handlers={}, _running_local_ranks=set()),
        _start=lambda *_: SimpleNamespace(proc=SimpleNamespace(pid=7)),
        _has_lost_standby=True,
        _begin_standby=begun.append,
        _buried=set(),
        _born_at={},
    )
    group = SimpleNamespace(spec="the program", workers=[])
    for _ in range(2):
        LiveAgent._replace(agent, group, 0)  # type: ignore[arg-type]
    assert begun == ["the program"]
