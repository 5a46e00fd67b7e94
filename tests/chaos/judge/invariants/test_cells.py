"""Worlds of complete cells, each stage within one node: the judge reports worlds that are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.departures import deaths
from chaos.judge.invariants.exactly_once.counts import cells

NODE_OF = {number: number // 2 for number in range(8)}
"""Four nodes of two processes each."""


def evidence_of(*worlds: Sequence[int], lines: Sequence[Line] = (), **parallel: int) -> Evidence:
    """Return a live job with a world for each of these rows of processes, ten seconds apart."""
    known: list[Line] = [{"op": "scenario", "t": 0.0, "recovery": "live"}]
    known += [{"op": "node", "t": 0.0, "node": node, "pids": [pid]} for pid, node in NODE_OF.items()]
    for term, pids in enumerate(worlds, 1):
        for rank, pid in enumerate(pids):
            known.append({"op": "form", "t": 10.0 * term, "term": term, "rank": rank, "pid": pid, "world": len(pids)})
            known.append({"op": "restore", "t": 10.0 * term, "term": term, "rank": rank, "step": 0})
    ends = ({"op": "end", "t": 99.0, "term": len(worlds), "rank": n, "status": "done"} for n in range(len(worlds[-1])))
    config = {"parallel": parallel or {"tensor": 2, "pipeline": 2}}
    return Evidence(Path("drawn"), [[*known, *lines, *ends]], [], config, None, None)


def test_stages_may_be_of_different_nodes_and_their_ranks_may_not() -> None:
    assert cells(evidence_of(range(8))).startswith("1 worlds of whole cells of 4; 2 borders")
    with pytest.raises(Violated, match="term 1: stage 1 of cell 0 is on the nodes 1 and 2"):
        cells(evidence_of([0, 1, 2, 4, 3, 5, 6, 7]))
    with pytest.raises(Violated, match="stage 0 of cell 0 is on the nodes 0 and 1"):
        cells(evidence_of(range(8), tensor=4))
    assert "0 borders" in cells(evidence_of(range(8), pipeline=2))


def test_a_world_without_a_stage_is_not_of_whole_cells() -> None:
    with pytest.raises(Violated, match="term 2: a world of 6 ranks is not of whole cells of 4"):
        cells(evidence_of(range(8), [0, 1, 2, 3, 4, 5]))


def test_a_process_that_no_executor_knows_is_of_no_node() -> None:
    assert cells(evidence_of([90, 1, 2, 3])).startswith("1 worlds")


def test_what_a_lost_stage_leaves_of_its_cell_may_wait() -> None:
    """As many may wait as a cell has other ranks, of any cell; none if each cell is within one node."""
    hit: Line = {"op": "fault", "t": 12.0, "kind": "kill_node", "node": 0, "pids": [0, 1]}
    for left in ([4, 5, 2, 3], [4, 5, 6, 7]):
        assert deaths(evidence_of(range(8), left, lines=[hit])).startswith("1 changes")
        with pytest.raises(Unknown, match="left between terms 1 and 2, and no fault explains it"):
            deaths(evidence_of(range(8), left, lines=[hit], tensor=2))
    two: Line = {**hit, "pids": [0]}
    with pytest.raises(Unknown, match="left between terms 1 and 2"):
        deaths(evidence_of(range(8), [2, 3], lines=[two], tensor=1, pipeline=2))
