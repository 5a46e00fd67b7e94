"""The ends of nodes against the lines of their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Line, collect
from chaos.judge.findings import find
from chaos.judge.invariants.written.order import order
from chaos.planted.edits import edit, without


def judged(folder: Path, *added: Line) -> str:
    """Return what is found of the run with further lines of the executor."""
    run = collect(folder / "faulted")
    run.processes.append([*added])
    return find("order", lambda: order(run)).truth


@pytest.mark.parametrize("earlier_s", [20.0, 3600.0])
def test_a_node_that_ended_before_its_processes_trained_is_found(folder: Path, earlier_s: float) -> None:
    assert judged(folder) == "true"
    edit(folder / "faulted", lambda line: {**line, "t": float(str(line["t"])) - earlier_s * (line["op"] == "exit")})
    assert judged(folder) == "false"


def test_a_node_may_end_start_again_and_be_killed(folder: Path) -> None:
    """Its processes train after its first end, and there is no second one; without a start they may not."""
    line = collect(folder / "faulted").of("node")[0]
    node, t = line["node"], float(str(line["t"]))
    without("exit")(folder / "faulted")
    end: Line = {"op": "exit", "node": node, "t": t - 60.0, "code": 0}
    start: Line = {"op": "undo", "kind": "kill_node", "node": node, "t": t - 50.0, "pids": []}
    assert judged(folder, end, start) == "true"
    assert judged(folder, end) == "false"
