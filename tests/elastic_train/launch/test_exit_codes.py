"""Exit codes of nodes, and the end of a node whose parent has ended."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.launch.node import exit_code, outstayed
from elastic_train.launch.parent import train_in_a_child
from rendezvous.agent.worker_end import announce, declare_finished
from rendezvous.process_table import children_of, is_alive
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S, eventually


@pytest.mark.parametrize(
    ("codes", "has_failed", "expected"),
    [
        ([0, 0], False, 0),
        ([75, 0], False, 75),
        ([75, 75], True, 75),
        ([75, -9], True, 1),
        ([1, 65, -15], True, 65),
        ([2, 65], True, 65),
        ([71, -15], True, 71),
        ([71, 76], True, 71),
        ([77, 75], True, 77),
        ([0, 74], True, 74),
        ([], True, 1),
        ([0, 1], True, 1),
    ],
)
def test_more_specific_exit_codes_win(codes: list[int], has_failed: bool, expected: int) -> None:
    """Damage, a bad configuration, a hang, too few nodes, a lost result are passed on; the rest is 0, 75 or 1."""
    assert exit_code(codes, has_failed=has_failed) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([-15], 75),
        ([-10], 75),
        ([-2, 75], 75),
        ([75, -15], 75),
        ([0, -15], 75),
        ([], 75),
        ([-9], 75),
        ([75, -9], 75),
        ([65, -9], 65),
        ([1, -9], 1),
        ([65, -15], 65),
        ([0], 0),
    ],
)
def test_a_signal_before_the_workers_listen_loses_nothing(codes: list[int], expected: int) -> None:
    """A worker that it killed was still importing; asked at any other time it leaves with its own exit code.

    One that was killed because its grace had ended is requeued as well: its job goes on from a commit.
    """
    assert exit_code(codes, has_failed=False, is_asked=True) == expected


def test_workers_that_outstay_their_grace_are_counted() -> None:
    assert [outstayed(codes) for codes in ([], [75, -15], [75, -9], [-9, -9])] == [0, 0, 1, 2]


def begin(work: Callable[[], object], said: Path, *ignored: signal.Signals) -> ForkedWorker:
    """Begin a parent whose child does some work, and ends with 0 in a way that Python hears nothing of.

    Whoever starts the parent ignores some signals, and so does what it starts.
    """
    if pid := os.fork():
        return ForkedWorker(pid)
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        faulthandler.disable()  # pytest's would write of a crash that is meant
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        train_in_a_child()
        work()
    finally:
        ctypes.CDLL(None)._exit(0)
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        (lambda: (announce(), declare_finished()), 0, ""),
        (announce, 1, "exited with 0 without finishing"),
        (lambda: (announce(), os.execv("/bin/true", ["true"])), 1, "put another program in its place"),
        (lambda: ctypes.CDLL(None)._exit(75), 75, ""),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV, "was killed by SIGSEGV"),
    ],
    ids=["finished", "exit in C", "exec", "left", "killed", "crashed"],
)
def test_an_end_that_the_process_itself_cannot_report_is_reported(
    tmp_path: Path, work: Callable[[], object], code: int, words: str
) -> None:
    """The command ended with 0 and without a word at step 19 of 60."""
    assert begin(work, tmp_path / "said").wait(PATIENCE_S) == code
    said = (tmp_path / "said").read_text()
    assert words in said and bool(words) == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_request_to_the_parent_reaches_the_child(tmp_path: Path, number: signal.Signals) -> None:
    """The child has not begun yet and ends with 75; so does a request that came before it listened."""
    parent = begin(signal.pause, tmp_path / "said")
    eventually(lambda: bool(children_of(parent.pid)), "the child is there")
    os.kill(parent.pid, number)
    assert parent.wait(PATIENCE_S) == 75
    assert (tmp_path / "said").read_text() == f"asked to leave by {number.name} before anything was started\n"


@pytest.mark.slow
def test_the_parent_ends_with_its_child_where_ends_of_children_are_ignored(tmp_path: Path) -> None:
    """As below a daemon, or `trap '' CHLD` of a script: the command never returned."""
    work = lambda: (announce(), declare_finished(), ctypes.CDLL(None)._exit(75))  # noqa: E731
    assert begin(work, tmp_path / "said", signal.SIGCHLD).wait(PATIENCE_S) == 75


@pytest.mark.slow
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    parent = begin(lambda: (ready.touch(), signal.pause()), tmp_path / "said")
    eventually(ready.exists, "the child is there")
    (child,) = children_of(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait(PATIENCE_S) == -signal.SIGKILL
    eventually(lambda: not is_alive(child), "the child's end")
