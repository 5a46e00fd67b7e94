"""The simulator runs the product in virtual time, is reproducible, and finds planted bugs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.cli import main
from chaos.errors import ScenarioError
from chaos.judge.evidence.run_files import Evidence
from chaos.judge.findings import Violated
from chaos.judge.invariants.one_lineage import lineage
from chaos.sim.campaign import cases
from chaos.sim.campaign.planted import catalogue
from chaos.sim.campaign.planted.catalogue import PLANTED
from chaos.sim.campaign.planted.hunt import LIKELY, SEEDS, SimBug, near
from chaos.sim.campaign.shrink import shrink
from chaos.sim.campaign.simulate import Case, case_of, digest_of, simulate
from chaos.sim.job.fault import AT_POINTS, POINTS, SimFault
from chaos.sim.job.install.installed import planted
from chaos.sim.job.job import Job
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.shape import Shape, Shards
from chaos.sim.machine.kernel import Kernel, Timeless
from elastic_train.errors import ElasticTrainError
from elastic_train.job.sharded.held_tree import written_of
from elastic_train.placement.holdings import grains_in_each
from elastic_train.placement.seating import Seating, owned_of, plan_recut
from elastic_train.placement.seats import seats_of_holders
from elastic_train.training.session import Session

pytestmark = pytest.mark.slow

LONG = ("a-number-comes-back", "a-rank-with-no-share", "away-while-shares-were-lost", "begins-again-on-three-nodes")
"""Kept cases of long jobs, each of which takes seconds."""
KEPT = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.hunt] if path.stem in LONG else [])
    for path in sorted(cases.FOLDER.glob("*.yaml"))
]


def test_fifty_seeds_draw_most_kinds_of_faults_at_most_places() -> None:
    """`make sim` runs five hundred: no fault of theirs breaks an invariant, and it lists those that never came."""
    faults = [fault for seed in range(50) for fault in case_of(seed).faults]
    drawn = {f"{fault.kind}@{fault.point}" if fault.point else fault.kind for fault in faults}
    assert len(drawn) > 1 / 2 * (len(KINDS) + len(AT_POINTS) * len(POINTS))


def test_the_same_seed_is_the_same_history() -> None:
    """Every line of every process, every commit and the result are the same."""
    first, again = simulate(case_of(11)), simulate(case_of(11))
    assert first == again and first.digest


def test_a_fault_left_out_is_another_history() -> None:
    """A case determines the history: without its faults it is the run without faults."""
    case = Case(5, Shape(), (SimFault("kill_worker", at_s=6.0, node=1),))
    faulted, healthy = simulate(case), simulate(replace(case, faults=()))
    assert faulted.num_faults == {"kill_worker": 1} and healthy.num_faults == {}
    assert faulted.digest != healthy.digest
    assert all(finding.truth == "true" for finding in faulted.findings), faulted.findings


def test_what_planted_bugs_replace_is_in_the_product() -> None:
    """A bug whose code has moved would replace nothing, and only a long hunt would tell."""
    assert [bug.name for bug in PLANTED if not list(planted(bug.code()))] == []


@pytest.mark.hunt
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_by_its_invariant(bug: SimBug) -> None:
    """Each bug is found within a bounded number of seeds; without it the same faults break nothing."""
    found, _ = bug.hunt()
    assert found is not None, f"{bug.bug}: not found"
    assert simulate(found.case).violations == ()


def test_the_cases_that_are_run_first_are_those_of_planted_bugs() -> None:
    """All of a bug's cases are still run if need be, and each once."""
    assert set(LIKELY) <= {bug.name for bug in PLANTED}
    bug = catalogue.named("no-fence")
    hunted = list(bug.cases())
    assert hunted[0].seed == LIKELY["no-fence"] and sorted(case.seed for case in hunted) == list(range(SEEDS))


@pytest.mark.parametrize("name", ["fetched-cursor", "double-apply", "dropped-tail", "stale-stride", "hole-found-again"])
def test_training_itself_ends_where_samples_were_not_applied_once_each(name: str) -> None:
    """Even without the judge it ends at the end of that epoch, before a commit holds it, and permanently."""
    found, _ = catalogue.named(name).hunt()
    assert found is not None
    watched = {place: code for place, code in catalogue.named(name).code().items() if place not in catalogue.UNWATCHED}
    outcome = simulate(found.case, watched)
    assert any("were not applied once each" in error for error in outcome.errors)
    assert not any("were not applied once each" in error for error in found.errors)


def test_a_run_in_which_a_worker_dies_by_itself_is_not_valid() -> None:
    """A worker ends with an unrelated error long after the only fault: nothing is false, and nothing explains it."""
    calls = itertools.count()
    steps_from = Session.steps

    def steps(session: Session) -> Iterator[object]:
        for step in steps_from(session):
            if next(calls) == 130:
                raise ElasticTrainError("by itself")
            yield step

    shape = Shape(epochs=20, lane_s=15.0)
    outcome = simulate(
        Case(1, shape, (SimFault("kill_worker", at_s=6.0, node=1),)),
        {"elastic_train.training.session:Session.steps": steps},
    )
    assert [finding.invariant for finding in outcome.violations] == ["deaths"]
    assert any("by itself" in error for error in outcome.errors)


@pytest.mark.parametrize("path", KEPT)
def test_every_past_failure_stays_fixed(path: Path) -> None:
    """Every case that once broke an invariant is kept, minimised, and breaks none."""
    assert simulate(cases.load(path)).violations == ()


def test_a_deleted_parent_is_known_by_the_term_that_restored_it() -> None:
    """A term began from a commit that no history has and retention deleted: its first commit must name that parent."""
    kept = cases.load(cases.FOLDER / "begun-again-from-untold.yaml")
    runs = (Job(case.shape, case.seed, case.faults).run() for case in near(kept))
    run, restored, first = next(found for run in runs if (found := begun_from_unreported(run)) is not None)
    others = {line["key"]: line for line in run.of("commit")}
    for key in sorted(others):
        if others[key]["step"] < first["step"]:
            first["parent"] = others[key]["digest"]
            with pytest.raises(Violated, match=f"its term continued from {restored}"):
                lineage(run)


def begun_from_unreported(run: Evidence) -> tuple[Evidence, str, dict[str, object]] | None:
    """Return a commit from which a term began and that no history reports, and the first commit of that term."""
    reported, stored = {line["key"]: line for line in run.of("commit")}, {commit.key for commit in run.commits}
    for line in run.of("restore"):
        firsts = [commit for commit in reported.values() if commit["term"] == line["term"]]
        if line["commit"] and line["commit"] not in reported and firsts and line["commit"] not in stored:
            return run, str(line["commit"]), min(firsts, key=lambda commit: commit["step"])  # type: ignore[return-value]
    return None


def test_a_failing_case_is_shrunk(tmp_path: Path) -> None:
    """Of five faults only the relevant one is left, and its written file is the same case."""
    bug = next(bug for bug in PLANTED if bug.name == "fetched-cursor")
    harmless = [SimFault("jump_clock", at_s=at_s, for_s=1.0) for at_s in (5.0, 6.0, 7.0, 8.0)]
    case = Case(1, Shape(), (*harmless[:2], SimFault("kill_worker", at_s=6.5, node=1), *harmless[2:]))
    small = shrink(case, lambda case: any(f.invariant == "witness" for f in simulate(case, bug.code()).violations))
    assert [fault.kind for fault in small.faults] == ["kill_worker"]
    assert small.shape.nodes < case.shape.nodes
    cases.save(small, tmp_path / "case.yaml", "witness: counted twice")
    assert cases.load(tmp_path / "case.yaml") == small


def test_an_impossible_case_is_refused(tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text("seed: 1\nshape: {nodes: two}\nfaults: [{kind: kill_worker, at: 3}]\n")
    with pytest.raises(ScenarioError, match=r"nodes"):
        cases.load(tmp_path / "case.yaml")
    (tmp_path / "case.yaml").write_text("seed: 1\nshape: {}\nfaults: [{kind: kil_worker}]\n")
    with pytest.raises(ScenarioError, match=r"no fault 'kil_worker'"):
        cases.load(tmp_path / "case.yaml")
    for content in (b"# caf\xe9\nseed: 1\n", b"seed: 2026-99-99\n"):
        (tmp_path / "case.yaml").write_bytes(content)
        with pytest.raises(ScenarioError, match=r"case.yaml: cannot be read: "):
            cases.load(tmp_path / "case.yaml")


def test_a_deadlock_ends_the_simulation() -> None:
    """A wait that nothing can end, and a busy loop without a wait, end the simulation instead of hanging it."""
    kernel = Kernel()
    with pytest.raises(Timeless, match="nothing is left"):
        kernel.park()
    kernel = Kernel()

    def circle() -> None:
        kernel.wake(kernel.current)
        kernel.park()

    kernel.spawn(None, lambda: [circle() for _ in range(10**6)] and None)
    with pytest.raises(Timeless, match="loops without waiting"):
        kernel.sleep(1.0)


@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_shares_that_are_worked_out_once_are_those_of_every_rank(shards: Shards) -> None:
    """Computing them separately on each rank, by the product's own functions, gives the same history."""
    kills = tuple(SimFault("kill_node", at_s=6.0 + 4.0 * node, node=node, for_s=3.0) for node in (0, 1, 3))
    case = Case(1, Shape(nodes=4, copies=2, shards=shards, epochs=6), kills)
    own = dict[str, object]()
    for module, names in {
        "job.reshard": (seats_of_holders, plan_recut, grains_in_each),
        "placement.table": (Seating, owned_of),
        "job.state_shards": (written_of,),
    }.items():
        own |= {f"elastic_train.{module}:{one.__name__}": one for one in names}
    found = simulate(case)
    assert found.violations == () and found.num_faults
    assert simulate(case, own).digest == found.digest


def test_the_history_is_the_evidence_that_real_runs_leave() -> None:
    """Lines, commits and result have the product's fields; only tensors and the agent are modelled."""
    run = Job(Shape(), 1, ()).run()
    assert {line["op"] for process in run.processes for line in process} == {
        *("form", "restore", "step", "commit", "end"),
        *("scenario", "node", "exit", "clean"),
    }
    assert run.result is not None and run.result["status"] == "done" and run.witness is not None
    assert set(run.witness.tolist()) == {3}
    assert digest_of(run) == digest_of(Job(Shape(), 1, ()).run())


@pytest.mark.hunt
def test_as_many_nodes_as_asked_for() -> None:
    """A job of 128 nodes loses some and finishes; etcd accepts no larger transactions than in reality."""
    faults = (SimFault("lose_node", at_s=6.0, node=3, for_s=4.0), SimFault("kill_node", at_s=6.5, node=7, for_s=3.0))
    shape = Shape(nodes=128, lanes=128, micro_batch=1, rows=(384,), epochs=1, commit_every=2, lane_s=2.0)
    outcome = simulate(Case(1, shape, faults))
    assert outcome.violations == () and outcome.num_faults == {"lose_node": 1, "kill_node": 1}


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """`elastic-chaos sim --json` ends with the totals of all seeds."""
    with pytest.raises(SystemExit) as left:
        main(["sim", "--seeds", "20:23", "--json"])
    fields = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert left.value.code == 0
    assert (fields["seeds"], fields["valid"], fields["replay"]) == (3, 3, None)
    assert {"faults", "virtual_hours", "digest", "runs_per_s", "faults_by_kind"} <= set(fields)
    assert set(fields["never_came"]).isdisjoint(fields["faults_by_kind"]) and "kill@data" in fields["never_came"]
