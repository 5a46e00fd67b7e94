"""Departures from a world and their explanations: a process, an agent, or a world that was formed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.recovery_cost import sealed_at
from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.departures import MOST_WORLDS_LEAVING, deaths, is_any_unfit, unfit
from tests.chaos.judge.soaks import a_soak, a_world

ENDS: list[Line] = [{"op": "end", "t": 7300.0, "term": 2, "rank": rank, "status": "done"} for rank in (0, 1)]


def test_a_process_left_when_it_was_last_seen() -> None:
    """A process without a line in a world may be in the next, or be hit in it; one never seen again was lost."""

    def formed(term: int, *pids: int) -> list[Line]:
        return [
            {"op": "form", "t": 10.0 * term, "term": term, "rank": rank, "pid": pid, "world": 2}
            for rank, pid in enumerate(pids)
        ]

    scenario: Line = {"op": "scenario", "t": 0.0, "recovery": "live"}
    hit: Line = {"op": "fault", "t": 12.0, "kind": "kill_worker", "node": 0, "pids": [8]}
    ends: list[Line] = [{"op": "end", "t": 40.0, "term": 3, "rank": rank, "status": "done"} for rank in (0, 1)]

    def evidence_of(*lines: Line) -> Evidence:
        return Evidence(Path("drawn"), [[scenario, *formed(1, 7, 8), *lines, *ends]], [], {}, None, None)

    assert deaths(evidence_of(hit, *formed(2, 9), *formed(3, 7, 9))).startswith("2 changes")
    assert deaths(evidence_of(hit, *formed(2, 9), *formed(3, 9, 10), {**hit, "t": 25.0, "pids": [7]})).startswith(
        "2 changes"
    )
    with pytest.raises(Unknown, match="process 7 left between terms 1 and 2"):
        deaths(evidence_of(hit, *formed(2, 9), *formed(3, 9, 10)))


def test_a_process_that_names_a_later_world_that_did_not_form_has_not_left_before_it() -> None:
    """It may have been in no world that lived long enough for all members to record it, until a fault hits it."""
    lines: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": "live"},
        *({"op": "form", "t": 10.0, "term": 1, "rank": pid - 7, "pid": pid, "world": 3} for pid in (7, 8, 9)),
        {"op": "fault", "t": 15.0, "kind": "kill_worker", "node": 0, "pids": [9]},
        {"op": "form", "t": 20.0, "term": 2, "rank": 0, "pid": 7, "world": 2, "cause": "lost"},
        {"op": "form", "t": 30.0, "term": 3, "rank": 0, "pid": 7, "world": 1, "cause": "lost"},
        {"op": "fault", "t": 45.0, "kind": "kill_worker", "node": 1, "pids": [8]},
        {"op": "form", "t": 50.0, "term": 5, "rank": 0, "pid": 7, "world": 1, "cause": "lost"},
        {"op": "end", "t": 60.0, "term": 5, "rank": 0, "status": "done"},
    ]
    named: Line = {"op": "unformed", "t": 40.0, "term": 4, "rank": 1, "pid": 8, "why": "the world has changed"}

    def evidence_of(*more: Line) -> Evidence:
        return Evidence(Path("drawn"), [[*lines, *more]], [], {}, None, None)

    assert deaths(evidence_of(named)).startswith("3 changes")
    with pytest.raises(Unknown, match="process 8 left between terms 1 and 2"):
        deaths(evidence_of())


def test_a_process_that_was_hit_may_have_been_in_several_worlds_that_it_did_not_live_to_record() -> None:
    """In each of them a seat has no record; from the first complete one on, it was no member."""

    def verdict_of(*seats: int, hit_in: int) -> str:
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "live"},
            {"op": "form", "t": 10.0, "term": 1, "rank": 1, "pid": 8, "world": seats[0]},
            *(
                {"op": "form", "t": 10.0 * term, "term": term, "rank": 0, "pid": 7, "world": world}
                for term, world in enumerate(seats, 1)
            ),
            *(
                {"op": "fault", "t": 10.0 * term + 5.0, "kind": "kill@form", "node": term, "pids": [20 + term]}
                for term in range(1, len(seats))
                if term != hit_in
            ),
            {"op": "fault", "t": 10.0 * hit_in + 6.0, "kind": "kill@form", "node": 0, "pids": [8]},
            {"op": "end", "t": 90.0, "term": len(seats), "rank": 0, "status": "done"},
        ]
        return deaths(Evidence(Path("drawn"), [lines], [], {}, None, None))

    assert verdict_of(2, 4, 3, 1, hit_in=3).startswith("3 changes")
    with pytest.raises(Unknown, match="process 8 left between terms 1 and 2"):
        verdict_of(2, 4, 1, 1, hit_in=3)


@pytest.mark.parametrize(
    ("kind", "node", "code", "is_explained"),
    [
        ("readonly_dir", 0, 2, True),
        ("readonly_dir", 1, 2, False),
        ("readonly_dir", 0, 1, False),
        ("storage_errors", 0, 2, False),
    ],
)
@pytest.mark.parametrize("recovery", ["restart", "live"])
def test_only_the_node_that_may_not_write_ends_for_good(
    recovery: str, kind: str, node: int, code: int, is_explained: bool
) -> None:
    """If some requests of all nodes fail, several failures in a row on one node are an accident."""
    lines: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": recovery},
        {"op": "form", "t": 10.0, "term": 1, "rank": 0, "pid": 7, "world": 1},
        {"op": "fault", "t": 12.0, "kind": kind, "node": node, "pids": [7], "for_s": 5.0},
        {"op": "exit", "t": 15.0, "node": 0, "code": code},
        {"op": "end", "t": 20.0, "term": 1, "rank": 0, "status": "done"},
    ]
    run = Evidence(Path("drawn"), [lines], [], {}, None, None)
    if is_explained:
        assert deaths(run).startswith("0 changes")
    else:
        with pytest.raises(Unknown, match=f"node 0 ended with code {code}"):
            deaths(run)


@pytest.mark.parametrize(
    ("kind", "is_explained"),
    [("storage_errors", True), ("etcd_outage", True), ("start_twin", True), ("flip_bit", False)],
)
def test_a_service_outage_explains_processes_that_leave_during_it(kind: str, is_explained: bool) -> None:
    """A process started during an outage of etcd or the storage is hit by it; the fault's line cannot name it."""

    def evidence_of(outage_s: float, *, stays: bool = False, left_at: float = 90.0) -> Evidence:
        both = [(1, 10.0), (2, 20.0)] if stays else [(1, 10.0)]
        last = len(both) + 1
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "live"},
            {"op": "fault", "t": 1.0, "kind": kind, "node": 0, "pids": [], "for_s": outage_s},
            *(
                {"op": "form", "t": t, "term": term, "rank": rank, "pid": 7 + rank, "world": 2, "sealed_at": t}
                for term, t in both
                for rank in (0, 1)
            ),
            {"op": "form", "t": left_at, "term": last, "rank": 0, "pid": 7, "world": 1},
            {"op": "end", "t": 9040.0, "term": last, "rank": 0, "status": "done"},
        ]
        return Evidence(Path("drawn"), [lines], [], {}, None, None)

    if is_explained:
        assert deaths(evidence_of(outage_s=10.0)).startswith("1 changes")
        with pytest.raises(Unknown, match="process 8 left"):
            deaths(evidence_of(outage_s=10.0, left_at=9000.0))
    with pytest.raises(Unknown, match="process 8 left between terms 1 and 2"):
        deaths(evidence_of(outage_s=5.0 if is_explained else 10.0))
    with pytest.raises(Unknown, match="process 8 left between terms 2 and 3" if is_explained else "term 2 was formed"):
        deaths(evidence_of(outage_s=10.0, stays=True))


def test_a_world_is_sealed_before_it_forms_whatever_its_leaders_clock_says() -> None:
    """Its clock may be an hour ahead: a fault after the seal by that clock still hits the world."""

    def evidence_of(sealed_at: float) -> Evidence:
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "live"},
            *(
                {"op": "form", "t": t, "term": term, "rank": rank, "pid": 7 + rank, "world": 2, "sealed_at": at}
                for term, t, at in ((1, 10.0, sealed_at), (2, 60.0, 59.0))
                for rank in (0, 1)
            ),
            {"op": "fault", "t": 50.0, "kind": "slow_etcd", "node": 0, "pids": [], "for_s": 5.0},
            {"op": "restore", "t": 61.0, "term": 2, "rank": 0, "step": 0, "commit": None},
            {"op": "step", "t": 62.0, "term": 2, "rank": 0, "step": 1},
            *({"op": "end", "t": 70.0, "term": 2, "rank": rank, "status": "done"} for rank in (0, 1)),
        ]
        return Evidence(Path("drawn"), [lines], [], {}, None, None)

    assert sealed_at(evidence_of(3610.0)) == {1: 10.0, 2: 59.0}
    assert (
        deaths(evidence_of(3610.0)) == deaths(evidence_of(9.0)) == "1 changes of the world, each explained by a fault"
    )


def test_a_restarted_world_is_explained_by_a_fault_of_the_previous_one() -> None:
    """The fault came after that world was sealed, lasted until then, or hit a member; or a joiner explains it."""

    def verdict_of(*hits: Line, seats: tuple[int, int] = (2, 2)) -> str:
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "restart"},
            *hits,
            {"op": "form", "t": 10.0, "sealed_at": 8.0, "term": 1, "rank": 0, "pid": 7, "world": seats[0]},
            {"op": "form", "t": 20.0, "sealed_at": 19.0, "term": 2, "rank": 0, "pid": 9, "world": seats[1]},
            {"op": "end", "t": 40.0, "term": 2, "rank": 0, "status": "done"},
        ]
        return deaths(Evidence(Path("drawn"), [lines], [], {}, None, None))

    fault: Line = {"op": "fault", "t": 5.0, "kind": "cut_off_etcd", "node": 0, "pids": [1], "for_s": 2.0}
    killed: Line = {**fault, "kind": "kill_node", "for_s": 300.0}  # the time that it stays away
    for hit in (
        {**fault, "t": 9.0},
        {**fault, "for_s": 4.0},
        {**fault, "pids": [7]},
        {**fault, "op": "undo", "t": 15.0},
    ):
        assert verdict_of(hit).startswith("1 changes"), hit
    assert verdict_of(fault, seats=(1, 2)).startswith("1 changes")
    for hits in ([], [fault], [killed], [{**fault, "t": 21.0, "pids": [7]}]):
        with pytest.raises(Unknown, match="term 2 was formed, but no fault since term 1"):
            verdict_of(*hits)


def test_an_agent_cut_off_from_etcd_explains_one_world_sealed_after_that() -> None:
    """The lost renewal is noticed when the next world has formed; by then it is another member (seed 8961)."""

    def verdict_of(*worlds: tuple[float, int], kind: str = "lose_requests", node: int = 1) -> str:
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "restart"},
            {"op": "fault", "t": 5.0, "kind": kind, "node": node, "pids": [900], "for_s": 2.0},
        ]
        for term, (at, pid) in enumerate(worlds, 1):
            lines += [
                {"op": "node", "t": at - 3.0, "node": 1, "pids": [pid]},
                {"op": "form", "t": at, "sealed_at": at - 2, "term": term, "rank": 0, "pid": pid, "world": 1},
            ]
        lines.append({"op": "end", "t": 90.0, "term": len(worlds), "rank": 0, "status": "done"})
        return deaths(Evidence(Path("drawn"), [lines], [], {}, None, None))

    assert verdict_of((9.2, 7), (14.0, 8)).startswith("1 changes")
    for kind, node, worlds in (
        ("lose_requests", 1, [(9.2, 7), (14.0, 8), (19.0, 9)]),
        ("lose_requests", 0, [(9.2, 7), (14.0, 8)]),
        ("slow_worker", 1, [(9.2, 7), (14.0, 8)]),
        ("lose_requests", 1, [(1009.2, 7), (1014.0, 8)]),
    ):
        with pytest.raises(Unknown, match=f"term {len(worlds)} was formed, but no fault since term {len(worlds) - 1}"):
            verdict_of(*worlds, kind=kind, node=node)


def test_a_process_asked_to_leave_may_end_worlds_until_it_has_left() -> None:
    """A world may end with a member that leaves before all know of its last step: it then leaves the next one.

    A world that loses a member as a late effect of the fault may be formed by the same processes.
    """

    def verdict_of(kind: str, cause: str = "restart", num_worlds: int = 3) -> str:
        who = {"rank": 0, "pid": 7, "world": 1, "cause": cause}
        lines: list[Line] = [
            {"op": "scenario", "t": 0.0, "recovery": "live"},
            *({"op": "form", "t": 10.0 * term, "term": term, **who} for term in range(1, num_worlds + 1)),
            {"op": "fault", "t": 15.0, "kind": kind, "node": 0, "pids": [7]},
            {"op": "end", "t": 400.0, "term": num_worlds, "rank": 0, "status": "done"},
        ]
        return deaths(Evidence(Path("drawn"), [lines], [], {}, None, None))

    for asked in ("stop_node", "preempt_node", "requeue_job"):
        assert verdict_of(asked, num_worlds=MOST_WORLDS_LEAVING + 2).startswith("4 changes")
    with pytest.raises(Unknown, match="term 6 was formed by the processes of term 5"):
        verdict_of("stop_node", num_worlds=10)
    assert verdict_of("freeze_worker", "lost").startswith("2 changes")
    with pytest.raises(Unknown, match="term 4 was formed by the processes of term 3"):
        verdict_of("freeze_worker", "lost", num_worlds=10)
    with pytest.raises(Unknown, match="term 3 was formed by the processes of term 2"):
        verdict_of("freeze_worker")


@pytest.mark.parametrize(("left_at", "is_explained"), [(100.0, True), (3600.0, False)])
def test_what_hit_a_node_an_hour_ago_explains_nothing_even_in_a_soak(left_at: float, is_explained: bool) -> None:
    """Faults come continuously, but each explains departures only for a limited time."""
    run = a_soak(*a_world(1.0, 1, 7, 8), *a_world(left_at, 2, 7, 9), *ENDS)
    if is_explained:
        assert deaths(run).startswith("1 changes")
        return
    with pytest.raises(Unknown, match="process 8 left between terms 1 and 2"):
        deaths(run)


@pytest.mark.parametrize(("at", "is_explained"), [(100.0, True), (3600.0, False)])
def test_an_agent_gives_up_not_long_after_it_was_kept_from_etcd(at: float, is_explained: bool) -> None:
    ends = [{**line, "term": 1} for line in ENDS]
    run = a_soak(*a_world(1.0, 1, 7, 8), *ends, {"op": "exit", "t": at, "node": 1, "code": 1})
    if is_explained:
        assert deaths(run).startswith("0 changes")
        return
    with pytest.raises(Unknown, match="node 1 ended with code 1"):
        deaths(run)


def of_an_unfit_node(*lines: Line) -> Evidence:
    """Return a job of two nodes, of which the second returns at 20 s on a CPU that computes wrongly."""
    told: list[Line] = [
        {"op": "scenario", "t": 0.0, "recovery": "live"},
        {"op": "node", "t": 9.0, "node": 0, "pids": [7]},
        {"op": "node", "t": 9.0, "node": 1, "pids": [8]},
        {"op": "fault", "t": 20.0, "kind": "unfit_node", "node": 1, "pids": [8], "for_s": 30.0},
        {"op": "undo", "t": 52.0, "kind": "unfit_node", "node": 1, "pids": []},
        {"op": "undo", "t": 30.0, "kind": "unfit_node", "node": 0, "pids": []},
        *({"op": "form", "t": 10.0, "term": 1, "rank": pid - 7, "pid": pid, "world": 2} for pid in (7, 8)),
    ]
    return Evidence(Path("drawn"), [[*told, *lines]], [], {}, None, None)


def test_a_machine_that_computes_wrongly_is_in_no_world() -> None:
    """This holds for the process and for others that its node starts, until the CPU is replaced."""
    named: Line = {"op": "unfit", "t": 26.0, "term": 0, "pid": 9, "why": "core 0 computes wrongly"}
    started: Line = {"op": "node", "t": 24.0, "node": 1, "pids": [9]}
    later: list[Line] = [
        {"op": "node", "t": 55.0, "node": 1, "pids": [10]},
        {"op": "form", "t": 56.0, "term": 2, "rank": 1, "pid": 10, "world": 2},
    ]
    assert not is_any_unfit(of_an_unfit_node(started, *later)), "it was replaced before it had examined itself"
    assert unfit(of_an_unfit_node(named, *later)).startswith("1 times a machine that computes wrongly was named")
    let_in: Line = {"op": "form", "t": 40.0, "term": 2, "rank": 1, "pid": 9, "world": 2}
    for run in (of_an_unfit_node(started, named, let_in), of_an_unfit_node(started, let_in)):
        assert is_any_unfit(run)
        with pytest.raises(Violated, match="process 9 of node 1, which computes wrongly, was let into a world"):
            unfit(run)


def test_a_machine_that_computes_wrongly_is_named() -> None:
    """The process itself names it, whatever its clock says; a node that only exits with the code gives no reason."""
    started: Line = {"op": "node", "t": 24.0, "node": 1, "pids": [9]}
    ended: Line = {"op": "exit", "t": 30.0, "node": 1, "code": 71}
    assert is_any_unfit(of_an_unfit_node(started, ended))
    with pytest.raises(Unknown, match="no machine that computes wrongly was named"):
        unfit(of_an_unfit_node(started, ended))
    fast: Line = {"op": "unfit", "t": 90.0, "term": 0, "pid": 9, "why": "core 0 computes wrongly"}
    assert unfit(of_an_unfit_node(started, ended, fast)).startswith("1 times")
