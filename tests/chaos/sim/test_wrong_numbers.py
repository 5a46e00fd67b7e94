"""A rank that computes wrongly for a moment: a bit of its weights flips, or a loss is NaN."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from chaos.judge.findings import Violated
from chaos.judge.invariants.progress import updates
from chaos.sim.campaign.simulate import Case, reference_of, run_and_judge, simulate, skipped_in
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Recovery, Shape, Shards

pytestmark = pytest.mark.slow

FLIPPED = SimFault("flip_memory", node=1, step=6, other=3)
SPOILT = tuple(SimFault("nan_loss", step=step, node=step % 3) for step in (3, 8, 9))


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_a_flipped_bit_costs_the_steps_since_the_last_commit_and_nothing_else(recovery: Recovery) -> None:
    """All ranks find it before the next commit, report the rank that differs, and restore the last commit."""
    case = Case(1, Shape(recovery=recovery), (FLIPPED,))
    run, outcome = run_and_judge(case)
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert len(outcome.errors) == 3
    assert all(
        re.search(r"step 10: ranks \[\d\] hold other weights than the 2 others", error) for error in outcome.errors
    )
    assert run is not None
    assert [line["step"] for line in run.of("restore") if line["rank"] == 0] == [0, 5]


def test_of_two_ranks_nobody_knows_which_has_flipped() -> None:
    """Both exit, and the last commit is right nevertheless."""
    outcome = simulate(Case(1, Shape(nodes=2), (FLIPPED,)))
    assert outcome.violations == () and outcome.num_faults == {"flip_memory": 1}
    assert all("hold different weights" in error for error in outcome.errors), outcome.errors


@pytest.mark.parametrize(("shards", "copies"), [("optimizer", 1), ("parameters", 2)])
def test_no_bit_flips_where_nobody_could_tell(shards: Shards, copies: int) -> None:
    """A shard with one holder has nothing to be compared with, so the fault does not count as one."""
    outcome = simulate(Case(1, Shape(copies=copies, shards=shards), (FLIPPED,)))
    assert outcome.num_faults == {} and outcome.violations == ()


@pytest.mark.parametrize(
    ("recovery", "more"),
    [("restart", {}), ("live", {"vectors": True}), ("live", {"copies": 2, "shards": "parameters"})],
    ids=str,
)
def test_the_update_of_a_step_without_a_loss_is_left_out_by_all(recovery: Recovery, more: dict[str, object]) -> None:
    """The bits equal those of one rank with NaN losses at the same steps; no world ends because of it."""
    shape = replace(Shape(recovery=recovery), **more)  # type: ignore[arg-type]
    run, outcome = run_and_judge(Case(1, shape, SPOILT))
    truths = {finding.invariant: finding for finding in outcome.findings}
    assert {name for name, finding in truths.items() if finding.truth != "true"} <= {"rpo", "rto"}, truths
    assert truths["updates"].why.startswith("3 of 15 steps without an update")
    assert run is not None
    assert skipped_in(run) == (3, 8, 9) and {line["term"] for line in run.of("form")} == {1}
    assert reference_of(replace(shape, nodes=1)).result != run.result, "without the faults it is another result"


def test_updates_that_are_left_out_need_a_loss_that_is_none() -> None:
    """A step with a finite loss has its update; a NaN loss is recorded; and it needs a fault as its cause."""
    run = Job(Shape(), 1, SPOILT[:1]).run()
    assert updates(run).startswith("1 of 15 steps")
    steps = [line for line in run.of("step") if line["step"] == 4]
    (fault,) = run.of("fault")
    for line in steps:
        assert math.isnan(line["loss"])
    fault["kind"] = "kill_worker"
    with pytest.raises(Violated, match="1 steps have no update, and 0 faults took a loss away"):
        updates(run)
    for line in run.of("nonfinite"):
        line["step"] = 5
    with pytest.raises(Violated, match="step 4 has no update, and no history says which samples did that"):
        updates(run)
    for line in steps:
        line["loss"] = 1.0
    with pytest.raises(Violated, match="step 4 has no update, although its loss and its gradient were finite"):
        updates(run)
    assert run.result is not None
    run.result["skipped_steps"] = []
    steps[0]["loss"] = math.inf
    with pytest.raises(Violated, match="step 4 was applied with a loss, or a gradient, that is not finite"):
        updates(run)
