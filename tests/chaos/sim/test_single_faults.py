"""The effect of one fault on a simulated job: whom it stops, whose world it ends, and the exit code that says why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from chaos.judge.checker import judge
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.departures import deaths
from chaos.judge.invariants.exactly_once.samples import coverage
from chaos.judge.invariants.progress import progress
from chaos.scenario.kinds import spares_others
from chaos.sim.campaign.simulate import Case, run_and_judge, simulate
from chaos.sim.campaign.swarm import LONE
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Recovery, Shape, Shards
from chaos.sim.machine.kernel import EPOCH_S

pytestmark = pytest.mark.slow
LANE_S = Shape().lane_s  # more of it: a job that lasts as long in fewer steps
HUNT = pytest.mark.hunt  # other moments of a fault that is tested at one moment here


def test_two_nodes_that_only_a_third_reaches_do_not_stop_the_job() -> None:
    """Both reach etcd, so no lease expires; a waiting member probes the other, and worlds form without the pair."""
    run = Job(Shape(), 1, (SimFault("cut_link", at_s=6.0, node=0, other=1, for_s=1000.0),)).run()
    assert run.result is not None and run.result["status"] == "done"
    (ended,) = {line["t"] for process in run.processes for line in process if line["op"] == "end" and line["rank"] == 0}
    assert isinstance(ended, float) and ended < EPOCH_S + 100.0


@pytest.mark.parametrize("kind", ["refuse_address", "same_address"])
def test_a_node_that_comes_back_at_a_wrong_address_stops_nobody(kind: str) -> None:
    """The others check its identity before they make room for it: their one world after its loss lasts to the end."""
    away = SimFault("kill_node", at_s=8.0, node=2, for_s=6.0)
    run = Job(Shape(epochs=30), 1, (away, SimFault(kind, at_s=8.5, node=2, for_s=1000.0))).run()
    assert run.result is not None and run.result["status"] == "done"
    assert {(line["term"], line["world"]) for process in run.processes for line in process if line["op"] == "form"} == {
        (1, 3),
        (2, 2),
    }


@pytest.mark.parametrize("kind", ["refuse_address", "same_address"])
def test_a_node_that_is_refused_in_the_middle_costs_one_world(kind: str) -> None:
    """It lives, so the refusal only briefly counts as death: the others continue without it, and accept it later."""
    run = Job(Shape(epochs=30), 1, (SimFault(kind, at_s=10.0, node=2, for_s=12.0),)).run()
    assert run.result is not None and run.result["status"] == "done"
    forms = {line["term"]: line["world"] for process in run.processes for line in process if line["op"] == "form"}
    assert list(forms.values()) == [3, 2, 3]


@pytest.mark.parametrize(("kind", "node"), [("refuse_address", 0), ("same_address", 1)])
def test_of_two_nodes_that_refuse_each_other_either_may_leave(kind: str, node: int) -> None:
    """The fault names one of them, and neither can tell whose address is wrong."""
    fault = SimFault(kind, at_s=15.0, node=node, for_s=20.0)
    run = Job(Shape(nodes=2, epochs=30), 1, (fault,)).run()
    assert [line["world"] for line in run.of("form") if line["rank"] == 0][:2] == [2, 1], "one has left"
    assert deaths(run).endswith("each explained by a fault")


def test_the_departure_of_a_third_node_from_two_that_refuse_each_other_is_not_explained() -> None:
    """Of three nodes, the one whose address nobody can reach has to leave."""
    run = Job(Shape(epochs=30), 1, (SimFault("refuse_address", at_s=10.0, node=2, for_s=1000.0),)).run()
    (fault,) = run.of("fault")
    fault.update(pids=[], node=1)
    with pytest.raises(Unknown, match="left between terms 1 and 2"):
        deaths(run)


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_a_process_that_hangs_is_ended_by_its_own_watchdog(recovery: Recovery) -> None:
    """The product's code does so after a third of a minute; otherwise the others wait until the hang ends."""
    case = Case(
        1, Shape(epochs=30, recovery=recovery, peer_timeout_s=300.0), (SimFault("hang_worker", 15.0, for_s=200.0),)
    )
    watched, outcome = run_and_judge(case)
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert watched is not None
    sleepless = {"elastic_train.system.watchdog:Watchdog.look": lambda watchdog: None}
    unwatched = Job(case.shape, 1, case.faults, bug=sleepless).run()
    steps = [max(b["t"] - a["t"] for a, b in pairwise(run.of("step"))) for run in (watched, unwatched)]
    assert 20.0 < steps[0] < 40.0 and steps[1] > 190.0


def test_a_stopped_worker_is_left_out_before_its_lease_ends_and_comes_back() -> None:
    """Its agent sees it in half a second, and removes its member; if the agent is frozen too, the lease must expire."""
    shape = Shape(epochs=30, ttl_s=20.0, peer_timeout_s=300.0)
    seconds = {}
    for kind in ("freeze_worker", "freeze_node"):
        run = Job(shape, 1, (SimFault(kind, at_s=15.0, node=1, for_s=40.0),)).run()
        worlds = [line for line in run.of("form") if line["rank"] == 0]
        assert [line["world"] for line in worlds] == [3, 2, 3]
        seconds[kind] = worlds[1]["t"] - EPOCH_S - 15.0
    assert seconds["freeze_worker"] < 2.0 and seconds["freeze_node"] > 10.0


def test_a_worker_that_stays_stopped_is_replaced() -> None:
    """Its agent replaces it after a minute; nobody continues it."""
    run = Job(
        Shape(epochs=30, lane_s=LANE_S * 3), 1, (SimFault("freeze_worker", at_s=15.0, node=1, for_s=1000.0),)
    ).run()
    (again,) = [line for line in run.of("node") if line["node"] == 1][1:]
    assert 60.0 < again["t"] - EPOCH_S - 15.0 < 65.0
    assert [line["world"] for line in run.of("form") if line["rank"] == 0] == [3, 2, 3]


def test_workers_that_die_young_are_started_after_longer_and_longer_pauses() -> None:
    """Meanwhile the others continue to train."""
    kills = tuple(SimFault("kill_worker", at_s=at_s, node=1) for at_s in (40.0, 45.0, 50.0, 57.0))
    run, outcome = run_and_judge(Case(1, Shape(epochs=20, lane_s=LANE_S * 3), kills))
    assert outcome.violations == (), outcome.violations
    assert run is not None
    started = [line["t"] - EPOCH_S for line in run.of("node") if line["node"] == 1][1:]
    assert [round(at_s - kill.at_s) for at_s, kill in zip(started, kills, strict=True)] == [0, 0, 1, 2]


def test_a_node_that_has_used_up_its_restarts_leaves_and_is_started_again() -> None:
    """It exits with 1 after its allowed number of own failures; the judge accepts no such end after fewer faults."""
    kills = tuple(SimFault("kill_worker", at_s=at_s, node=1) for at_s in (20.0, 50.0, 80.0))
    shape = Shape(epochs=30, max_restarts=2, lane_s=LANE_S * 4)
    run, outcome = run_and_judge(Case(1, shape, kills))
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert run is not None
    (left,) = [line for line in run.of("exit") if line["code"] != 0]
    assert (left["node"], left["code"]) == (1, 1) and 80.0 < left["t"] - EPOCH_S < 82.0
    assert [line["world"] for line in run.of("form") if line["rank"] == 0][-1] == 3
    for line in run.of("scenario"):
        line["max_restarts"] = 3
    with pytest.raises(Unknown, match="node 1 ended with code 1, and no fault explains it"):
        deaths(run)


def test_a_node_that_cannot_write_costs_one_world_and_a_few_commits() -> None:
    """Leader or not, it steps back, and all others commit as before. Otherwise nobody can commit any more."""
    for node in range(3):
        faults = (SimFault("readonly_dir", at_s=10.0, node=node, for_s=1000.0),)
        run = Job(Shape(epochs=30), 1, faults).run()
        assert run.result is not None and run.result["status"] == "done"
        assert [(line["term"], line["world"]) for line in run.of("form") if line["rank"] == 0] == [(1, 3), (2, 3)]
        assert [line["step"] for line in run.of("commit")][-20:] == list(range(55, 155, 5))
        assert len(run.of("unwritable")) == 1
    never = {"elastic_train.training.commits:Commits.is_unable": lambda commits: False}
    before = Job(Shape(epochs=30), 1, faults, bug=never).run()
    assert [line["step"] for line in before.of("commit")][-20:] != list(range(55, 155, 5))


def test_nodes_that_fail_to_write_by_accident_come_back() -> None:
    """This includes `restart` mode, where the process ends; nodes must not be lost permanently."""
    shape = Shape(nodes=4, lanes=5, rows=(17, 50, 9, 31, 2), epochs=4, commit_every=2, lane_s=0.3, recovery="restart")
    outcomes = []
    for seed in range(4):
        case = Case(seed, shape, (SimFault("storage_errors", at_s=7.0, node=2, for_s=12.0),))
        run, outcome = run_and_judge(case)
        assert run is not None, outcome.findings
        assert {line["node"]: line["code"] for line in run.of("exit")} == dict.fromkeys(range(4), 0)
        outcomes.append(outcome)
    assert all(outcome.violations == () for outcome in outcomes)
    assert any("tries again if its launcher" in error for outcome in outcomes for error in outcome.errors)


@pytest.mark.parametrize("gap_s", [pytest.param(0.02, marks=HUNT), 0.1, pytest.param(0.19, marks=HUNT)])
@pytest.mark.parametrize("seed", [4, 10])
def test_nodes_that_are_asked_to_leave_one_after_another_leave_together(gap_s: float, seed: int) -> None:
    """One commit of all, and no world of the remaining ranks in which some would be asked next.

    With seeds 4 and 10 some ranks leave before others know that all have been asked to leave.
    """
    asked = tuple(SimFault("stop_node", at_s=10.0 + gap_s * node, node=node, for_s=10.0) for node in range(3))
    run = Job(Shape(epochs=30), seed, asked).run()
    assert run.result is not None and run.result["status"] == "done"
    assert [(line["term"], line["world"]) for line in run.of("form") if line["rank"] == 0] == [(1, 3), (2, 3)]
    left = [line for line in run.of("end") if line["term"] == 1]
    assert [line["status"] for line in left] == ["preempted"] * 3
    last = max(line["step"] for line in run.of("commit") if line["term"] == 1)
    assert {line["step"] for line in left} == {last}


@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
def test_a_node_that_is_asked_to_leave_takes_no_share_of_the_state_along(shards: Shards) -> None:
    """It holds the only copy, and no commit was due yet: one is made before the node leaves, and no step is lost."""
    shape = Shape(copies=1, shards=shards, epochs=20, commit_every=90)
    run = Job(shape, 1, (SimFault("stop_node", at_s=10.0, node=1, for_s=10.0),)).run()
    assert run.result is not None and run.result["status"] == "done"
    (left,) = run.of("leave")
    assert left["step"] == run.of("commit")[0]["step"]
    assert not run.of("rollback") and not any(line.get("lost") for line in run.of("restore"))


def test_every_process_of_a_flapping_node_that_leaves_is_explained() -> None:
    """The node's second and third processes are not the one in the fault's line."""
    run = Job(Shape(epochs=20), 1, (SimFault("flap_node", at_s=8.0, node=1, for_s=8.0),)).run()
    named = [line["pids"] for line in run.of("undo") if line["kind"] == "flap_node"]
    assert len(named) == 2 and all(named)
    assert deaths(run).endswith("each explained by a fault")


@pytest.mark.parametrize("kind", filter(spares_others, LONE))
def test_one_bad_node_costs_the_others_next_to_nothing(kind: str) -> None:
    """Each kind tests the law, which holds; so does everything else."""
    shape = Shape(epochs=30, lane_s=0.5)
    outcome = simulate(Case(1, shape, (SimFault(kind, at_s=20.0, node=2, for_s=100.0),)))
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    (why,) = [finding.why for finding in outcome.findings if finding.invariant == "no-harm"]
    assert why.startswith("1 times a node was wrong or joined")


def test_a_node_of_another_version_ends_with_2_and_says_why() -> None:
    """It is in no world for longer than the comparison takes; with the others' version it returns."""
    shape = Shape(epochs=30, lane_s=0.5)
    run = Job(shape, 1, (SimFault("other_code", at_s=20.0, node=2, for_s=100.0),)).run()
    (turned_away,) = [line for line in run.of("exit") if line["code"] != 0]
    assert (turned_away["node"], turned_away["code"]) == (2, 2)
    sizes = [line["world"] for line in run.of("form") if line["rank"] == 0]
    assert sizes[0] == sizes[-1] == 3 and sizes.count(2) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_node_that_computes_wrongly_ends_with_71_and_is_let_in_when_it_is_replaced(ranks: int) -> None:
    """It says why, and costs the others no world; on another CPU it is a member again."""
    shape = Shape(epochs=30, lane_s=0.5, ranks=ranks, lanes=12)
    job = Job(shape, 1, (SimFault("unfit_node", at_s=20.0, node=2, for_s=100.0),))
    run = job.run()
    (left,) = [line for line in run.of("exit") if line["code"] != 0]
    assert (left["node"], left["code"]) == (2, 71)
    assert [line["world"] for line in run.of("form") if line["rank"] == 0] == [3 * ranks, 2 * ranks, 3 * ranks]
    assert job.record.errors and all("core 0 computes wrongly" in error for error in job.record.errors)


def test_another_job_in_the_folder_ends_with_2_and_leaves_no_trace() -> None:
    """It sees that the first one is running, claims no term, and trains nothing; the first one's world is intact."""
    job = Job(Shape(epochs=30, lane_s=0.5), 1, (SimFault("twin_dir", at_s=20.0, for_s=100.0),))
    run = job.run()
    turned_away = [line for line in run.of("exit") if line["code"] != 0]
    assert [line["code"] for line in turned_away] == [2, 2, 2] and min(line["node"] for line in turned_away) == 6
    assert {(line["term"], line["world"]) for line in run.of("form")} == {(1, 3)}
    assert [key for key in job.around.storage.files if key.startswith("terms/")] == ["terms/00000001.json"]
    assert all("is at work here" in error for error in job.record.errors)


def test_worlds_that_do_not_form_for_minutes_do_not_end_the_job() -> None:
    """Hundreds of them fail; the network recovers, and the job finishes."""
    outcome = simulate(Case(1, Shape(), (SimFault("block_ports", at_s=5.5, for_s=900.0),)))
    assert outcome.violations == ()


def test_worlds_that_never_form_end_every_node_with_93() -> None:
    """They end after half an hour, with a reason; `progress` catches a product that retries for ever."""
    blocked = SimFault("block_ports", at_s=5.5, for_s=3600.0)
    run = Job(Shape(), 1, (blocked,)).run()
    assert [line["code"] for line in run.of("exit")] == [93, 93, 93]
    assert progress(run).endswith("worlds in a row without a step of a process")
    tireless = {"elastic_train.world.forming:Standstill.note": lambda self, *_: None}
    with pytest.raises(Violated, match=r"worlds in a row without a step, for .* and did not end with 93"):
        progress(Job(Shape(), 1, (blocked,), bug=tireless).run())


def test_an_unreadable_row_group_is_skipped_by_all_and_in_the_replay() -> None:
    """A hole begins after a commit, every process dies, all can be read again: the replay skips the same samples.

    The bits are those of a run that knew of the hole from the beginning.
    """
    shape = Shape(unreadable="quarantine")
    bad = SimFault("bad_row_group", at_s=6.0, node=-1, other=2, for_s=3.0)
    case = Case(1, shape, (bad, SimFault("kill_job", step=8, for_s=3.0)))
    run, outcome = run_and_judge(case)
    assert run is not None and run.result is not None
    assert [hole["since"] for hole in run.result["holes"]] == [6]  # type: ignore[attr-defined]
    assert [line["step"] for line in run.of("restore") if line["rank"] == 0] == [0, 5]
    findings = outcome.findings
    assert all(finding.truth == "true" for finding in findings), findings
    (why,) = [finding.why for finding in findings if finding.invariant == "coverage"]
    assert "but for 54 in 1 holes that are listed" in why
    for place in ({"row_group": 1}, {"file": "others.parquet"}, {"kind": "kill_job"}):
        lines = [[{**line, **place} if line.get("row_group") == 2 else line for line in own] for own in run.processes]
        with pytest.raises(Unknown, match=r"row group 2 of rows.parquet: samples \[47, 77\) .* no fault explains it"):
            coverage(replace(run, processes=lines))


@pytest.mark.parametrize(
    ("recovery", "more", "for_s"),
    [("live", None, 15.0), ("restart", None, 2.0), ("live", 1, 2.0), ("restart", 1, 15.0), ("live", 2, 15.0)],
    ids=["alone", "alone, restart", "its worker dies", "its worker dies, restart", "another's worker dies"],
)
def test_a_frozen_agent_stops_nobody(recovery: Recovery, more: int | None, for_s: float) -> None:
    """In live mode, alone, it does not even cost a world; its worker that dies meanwhile is replaced later."""
    faults = [SimFault("freeze_agent", at_s=10.0, node=1, for_s=for_s)]
    faults += [] if more is None else [SimFault("kill_worker", at_s=11.0, node=more)]
    case = Case(1, Shape(epochs=8, recovery=recovery), tuple(faults))
    run, outcome = run_and_judge(case)
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert run is not None
    assert recovery == "restart" or more is not None or {line["term"] for line in run.of("form")} == {1}


@pytest.mark.parametrize(("recovery", "node"), [("live", 0), ("restart", 1)])
def test_the_bad_copy_of_one_node_costs_that_node_and_no_sample(recovery: Recovery, node: int) -> None:
    """With or without quarantine, leader or not, it exits with 65, and returns when its copy is restored."""
    shape = Shape(unreadable="quarantine", epochs=6, recovery=recovery)
    case = Case(1, shape, (SimFault("bad_row_group", at_s=6.0, node=node, other=2),))
    run, outcome = run_and_judge(case)
    assert run is not None and run.result is not None, outcome.findings
    assert run.result["status"] == "done" and run.result["holes"] == []
    assert next((line["node"], line["code"]) for line in run.of("exit")) == (node, 65)
    worlds = [line["world"] for line in run.of("form") if line["rank"] == 0]
    assert worlds == [3, 2, 3] or (recovery, worlds) == ("restart", [3, 3])
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    assert any("this node's copy or disk is at fault" in error for error in outcome.errors)


def test_what_all_can_read_again_when_they_look_is_no_hole() -> None:
    """An outage that ends before the ranks look again, bypassing caches, costs a repeated step."""
    shape = Shape(unreadable="quarantine", epochs=6)
    for at_s in (6.0, 6.3, 6.6):
        run = Job(shape, 1, (SimFault("bad_row_group", at_s=at_s, node=-1, other=2, for_s=0.05),)).run()
        assert run.result is not None and (run.result["status"], run.result["holes"]) == ("done", [])


def test_without_quarantine_an_unreadable_row_group_ends_the_job() -> None:
    """Every node exits with 65, and is not restarted; the judge says that the job did not end."""
    run = Job(Shape(), 1, (SimFault("bad_row_group", at_s=6.0, node=-1, other=1),)).run()
    assert [line["code"] for line in run.of("exit")] == [65, 65, 65]
    (finished,) = [finding for finding in judge(run) if finding.invariant == "finished"]
    assert finished.truth == "false"


@pytest.mark.parametrize(("recovery", "for_s"), [("restart", 4.0), ("live", 60.0)])
def test_a_tracker_has_every_value_once_after_an_outage(recovery: Recovery, for_s: float) -> None:
    """Back before the job's end or long after it: each value of each step is there once, and is the final one.

    If it is back after the end, the product's `sync` sends the values.
    """
    shape = Shape(tracked=True, recovery=recovery)
    away = SimFault("tracker_outage", at_s=5.5, for_s=for_s)
    outcome = simulate(Case(1, shape, (away, SimFault("kill_worker", step=8, node=2))))
    assert outcome.num_faults == {"tracker_outage": 1, "kill_worker": 1}
    assert all(finding.truth == "true" for finding in outcome.findings), outcome.findings
    (why,) = [finding.why for finding in outcome.findings if finding.invariant == "tracking"]
    assert "15 losses are those applied" in why and "once each" in why


def test_a_store_without_conditional_creates_is_refused_by_all() -> None:
    """No step is committed there: every node exits with 2, before two worlds could publish under one name."""
    job = Job(Shape(nodes=3), 0, ())
    job.around.storage.is_unconditional = True
    run = job.run()
    assert {line["code"] for line in run.of("exit")} == {2}
    assert run.commits == []
    assert any("ignores that a key is to be created only" in error for error in job.record.errors)
