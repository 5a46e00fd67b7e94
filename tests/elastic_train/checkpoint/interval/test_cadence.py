"""When a commit is due: by steps, by time, and with `interval: auto` by measurements."""

from __future__ import annotations

import time
from types import SimpleNamespace

from elastic_train.checkpoint.interval.cadence import FIRST_S, Cadence
from elastic_train.checkpoint.interval.young_daly import Faults, SaveCost, choose
from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.training.opening import saves


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_cadence(past: Faults | None = None, **keys: object) -> tuple[Cadence, Clock]:
    """Open a cadence and its clock."""
    clock = Clock()
    return Cadence(CheckpointConfig.model_validate(keys), past or Faults(0, 0.0), clock), clock


def seconds_to_the_next(cadence: Cadence, clock: Clock) -> float:
    """Begin a save, and return the time until the next one is due."""
    cadence.begin()
    begun = clock.now
    while not cadence.is_overdue():
        clock.now += 0.5
    return clock.now - begun


def test_steps_and_seconds_are_as_configured() -> None:
    """Both rules apply at once, each can be switched off, and measurements change neither."""
    cadence, clock = open_cadence(every="5 steps, 30 s")
    assert [step for step in range(1, 12) if cadence.is_due(step)] == [5, 10]
    assert cadence.measured(1.0, 2.0) is None
    assert 30 < seconds_to_the_next(cadence, clock) <= 31
    cadence, clock = open_cadence(every=None)
    clock.now += 1e9
    assert not cadence.is_overdue()
    assert not cadence.is_due(50)


def test_worlds_shorter_than_the_interval_still_commit() -> None:
    """Steps beyond the head count from the head on, over all worlds; before the first commit from the start on."""
    process = SimpleNamespace(
        plan=SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig(every="15 min"))),
        state=SimpleNamespace(step=7),
        started_at=time.time() - 1000,
    )
    world = SimpleNamespace(is_leader=False)

    def is_overdue(head: tuple[int, float] | None) -> bool:
        record = head and SimpleNamespace(step=head[0], created_at=time.time() - head[1])
        return saves.open_cadence(process, world, record).is_overdue()  # type: ignore[arg-type]

    assert is_overdue((5, 901))
    assert not is_overdue((5, 600))
    assert not is_overdue((5, -3600))  # written by a machine whose clock is ahead
    assert not is_overdue((7, 5000))  # restored from it
    assert is_overdue(None)
    process.state.step = 0
    assert not is_overdue(None)


def test_auto_saves_early_to_measure_and_then_at_the_computed_interval() -> None:
    """The first save comes soon; the next by Young and Daly from the medians, and the reason is logged."""
    past = Faults(9, 36000.0)
    cadence, clock = open_cadence(past, every="auto")
    assert not cadence.is_due(5)
    assert FIRST_S < seconds_to_the_next(cadence, clock) <= FIRST_S + 1
    reason = cadence.measured(0.5, 3.0)
    trained_s = past.trained_s + FIRST_S + 0.5
    expected = choose(SaveCost(0.5, 3.0), Faults(9, trained_s).mtbf_s, rpo_s=900)
    assert reason == expected.reason
    assert expected.interval_s < seconds_to_the_next(cadence, clock) <= expected.interval_s + 1
    assert cadence.measured(0.5, 3.0) is None
    assert cadence.measured(500.0, 3000.0) is None


def test_auto_logs_a_new_reason_only_after_a_large_change() -> None:
    """A small change is silent, a large one is logged with its reason."""
    cadence, _ = open_cadence(every="auto, 9999 days")
    assert cadence.measured(0.5, 3.0) is not None
    assert cadence.measured(0.55, 3.0) is None
    reasons = [cadence.measured(5.0, 30.0) for _ in range(5)]
    assert any(reasons)
    assert reasons[-1] is None
