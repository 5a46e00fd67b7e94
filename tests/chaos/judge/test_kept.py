"""Every next world keeps the last one's applied steps; records of kills are checked against the histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.delivery.claims import check_kills
from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.whole_run import check_kept


def evidence_of(last: Line, *, kept: int) -> Evidence:
    """Two processes apply a step, one of them (`last`) another one; process 7 lives on in a world that keeps `kept`."""
    return Evidence(
        Path("drawn"),
        [
            [
                *({"op": "form", "t": 1.0, "term": 1, "rank": pid - 7, "pid": pid, "world": 2} for pid in (7, 8)),
                {"op": "restore", "t": 1.1, "term": 1, "rank": 0, "step": 0},
                *({"op": "step", "t": 2.0, "term": 1, "rank": rank, "step": 1} for rank in (0, 1)),
                {"op": "step", "t": 3.0, "term": 1, "step": 2, **last},
                {"op": "form", "t": 4.0, "term": 2, "rank": 0, "pid": 7, "world": 1},
                {"op": "restore", "t": 4.1, "term": 2, "rank": 0, "step": kept},
            ]
        ],
        [],
        {},
        None,
        None,
    )


@pytest.mark.parametrize("rank", [0, 1], ids=["its own", "another's"])
def test_a_step_that_all_could_apply_is_not_given_up_while_one_of_them_lives_on(rank: int) -> None:
    check_kept(evidence_of({"rank": rank}, kept=2))
    with pytest.raises(Violated, match="step 2 was applied in term 1, of which process 7 lives on, and term 2 began"):
        check_kept(evidence_of({"rank": rank}, kept=1))


def test_a_step_that_a_rank_applied_without_knowing_that_others_can_counts_for_itself_alone() -> None:
    """It had lost a peer before: others may have continued without it, and have dropped that step."""
    check_kept(evidence_of({"rank": 1, "unsettled": True}, kept=1))
    with pytest.raises(Violated):
        check_kept(evidence_of({"rank": 0, "unsettled": True}, kept=1))


def test_a_step_that_a_rank_only_held_as_pending_was_not_applied_by_it() -> None:
    """The remaining ranks may find that nobody can have applied it, and drop it."""
    check_kept(evidence_of({"rank": 0, "pending": True}, kept=1))
    with pytest.raises(Violated):
        check_kept(evidence_of({"rank": 1}, kept=1))


def run(fault: dict[str, object]) -> Evidence:
    """Return a run of three nodes with one process each, of which the first and third are killed at once."""
    nodes = [{"op": "node", "t": 1.0, "node": number, "pids": [100 + number]} for number in range(3)]
    hit = {"op": "fault", "t": 5.0, "kind": "kill_node", "node": 0, "pids": [100, 102], **fault}
    return Evidence(Path(), [[*nodes, hit]], [], {}, None, None)


def test_a_fault_may_hit_several_nodes() -> None:
    check_kills(run({"nodes": [0, 2]}))


def test_a_process_of_a_node_that_was_not_hit_is_not_killed_by_it() -> None:
    with pytest.raises(Violated, match="names process 102, which ran on node 2"):
        check_kills(run({}))


def test_a_fault_hits_the_node_that_it_is_of() -> None:
    with pytest.raises(Violated, match=r"kill_node on node 0 .*hit nodes \[2\]"):
        check_kills(run({"nodes": [2]}))
