"""Rows of a user's script: what its log lacks altogether is lost as well, not only what it has too often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Finding, find
from chaos.judge.invariants.script_run import coverage

ROWS = 4
WHOLE = ((0, 1), (2, 3))
"""The two steps of an epoch."""


def ran(epochs: Mapping[int, Sequence[Sequence[int]]], status: str = "done") -> Evidence:
    """Return the evidence of one world of one rank that applied these rows in the steps of these epochs."""
    steps = [(epoch, [*rows]) for epoch, batches in epochs.items() for rows in batches]
    who: Line = {"term": 1, "rank": 0, "world": 1}
    lines: list[Line] = [
        {"op": "script", "t": 0.0, "command": "torchrun train.py"},
        {"op": "form", "t": 1.0, **who, "pid": 7},
        {"op": "restore", "t": 1.0, **who, "step": 0},
    ]
    lines += [
        {"op": "step", "t": 1.0 + step, **who, "step": step, "epoch": epoch, "ids": rows, "of": ROWS}
        for step, (epoch, rows) in enumerate(steps, 1)
    ]
    result: Line = {"status": status, "step": len(steps), "term": 1, "num_samples": ROWS}
    return Evidence(Path("nowhere"), [lines], [], {}, result, None)


def judged(run: Evidence, reference: Evidence | None) -> Finding:
    return find("coverage", lambda: coverage(run, reference))


@pytest.mark.parametrize("has_reference", [False, True])
def test_an_epoch_without_a_step_was_never_applied(has_reference: bool) -> None:
    """A script whose snapshot is one epoch ahead resumes after the epoch that a fault interrupted."""
    reference = ran({0: WHOLE, 1: WHOLE, 2: WHOLE}) if has_reference else None
    found = judged(ran({0: WHOLE, 2: WHOLE}), reference)
    assert (found.truth, "epoch 1 was never applied" in found.why) == ("false", True), found
    assert judged(ran({1: WHOLE, 2: WHOLE}), None).truth == "true", "a script may count from 1"


def test_a_job_has_the_epochs_that_it_has_without_faults() -> None:
    """A job that ends early has lost its last epochs; a longer one has trained on its rows again."""
    reference = ran({0: WHOLE, 1: WHOLE})
    assert judged(ran({0: WHOLE, 1: WHOLE}), reference).truth == "true"
    short, long = judged(ran({0: WHOLE}), reference), judged(ran({0: WHOLE, 1: WHOLE, 2: WHOLE}), reference)
    assert (short.truth, "epoch 1 was never applied" in short.why) == ("false", True), short
    assert (long.truth, "epoch 2 was applied, and without faults it was not" in long.why) == ("false", True), long


def test_a_last_epoch_may_be_cut_as_short_as_without_faults_and_no_shorter() -> None:
    """A loader that drops its last, incomplete batch does not excuse the loss of others; nor does a failed run."""
    cut = {0: WHOLE, 1: ((0, 1), (2,))}
    assert judged(ran(cut), ran(cut)).truth == "true"
    found = judged(ran({0: WHOLE, 1: ((0, 1),)}), ran(cut))
    assert (found.truth, "row 2 was never applied" in found.why) == ("false", True), found
    assert judged(ran(cut), ran(cut, status="failed")).truth == "false"
