"""The process table: a pid proves little, since pids are reused and dead processes keep theirs for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from rendezvous.context import LiveContext
from rendezvous.errors import StoppedWaiting
from rendezvous.live_member import LiveMember
from rendezvous.process_table import boot_id, children_of, environ_of, is_alive, is_stopped, name_of, pids, stat_of
from tests.conftest import PATIENCE_S

pytestmark = pytest.mark.slow
GONE = 2**22 + 1  # above the largest possible pid
PROGRAM = "print(flush=True); input()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that has started its program."""
    command = [sys.executable, "-c", PROGRAM]
    environ = {**os.environ, "COLOUR": "a=b"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as started:
        assert started.stdout is not None and started.stdout.readline()
        yield started
        started.kill()


def test_a_line_says_whose_child_it_is_and_when_it_began(child: subprocess.Popen[str]) -> None:
    stat = stat_of(child.pid)
    assert stat is not None and not stat.has_ended
    assert stat.parent == os.getpid()
    now = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    mine = stat_of(os.getpid())
    assert mine is not None and mine.born <= stat.born <= now
    assert mine.cpu_ticks > 0
    assert {os.getpid(), child.pid} <= set(pids()) and child.pid in children_of(os.getpid())


def test_a_name_with_brackets_and_blanks_moves_no_field(tmp_path: Path) -> None:
    """The kernel writes a program's name between brackets, whatever it contains."""
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as started:
        stat = stat_of(started.pid)
        assert stat is not None and stat.parent == os.getpid()
        assert name_of(started.pid) == program.name
        started.kill()


def test_a_process_is_alive_until_it_ends_reaped_or_not(child: subprocess.Popen[str]) -> None:
    """In a container without an init nobody reaps killed processes: they have ended, and do not count as running."""
    stat = stat_of(child.pid)
    assert stat is not None
    assert is_alive(child.pid) and is_alive(child.pid, stat.born) and not is_alive(child.pid, stat.born + 1)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert child.pid in pids()
    assert not is_alive(child.pid) and not is_alive(child.pid, stat.born)
    assert child.pid not in children_of(os.getpid())
    child.wait()
    assert not is_alive(child.pid) and stat_of(child.pid) is None


def test_a_stopped_process_is_alive(child: subprocess.Popen[str]) -> None:
    assert not is_stopped(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert is_stopped(child.pid) and is_alive(child.pid)


def test_a_process_shows_the_environment_that_it_was_started_with(child: subprocess.Popen[str]) -> None:
    assert environ_of(child.pid)["COLOUR"] == "a=b"


def test_what_is_not_there_has_nothing_to_say() -> None:
    assert stat_of(GONE) is None and not is_alive(GONE) and not is_stopped(GONE)
    assert children_of(GONE) == [] and children_of(None) == []
    assert environ_of(GONE) == {} and name_of(GONE) == ""


def test_a_boot_has_an_id() -> None:
    assert boot_id() == boot_id() != ""


def test_a_worker_regrouping_while_etcd_is_away_can_be_asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves at once, with its state to save: it may be asked to leave at the moment when etcd ends as well."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with EtcdServer() as etcd:
        context = LiveContext((etcd.endpoint,), "job", "n", "h", "127.0.0.1", "", 1, 1, 3.0, 0.0, timeout_s=PATIENCE_S)
        member = LiveMember(context, max_members=1)
        assert member.next_world(lambda: False) is not None
        etcd.kill()
        with pytest.raises(StoppedWaiting, match="while etcd was away"):
            member.next_world(lambda: True)
        member.leave()
