"""Where a step's time goes: laps of one clock, and the rank that the others wait for."""

from __future__ import annotations

import pytest

from elastic_train.training import step_clock
from elastic_train.training.step_clock import RankFacts, StepClock, slowest


def ranks(*compute_s: float) -> list[RankFacts]:
    return [RankFacts(0.0, seconds, 0.0, 0.0, 0) for seconds in compute_s]


@pytest.mark.parametrize(
    ("compute_s", "expected"),
    [
        ((1.0,), None),
        ((1.0, 1.4), None),
        ((1.0, 1.5), (1, 1.5)),
        ((2.0, 6.0, 2.0, 2.0), (1, 3.0)),
        ((0.0, 0.0), None),
    ],
)
def test_the_slowest_rank_is_named_where_it_stands_out(
    compute_s: tuple[float, ...], expected: tuple[int, float] | None
) -> None:
    """Against the median of all ranks; a world of one, or ranks that are alike, have none."""
    assert slowest(ranks(*compute_s)) == expected


def test_laps_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lap is the time since the last one, and what passes before a start belongs to none."""
    times = iter([10.0, 11.0, 13.5])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(times))
    clock = StepClock()
    clock.start()
    assert [clock.lap(), clock.lap()] == [1.0, 2.5]
