"""A scenario in virtual time: the same faults in the same order; faults that are not simulated are listed."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from chaos.errors import ScenarioError
from chaos.judge.checker import judge
from chaos.judge.evidence.applied import pids_of
from chaos.scenario.model import FOLDER, Fault, Nodes, Point, Scenario, load
from chaos.sim.campaign.rehearsal import rehearse
from chaos.sim.campaign.simulate import Case, simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Shape

LIVE = Nodes(count=3, recovery="live")


def scenario(*faults: Fault, nodes: Nodes = LIVE) -> Scenario:
    return Scenario(name="x", description="y", config="c", nodes=nodes, faults=faults)


@pytest.mark.heavy
def test_the_live_scenario_holds_in_virtual_time() -> None:
    """The packaged scenario for real nodes runs in the simulator without violations."""
    case = rehearse(load(FOLDER / "live-faults.yaml"), 3)
    assert [fault.kind for fault in case.faults] == ["kill_worker", "freeze_worker", "kill_node", "stop_node"]
    outcome = simulate(case)
    assert outcome.violations == ()
    assert sum(outcome.num_faults.values()) == 4


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["kill-a-rank", "shrink-and-regrow", "witness"])
def test_scenarios_of_restart_mode_hold_in_virtual_time(name: str) -> None:
    """All of their faults come, at their steps, and no process outlives its world."""
    case = rehearse(load(FOLDER / f"{name}.yaml"), 3)
    run = Job(case.shape, case.seed, case.faults).run()
    assert case.shape.recovery == "restart" and len(run.of("fault")) == len(case.faults)
    assert [fault["seen_step"] for fault in run.of("fault")] == [fault.step for fault in case.faults]
    pids = pids_of(run)
    assert len(pids) > len(case.faults) and not any(pids[a] & pids[b] for a, b in combinations(pids, 2))
    assert not any(finding.truth == "false" for finding in judge(run))


def test_moments_become_times_and_roles_become_nodes() -> None:
    """Steps, times, times after another fault, failpoints; a lost node is away until it is started."""
    case = rehearse(
        scenario(
            Fault(kind="kill_node", node=1, at_step=10),
            Fault(kind="start_node", node="lost", after_s=4),
            Fault(kind="freeze_node", node="majority", after_s=1, for_s=2),
            Fault(kind="stop", node="writer", at_point=Point(name="record", nth=2), for_s=8),
            Fault(kind="cut_one_way", node=2, at_s=90, for_s=3),
        ),
        1,
    )
    killed, *frozen, stopped, cut = case.faults
    assert (killed.node, killed.for_s) == (1, 4.0)
    assert len({fault.node for fault in frozen}) == 2
    assert {fault.at_s for fault in frozen} == {round(killed.at_s + 5, 3)}
    assert (stopped.point, stopped.nth, stopped.node) == ("record", 2, 0)
    assert (cut.node, cut.for_s) == (2, 3.0)
    assert cut.at_s > frozen[0].at_s


@pytest.mark.heavy
def test_data_and_tracker_break_in_a_scenario_too() -> None:
    """A row group is lost forever and quarantined, unless the file says otherwise; the job has a tracker to lose."""
    faults = (
        Fault(kind="tracker_outage", at_step=10, for_s=5),
        Fault(kind="bad_row_group", at_step=20),
        Fault(kind="kill_worker", node="leader", at_step=26),
    )
    case = rehearse(scenario(*faults), 1)
    assert (case.shape.tracked, case.shape.unreadable, case.faults[1].for_s) == (True, "quarantine", 0.0)
    outcome = simulate(case)
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert {"tracking", "hash"} <= {finding.invariant for finding in outcome.findings}
    strict = scenario(*faults).model_copy(update={"set": {"data.quarantine": []}})
    assert rehearse(strict, 1).shape.unreadable == "fail"
    nested = strict.model_copy(update={"set": {"data": {"quarantine": []}}})
    assert rehearse(nested, 1).shape.unreadable == "fail"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_package_is_simulated_or_refused(path: Path) -> None:
    """Every packaged scenario for real nodes has a case whose steps fit the job, except for those listed."""
    refused = {"hangs": "hang is not simulated", "frozen-disk": "freeze_fs is not simulated"}
    refused |= {"flipped-data": "flip_data is not simulated", "no-more-files": "cap_fds is not simulated"}
    refused["data-away"] = "data_outage is not simulated"
    refused["slow-node"] = "slow_cpu is not simulated"
    on_slurm = [path.stem for path in FOLDER.glob("slurm*.yaml")]
    refused |= dict.fromkeys(on_slurm, "jobs on Slurm are not simulated")
    refused["renewed-certificates"] = "rotate_cert is not simulated"
    refused |= dict.fromkeys(
        ("soak", "soak-witness", "soak-cells", "soak-stages", "soak-shares"), "a soak lists no faults to simulate"
    )
    if path.stem in refused:
        with pytest.raises(ScenarioError, match=refused[path.stem]):
            rehearse(load(path), 1)
        return
    case = rehearse(load(path), 1)
    assert case.faults and max(fault.step for fault in case.faults) < case.shape.total_steps


def test_all_faults_that_are_not_simulated_are_listed_at_once() -> None:
    """Kinds that exist only in real runs come in one error."""
    faults = (Fault(kind="slow", node=0, at_point=Point(name="write")), Fault(kind="cut_node", node=2, at_s=1, for_s=3))
    with pytest.raises(ScenarioError) as caught:
        rehearse(scenario(*faults, nodes=Nodes()), 1)
    assert len(caught.value.problems) == 2


@pytest.mark.heavy
def test_a_state_that_skipped_a_damaged_commit_is_kept() -> None:
    """The newest commit is damaged and the job killed; the next world breaks before its first commit.

    Its members continue from their state, and not from that older commit again and again.
    """
    shape = Shape(nodes=2, lanes=6, epochs=8, keep_last=4)
    for nth in range(16, 30, 2):
        faults = (
            SimFault("flip_bit", at_s=8.4),
            SimFault("kill_job", at_s=8.45, for_s=1.0),
            SimFault("kill", point="applied", nth=nth),
        )
        outcome = simulate(Case(1, shape, faults))
        assert outcome.violations == (), nth
