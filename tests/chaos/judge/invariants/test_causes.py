"""`status --why`: the judge accepts who is blamed only if a fault hit that process, lately."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.causes import causes


def evidence_of(*faults: Line, of_rank: int | None, do: str) -> Evidence:
    """Return a world of the processes 10 to 12, which takes a step, and one of 10 and 11, which takes none; somebody
    asks after the last fault."""
    lines: list[Line] = []
    for term, pids in ((1, (10, 11, 12)), (2, (10, 11))):
        lines += [{"op": "form", "t": 10.0 * term, "term": term, "rank": n, "pid": pid} for n, pid in enumerate(pids)]
    lines += [{"op": "step", "t": 11.0, "term": 1, "rank": n, "step": 1} for n in range(3)]
    lines += [{"op": "fault", "number": number, **fault} for number, fault in enumerate(faults)]
    code = {"start": 75, "fix": 65}[do]
    asked = {"t": 30.0, "fault": len(faults) - 1, "do": do, "exit_code": code, "of_rank": of_rank, "sentence": "..."}
    return Evidence(Path("drawn"), [[*lines, {"op": "why", **asked}]], [], {}, None, None)


CAPPED: Line = {"t": 12.0, "term": 1, "kind": "cap_fds", "pids": [12]}
KILLED: Line = {"t": 21.0, "term": 2, "kind": "kill", "point": "backward", "pids": [10]}


def test_the_process_that_the_fault_hit_is_the_cause() -> None:
    assert causes(evidence_of(KILLED, of_rank=0, do="start")).endswith("it named the right process 1 times")
    assert causes(evidence_of(KILLED, of_rank=None, do="start")).endswith("it named the right process 0 times")
    with pytest.raises(Violated, match="hit no process of rank 1"):
        causes(evidence_of(KILLED, of_rank=1, do="start"))
    with pytest.raises(Violated, match="asks for 'start', not for 'fix'"):
        causes(evidence_of(KILLED, of_rank=0, do="fix"))


def test_an_error_that_an_earlier_fault_left_since_the_last_step_is_a_cause_too() -> None:
    """Who was killed left no message, and a process without files to open has said why it ended."""
    assert causes(evidence_of(CAPPED, KILLED, of_rank=2, do="fix"))
    with pytest.raises(Violated, match="hit no process of rank 2"):
        causes(evidence_of({**CAPPED, "pids": [11]}, KILLED, of_rank=2, do="fix"))
    before: Line = {**CAPPED, "term": 0}
    with pytest.raises(Violated, match="hit no process of rank 2"):
        causes(evidence_of(before, KILLED, of_rank=2, do="fix"))
