"""Abandonable calls: results and errors arrive, and a caller that leaves does not wait."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

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
