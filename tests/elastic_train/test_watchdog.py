"""The watchdog's sense of time: what it learns a stretch of work is, and what does not count."""

from __future__ import annotations

import pytest

from elastic_train import watchdog
from elastic_train.watchdog import LEAST_S, MOST_S, TIMES_LONGEST, Watchdog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that tests move; the watching thread does not run."""
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Watchdog, "_start", lambda self: None)
    monkeypatch.setattr(Watchdog, "_arm", lambda self: None)
    return now


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


def test_limits_have_bounds(clock: list[float]) -> None:
    """Nothing is known at first; short steps do not make it nervous; long ones do not make it blind."""
    watched = Watchdog()
    assert watched.limit_s == MOST_S
    for seconds, limit_s in ((0.1, LEAST_S), (1000.0, MOST_S)):
        watched.beat()
        clock[0] += seconds
        watched.beat()
        assert watched.limit_s == limit_s


def test_entering_has_the_longest_limit_and_teaches_nothing(clock: list[float]) -> None:
    """From a world's beginning to its first step the limit is the longest, also where one is configured."""
    watched = Watchdog(3.0)
    watched.enter()
    assert watched.limit_s == MOST_S
    clock[0] += 200.0
    watched.beat()
    assert watched.limit_s == 3.0
    learning = Watchdog()
    learning.enter()
    clock[0] += 200.0
    learning.beat()
    clock[0] += 1.0
    learning.beat()
    assert learning.limit_s == LEAST_S
