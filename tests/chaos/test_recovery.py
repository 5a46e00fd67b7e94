"""What faults cost: the fast reading of long runs says what a slow and plain one says, and stays linear."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos import recovery
from chaos.evidence import Evidence, Line, number, whole
from chaos.findings import Unknown
from chaos.injected import deaths
from chaos.recovery import behind_the_last_step, recoveries, ridden_out
from tests.chaos.recorded import record

WORLD_S = 10.0


@st.composite
def runs(draw: st.DrawFn) -> Evidence:
    """Terms that follow each other, some of which apply nothing, some late; faults at any time."""
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
    """Return (fault's place, term, seconds) by looking at every line for every fault."""
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


@given(runs())
@settings(max_examples=200)
def test_costs_are_those_of_the_plain_reading(run: Evidence) -> None:
    """Whatever terms and faults there are, each fault has the same next world and the same time to it."""
    assert [(cost.place, cost.term, cost.rto_s) for cost in recoveries(run)] == plainly(run)
    costly = {cost.place for cost in recoveries(run)}
    last = max((number(line, "t") for line in run.of("step")), default=0.0)
    faults = list(enumerate(run.of("fault")))
    harmless = {place for place, f in faults if f["kind"] == "freeze_worker" and number(f, "t") < last}
    assert ridden_out(run).keys() == harmless - costly


def test_a_long_run_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 faults and 20,000 steps, lines are looked at a few times each, not once for every fault."""
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
    monkeypatch.setattr(recovery, "number", counted)
    monkeypatch.setattr(recovery, "whole", lambda line, key: int(counted(line, key)))
    assert len(recoveries(run)) == 500
    assert looks[0] < 3 * len(lines)


def test_a_fault_between_two_worlds_costs_what_lies_between(tmp_path: Path) -> None:
    """The recorded run's kill gives up three steps, its start none."""
    from chaos.evidence import collect

    run = collect(record(tmp_path / "run") / "faulted")
    assert [(cost.kind, cost.rpo_steps) for cost in recoveries(run)] == [("kill_node", 3), ("start_node", 0)]


def test_a_fault_behind_the_last_step_is_answered_by_the_jobs_end() -> None:
    """A kill while the last step was applied, or later, has no next world's step; earlier it has changed nothing."""
    lines: list[Line] = [
        {"op": "form", "t": 1.0, "term": 1, "rank": 0, "pid": 7, "world": 1},
        {"op": "restore", "t": 2.0, "term": 1, "rank": 0, "step": 0, "commit": None},
        *({"op": "step", "t": 2.0 + step, "term": 1, "rank": 0, "step": step} for step in (1, 2, 3)),
        *({"op": "fault", "t": t, "kind": "kill_worker", "node": 0, "pids": [7]} for t in (3.5, 4.5, 6.0)),
    ]
    assert behind_the_last_step(Evidence(Path("drawn"), [lines], [], {}, None, None)) == {}, "the job is not done"
    lines.append({"op": "end", "t": 7.0, "term": 1, "rank": 0, "status": "done"})
    assert list(behind_the_last_step(Evidence(Path("drawn"), [lines], [], {}, None, None))) == [1, 2]


def test_a_process_leaves_when_it_is_seen_no_more() -> None:
    """Who did not live to tell of a world may be in the next, or be hit in it; who is never seen again was lost."""

    def formed(term: int, *pids: int) -> list[Line]:
        return [
            {"op": "form", "t": 10.0 * term, "term": term, "rank": rank, "pid": pid, "world": 2}
            for rank, pid in enumerate(pids)
        ]

    scenario: Line = {"op": "scenario", "t": 0.0, "recovery": "live"}
    hit: Line = {"op": "fault", "t": 12.0, "kind": "kill_worker", "node": 0, "pids": [8]}
    ends: list[Line] = [{"op": "end", "t": 40.0, "term": 3, "rank": rank, "status": "done"} for rank in (0, 1)]

    def told(*lines: Line) -> Evidence:
        return Evidence(Path("drawn"), [[scenario, *formed(1, 7, 8), *lines, *ends]], [], {}, None, None)

    assert deaths(told(hit, *formed(2, 9), *formed(3, 7, 9))).startswith("2 changes")
    assert deaths(told(hit, *formed(2, 9), *formed(3, 9, 10), {**hit, "t": 25.0, "pids": [7]})).startswith("2 changes")
    with pytest.raises(Unknown, match="process 7 left between terms 1 and 2"):
        deaths(told(hit, *formed(2, 9), *formed(3, 9, 10)))
