"""The parent of a process that trains alone ends as it has ended, and passes requests on to it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.launch.parent import train_in_a_child
from rendezvous.agent.worker_end import announce, declare_finished
from rendezvous.process_table import children_of, is_alive
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.live.test_live import eventually

pytestmark = pytest.mark.slow


def begin(work: Callable[[], object], said: Path) -> ForkedWorker:
    """Begin a parent whose child does some work, and ends with 0 in a way that Python hears nothing of."""
    if pid := os.fork():
        return ForkedWorker(pid)
    try:
        faulthandler.disable()  # pytest's would write of a crash that is meant
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        train_in_a_child()
        work()
    finally:
        ctypes.CDLL(None)._exit(0)
    raise AssertionError


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_request_to_the_parent_reaches_the_child(tmp_path: Path, number: signal.Signals) -> None:
    """The child has not begun yet and ends with 75; so does a request that came before it listened."""
    parent = begin(signal.pause, tmp_path / "said")
    eventually(lambda: bool(children_of(parent.pid)), "the child is there")
    os.kill(parent.pid, number)
    assert parent.wait(PATIENCE_S) == 75
    assert (tmp_path / "said").read_text() == f"asked to leave by {number.name} before anything was started\n"


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    parent = begin(lambda: (ready.touch(), signal.pause()), tmp_path / "said")
    eventually(ready.exists, "the child is there")
    (child,) = children_of(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait(PATIENCE_S) == -signal.SIGKILL
    eventually(lambda: not is_alive(child), "the child's end")
