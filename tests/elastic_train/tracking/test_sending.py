"""The thread that sends to a tracker: when it begins."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_train.core.lineage import Interval
from elastic_train.tracking import tracker
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.metric_log import Settled, Values
from elastic_train.training import run
from tests.conftest import PATIENCE_S, eventually, no_thread


class Noting:
    """A tracker that takes everything."""

    name, lock, remedy = "a tracker", "noting.lock", "none is needed"

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def known_id(self) -> str | None:
        return None

    def open(self) -> str:
        self.is_open.set()
        return "id"

    def describe(self) -> list[Exception]:
        return []

    def send(self, lines: Sequence[Values | Settled]) -> int:
        return 0

    def tag(self) -> None:
        pass

    def end(self, status: str) -> None:
        pass


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_world_that_goes_on_has_its_first_steps_before_a_tracker_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """To open one costs a new leader seconds of the interpreter; the end of the job does not wait for that."""
    monkeypatch.setattr(tracker, "FIRST_STEPS_S", 600.0)
    noting = Noting()
    sending = tracker._Sending(noting, tmp_path, 2, [Interval(1, 0, 5)] if goes_on else [], BackgroundFiles())
    assert noting.is_open.wait(0.2 if goes_on else PATIENCE_S) is not goes_on
    sending.ask_to_finish("KILLED", goes_on=False)
    assert sending.is_finished(PATIENCE_S) and noting.is_open.is_set()


def test_a_run_folder_that_cannot_be_listed_for_a_while_does_not_end_the_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server that fails over answers ESTALE or EIO."""
    errors = [OSError(errno.ESTALE, "Stale file handle") for _ in range(3)]

    def terms(run_dir: Path) -> list[int]:
        if errors:
            raise errors.pop()
        return []

    monkeypatch.setattr(tracker, "terms", terms)
    monkeypatch.setattr(tracker, "SEND_EVERY_S", 0.01)
    noting = Noting()
    sending = tracker._Sending(noting, tmp_path, 2, [], BackgroundFiles())
    assert noting.is_open.wait(PATIENCE_S)
    sending.ask_to_finish("FINISHED", goes_on=False)
    assert sending.is_finished(PATIENCE_S)


def test_a_run_folder_that_does_not_take_the_lock_for_a_while_does_not_end_the_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a server that fails over, when the term began: its tracker got none of the term's values."""
    monkeypatch.setattr(tracker, "SEND_EVERY_S", 0.01)
    noting, run = Noting(), tmp_path / "run"
    sending = tracker._Sending(noting, run, 2, [], BackgroundFiles())
    eventually(lambda: sending.num_failures, "a lock that cannot be made")
    run.mkdir()
    assert noting.is_open.wait(PATIENCE_S)
    sending.ask_to_finish("FINISHED", goes_on=False)
    assert sending.is_finished(PATIENCE_S)


def test_a_tracker_without_a_thread_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the world that began."""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    sending = tracker._Sending(Noting(), tmp_path, 2, [], BackgroundFiles())
    sending.ask_to_finish("FINISHED", goes_on=False)
    assert not sending.is_finished(PATIENCE_S) and sending.wait_run_id(PATIENCE_S) is None
    assert "a tracker cannot be reached, training continues with local metrics: can't start new thread" in caplog.text


def test_the_thread_that_trains_has_the_interpreter_back_soon() -> None:
    before = sys.getswitchinterval()
    try:
        run._begin().release()
        assert sys.getswitchinterval() == pytest.approx(run.TURN_S)
    finally:
        sys.setswitchinterval(before)
