"""Requests to leave, by real signals to this process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from elastic_train.system import preemption
from elastic_train.system.preemption import (
    GRACE_VARIABLE,
    ORDERS,
    TORCHELASTIC_GRACE_S,
    LeaveNow,
    LeaveRequest,
    Orders,
    StepDropped,
    launched_grace_s,
    step_time_s,
)
from tests.conftest import PATIENCE_S

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
TERM, INT, HUP = ORDERS


@pytest.fixture
def leave() -> Iterator[LeaveRequest]:
    """A request with so little grace that a step may take 50 ms more; also where `nohup` has begun the tests."""
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = [signal.getsignal(number) for number in NUMBERS]
    request = LeaveRequest(grace_s=0.1)
    yield request
    request.release()
    assert [signal.getsignal(number) for number in NUMBERS] == before
    signal.signal(signal.SIGHUP, outside)


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_for_alarm(leave: LeaveRequest) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not leave.is_late and time.monotonic() < deadline:
        time.sleep(0.001)
    assert leave.is_late


def test_a_step_is_dropped_when_the_time_is_up(leave: LeaveRequest) -> None:
    """Wherever it is, even where a task catches every Exception."""
    ask(signal.SIGTERM)
    with pytest.raises(StepDropped), leave.droppable():
        while True:
            try:
                time.sleep(30)
            except Exception:  # noqa: BLE001 - what a task may do
                pytest.fail("a task cannot keep the process")


def test_what_may_not_be_dropped_is_finished_first(leave: LeaveRequest) -> None:
    ask(signal.SIGTERM)
    wait_for_alarm(leave)  # not droppable here: nothing is raised
    with pytest.raises(StepDropped), leave.droppable():
        pytest.fail("no step begins any more")


def test_waiting_for_the_next_batch_is_droppable_and_what_is_done_with_it_is_not(leave: LeaveRequest) -> None:
    taken = []
    with pytest.raises(StepDropped):
        for item in leave.dropping(range(3)):
            taken.append(item)
            if item == 1:
                ask(signal.SIGTERM)
                wait_for_alarm(leave)
    assert taken == [0, 1]
    assert list(LeaveRequest.dropping(LeaveRequest(), "ab")) == ["a", "b"]


def test_an_early_warning_starts_no_clock_and_sigterm_after_it_is_the_first_order(
    leave: LeaveRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's `--signal=USR1@120` warns two minutes before SIGTERM, which then must not end the process at once."""
    monkeypatch.setattr(preemption, "SAME_REQUEST_S", -1.0)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"left with {code}"))
    ask(signal.SIGUSR1)
    assert leave.is_set and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    warned_at = leave.since_s
    ask(signal.SIGTERM)
    assert leave.since_s > warned_at
    wait_for_alarm(leave)


def test_a_second_sigterm_leaves_at_once(leave: LeaveRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(preemption, "SAME_REQUEST_S", PATIENCE_S)
    ask(signal.SIGTERM)
    ask(signal.SIGTERM)
    assert codes == []  # a scheduler that signals the whole tree
    monkeypatch.setattr(preemption, "SAME_REQUEST_S", -1.0)
    ask(signal.SIGTERM)
    assert codes == [143]


@pytest.mark.parametrize(
    ("orders", "is_final"),
    [
        ([(TERM, 0.0), (TERM, 2.9)], False),
        ([(TERM, 0.0), (TERM, 3.1)], True),
        ([(INT, 0.0), (INT, 0.1)], False),
        ([(INT, 0.0), (INT, 0.1), (INT, 0.2), (INT, 0.4)], True),
        ([(TERM, 0.0), (INT, 1.0)], True),
        ([(INT, 0.0), (TERM, 1.0)], False),
        ([(HUP, 0.0), (HUP, 9.0)], False),
        ([(HUP, 0.0), (TERM, 9.0)], True),
    ],
)
def test_a_second_order_ends_at_once_unless_it_is_the_first_again(
    orders: list[tuple[signal.Signals, float]], is_final: bool
) -> None:
    """A scheduler's reaches a process twice, within seconds; a key is pressed twice within less; a terminal is gone."""
    got = Orders()
    assert [got.is_final(number, at_s) for number, at_s in orders] == [False] * (len(orders) - 1) + [is_final]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_whoever_has_nothing_to_lose_leaves_where_it_is(
    leave: LeaveRequest, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: a second request finds it leaving. Where something would be lost, nothing is raised."""
    with pytest.raises(LeaveNow):
        leave.may_go = lambda: True
        ask(number)
    ask(signal.SIGHUP)
    assert leave.is_set and leave.name == "", "its launcher names the signal that it received"


def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(
    leave: LeaveRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(preemption, "SAME_KEY_S", -1.0)
    leave.lost = lambda: "3 steps are lost"
    ask(signal.SIGTERM)
    ask(signal.SIGINT)
    assert codes == [130]
    assert capfd.readouterr().err == "ended at once by SIGINT: 3 steps are lost\n"


def test_a_hangup_that_was_ignored_stays_so() -> None:
    """As `nohup` starts a process."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        leave = LeaveRequest()
        ask(signal.SIGHUP)
        assert not leave.is_set and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        leave.release()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("grace_s", "step_s"), [(3.0, 1.5), (30.0, 15.0), (120.0, 90.0), (0.0, 0.001)])
def test_the_reserve_for_the_commit_is_half_of_the_grace_and_at_most_half_a_minute(
    grace_s: float, step_s: float
) -> None:
    assert step_time_s(grace_s) == step_s


def test_the_launcher_says_how_long_the_grace_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GRACE_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launched_grace_s() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert launched_grace_s() == TORCHELASTIC_GRACE_S
    monkeypatch.setenv(GRACE_VARIABLE, "3")
    assert launched_grace_s() == 3.0
