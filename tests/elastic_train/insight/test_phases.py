"""The phases of a step: marks that tile its time, and the rank that the others wait for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_train.insight import phases
from elastic_train.insight.phases import (
    PHASES,
    Phase,
    PhaseTotals,
    PhaseWindow,
    RankFacts,
    StepClock,
    facts_of,
    slowest,
)


def facts(**known: float) -> RankFacts:
    return RankFacts(**{**dict.fromkeys(RankFacts._fields, 0.0), **known})  # type: ignore[arg-type]


def ranks(*compute_s: float) -> list[RankFacts]:
    return [facts(forward_s=seconds / 4, backward_s=seconds * 3 / 4) for seconds in compute_s]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock to set."""
    clock = SimpleNamespace(s=10.0)
    monkeypatch.setattr(phases.time, "perf_counter", lambda: clock.s)
    return clock


@pytest.mark.parametrize(
    ("compute_s", "num_lanes", "expected"),
    [
        ((1.0,), (1,), None),
        ((1.0, 1.4), (1, 1), None),
        ((1.0, 1.5), (1, 1), (1, 1.5)),
        ((2.0, 6.0, 2.0, 2.0), (1, 1, 1, 1), (1, 3.0)),
        ((0.0, 0.0), (1, 1), None),
        ((3.0, 3.0, 2.0), (3, 3, 2), None),
        ((3.0, 6.0, 2.0), (3, 3, 2), (1, 2.0)),
    ],
)
def test_the_slowest_rank_is_named_where_it_stands_out(
    compute_s: tuple[float, ...], num_lanes: tuple[int, ...], expected: tuple[int, float] | None
) -> None:
    """Against the median of all ranks; a world of one, or ranks that are alike, have none. More lanes take longer."""
    assert slowest(ranks(*compute_s), num_lanes) == expected


def test_the_slowest_is_looked_for_among_those_that_compute_the_same() -> None:
    """A last stage with the output layer takes longer than a first one, in every cell, and is not slow."""
    stages = [[0, 2, 4], [1, 3, 5]]
    assert slowest(ranks(1.0, 3.0, 1.0, 3.0, 1.0, 3.0), [1] * 6, stages) is None
    assert slowest(ranks(1.0, 3.0, 2.0, 3.0, 1.0, 3.0), [1] * 6, stages) == (2, 2.0)
    assert slowest(ranks(1.0, 3.0), [1, 1], [[0], [1]]) is None


def test_phases_add_up_to_the_time_between_rows(now: SimpleNamespace) -> None:
    """A mark names what has passed since the last one; what passes before a start belongs to no phase."""
    clock = StepClock()
    clock.start()
    marks: list[tuple[Phase, float]] = [("data", 11.0), ("forward", 13.5), ("backward", 14.5), ("forward", 15.0)]
    for phase, now.s in marks:
        clock.mark(phase)
    now.s = 15.25
    first = facts_of(clock.row())
    assert first == facts(data_s=1.0, forward_s=3.0, backward_s=1.0, rest_s=0.25)
    assert first.total_s == 5.25
    now.s = 16.0
    clock.mark("optimizer")
    assert facts_of(clock.row()) == facts(optimizer_s=0.75)


def test_a_device_says_how_its_lanes_are_divided(now: SimpleNamespace) -> None:
    """A host has soon asked for everything, and then waits: together forward and backward take as long as it waited."""
    noted: list[str] = []
    taken = [{"to_device": 0.5, "forward": 1.5, "backward": 2.0}, {"to_device": 0.0, "forward": 0.0, "backward": 0.0}]
    device = SimpleNamespace(note=noted.append, take=lambda phases: {phase: taken[0][phase] for phase in phases})
    clock = StepClock(device=device)
    clock.start()
    marks: list[tuple[Phase, float]] = [("data", 11.0), ("forward", 11.25), ("backward", 19.0)]
    for phase, now.s in marks:
        clock.mark(phase)
    assert facts_of(clock.row()) == facts(data_s=1.0, to_device_s=1.0, forward_s=3.0, backward_s=4.0)
    assert noted == ["data", "forward", "backward", "rest"]
    del taken[0]
    now.s = 20.0
    clock.mark("backward")
    assert facts_of(clock.row()) == facts(backward_s=1.0), "of a device that has computed nothing the host's time stays"


def test_what_is_waited_for_peers_within_a_phase_is_exchange(now: SimpleNamespace) -> None:
    """A backward pass that waits for gradients is no slower than one that does not; what a save waits is its own."""
    group = SimpleNamespace(num_bytes=100, waited_s=5.0, beside_s=1.0, round_trip_s=lambda: 0.25)
    clock = StepClock(group)
    clock.start()
    now.s, group.waited_s = 14.0, 8.0
    clock.mark("backward")
    now.s, group.waited_s = 16.0, 9.5
    clock.mark("wait")
    now.s, group.waited_s = 17.0, 10.0
    clock.mark("save")
    group.num_bytes, group.beside_s = 164, 3.0
    expected = facts(backward_s=1.0, exchange_s=3.0, wait_s=2.0, save_s=1.0)._replace(
        hidden_s=2.0, exchanged_bytes=64, round_trip_s=0.25
    )
    assert facts_of(clock.row()) == expected
    assert facts_of(clock.row()) == facts(round_trip_s=0.25)


def test_windows_add_up_by_rank_and_totals_over_worlds() -> None:
    """A world of two and one of one: a summary is of an average rank, and its shares add up to 1."""
    totals = PhaseTotals()
    assert totals.summary() is None
    window = PhaseWindow()
    for _ in range(2):
        window.add([facts(data_s=1.0, round_trip_s=0.5), facts(forward_s=3.0, exchanged_bytes=10)])
    assert window.by_rank() == [facts(data_s=2.0, round_trip_s=0.5), facts(forward_s=6.0, exchanged_bytes=20)]
    assert (window.mean()["data"], window.mean()["forward"]) == (0.5, 1.5)
    totals.add(window)
    alone = PhaseWindow()
    alone.add([facts(forward_s=4.0)])
    totals.add(alone)
    summary = totals.summary()
    assert summary is not None
    assert (summary["steps"], summary["bytes"]) == (3, 3)
    assert summary["step_s"] == pytest.approx((2 * 2.0 + 4.0) / 3)
    shares = summary["share"]
    assert isinstance(shares, dict) and set(shares) == set(PHASES) and sum(shares.values()) == pytest.approx(1.0)
