"""Scenarios: all mistakes at once with file, key and nearest name; drawn steps come from the seed and lose work."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.errors import ScenarioError
from chaos.real.acts import ACTS
from chaos.real.runs import undoable
from chaos.real.slurm import acts as slurm_acts
from chaos.scenario.kinds import KINDS, asks_all_to_leave, ends_world
from chaos.scenario.model import FOLDER, Fault, Scenario, bounded, find, load
from chaos.scenario.on_slurm import OnSlurm
from chaos.scenario.schedule import SMALLEST_INTERVAL, Due, schedule
from chaos.sim.job import fault, kinds
from elastic_train.system import failpoints

HEAD = "name: x\ndescription: y\nconfig: c.yaml\n"


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_scenarios_of_the_package_are_valid(path: Path) -> None:
    """Every scenario loads, carries its file's name, and can be scheduled on a job of some size."""
    scenario = load(path)
    assert scenario.name == path.stem
    assert len(schedule(scenario, 1, total_steps=600, commit_every=20)) == len(scenario.faults)


@pytest.mark.parametrize("name", ["..", "../x", "/x", "''"])
def test_a_name_is_that_of_one_folder(tmp_path: Path, name: str) -> None:
    """Results go to runs/<name>, and nowhere else."""
    [found] = problems(tmp_path, f"name: {name}\ndescription: y\nconfig: c.yaml\n")
    assert found.startswith("'name': ")


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong kinds, wrong types and missing moments come in one error, each with the nearest name."""
    found = problems(
        tmp_path,
        "name: x\ndescripton: y\nconfig: c.yaml\nnodes: {cout: 3, min: 0}\nfaults:\n"
        "  - {kind: kill_nod, node: 0, at_step: 3}\n"
        "  - {kind: kill_node, node: 7, at_step: 5}\n"
        "  - {kind: kill_node, node: leadr, after_s: 1}\n"
        "  - {kind: kill_node, nodes: 1}\n"
        "  - {kind: start_node, node: 1, within: [0.5, 0.2]}\n",
    )
    expected = [
        "'description' is missing",
        "unknown key 'descripton'; did you mean 'description'?",
        "unknown key 'nodes.cout'; did you mean 'count'?",
        "'nodes.min': Input should be greater than 0",
        "'faults.0.kind': no 'kill_nod'; did you mean 'kill_node'?",
        (
            "'faults.2.node': must be a node's number from 0, or one of leader, other, lost, one, minority, majority, "
            "writer, all, not 'leadr'"
        ),
        "unknown key 'faults.3.nodes'; did you mean 'node'?",
        "'faults.4': within must be two growing parts of the job between 0 and 1, not (0.5, 0.2)",
    ]
    assert [text for text in expected if text not in found] == [], found


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ("[{kind: kill_node, node: 2, at_step: 5}]", "'faults.0' is for node 2, but there are 2 (from 0)"),
        ("[{kind: kill, node: 7, at_point: {name: commit}}]", "'faults.0' is for node 7, but there are 2 (from 0)"),
        ("[{kind: start_node, node: 1, at_step: 5}]", "'faults.0': start_node on node 1, which is up"),
        (
            "[{kind: kill_node, node: 1, at_step: 5}, {kind: stop_node, node: 1, after_s: 5}]",
            "'faults.1': stop_node on node 1, which is lost",
        ),
        (
            "[{kind: kill_node, node: 1, at_step: 5}, {kind: kill_node, node: 0, at_step: 9}]",
            "'faults.1' leaves 0 nodes, fewer than nodes.min, and no node is started after_s",
        ),
        (
            "[{kind: kill_worker, node: 1, within: [0.5, 0.7]}, {kind: kill_worker, node: 0, within: [0.6, 0.8]}]",
            "'faults.1' may be drawn before the fault above it: begin its within at 0.7 or later",
        ),
        ("[{kind: kill_node, at_step: 4}]", "'faults.0': 'node' is missing: kill_node needs one"),
        ("[{kind: freeze_node, node: one, at_step: 4}]", "'faults.0': freeze_node needs for_s"),
        ("[{kind: lose_lease, node: one, at_s: 4, for_s: 1}]", "'faults.0': lose_lease is not undone: no for_s"),
        ("[{kind: full, node: one, at_point: {name: write}}]", "it can be at the point 'sync' only"),
        ("[{kind: raise, node: one, at_point: {name: comit}}]", "no failpoint 'comit'; did you mean 'commit'?"),
        ("[{kind: raise, node: one, at_step: 4}]", "at_point belongs to kill, stop, raise"),
        ("[{kind: storage_errors, at_step: 4, for_s: 1}]", "'faults.0': storage_errors needs s3: true"),
        ("[{kind: unfit_node, node: one, at_step: 4, for_s: 1}]", "'faults.0': unfit_node needs orders: true"),
        ("[{kind: unfit_node, node: one, at_step: 4, for_s: 1}]", "'faults.0': unfit_node needs recovery: live"),
        ("[{kind: kill_node, node: lost, at_step: 4}]", "kill_node cannot be done to 'lost'"),
        ("[{kind: start_node, node: leader, at_step: 4}]", "start_node cannot be done to 'leader'"),
        ("[{kind: kill_node, node: 0, at_step: 4, after_s: 2}]", "exactly one of at_step, within"),
    ],
)
def test_impossible_faults_are_refused(tmp_path: Path, faults: str, expected: str) -> None:
    """A fault of a node that does not exist, is not up or not down, and a job that could never continue, are errors."""
    assert any(expected in problem for problem in problems(tmp_path, f"{HEAD}faults: {faults}\n"))


@pytest.mark.parametrize(
    ("soak", "expected"),
    [
        (
            "s3: true\nsoak: {faults: 5}",
            "'scenario': a soak damages and counts commits in the run's folder: leave out s3",
        ),
        ("soak: {kinds: [storage_slow]}", "'soak.kinds': storage_slow needs an S3, and a soak has none: leave it out"),
        ("soak: {kinds: [tracker_outage]}", "'soak.kinds': tracker_outage needs tracker: true"),
        ("soak: {kinds: [start_node]}", "'soak.kinds': start_node only follows a fault that ends a node"),
    ],
)
def test_a_soak_that_could_never_begin_is_refused(tmp_path: Path, soak: str, expected: str) -> None:
    """Settings from which a soak cannot draw, or by which it cannot be judged, are reported before a node starts."""
    (found,) = problems(tmp_path, f"{HEAD}{soak}\n")
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("faults: [{kind: freeze_node, node: 1, at_step: 3, for_s: 1}]", "freeze_node is not done to such jobs"),
        ("tls: true", "a scenario on Slurm has no tls"),
        ("soak: {faults: 3}", "a scenario on Slurm has no soak, and nodes.recovery: live"),
        ("slurm: {at_first: 2}", "slurm.at_first is 2, but there are 2 nodes: leave it out"),
        ("slurm: {script: elastic-array, jobs: 2}", "slurm.jobs: 2 is for jobs of one allocation"),
        ("slurm: {script: array}", "'slurm.script': Input should be 'train' or 'elastic-array'"),
        ("slurm: {job: 2}", "unknown key 'slurm.job'; did you mean 'jobs'?"),
        ("faults: [{kind: requeue_job, job: 1, at_step: 3}]", "requeue_job is for job 1, and slurm.jobs is 1 (from 0)"),
        (
            "slurm: {script: elastic-array}\nfaults: [{kind: kill_node, node: 1, at_step: 3}]",
            "kill_node needs for_s in an array: its job waits for the node",
        ),
    ],
)
def test_what_slurm_does_not_do_is_refused(tmp_path: Path, more: str, expected: str) -> None:
    """The error names it before a cluster is started."""
    nodes = "" if "soak" in more else "nodes: {recovery: live}\n"
    (found,) = problems(tmp_path, f"{HEAD}executor: slurm\n{nodes}{more}\n")
    assert expected in found


def test_how_jobs_are_submitted_is_for_slurm(tmp_path: Path) -> None:
    """On local nodes it would have no effect."""
    (found,) = problems(tmp_path, f"{HEAD}slurm: {{jobs: 2}}\n")
    assert "slurm: belongs to executor: slurm" in found


def test_a_job_that_begins_with_fewer_nodes_has_others_join_it(tmp_path: Path) -> None:
    """A node that is already there cannot be added, and each is added only once."""
    head = f"{HEAD}executor: slurm\nslurm: {{at_first: 1}}\nnodes: {{count: 2, recovery: live}}\n"
    join = "{kind: start_node, node: 1, at_step: 3}"
    path = tmp_path / "grows.yaml"
    path.write_text(f"{head}faults: [{join}]\n")
    assert load(path).slurm.at_first == 1
    again = f"{head}faults: [{join}, {{kind: start_node, node: 1, after_s: 1}}]\n"
    assert any("start_node on node 1, which is up" in problem for problem in problems(tmp_path, again))


def test_what_slurm_alone_does_needs_its_executor(tmp_path: Path) -> None:
    """On local nodes no scheduler can preempt a job."""
    (tmp_path / "mine.yaml").write_text(f"{HEAD}faults: [{{kind: preempt_job, at_step: 3, for_s: 1}}]\n")
    assert list(undoable(load(tmp_path / "mine.yaml"))) == [
        "'faults.0': preempt_job is for Slurm: `executor: slurm` does it"
    ]


def test_a_soaks_bounds_are_checked() -> None:
    """Errors name the option, also on the command line; valid options replace the file's."""
    soak = load(FOLDER / "soak.yaml")
    with pytest.raises(ScenarioError) as caught:
        bounded(soak, 0, -1.0)
    assert [text.split(":")[0] for text in caught.value.problems] == ["--faults 0", "--minutes -1.0"]
    shorter = bounded(soak, 7, None).soak
    assert shorter is not None and soak.soak is not None
    assert (shorter.faults, shorter.burst) == (7, soak.soak.burst)


def test_a_whole_job_may_be_killed_and_started(tmp_path: Path) -> None:
    """All nodes may be killed if one is started some seconds later."""
    path = tmp_path / "job-kill.yaml"
    path.write_text(
        f"{HEAD}faults: [{{kind: kill_node, node: 0, at_step: 9}}, {{kind: kill_node, node: 1, after_s: 0}},"
        " {kind: start_node, node: 1, after_s: 1}]\n"
    )
    assert len(load(path).faults) == 3


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_not_a_scenario_is_refused(tmp_path: Path, text: str) -> None:
    """Broken YAML, and YAML that is not a mapping, are errors with the file's name."""
    assert len(problems(tmp_path, text)) == 1


@pytest.mark.parametrize("content", [b"name: caf\xe9\n", b"name: x\ndescription: 2026-99-99\n"])
def test_a_file_that_yaml_cannot_hold_is_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are not UTF-8, and a date that no calendar has, are mistakes of the file as well."""
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ScenarioError, match=r"x.yaml: is not valid YAML: "):
        load(tmp_path / "x.yaml")


def test_an_unknown_name_suggests_the_nearest() -> None:
    """An unknown scenario name gets the nearest known one as a suggestion."""
    with pytest.raises(ScenarioError, match="did you mean 'kill-a-node'"):
        find("kil-a-node")


def drawn(lo: float, hi: float) -> Scenario:
    fault = Fault(kind="kill_node", node=1, within=(lo, hi))
    return Scenario(name="x", description="y", config="c", faults=(fault,))


@given(st.integers(0, 2**32), st.integers(SMALLEST_INTERVAL, 100), st.integers(3, 50), st.floats(0, 0.8))
def test_a_drawn_step_always_loses_work(seed: int, commit_every: int, num_commits: int, lo: float) -> None:
    """It is after the first commit, never on a commit's step nor next to one; only the seed decides."""
    total_steps = commit_every * num_commits
    (due,) = schedule(drawn(lo, lo + 0.2), seed, total_steps, commit_every)
    assert due.step is not None
    assert commit_every < due.step < total_steps
    assert 1 <= due.step % commit_every < commit_every - 1
    assert due.has_come(due.step)
    assert not due.has_come((due.step // commit_every + 1) * commit_every)  # if missed, the next interval is used
    assert [due] == schedule(drawn(lo, lo + 0.2), seed, total_steps, commit_every)


def test_seeds_draw_different_steps() -> None:
    """The drawn step covers its part of the job."""
    steps = {schedule(drawn(0.2, 0.6), seed, 400, 20)[0].step for seed in range(200)}
    assert len(steps) > 20
    assert min(steps, key=lambda step: step or 0) >= 80  # type: ignore[operator, type-var]


def test_a_job_too_short_for_its_faults_is_refused() -> None:
    """A step after the job's end, and commits so dense that nothing can be lost, are reported together."""
    faults = (Fault(kind="kill_node", node=1, at_step=70), Fault(kind="start_node", node=1, within=(0.8, 0.9)))
    with pytest.raises(ScenarioError) as caught:
        schedule(Scenario(name="x", description="y", config="c", faults=faults), 1, 60, 2)
    assert len(caught.value.problems) == 2


def test_a_fault_at_a_given_step_is_not_moved() -> None:
    """It comes at that step, even if that is a commit's."""
    due = Due("kill_node", 1, 40, None)
    assert not due.has_come(39)
    assert due.has_come(40)
    assert due.has_come(41)


def test_the_local_executor_does_every_local_kind() -> None:
    """Its acts, directly and at failpoints, are those of the vocabulary."""
    assert set(ACTS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim != "point"}
    assert set(failpoints.KINDS) == {kind.name for kind in KINDS.values() if kind.local and kind.aim == "point"}


def test_the_executor_for_slurm_does_every_kind_of_slurm() -> None:
    """Kinds that affect a whole job make it leave its nodes; a drained node costs nothing."""
    assert set(slurm_acts.ACTS) == {kind.name for kind in KINDS.values() if kind.slurm}
    of_job = {"preempt_job", "requeue_job", "hold_job", "end_time_limit"}
    assert {name for name in slurm_acts.ACTS if asks_all_to_leave(name)} == of_job
    assert not ends_world("drain_node")


def test_what_affects_a_job_on_slurm_follows_from_how_it_is_submitted() -> None:
    """Nodes of an array are jobs, which can be cancelled; two jobs are hit by faults that leave the nodes alone."""
    allocation, array = OnSlurm(), OnSlurm(script="elastic-array")
    grown, shared = OnSlurm(at_first=1), OnSlurm(jobs=2)
    assert set(allocation.kinds()) == set(slurm_acts.ACTS) - {"stop_node", "start_node", "preempt_node"}
    of_job = {kind for kind in slurm_acts.ACTS if asks_all_to_leave(kind)}
    assert set(array.kinds()) == set(slurm_acts.ACTS) - of_job
    assert set(grown.kinds()) == {"start_node", "kill_worker", "drain_node"}
    assert set(shared.kinds()) == {"kill_worker"} | of_job - {"preempt_job"}


def test_the_simulators_kinds_are_in_the_vocabulary() -> None:
    """The simulator's faults have the same names, directly and at failpoints."""
    assert set(kinds.KINDS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim != "point"}
    assert set(fault.AT_POINTS) <= {kind.name for kind in KINDS.values() if kind.sim and kind.aim == "point"}


def test_only_known_kinds_may_be_harmless() -> None:
    """An unknown kind is assumed to end a world, so that its name alone never makes it harmless."""
    assert ends_world("kill_node")
    assert ends_world("kill@commit")
    assert ends_world("unheard of")
    assert not ends_world("freeze_node")
