"""The watchdog's limits: what it learns from, and what does not count."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from elastic_train.errors import HungError, PeerLostError
from elastic_train.system import watchdog
from elastic_train.system.watchdog import ENTERING_S, LEAST_S, MOST_LOOK_S, MOST_S, PREPARING_S, TIMES_LONGEST, Watchdog
from elastic_train.training import supervisor
from elastic_train.training.commits import Commits
from elastic_train.training.opening import resources
from rendezvous.process_table import children_of, environ_of, is_alive, is_stopped
from tests.conftest import PATIENCE_S, eventually


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that tests move; the watching thread does not run."""
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    monkeypatch.setattr(Watchdog, "_arm", lambda self: None)
    return now


def watch_for(clock: list[float], watched: Watchdog, seconds: float) -> None:
    """Let time pass in which the process runs, and its thread looks every second."""
    until = clock[0] + seconds
    while clock[0] < until:
        clock[0] = min(until, clock[0] + 1.0)
        watched.look()


def test_work_up_to_a_wait_is_learned(clock: list[float]) -> None:
    """A step's compute, from its beat to its first wait, sets the limit; the wait itself does not."""
    watched = Watchdog()
    watched.beat()
    clock[0] += 25.0
    with watched.resting():
        clock[0] += 500.0
    clock[0] += 0.5
    watched.beat()
    assert watched.limit_s == TIMES_LONGEST * 25.0


def test_nothing_is_known_before_a_whole_step_is_over(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a cell meet before they compute: that first stretch is short, and the next may take any time."""
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: pytest.fail(f"ended after {stuck_s} s"))
    watched = Watchdog()
    watched.enter()
    watched.await_first()
    watched.beat()
    with watched.resting():
        clock[0] += 1.0
    watch_for(clock, watched, 5 * LEAST_S)
    assert watched.limit_s == MOST_S
    watched.beat()
    assert watched.limit_s == min(MOST_S, TIMES_LONGEST * 5 * LEAST_S)


def test_limits_have_bounds(clock: list[float]) -> None:
    """Nothing is known at first; short steps do not make the limit too short, nor long ones too long."""
    watched = Watchdog()
    assert watched.limit_s == MOST_S
    for seconds, limit_s in ((0.1, LEAST_S), (1000.0, MOST_S)):
        watched.beat()
        clock[0] += seconds
        watched.beat()
        assert watched.limit_s == limit_s


def test_entering_a_world_has_a_separate_limit_and_is_not_learned_from(clock: list[float]) -> None:
    """Between two signs of progress it is half a minute, a process's first world too; a first batch may take long.

    A limit that is configured, or learned, for steps does not make it stricter; a longer one makes it laxer.
    """
    for fixed_s, first_s in ((3.0, ENTERING_S), (100.0, 100.0), (None, MOST_S)):
        watched = Watchdog(fixed_s)
        watched.enter()
        assert watched.limit_s == max(ENTERING_S, fixed_s or 0.0)
        watched.await_first()
        assert watched.limit_s == first_s
        clock[0] += 200.0
        watched.beat()
        assert watched.limit_s == (fixed_s or MOST_S)
        clock[0] += 1.0
        watched.beat()
        assert watched.limit_s == (fixed_s or LEAST_S)
        watched.leave()
        assert watched.limit_s == MOST_S


def test_silence_beyond_the_limit_is_a_hang(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung claim is detected after the limit without an answer; a long load is not a hang while the storage answers.

    While there are steps, the storage's answers to a save beside them do not count as progress.
    """
    ends: list[float] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: ends.append(stuck_s))
    watched = Watchdog(3.0)
    watched.enter()
    for _ in range(100):
        watch_for(clock, watched, 0.9 * ENTERING_S)
        watched.moved()
    assert ends == []
    watch_for(clock, watched, ENTERING_S + 1.0)
    assert ends == [pytest.approx(ENTERING_S + 1.0)]
    watched.beat()
    watch_for(clock, watched, 2.9)
    watched.moved()
    watch_for(clock, watched, 0.2)
    assert ends[1:] == [pytest.approx(3.1)]
    with watched.resting():
        watched.moved()
        watch_for(clock, watched, 100.0)
    assert len(ends) == 2


@pytest.mark.parametrize(("fixed_s", "limit_s"), [(None, PREPARING_S), (10.0, MOST_S), (100.0, TIMES_LONGEST * 100.0)])
@pytest.mark.parametrize(("cpu_share", "num_bytes"), [(0.02, 0), (0.0, 1_000_000)])
def test_a_process_that_is_idle_before_it_asks_for_a_world_is_ended(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    fixed_s: float | None,
    limit_s: float,
    cpu_share: float,
    num_bytes: int,
) -> None:
    """Days of work on data or a model are no hang, nor is the wait for a world, which has its own limits."""
    ends: list[float] = []
    done = [(0.0, 0)]
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: ends.append(stuck_s))
    monkeypatch.setattr(watchdog, "_work_done", lambda: done[0])
    watched = Watchdog(fixed_s)
    watched.prepare()
    for _ in range(4 * round(limit_s)):
        clock[0] += 1.0
        done[0] = (done[0][0] + cpu_share, done[0][1] + num_bytes)
        watched.look()
    with watched.resting():
        watch_for(clock, watched, 4 * limit_s)
    assert ends == []
    watch_for(clock, watched, limit_s + 2.0)
    assert ends[0] == pytest.approx(limit_s, abs=1.5)


def test_time_in_which_the_process_did_not_run_does_not_count(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped for an hour in the middle of a step, and again before the next look; a hang after it is found."""
    ends: list[float] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: ends.append(stuck_s))
    watched = Watchdog(10.0)
    watched.beat()
    watch_for(clock, watched, 3.0)
    for _ in range(2):
        clock[0] += 3600.0
        watched.look()
    assert ends == []
    watch_for(clock, watched, 4.0)
    assert ends == [3.0 + 2 * MOST_LOOK_S + 4.0]


@pytest.mark.parametrize(
    ("fixed_s", "limit_s"),
    [(None, MOST_S), (100.0, TIMES_LONGEST * 100.0), (8.0, TIMES_LONGEST * 8.0), (1.0, ENTERING_S)],
)
def test_a_process_that_hangs_while_warming_up_is_ended(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, fixed_s: float | None, limit_s: float
) -> None:
    """It is in no world yet, so nobody misses it: only its own watchdog sees a hang. Waiting for a world has no limit.

    What it loads and compiles takes longer than a step: the limit that was set for those does not end it.
    """
    ends: list[float] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: ends.append(stuck_s))
    watched = Watchdog(fixed_s)

    def hang(*_: object) -> None:
        watch_for(clock, watched, limit_s)
        assert ends == []
        watch_for(clock, watched, 1.0)

    def wait(*, as_last: bool) -> None:
        assert len(ends) == 1
        watch_for(clock, watched, 10 * MOST_S)

    monkeypatch.setattr(resources, "warm_up", hang)
    monkeypatch.setattr(supervisor, "open_worlds", lambda *_: SimpleNamespace(is_live=True, form=wait))
    monkeypatch.setattr(supervisor, "job_of", lambda plan: None)
    monkeypatch.setattr(resources, "peak_of", lambda plan: None)
    monkeypatch.setattr(supervisor, "UnformedWorlds", Mock())
    monkeypatch.setattr(supervisor, "open_page", lambda config, utilisation: None)
    monkeypatch.setattr(supervisor, "digest_of_all", lambda shards: "")
    monkeypatch.setattr(supervisor, "result_of", lambda plan, state, status, digest: status)
    monkeypatch.setattr(supervisor, "KeptSwitches", Mock())
    assert (
        supervisor._train_on(Mock(), Mock(), watched, MagicMock(), started_at=0.0, proof=None, meter=Mock()) == "closed"
    )
    assert ends == [pytest.approx(limit_s + 1.0)]
    assert watched.limit_s == max(MOST_S, fixed_s or 0.0), "also for a process that is frozen while it waits"


@pytest.mark.process
@pytest.mark.parametrize("closed", [True, False])
def test_a_finished_process_may_end_slowly(closed: bool) -> None:
    """Once it is closed neither the thread nor the observer ends the process; until then one of them does."""
    program = f"""
import time
from elastic_train.system import watchdog
watchdog.BACKSTOP_S = 0.0
watched = watchdog.Watchdog(2.0)
watched.beat()
if {closed}:
    watched.close()
time.sleep(6.0 if {closed} else 600)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode == 0) == closed, ended.stderr
    is_ended_by_one = "no progress for" in ended.stderr or "no thread of process" in ended.stderr
    assert is_ended_by_one != closed, ended.stderr


@pytest.mark.process
def test_a_process_that_computes_while_it_prepares_is_not_ended_until_it_is_idle() -> None:
    program = """
import time
from elastic_train.system import watchdog
watchdog._PREPARING = watchdog._Stage(2.0, 2.0)
watchdog.Watchdog().prepare()
until = time.monotonic() + 5.0
while time.monotonic() < until:
    sum(range(1000))
print("computed", flush=True)

def waits_for_nobody():
    time.sleep(600)

waits_for_nobody()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (HungError.exit_code, "computed\n"), ended.stderr
    assert "in waits_for_nobody" in ended.stderr


@pytest.mark.process
def test_native_code_that_holds_the_interpreters_lock_is_ended_with_its_stacks() -> None:
    """No thread of the process can run, so its observer ends it; that ends, too."""
    program = """
import ctypes
from elastic_train.system import watchdog
watchdog.BACKSTOP_S = 0.0
watched = watchdog.Watchdog(2.0)
watched.beat()
while watched._observer is None:
    watched.beat()
print(watched._observer._process.pid, flush=True)

def computes():
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        native.pthread_mutex_lock(mutex)

computes()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert "native code hangs that holds the interpreter's lock" in ended.stderr and "in computes" in ended.stderr
    eventually(lambda: not is_alive(int(ended.stdout)), "the observer's end")


STOPPED_S = 10.0
WORKS = """
import select
import sys
from elastic_train.system import watchdog
watchdog.BACKSTOP_S = 1.0
watched = watchdog.Watchdog(5.0)
watched.beat()
while watched._observer is None:
    watched.beat()
print("begun", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:
    watched.beat()
print("goes on")
"""


def test_the_observer_finds_what_its_interpreter_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a Python from an environment module could not start: no hang in native code was noticed."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    with contextlib.closing(watchdog.Observer()) as observer:
        pid = observer._process.pid
        eventually(lambda: environ_of(pid), "the environment of a process that has just been started")
        assert environ_of(pid).get("LD_LIBRARY_PATH") == "/opt/python/lib"


@pytest.mark.process
def test_who_was_stopped_goes_on_when_it_is_continued() -> None:
    """For longer than it may hang: by a debugger, a shell's Ctrl-Z, a scheduler that suspends the job.

    A process, another one's observer, and both of a third are stopped at once.
    """
    begun = [subprocess.Popen([sys.executable, "-c", WORKS], stdin=PIPE, stdout=PIPE, text=True) for _ in range(3)]
    assert [one.stdout.readline() for one in begun if one.stdout is not None] == ["begun\n"] * 3
    observers = [observer for one in begun for observer in children_of(one.pid)]
    stopped = [begun[0].pid, observers[1], begun[2].pid, observers[2]]
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            begun[0].wait(STOPPED_S)
        assert [one.poll() for one in begun] == [None] * 3
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert [(one.communicate("enough\n")[0], one.returncode) for one in begun] == [("goes on\n", 0)] * 3
    finally:
        for one in begun:
            one.kill()


@pytest.mark.process
def test_an_observer_that_is_stopped_ends_with_its_process() -> None:
    """With a job that was suspended and then killed; it stayed, stopped, for ever."""
    with subprocess.Popen([sys.executable, "-c", WORKS], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        (observer,) = children_of(process.pid)
        command = Path(f"/proc/{observer}/cmdline")
        eventually(lambda: b"orphans.py" not in command.read_bytes(), "the observer's start")
        for pid in (process.pid, observer):
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(observer), "the observer's stop")
        process.kill()
        process.wait(PATIENCE_S)
        eventually(lambda: not is_alive(observer), "the observer's end")


def test_each_phase_is_measured_by_its_own_limit(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the thread checks while a slow first batch arrives, it sees no hang."""
    ends: list[float] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, stuck_s: ends.append(stuck_s))
    watched = Watchdog(3.0)

    def arrive_during_a_look() -> float:
        monkeypatch.setattr(Watchdog, "limit_s", property(limit_s))
        watched.beat()
        return watched.limit_s

    def look_during_an_arrival() -> float:
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
        watched.look()
        return clock[0]

    limit_s = Watchdog.limit_s.fget
    assert limit_s is not None
    for is_looking in (True, False):
        watched.await_first()
        clock[0] += 0.9 * ENTERING_S
        if is_looking:
            monkeypatch.setattr(Watchdog, "limit_s", property(lambda self: arrive_during_a_look()))
            watched.look()
        else:
            monkeypatch.setattr(watchdog.time, "monotonic", look_during_an_arrival)
            watched.beat()
    assert ends == []


def test_a_copy_and_a_failed_end_may_take_long(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a large state, or reporting a failure to a tracker, is not a hang, and does not count as step time."""
    watched, limits = Watchdog(), list[float]()

    def take_long(**_: object) -> None:
        limits.append(watched.limit_s)
        clock[0] += 100.0

    watched.beat()
    clock[0] += 1.0
    watched.beat()
    saves = SimpleNamespace(is_staging=True, await_staging=take_long)
    worlds = SimpleNamespace(is_launched=False)
    commits = SimpleNamespace(watchdog=watched, saves=saves)
    Commits.await_staging(commits)  # type: ignore[arg-type]
    session = SimpleNamespace(
        watchdog=watched, worlds=worlds, memory=None, close=take_long, pause=take_long, leave=MagicMock()
    )
    assert watched.limit_s == LEAST_S
    for error in (ZeroDivisionError(), PeerLostError("gone")):
        monkeypatch.setattr(supervisor, "train_steps", Mock(side_effect=error))
        watched.beat()
        with pytest.raises(type(error)):
            supervisor._train_in(session)  # type: ignore[arg-type]
    assert limits == [MOST_S] * 3
