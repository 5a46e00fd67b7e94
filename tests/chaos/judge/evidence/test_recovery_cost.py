"""Costs of faults: the fast analysis of long runs agrees with a slow and simple one, and takes linear time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.judge.evidence import recovery_cost
from chaos.judge.evidence.recovery_cost import after_the_last_step, recoveries, ridden_out
from chaos.judge.evidence.run_files import Evidence, Line, number, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.whole_run import faults, rpo, rto
from tests.chaos.judge.soaks import a_soak, a_world
from tests.chaos.recorded import record

WORLD_S = 10.0


@st.composite
def runs(draw: st.DrawFn) -> Evidence:
    """Draw successive terms, some without steps, some late; faults at any time."""
    lines: list[Line] = []
    step = 0
    for term in range(1, draw(st.integers(2, 8))):
        began = term * WORLD_S
        lines.append({"op": "form", "t": began, "term": term, "rank": 0, "pid": 7, "world": 1, "sealed_at": began - 1})
        lo = max(0, step - draw(st.integers(0, 3)))
        lines.append({"op": "restore", "t": began + 1, "term": term, "rank": 0, "step": lo, "commit": None})
        count = draw(st.integers(1 if term == 1 else 0, 4))
        late = draw(st.sampled_from([0.0, 0.0, WORLD_S]))
        lines += [
            {"op": "step", "t": began + 2 + late + n, "term": term, "rank": 0, "step": lo + n + 1} for n in range(count)
        ]
        step = lo + count
    times = sorted(draw(st.lists(st.one_of(st.floats(1, 90), st.sampled_from([20.0, 21.0])), max_size=6)))
    kinds = st.sampled_from(["kill_worker", "freeze_worker"])
    lines += [{"op": "fault", "t": t, "kind": draw(kinds), "node": 0, "pids": [7]} for t in times]
    return Evidence(Path("drawn"), [lines], [], {}, None, None)


def plainly(run: Evidence) -> list[tuple[int, int, float]]:
    """Return (fault's place, term, seconds), scanning every line for every fault."""
    formed: dict[int, float] = {}
    for line in run.of("form"):
        formed.setdefault(whole(line, "term"), number(line, "t"))
    faults = [number(fault, "t") for fault in run.of("fault")]
    found = []
    for place, fault in enumerate(run.of("fault")):
        at = number(fault, "t")
        before = max((term for term, t in formed.items() if t <= at), default=0)
        later = [line for line in run.of("step") if whole(line, "term") > before]
        following = min(faults[place + 1 :], default=float("inf"))
        if later and (fault["kind"] == "kill_worker" or formed[whole(later[0], "term")] <= following):
            found.append((place, whole(later[0], "term"), number(later[0], "t") - at))
    return found


@pytest.mark.heavy
@given(runs())
@settings(max_examples=200)
def test_costs_match_a_slow_and_plain_calculation(run: Evidence) -> None:
    """For any terms and faults, each fault has the same next world and the same time to it."""
    assert [(cost.place, cost.term, cost.rto_s) for cost in recoveries(run)] == plainly(run)
    costly = {cost.place for cost in recoveries(run)}
    last = max((number(line, "t") for line in run.of("step")), default=0.0)
    faults = list(enumerate(run.of("fault")))
    harmless = {place for place, f in faults if f["kind"] == "freeze_worker" and number(f, "t") < last}
    assert ridden_out(run).keys() == harmless - costly


def test_a_long_run_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 faults and 20,000 steps, each line is read a few times, not once per fault."""
    looks = [0]

    def counted(line: Line, key: str) -> float:
        looks[0] += 1
        return number(line, key)

    lines: list[Line] = []
    for term in range(1, 502):
        began = term * 100.0
        lines.append({"op": "form", "t": began, "term": term, "rank": 0, "pid": term, "world": 1, "sealed_at": began})
        lo = (term - 1) * 40
        lines.append({"op": "restore", "t": began + 1, "term": term, "rank": 0, "step": lo, "commit": None})
        lines += [{"op": "step", "t": began + 2 + n, "term": term, "rank": 0, "step": lo + n + 1} for n in range(40)]
        lines.append({"op": "fault", "t": began + 50, "kind": "kill_worker", "node": 0, "pids": [term]})
    run = Evidence(Path("long"), [lines], [], {}, None, None)
    monkeypatch.setattr(recovery_cost, "number", counted)
    monkeypatch.setattr(recovery_cost, "whole", lambda line, key: int(counted(line, key)))
    assert len(recoveries(run)) == 500
    assert looks[0] < 3 * len(lines)


def test_a_fault_between_two_worlds_costs_the_steps_between(tmp_path: Path) -> None:
    """The recorded run's kill loses three steps, its start none."""
    from chaos.judge.evidence.run_files import collect

    run = collect(record(tmp_path / "run") / "faulted")
    assert [(cost.kind, cost.rpo_steps) for cost in recoveries(run)] == [("kill_node", 3), ("start_node", 0)]


def test_recovery_from_a_fault_after_the_last_step_is_the_jobs_end() -> None:
    """A kill during or after the last step is followed by no step of a next world; an earlier one had no effect."""
    lines: list[Line] = [
        {"op": "form", "t": 1.0, "term": 1, "rank": 0, "pid": 7, "world": 1},
        {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
        *({"op": "step", "t": 2.0 + step, "term": 1, "rank": 0, "step": step} for step in (1, 2, 3)),
        *({"op": "fault", "t": t, "kind": "kill_worker", "node": 0, "pids": [7]} for t in (3.5, 4.5, 6.0)),
    ]
    assert after_the_last_step(Evidence(Path("drawn"), [lines], [], {}, None, None)) == {}, "the job is not done"
    lines.append({"op": "end", "t": 7.0, "term": 1, "rank": 0, "status": "done"})
    assert list(after_the_last_step(Evidence(Path("drawn"), [lines], [], {}, None, None))) == [1, 2]


def test_a_fault_of_a_spare_node_is_ridden_out() -> None:
    """A node that waits outside a full world may die without ending it: nothing is lost or formed."""

    def evidence_of(*faults: Line) -> Evidence:
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "live"},
            {"op": "form", "t": 1.0, "term": 1, "rank": 0, "pid": 7, "world": 1},
            {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
            *({"op": "step", "t": 2.0 + step, "term": 1, "rank": 0, "step": step} for step in (1, 2, 3)),
            *faults,
            {"op": "end", "t": 9.0, "term": 1, "rank": 0, "status": "done"},
        ]
        return Evidence(Path("drawn"), [lines], [], {}, {"status": "done", "term": 1, "step": 3}, None)

    spare: Line = {"op": "fault", "t": 3.5, "kind": "kill_node", "node": 1, "pids": [8]}
    for kind in ("start_node", "lose_lease"):  # these faults name agents, which are never in a world
        with pytest.raises(Unknown, match="0 of 1 faults were recovered from"):
            rto(evidence_of({**spare, "kind": kind}))
    assert rpo(evidence_of(spare)) == "0 applied steps computed again; 1 faults were ridden out"
    assert rto(evidence_of(spare)) == "no new world had to be formed: 1 faults were ridden out"
    with pytest.raises(Unknown, match="nothing was recovered from"):
        rpo(evidence_of())
    with pytest.raises(Unknown, match="0 of 1 faults were recovered from"):
        rto(evidence_of({**spare, "t": 2.5, "pids": [7]}))
    with pytest.raises(Unknown, match="0 of 0 faults were recovered from"):
        rto(evidence_of({**spare, "t": 8.0}))


def test_the_end_of_a_process_that_was_left_out_costs_nothing() -> None:
    """It belonged to the previous world, and slept while the others, with a replacement, formed the next one."""
    lines: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": "live"},
        *({"op": "form", "t": 1.0, "term": 1, "rank": rank, "pid": 7 + rank, "world": 2} for rank in (0, 1)),
        {"op": "restore", "t": 1.5, "term": 1, "rank": 0, "step": 0, "commit": None},
        {"op": "fault", "t": 2.0, "kind": "freeze_worker", "node": 1, "pids": [8], "for_s": 4.0},
        *({"op": "form", "t": 4.0, "term": 2, "rank": rank, "pid": 7 + 2 * rank, "world": 2} for rank in (0, 1)),
        {"op": "restore", "t": 4.5, "term": 2, "rank": 0, "step": 0, "commit": None},
        *({"op": "step", "t": 5.0 + step, "term": 2, "rank": 0, "step": step} for step in (1, 2, 3, 4)),
        {"op": "fault", "t": 6.5, "kind": "raise", "point": "applied", "node": 1, "pids": [8]},
        {"op": "end", "t": 12.0, "term": 2, "rank": 0, "status": "done"},
    ]
    run = Evidence(Path("drawn"), [lines], [], {}, {"status": "done", "term": 2, "step": 4}, None)
    assert list(ridden_out(run)) == [1]
    hit = [{**line, "pids": [9]} if line.get("point") else line for line in lines]  # the process that replaced it
    assert list(ridden_out(Evidence(Path("drawn"), [hit], [], {}, run.result, None))) == []


def test_a_node_that_is_never_admitted_is_not_a_spare() -> None:
    """Its later deaths cost nothing only because the world stayed small, which is itself wrong."""
    lines: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": "live"},
        *({"op": "form", "t": 1.0, "term": 1, "rank": rank, "pid": 7 + rank, "world": 2} for rank in (0, 1)),
        {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
        {"op": "step", "t": 3.0, "term": 1, "rank": 0, "step": 1},
        {"op": "fault", "t": 3.5, "kind": "kill_node", "node": 1, "pids": [8]},
        {"op": "form", "t": 4.0, "term": 2, "rank": 0, "pid": 7, "world": 1},
        {"op": "restore", "t": 4.5, "term": 2, "rank": 0, "step": 1, "commit": None},
        *({"op": "step", "t": 3.0 + step, "term": 2, "rank": 0, "step": step} for step in range(2, 9)),
        {"op": "fault", "t": 6.5, "kind": "kill_node", "node": 1, "pids": [9]},
        {"op": "end", "t": 12.0, "term": 2, "rank": 0, "status": "done"},
    ]
    with pytest.raises(Unknown, match="1 of 2 faults were recovered from"):
        rto(Evidence(Path("drawn"), [lines], [], {}, {"status": "done", "term": 2, "step": 8}, None))


@pytest.mark.parametrize(("steps_at", "first_at", "late_s"), [
    ((), 190.0, None),
    ((), 204.0, 2.5),
    ((250.0, 350.0), 440.0, None),
    ((250.0, 350.0, 450.0), 460.0, 10.0),
    ((250.0,), 460.0, 110.0),
])  # fmt: skip
def test_a_small_world_admits_a_returning_node_after_its_first_step(
    steps_at: tuple[float, ...], first_at: float, late_s: float | None
) -> None:
    """A returning node waits for a working world, but not for its third step, nor for a world without progress."""
    back = first_at - 2
    lines: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": "live", "patience_s": 100.0},
        *({"op": "form", "t": 1.0, "term": 1, "rank": rank, "pid": 7 + rank, "world": 2} for rank in (0, 1)),
        {"op": "restore", "t": 1.5, "term": 1, "rank": 0, "step": 0, "commit": None},
        {"op": "fault", "t": 2.0, "kind": "kill_node", "node": 1, "pids": [8]},
        {"op": "form", "t": 3.0, "term": 2, "rank": 0, "pid": 7, "world": 1},
        {"op": "restore", "t": 3.5, "term": 2, "rank": 0, "step": 0, "commit": None},
        {"op": "step", "t": 101.0, "term": 2, "rank": 0, "step": 1},
        {"op": "fault", "t": 101.5, "kind": "kill_node", "node": 1, "pids": [9]},
        *({"op": "step", "t": t, "term": 2, "rank": 0, "step": 2 + n} for n, t in enumerate(steps_at)),
        *({"op": "form", "t": back, "term": 3, "rank": rank, "pid": 7 + 3 * rank, "world": 2} for rank in (0, 1)),
        {"op": "restore", "t": first_at - 1, "term": 3, "rank": 0, "step": 1 + len(steps_at), "commit": None},
        {"op": "step", "t": first_at, "term": 3, "rank": 0, "step": 2 + len(steps_at)},
    ]
    run = Evidence(Path("drawn"), [sorted(lines, key=lambda line: number(line, "t"))], [], {}, None, None)
    if late_s is None:
        assert rto(run) == f"{min(99.0, first_at - 101.5):.2f} to {max(99.0, first_at - 101.5):.2f} s to the next step"
        return
    with pytest.raises(Violated, match=f", {late_s:.1f} s after all should have been over"):
        rto(run)


@pytest.mark.parametrize(("formed_at", "size", "first_at", "late_s"), [
    (90.0, 1, 180.0, None),
    (90.0, 1, 195.0, 5.0),
    (90.0, 2, 180.0, 75.0),
    (110.0, 1, 120.0, 15.0),
    (5.5, 1, 107.0, 1.5),
])  # fmt: skip
def test_a_small_world_that_has_formed_in_time_may_take_long_over_its_first_step(
    formed_at: float, size: int, first_at: float, late_s: float | None
) -> None:
    """One rank of many computes all lanes: it may take as long as a step may take, and no longer."""
    scenario: Line = {"op": "scenario", "t": 0.0, "recovery": "live", "patience_s": 100.0}
    fault: Line = {"op": "fault", "t": 5.0, "kind": "kill_worker", "node": 1, "pids": [8]}
    restore: Line = {"op": "restore", "t": formed_at + 1, "term": 2, "rank": 0, "step": 0}
    step: Line = {"op": "step", "t": first_at, "term": 2, "rank": 0, "step": 1, "samples": 1}
    after = a_world(formed_at, 2, *[7, 9][:size], size=size)
    lines = [scenario, *a_world(1.0, 1, 7, 8), fault, *after, restore, step]
    run = Evidence(Path("drawn"), [lines], [], {}, None, None)
    if late_s is None:
        assert rto(run).endswith(f"{first_at - 5.0:.2f} s to the next step")
        return
    with pytest.raises(Violated, match=f", {late_s:.1f} s after all should have been over"):
        rto(run)


@pytest.mark.parametrize(("first_at", "late_s"), [(150.0, None), (3600.0, 3413.0)])
def test_a_recovery_of_an_hour_is_late_even_in_a_soak(first_at: float, late_s: float | None) -> None:
    steps: list[Line] = [
        {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
        {"op": "step", "t": 3.0, "term": 1, "rank": 0, "step": 1},
        {"op": "fault", "t": 7.0, "kind": "kill_worker", "node": 1, "pids": [8]},
        {"op": "restore", "t": first_at - 1, "term": 2, "rank": 0, "step": 1, "commit": None},
        {"op": "step", "t": first_at, "term": 2, "rank": 0, "step": 2},
    ]
    run = a_soak(*a_world(1.0, 1, 7, 8), *a_world(first_at - 2, 2, 7, 9), *steps, until=first_at)
    if late_s is None:
        rto(run)
        return
    with pytest.raises(Violated, match=f"{late_s:.1f} s after all should have been over"):
        rto(run)


@pytest.mark.parametrize(("every_s", "is_late"), [(10.0, False), (40.0, True)])
def test_a_recovery_is_not_late_where_faults_come_faster_than_any_world_can_form(every_s: float, is_late: bool) -> None:
    """The recovery's time pauses while others are answered (20 s each), and continues between them."""
    faults: list[Line] = [
        {"op": "fault", "t": t, "kind": "kill_worker", "node": 1, "pids": [8]} for t in np.arange(5.0, 605.0, every_s)
    ]
    scenario: Line = {"op": "scenario", "t": 0.0, "recovery": "live", "patience_s": 180.0, "recovery_s": 20.0}
    step: Line = {"op": "step", "t": 620.0, "term": 2, "rank": 0, "step": 1, "samples": 1}
    restore: Line = {"op": "restore", "t": 610.0, "term": 2, "rank": 0, "step": 0}
    lines = [scenario, *faults, *a_world(1.0, 1, 7, 8), *a_world(606.0, 2, 7, 9), restore, step]
    run = Evidence(Path("storm"), [lines], [], {}, None, None)
    if is_late:
        with pytest.raises(Violated, match="after all should have been over"):
            rto(run)
        return
    assert rto(run).endswith("615.00 s to the next step")


@pytest.mark.parametrize("saved_at", [None, 4])
def test_a_kill_that_lost_nothing_proves_something_only_where_a_survivor_saved_the_steps(saved_at: int | None) -> None:
    """A survivor that is asked to leave commits its steps; a kill right after a commit risks nothing."""
    kept = saved_at or 3
    lines: list[Line] = [
        {"op": "form", "t": 1.0, "term": 1, "rank": 0, "pid": 7, "world": 2, "recovery": "restart"},
        {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
        *({"op": "step", "t": 2.0 + step, "term": 1, "rank": 0, "step": step} for step in range(1, kept + 1)),
        {"op": "commit", "t": 5.0, "term": 1, "rank": 0, "step": 3},
        {"op": "fault", "t": 6.5, "kind": "kill_worker", "node": 0, "pids": [7], "is_drawn": True, "seen_step": kept},
        {"op": "form", "t": 7.0, "term": 3, "rank": 0, "pid": 8, "world": 2, "recovery": "restart"},
        {"op": "restore", "t": 8.0, "term": 3, "rank": 0, "step": kept, "commit": f"commits/2-{kept}.json"},
        {"op": "step", "t": 9.0, "term": 3, "rank": 0, "step": kept + 1},
    ]
    run = Evidence(Path("drawn"), [lines], [], {}, None, None)
    with contextlib.nullcontext() if saved_at else pytest.raises(Unknown, match="lost no applied step"):
        faults(run)
