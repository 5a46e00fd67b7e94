"""The interval between saves: least waste within the budget, and the reason names which of the two decided."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.field.lives import Fleet, Recovery, live
from elastic_train.checkpoint.interval.young_daly import PRIOR_S, SHORTEST_S, Faults, SaveCost, choose, optimum, waste

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
