"""Waiting: callers abandon calls that hang, and pauses do not advance the global generator of random numbers."""

from __future__ import annotations

import gc
import logging
import random
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import tenacity

from rendezvous.outage_log import OutageLog
from rendezvous.pauses import RandomExponential, between
from rendezvous.waiting import Bystander, GivenUp, begin
from tests.conftest import PATIENCE_S


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    yield (made := Bystander("tested"))
    made.leave()


def test_a_calls_result_or_error_arrives(bystander: Bystander) -> None:
    """Calls run one after another on one other thread; an error is raised at the call."""
    threads = [bystander.call(threading.current_thread, lambda: False) for _ in range(2)]
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        bystander.call(lambda: 1 // 0, lambda: False)
    assert bystander.call(lambda: 7, lambda: False) == 7


def test_a_hopeless_call_is_abandoned(bystander: Bystander) -> None:
    """The caller leaves while the call is stuck; its cleanup runs once the call returns."""
    is_free, has_said = threading.Event(), threading.Event()
    with pytest.raises(GivenUp):
        bystander.call(is_free.wait, lambda: True)
    bystander.leave(has_said.set)
    assert not has_said.is_set()
    is_free.set()
    assert has_said.wait(PATIENCE_S)


def test_a_call_on_a_thread_is_waited_for_no_longer_than_asked() -> None:
    """GivenUp affects only the caller: the call continues, and its result, or its own TimeoutError, arrives later."""
    is_free = threading.Event()
    call = begin("tested", lambda: is_free.wait(PATIENCE_S))
    with pytest.raises(GivenUp):
        call.result(0.01)
    is_free.set()
    assert call.result(PATIENCE_S) is True

    def fail() -> None:
        raise TimeoutError("the call's own")

    with pytest.raises(TimeoutError, match="the call's own"):
        begin("tested", fail).result(PATIENCE_S)


def test_an_error_that_was_raised_keeps_nothing() -> None:
    """A call that kept it would keep, by the error's frames, what was held where it was raised."""

    class Held:
        pass

    def raised() -> weakref.ref[Held]:
        held, call = Held(), begin("fails", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            call.result(PATIENCE_S)
        return weakref.ref(held)

    gc.disable()
    try:
        assert raised()() is None
    finally:
        gc.enable()


def test_calls_run_in_the_order_they_were_begun(bystander: Bystander) -> None:
    """None begins before the last one has ended; the thread exits after all of them."""
    is_free, made, has_left = threading.Event(), list[int](), threading.Event()
    stuck = bystander.begin(lambda: is_free.wait(PATIENCE_S))
    calls = [bystander.begin(lambda number=number: made.append(number)) for number in range(3)]
    bystander.leave(has_left.set)
    assert made == [] and not any(call.ended.is_set() for call in (stuck, *calls))
    is_free.set()
    assert has_left.wait(PATIENCE_S) and made == [0, 1, 2] and stuck.result(0)


REPOSITORY = Path(__file__).parents[2]


def test_pauses_do_not_draw_from_the_global_generator() -> None:
    before = random.getstate()
    assert 1.0 <= between(1.0, 2.0) <= 2.0
    pauses = list[float]()
    again = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(9), wait=RandomExponential(multiplier=0.5, max=2.0), sleep=pauses.append
    )
    tries = iter([*[OSError()] * 8, None])

    def fail() -> None:
        if (error := next(tries)) is not None:
            raise error

    again(fail)
    most = [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert len(pauses) == 8 and all(0 <= pause <= limit for pause, limit in zip(pauses, most, strict=True))
    assert len(set(pauses)) == 8 and random.getstate() == before


def test_no_module_of_ours_draws_from_the_global_generator() -> None:
    """Only the module that seeds it for a task's draws may seed or inspect it."""
    names = "random|uniform|choices?|sample|shuffle|randint|randrange|gauss"
    drawing = re.compile(rf"(?<![\w.])random\.({names})\(|wait_random\w*\(")
    files = [file for package in ("elastic_train", "rendezvous") for file in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if drawing.search(file.read_text())] == []


def test_a_wait_for_etcd_says_when_it_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each reason, not once a try."""
    outage = OutageLog(logging.getLogger("rendezvous"))
    for left_s in (899.6, 898.0):
        outage.waits(ConnectionError("refused"), left_s)
    outage.waits(ConnectionError("denied"))
    assert caplog.messages == ["waiting for etcd, giving up in 900 s: refused", "waiting for etcd: denied"]
