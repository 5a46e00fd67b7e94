"""The interval between saves: when a commit is due, the least waste, and what is measured for it."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.field.lives import Fleet, Recovery, live
from elastic_train.checkpoint.saving.cadence import (
    FIRST_S,
    PRIOR_S,
    SHORTEST_S,
    Cadence,
    Faults,
    SaveCost,
    choose,
    faults_before,
    optimum,
    waste,
)
from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import FOLDER, lines_of
from elastic_train.training.opening import resources
from tests.elastic_train.tracking.unqueued import Unqueued, add_restore

stalls = st.floats(1e-3, 100)
mtbfs = st.floats(60, 1e8)


@settings(deadline=None)
@given(stalls, mtbfs, st.floats(1.001, 100))
def test_no_other_interval_wastes_less(stall_s: float, mtbf_s: float, factor: float) -> None:
    """The optimum is unique: longer and shorter intervals waste more, up to rounding."""
    best, cost = optimum(stall_s, mtbf_s), SaveCost(stall_s, stall_s)
    least = waste(best, cost, mtbf_s)
    assert least <= waste(best * factor, cost, mtbf_s) + 1e-9
    assert least <= waste(best / factor, cost, mtbf_s) + 1e-9


@settings(deadline=None)
@given(stalls, mtbfs)
def test_young_and_daly_are_its_approximations(stall_s: float, mtbf_s: float) -> None:
    """Daly's series (2006, equation 20) is within its error; Young's first term, without the stall, is outside."""
    ratio = stall_s / mtbf_s
    young = math.sqrt(2 * stall_s * mtbf_s)
    daly = young * (1 + math.sqrt(ratio / 2) / 3 + ratio / 18) - stall_s
    exact = optimum(stall_s, mtbf_s)
    assert exact <= young * (1 + 1e-6)
    if ratio < 0.1:
        assert daly == pytest.approx(exact, rel=1e-2)
    if ratio < 1e-5:
        assert young == pytest.approx(exact, rel=1e-2)


@settings(deadline=None)
@given(stalls, st.floats(0, 1000), mtbfs, st.floats(1, 7200))
def test_the_budget_is_kept_where_possible(stall_s: float, rest_s: float, mtbf_s: float, rpo_s: float) -> None:
    """Interval and publication together stay within it, saves never overlap, and a breach is reported."""
    cost = SaveCost(stall_s, stall_s + rest_s)
    choice = choose(cost, mtbf_s, rpo_s)
    assert choice.interval_s >= max(cost.publish_s, SHORTEST_S)
    is_kept = choice.interval_s + cost.publish_s <= rpo_s * (1 + 1e-9)
    assert is_kept != ("cannot be kept" in choice.reason)
    assert is_kept or choice.interval_s == max(cost.publish_s, SHORTEST_S)


@settings(deadline=None)
@given(stalls, mtbfs, st.floats(1, 10), st.floats(1, 10))
def test_costlier_saves_are_less_frequent_and_more_faults_make_them_more_frequent(
    stall_s: float, mtbf_s: float, dearer: float, rarer: float
) -> None:
    """The interval grows with the stall and with the time between faults."""
    assert optimum(stall_s * dearer, mtbf_s) >= optimum(stall_s, mtbf_s) * (1 - 1e-9)
    assert optimum(stall_s, mtbf_s * rarer) >= optimum(stall_s, mtbf_s) * (1 - 1e-9)


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1e8))
def test_the_fault_rate_begins_at_the_prior_and_ends_at_what_was_seen(num: int, trained_s: float) -> None:
    """Each fault lowers the expected time to the next, each second without a fault raises it."""
    mtbf_s = Faults(num, trained_s).mtbf_s
    assert Faults(0, 0).mtbf_s == PRIOR_S
    assert Faults(num + 1, trained_s).mtbf_s < mtbf_s
    assert Faults(num, trained_s + 1e6).mtbf_s > mtbf_s
    many = Faults(num * 10**6 + 10**6, (num + 1) * 3600 * 10.0**6)
    assert many.mtbf_s == pytest.approx(3600, rel=1e-3)


@pytest.mark.parametrize("interval_s", [30.0, 90.0, 300.0])
def test_the_model_wastes_what_a_simulation_wastes(interval_s: float) -> None:
    """A background save costs its stall, and its time to publication at every fault, as the model says."""
    cost, mtbf_s, restart_s = SaveCost(1.0, 20.0), 3600.0, 30.0
    expected = waste(interval_s, cost, mtbf_s, restart_s)
    life = live(Recovery(lambda _: restart_s, cost=cost, every_s=interval_s), Fleet(mtbf_s), 1000.0, random.Random(1))
    assert 1 - life.goodput == pytest.approx(expected, rel=0.05)


def test_the_reason_names_the_deciding_limit() -> None:
    """Waste, the budget, or the save itself."""
    assert choose(SaveCost(0.5, 5), 3600, 900).reason == (
        "commit every 60 s: a save stalls training for 0.5 s and is published after 5 s, a fault is expected every "
        "60.0 min: least is wasted at 60 s; 1.79% of the time is wasted"
    )
    assert "RPO budget of 15.0 min allows 14.9 min" in choose(SaveCost(0.5, 5), 1e7, 900).reason
    assert "one save is in flight" in choose(SaveCost(0.5, 300), 3600, 900).reason
    assert "cannot be kept" in choose(SaveCost(0.5, 600), 3600, 900).reason


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
        return resources.open_cadence(process, world, record).is_overdue()  # type: ignore[arg-type]

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


def test_faults_are_the_terms_that_lost_applied_steps(tmp_path: Path) -> None:
    """Planned ends lose no step and do not count, nor do later terms, other ranks and unfinished histories."""
    for term, rank, lost in [(1, 0, None), (2, 0, 3), (2, 1, None), (3, 0, 0), (4, 0, 1), (7, 0, 5)]:
        history = History(Unqueued(), tmp_path, term, rank)
        add_restore(history, 4, lost)
        history.step(step=5, epoch=0, lo=5, hi=6, lanes=range(4), num_samples=4, world=2, loss=0.5)
        history.close()
    History(Unqueued(), tmp_path, 5, 0).close()
    found = faults_before(tmp_path, before_term=7)
    assert found.num == 2
    files = sorted((tmp_path / FOLDER).iterdir())
    lines = [line for path in files for line in lines_of(path.read_bytes())]
    times = [float(str(line["t"])) for line in lines if line["rank"] == 0 and int(str(line["term"])) < 7]
    assert found.trained_s == pytest.approx(sum(b - a for a, b in zip(times[::2], times[1::2], strict=True)))
    assert faults_before(tmp_path / "none", before_term=7) == Faults(0, 0.0)


def test_a_clock_that_is_set_back_does_not_make_faults_frequent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative training time would: each save would begin as soon as the last one has ended."""
    history, now = History(Unqueued(), tmp_path, 1, 0), time.time()
    add_restore(history, 4)
    monkeypatch.setattr(time, "time", lambda: now - 30 * 86400.0)
    history.step(step=5, epoch=0, lo=5, hi=6, lanes=range(4), num_samples=4, world=2, loss=0.5)
    history.close()
    faults = faults_before(tmp_path, before_term=2)
    assert faults == Faults(0, 0.0)
    assert choose(SaveCost(0.5, 3.0), faults.mtbf_s, rpo_s=math.inf).interval_s > 60
