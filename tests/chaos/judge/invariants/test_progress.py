"""Progress: a process that makes none must stop in time, none may stop without a reason, and updates need a target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.progress import progress
from chaos.judge.verdict import examine
from chaos.planted.edits import edit, edit_json, forge, rewrite
from tests.chaos.recorded import LANES, MICRO_BATCH, ORDER, ROWS

LIMITS: Line = {"give_up_after": "5 worlds, 1 min"}


def run(*lines: Line, config: Line = LIMITS) -> Evidence:
    return Evidence(Path(), [list(lines)], [], config, None, None)


def unformed(*times: float, pid: int = 7) -> list[Line]:
    return [{"op": "unformed", "t": t, "term": n + 1, "rank": 0, "world": 2, "pid": pid} for n, t in enumerate(times)]


EXIT: Line = {"op": "exit", "t": 200.0, "node": 0, "code": 93}


def test_a_process_that_goes_on_for_ever_is_caught() -> None:
    """Ten worlds over 90 s; it had to end with the first one after a minute."""
    with pytest.raises(Violated, match="process 7 has been in 10 worlds in a row without a step, for 90 s"):
        progress(run(*unformed(*range(0, 100, 10))))


def test_many_worlds_in_a_short_time_are_no_reason() -> None:
    """A network that recovers must not end the job."""
    assert progress(run(*unformed(*range(50)))) == "at most 50 worlds in a row without a step of a process"
    with pytest.raises(Violated, match="node 0 ended with 93, but worlds had got on"):
        progress(run(*unformed(*range(150, 170)), {**EXIT, "t": 175.0}))


def test_a_step_in_between_begins_the_count_again() -> None:
    form: Line = {"op": "form", "t": 45.0, "term": 99, "rank": 0, "world": 2, "pid": 7}
    step: Line = {"op": "step", "t": 46.0, "term": 99, "rank": 0, "step": 1}
    assert progress(run(*unformed(0, 10, 20, 30, 40), form, step, *unformed(50, 60, 70, 80)))


def test_93_after_as_many_worlds_and_seconds_as_configured_has_a_reason() -> None:
    assert progress(run(*unformed(0, 20, 40, 60, 80), EXIT))


@pytest.mark.parametrize("op", ["no_progress", "nonfinite"])
def test_93_for_what_a_history_says_has_a_reason(op: str) -> None:
    form: Line = {"op": "form", "t": 90.0, "term": 3, "rank": 0, "world": 1, "pid": 7}
    assert progress(run(form, {"op": op, "t": 100.0, "term": 3, "rank": 0, "step": 5}, EXIT))


def test_a_job_that_is_never_to_give_up_does_not() -> None:
    assert progress(run(*unformed(*range(0, 1000, 10)), config={**LIMITS, "give_up_after": None}))


def test_a_step_whose_samples_have_no_target_needs_no_fault(folder: Path) -> None:
    """Its loss is null, nothing is learned from it, and result and commits list it: with faults as without."""

    def is_it(line: Line) -> bool:
        return line.get("step") == 3

    for name in ("faulted", "reference"):
        own = folder / name
        edit(own, lambda line: {**line, "loss": None} if line["op"] == "step" and is_it(line) else line)
        forge(own, lambda record: {**record, "skipped_steps": [[2, 3]]})
        edit_json(own / "result.json", skipped_steps=[[2, 3]])
        for path in (own / "metrics").glob("*.jsonl"):
            rewrite(path, lambda lines: [line for line in lines if not is_it(line)])
        held = json.loads((own / "tracked.json").read_text())["train/loss"]
        edit_json(own / "tracked.json", **{"train/loss": [point for point in held if point[0] != 3]})
    witness = np.load(folder / "faulted" / "witness.npy")
    for lane in range(LANES):
        witness[ORDER.epoch(0).ids(lane, 0, ROWS)[2 * MICRO_BATCH : 3 * MICRO_BATCH]] -= 1
    np.save(folder / "faulted" / "witness.npy", witness)
    found = {finding.invariant: finding for finding in examine(folder).findings}
    assert [finding for finding in found.values() if finding.truth != "true"] == []
    assert found["updates"].why.startswith("0 of 30 steps without an update")
