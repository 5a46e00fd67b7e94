"""Scenarios of elastic-chaos on a real Slurm, each on a cluster of its own: no step is lost, and verdicts are VALID."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from chaos.judge.evidence.applied import pids_of
from chaos.judge.evidence.recovery_cost import seats_of
from chaos.judge.evidence.run_files import number, whole
from chaos.judge.verdict import FAULTED, REFERENCE, Verdict, examine
from chaos.real.runs import own_of_second
from chaos.real.slurm.run import BESIDE, FAULTS_ARE_OVER, run_on_slurm
from chaos.scenario.model import find, load
from chaos.scenario.schedule import Due, schedule
from chaos.services.slurm.cluster import why_no_slurm
from elastic_train.config.sources import load_config
from tests.deploy.jobs import COMMIT_EVERY, write_patient_config
from tests.memory_job import start

pytestmark = [pytest.mark.deploy]
LEASE_S = 60.0
"""Nobody is lost for want of processor time."""
STEPS = 200
"""More than are taken until the faults are over: few that are slow, since the rest is computed."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The remains of a scenario: its folder, its faults, and the verdict on each of its jobs."""

    folder: Path
    due: Sequence[Due]
    verdicts: list[Verdict]


@pytest.fixture
def play(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> Callable[[str, float], Broken]:
    """Run a scenario of the package with a job that ends soon after the last fault, and the same without faults."""
    if why := why_no_slurm():
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)  # from which jobs are submitted

    def run(name: str, lane_ms: float) -> Broken:
        done, folder = tmp_path / "done", tmp_path / "job"
        config = write_patient_config(tmp_path, rows, STEPS, lane_ms=lane_ms, until=done)
        shipped = load(find(name))
        nodes = shipped.nodes.model_copy(update={"lease_ttl_s": LEASE_S})
        scenario = shipped.model_copy(update={"config": config, "nodes": nodes})
        due = schedule(scenario, seed=1, total_steps=STEPS, commit_every=COMMIT_EVERY)

        def say(what: object) -> None:
            if what == FAULTS_ARE_OVER:
                done.touch()

        (folder / FAULTED).mkdir(parents=True)
        second = own_of_second(load_config(config))
        options = ["--grace-s", "100"]
        run_on_slurm(scenario, folder / FAULTED, due, 1, options, "", say, beside=second, shared=[tmp_path.parent])
        of_jobs = [(folder, []), (folder / BESIDE, second)][: scenario.slurm.jobs]
        for each, own in of_jobs:
            assert start([config, "--run.dir", str(each / REFERENCE), *own]).code == 0
        broken = Broken(folder, due, [examine(each) for each, _ in of_jobs])
        for verdict in broken.verdicts:
            _check(verdict, name, record_property)
        return broken

    return run


def _check(verdict: Verdict, name: str, record_property: Callable[[str, object], None]) -> None:
    """It is VALID, and no fault has cost a step."""
    assert [finding for finding in verdict.findings if finding.truth != "true"] == []
    for cost in verdict.recoveries:
        assert cost.rpo_steps == 0, cost
        what = f"{name}: seconds from {cost.kind} to the next step, with no step lost"
        record_property(f"{what} (lease {LEASE_S:g} s)", cost.rto_s)


@pytest.mark.xdist_group("slurm-scenarios")
def test_a_job_survives_what_affects_it_on_slurm(play: Callable[[str, float], Broken], tmp_path: Path) -> None:
    """A node is drained, one loses power; the job is preempted, requeued, held, and comes to its time limit."""
    broken = play("slurm", 600.0)
    (verdict,) = broken.verdicts
    assert len(verdict.recoveries) == len(broken.due) - 1, "all but the drained node have ended a world"


@pytest.mark.xdist_group("slurm")
def test_jobs_of_an_array_come_and_go_as_the_queue_gives_them_nodes(play: Callable[[str, float], Broken]) -> None:
    """One is cancelled and another joins, one is preempted, one loses power; the others train on, and all end well."""
    broken = play("slurm-array", 1250.0)
    (verdict,) = broken.verdicts
    assert len(verdict.recoveries) == len(broken.due)
    sizes = seats_of(verdict.run)
    assert [sizes[term] for term in sorted(sizes)][-1] == 3
    assert 2 in sizes.values(), "while one was away, the others trained"


@pytest.mark.xdist_group("slurm-scenarios")
def test_a_job_grows_by_jobs_that_join_it_and_nothing_starts_again(play: Callable[[str, float], Broken]) -> None:
    """From one node of an allocation to three, by arrays: whoever trained before a node came trains after it."""
    broken = play("slurm-growth", 1000.0)
    (verdict,) = broken.verdicts
    sizes, pids = seats_of(verdict.run), pids_of(verdict.run)
    terms = [term for term in sorted(sizes) if term in pids]
    assert {1, 2, 3} <= set(sizes.values())
    whole_at = next(term for term in terms if sizes[term] == 3)
    until = [term for term in terms if term <= whole_at]
    for before, after in pairwise(until):
        assert pids[before] <= pids[after], "nobody was started again"


@pytest.mark.xdist_group("slurm-codes")
def test_two_jobs_on_the_same_nodes_do_not_notice_each_other(play: Callable[[str, float], Broken]) -> None:
    """Each has its own etcd on the node that is the first of both; while one is broken, the other takes steps."""
    broken = play("slurm-two-jobs", 1000.0)
    first, second = broken.verdicts
    assert first.fields["weights_sha256"] != second.fields["weights_sha256"], "they are two jobs"
    for own, other in ((first, second), (second, first)):
        assert len(own.recoveries) == len(own.run.of("fault"))
        for cost in own.recoveries:
            steps = sorted(other.run.of("step"), key=lambda line: number(line, "t"))
            before = [whole(line, "term") for line in steps if number(line, "t") < cost.at]
            later = [line for line in steps if number(line, "t") >= cost.at]
            meanwhile = [line for line in later if number(line, "t") <= cost.at + cost.rto_s] or later[:1]
            assert before and {whole(line, "term") for line in meanwhile} == {before[-1]}, "in the world that it had"
