"""Stopping after worlds without a step: by their number, and by the time that they took."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from elastic_train.errors import NoProgressError
from elastic_train.world import standstill
from elastic_train.world.standstill import Standstill


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_worlds_without_a_step_end_the_process_once_they_have_gone_on_for_long(clock: SimpleNamespace) -> None:
    """Several within a second are an outage; the one after a minute exceeds the limit."""
    counted = Standstill(3, 60.0, lambda: 7)
    for clock.now in (0.0, 0.3, 0.6, 0.9, 59.0):
        counted.note("it did not form: connection refused")
    clock.now = 60.0
    with pytest.raises(
        NoProgressError, match=r"6 worlds in a row, for 60 s, did not get beyond step 7; .*refused"
    ) as no:
        counted.note("it did not form: connection refused")
    assert no.value.exit_code == 93


def test_a_few_worlds_are_not_enough_however_long_they_take(clock: SimpleNamespace) -> None:
    counted = Standstill(3, 60.0, lambda: 7)
    for clock.now in (0.0, 1000.0):
        counted.note("it did not form")


def test_a_step_begins_the_count_again(clock: SimpleNamespace) -> None:
    """A network that occasionally permits a step is progress."""
    steps = itertools.count()
    counted = Standstill(1, 0.0, lambda: next(steps))
    for _ in range(100):
        counted.note("it ended")


def test_steps_that_are_lost_again_are_no_progress_and_commits_are(clock: SimpleNamespace) -> None:
    """Two nodes hold one state together, and one dies after a few steps each time: 5, 7, 6 … after a commit at 0.

    A node with its own folder has no history of these deaths, so the survivor would start again for ever.
    """
    steps, committed = itertools.cycle((5, 7, 6)), 0
    counted = Standstill(4, 60.0, lambda: next(steps))
    for clock.now in range(0, 180, 20):
        committed += 1
        counted.note("it ended", committed)
    with pytest.raises(NoProgressError, match="4 worlds in a row, for 60 s, did not get beyond step 7"):
        for clock.now in range(180, 400, 20):
            counted.note("it ended", committed)
    assert clock.now == 240


def test_null_never_gives_up(clock: SimpleNamespace) -> None:
    counted = Standstill(None, 1.0, lambda: 0)
    for clock.now in range(0, 10_000, 100):
        counted.note("it did not form")
