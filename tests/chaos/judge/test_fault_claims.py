"""Records of kills are checked against the killed processes' own histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.delivery.claims import check_kills
from chaos.judge.evidence.run_files import Evidence
from chaos.judge.findings import Violated


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
