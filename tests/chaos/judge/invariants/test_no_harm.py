"""The cost of one bad node: its cost to the others is judged, without the effects of other faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.no_harm import is_put_to_the_test, no_harm

STEP_S, DOWN_S, FAULT_AT = 0.5, 0.8, 30.0
CONFIG: Line = {"batch": {"global_batch": 24, "micro_batch": 4}, "checkpoint": {"every": "20 steps"}}


def job(
    *worlds: tuple[float, int, float], faults: tuple[Line, ...], recovery: str = "live", spare_nodes: int = 2
) -> Evidence:
    """Return a job of worlds, each (start time, number of ranks, seconds per step), until 200 s have passed."""
    said: Line = {"recovery": recovery, "patience_s": 60.0, "spare_nodes": spare_nodes}
    chaos: list[Line] = [{"op": "scenario", "t": 0.0, **said}, *faults]
    lines, step = list[Line](), 0
    for term, ((since, world, step_s), until) in enumerate(
        zip(worlds, [*(since for since, _, _ in worlds[1:]), 200.0], strict=True), 1
    ):
        at = since + (DOWN_S if term > 1 else 0.0)
        lines += [{"op": "form", "t": at, "term": term, "rank": n, "world": world, "pid": n} for n in range(world)]
        while (at := at + step_s) < until:
            step += 1
            lines += [
                {"op": "step", "t": at, "term": term, "rank": n, "step": step, "world": world} for n in range(world)
            ]
    return Evidence(Path(), [chaos, lines], [], CONFIG, {"status": "done", "step": step}, None)


def fault(kind: str = "wrong_address", at: float = FAULT_AT, **more: object) -> Line:
    return {"op": "fault", "t": at, "kind": kind, "node": 2, "seen_step": 50, "for_s": 90.0, "pids": [], **more}


def test_a_world_that_ends_once_is_no_harm() -> None:
    run = job((0.0, 3, STEP_S), (34.0, 2, STEP_S), (130.0, 3, STEP_S), faults=(fault(),))
    assert no_harm(run).startswith("1 times a node was wrong or joined")


def test_a_node_that_ends_the_world_again_and_again_is_caught() -> None:
    """Each time costs less than two steps; together they are more than 5 % of two minutes."""
    worlds = [(0.0, 3, STEP_S), *((FAULT_AT + 3.0 * n, 2, STEP_S) for n in range(40))]
    with pytest.raises(
        Violated, match=r"wrong_address on node 2 at step 50: the others were held up for \d\d\.\d s of"
    ):
        no_harm(job(*worlds, faults=(fault(),)))


def test_worlds_that_each_cost_less_than_a_step_add_up() -> None:
    """A step takes 1.5 s, and 2.3 s if a world ends in it: no gap is long, but a fifth of the time is lost."""
    worlds = [(0.0, 3, 1.5), *((FAULT_AT + 4.0 * n, 3, 1.5) for n in range(25)), (130.0, 3, 1.5)]
    with pytest.raises(Violated, match="held up"):
        no_harm(job(*worlds, faults=(fault(),)))


def test_a_job_that_stops_for_good_is_caught() -> None:
    """No next step ends the gap, so it lasts until the job's processes were last seen."""
    run = job((0.0, 3, STEP_S), (199.0, 3, STEP_S), faults=(fault(),))
    kept = [line for line in run.processes[1] if line["op"] == "form" or float(str(line["t"])) < 40.0]
    stuck = Evidence(Path(), [[*run.processes[0], {"op": "clean", "t": 200.0}], kept], [], CONFIG, None, None)
    with pytest.raises(Violated, match="held up"):
        no_harm(stuck)


def test_a_job_that_needs_every_node_waits_for_the_one_that_is_wrong() -> None:
    """With the minimum number of nodes, the job trains with all of them or not at all: that is no harm."""
    worlds = ((0.0, 3, STEP_S), (90.0, 3, STEP_S))
    assert is_put_to_the_test(job(*worlds, faults=(fault(),)))
    assert not is_put_to_the_test(job(*worlds, faults=(fault(),), spare_nodes=0))


def test_a_smaller_world_is_slower_and_not_held_up() -> None:
    """Two ranks take longer over six lanes than three: the time lost is the cost of the missing node."""
    run = job((0.0, 3, STEP_S), (31.0, 2, 4 * STEP_S), faults=(fault(),))
    assert "at a price of at most" in no_harm(run)


def test_what_saves_make_a_step_wait_for_is_not_the_nodes_doing() -> None:
    run = job((0.0, 3, STEP_S), faults=(fault(),))
    late = 0.0
    for line in run.processes[1]:
        if line["op"] == "step" and line["rank"] == 0 and int(str(line["step"])) % 20 == 1:
            late += 1.5
        line["t"] = float(str(line["t"])) + late
    assert no_harm(run)


def test_the_spell_of_another_fault_is_not_counted() -> None:
    """A stall of a minute belongs to the etcd fault; without that fault it is the node's."""
    worlds = ((0.0, 3, STEP_S), (90.0, 3, STEP_S))
    away = fault("etcd_outage", at=FAULT_AT - 5.0, node=None, for_s=20.0)

    def stalled(*faults: Line) -> Evidence:
        run = job(*worlds, faults=faults)
        kept = [x for x in run.processes[1] if x["op"] == "form" or not 32.0 < float(str(x["t"])) < 90.0]
        return Evidence(Path(), [run.processes[0], kept], [], CONFIG, run.result, None)

    assert no_harm(stalled(away, fault()))
    with pytest.raises(Violated):
        no_harm(stalled(fault()))


def test_a_fault_that_comes_soon_after_ends_what_is_counted() -> None:
    """Too little time is left before it to judge anything."""
    assert not is_put_to_the_test(job((0.0, 3, STEP_S), faults=(fault(), fault("kill_node", at=FAULT_AT + 3.0))))


@pytest.mark.parametrize("kind", ["kill_node", "freeze_worker", "refuse_address", "storage_slow"])
def test_what_takes_away_capacity_or_what_all_use_has_no_such_price(kind: str) -> None:
    assert not is_put_to_the_test(job((0.0, 3, STEP_S), faults=(fault(kind),)))


def test_a_job_that_restarts_for_every_newcomer_is_not_judged() -> None:
    assert not is_put_to_the_test(job((0.0, 3, STEP_S), faults=(fault(),), recovery="restart"))
