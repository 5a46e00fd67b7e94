"""Calls that can be given up: results and errors arrive, and a caller who walks away does not wait."""

from __future__ import annotations

import threading

import pytest

from rendezvous.waiting import Bystander, GivenUp


@pytest.fixture
def bystander() -> Bystander:
    return Bystander("tested")


def test_what_a_call_returns_or_raises_arrives(bystander: Bystander) -> None:
    """Calls are made one after another on one other thread; an error is raised where the call was made."""
    threads = [bystander.call(threading.current_thread, lambda: False) for _ in range(2)]
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        bystander.call(lambda: 1 // 0, lambda: False)
    assert bystander.call(lambda: 7, lambda: False) == 7


def test_a_hopeless_call_is_given_up(bystander: Bystander) -> None:
    """The caller leaves while the call is stuck; the last words are said once it is free."""
    is_free, has_said = threading.Event(), threading.Event()
    with pytest.raises(GivenUp):
        bystander.call(is_free.wait, lambda: True)
    bystander.leave(has_said.set)
    assert not has_said.is_set()
    is_free.set()
    assert has_said.wait(10)
