"""Chaos Mesh objects: every kind is emitted or refused by name, and what is emitted is what a cluster would take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chaos import scenario as scenarios
from chaos.cli import main
from chaos.errors import ScenarioError
from chaos.kinds import KINDS
from chaos.mesh.emit import Pace, as_yaml, emit, experiments, write
from chaos.mesh.kinds import EMITTED, REFUSED, Aim, Cluster, Refused, maker_of
from chaos.mesh.models import NetworkChaos, Template, Workflow
from chaos.scenario import FOLDER, Fault, Nodes, Scenario
from chaos.sim.faults import AT_POINTS
from chaos.sim.kinds import KINDS as SIM_KINDS

CLUSTER = Cluster("training", {"app": "trainer"}, "index", {"app": "etcd"}, "/checkpoints")
PACE = Pace(step_s=0.5, num_steps=100)


def scenario(*faults: Fault, nodes: int = 5) -> Scenario:
    return Scenario(name="x", description="y", nodes=Nodes(count=nodes), faults=faults)


def specs(workflow: Workflow) -> dict[str, dict[str, object]]:
    """Return every fault's spec as it is written, by its template's name."""
    written = yaml.safe_load(as_yaml([workflow]))
    kinds = ("podChaos", "networkChaos", "ioChaos", "timeChaos", "stressChaos")
    return {
        template["name"]: next(template[kind] for kind in kinds if kind in template)
        for template in written["spec"]["templates"]
        if any(kind in template for kind in kinds)
    }


def test_every_kind_is_emitted_or_refused_by_name() -> None:
    """All kinds of the executors, of the simulator and at failpoints have a row, in one of the two tables."""
    assert not EMITTED.keys() & REFUSED.keys()
    known = set(KINDS) | set(SIM_KINDS) | set(AT_POINTS)
    assert EMITTED.keys() | REFUSED.keys() <= known, "a row for what nobody can ask for"
    for kind in known - EMITTED.keys():
        refused = maker_of(kind)
        assert isinstance(refused, Refused)
        assert len(str(refused)) > 30
    assert "'new_kind'" in str(maker_of("new_kind"))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_who_is_sent_elsewhere_can_do_it_there(kind: str) -> None:
    """Whatever says `elastic-chaos run` or `sim` is a kind that real runs, or the simulator, can do."""
    instead = REFUSED[kind].instead
    assert "elastic-chaos run" not in instead or KINDS[kind].local
    assert "elastic-chaos sim" not in instead or KINDS[kind].sim


@pytest.mark.parametrize("kind", sorted(EMITTED))
@pytest.mark.parametrize("is_undone", [False, True])
def test_what_is_emitted_is_valid_and_aimed(kind: str, is_undone: bool) -> None:
    """Every object passes the checks of the schemas and webhooks, and names the pods that it hits by their labels."""
    make = maker_of(kind)
    assert not isinstance(make, Refused)
    chaos = make(CLUSTER, Aim({"app": "trainer", "index": "1"}, "all"), is_undone)
    again = type(chaos).model_validate_json(chaos.model_dump_json(by_alias=True, exclude_none=True))
    assert again == chaos
    written = json.loads(chaos.model_dump_json(by_alias=True, exclude_none=True))
    assert written["selector"]["namespaces"] == ["training"]
    expected = {"app": "etcd"} if kind in ("kill_etcd_member", "etcd_outage") else {"app": "trainer"}
    assert expected.items() <= written["selector"]["labelSelectors"].items()
    assert "duration" not in written, "a workflow's template has it"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kill_node", {"action": "pod-kill", "gracePeriod": 0}),
        ("stop_node", {"action": "pod-kill", "gracePeriod": 60}),
        ("lose_requests", {"action": "partition", "direction": "to"}),
        ("lose_answers", {"action": "partition", "direction": "from"}),
        ("cut_one_way", {"action": "partition", "direction": "to"}),
        ("etcd_outage", {"action": "pod-failure", "mode": "all"}),
        ("jump_clock", {"timeOffset": "-300s", "clockIds": ["CLOCK_REALTIME"]}),
        ("storage_full", {"action": "fault", "errno": 28, "volumePath": "/checkpoints", "mode": "all"}),
        ("storage_outage", {"action": "fault", "errno": 5, "percent": 100}),
        ("storage_slow", {"action": "latency", "delay": "1s"}),
        ("slow_worker", {"stressors": {"cpu": {"workers": 8, "load": 100}}}),
    ],
)
def test_what_a_kind_becomes(kind: str, expected: dict[str, object]) -> None:
    """Each says the same in Chaos Mesh's words."""
    make = maker_of(kind)
    assert not isinstance(make, Refused)
    chaos = make(CLUSTER, Aim({"app": "trainer"}, "one"), False)
    assert expected.items() <= chaos.model_dump(by_alias=True, exclude_none=True, mode="json").items()


def test_both_ends_of_a_cut_are_named() -> None:
    """From etcd, from the other pods, or from everybody."""
    targets = {}
    for kind in ("cut_off_etcd", "cut_link", "cut_node"):
        make = maker_of(kind)
        assert not isinstance(make, Refused)
        chaos = make(CLUSTER, Aim({"app": "trainer"}, "one"), True)
        assert isinstance(chaos, NetworkChaos)
        targets[kind] = chaos.target and chaos.target.selector.label_selectors
    assert targets == {"cut_off_etcd": {"app": "etcd"}, "cut_link": {"app": "trainer"}, "cut_node": None}


def test_moments_are_waited_for_side_by_side() -> None:
    """Each fault is a branch that waits until it is due: seconds after the one before, or steps, at their pace."""
    workflow, refused = emit(
        scenario(
            Fault(kind="kill_node", node=1, at_step=30),
            Fault(kind="stop_node", node="one", after_s=2.5),
            Fault(kind="stop_node", node=0, within=(0.8, 0.9)),
        ),
        CLUSTER,
        PACE,
        seed=1,
    )
    assert refused == []
    by_name = {template.name: template for template in workflow.spec.templates}
    assert by_name["faults"].template_type == "Parallel"
    assert by_name["faults"].children == ("at-0-kill-node", "at-1-stop-node", "at-2-stop-node")
    assert by_name["at-0-kill-node"].children == ("wait-0-kill-node", "0-kill-node")
    assert by_name["wait-0-kill-node"].deadline == "15s"
    assert by_name["wait-1-stop-node"].deadline == "17500ms"
    drawn = float(str(by_name["wait-2-stop-node"].deadline).removesuffix("ms")) / 1000
    assert 40 <= drawn <= 45


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (2, {"mode": "all", "labelSelectors": {"app": "trainer", "index": "2"}}),
        ("leader", {"mode": "one", "labelSelectors": {"app": "trainer", "elastic-train/role": "leader"}}),
        ("other", {"mode": "one", "labelSelectors": {"app": "trainer"}}),
    ],
)
def test_targets_become_selectors(node: int | str, expected: dict[str, object]) -> None:
    """Numbers are an index label, roles that nobody but the job knows a label that has to be set."""
    workflow, _ = emit(scenario(Fault(kind="kill_node", node=node, after_s=0)), CLUSTER, PACE, 1)
    (spec,) = specs(workflow).values()
    selector = spec["selector"]
    assert isinstance(selector, dict)
    assert {"mode": spec["mode"], "labelSelectors": selector["labelSelectors"]} == expected


@pytest.mark.parametrize(
    ("role", "nodes", "expected"),
    [
        ("minority", 5, ("fixed", "2")),
        ("majority", 5, ("fixed", "3")),
        ("minority", 3, ("one", None)),
        ("all", 3, ("all", None)),
    ],
)
def test_shares_of_the_nodes_are_counted(role: str, nodes: int, expected: tuple[str, str | None]) -> None:
    """As many pods as the role means among the scenario's nodes."""
    fault = Fault(kind="kill_node", node=role, after_s=0)
    workflow, _ = emit(scenario(fault, nodes=nodes), CLUSTER, PACE, 1)
    (spec,) = specs(workflow).values()
    assert (spec["mode"], spec.get("value")) == expected


def test_who_is_refused_is_still_waited_for() -> None:
    """A fault that Chaos Mesh cannot do leaves those behind it at their moments."""
    refused = Fault(kind="lose_lease", node=0, at_s=40)
    workflow, problems = emit(scenario(refused, Fault(kind="kill_node", node=0, after_s=5)), CLUSTER, PACE, 1)
    assert len(problems) == 1
    assert [each.deadline for each in workflow.spec.templates if each.template_type == "Suspend"] == ["45s"]


def test_what_cannot_be_said_is_told_at_once() -> None:
    """Kinds, moments and targets that Chaos Mesh does not know come in one error, each with what to write instead."""
    faults = (
        Fault(kind="kill_worker", node=1, at_step=3),
        Fault(kind="freeze_node", node=1, within=(0.1, 0.2), for_s=3),
        Fault(kind="start_node", node="lost", after_s=3),
    )
    with pytest.raises(ScenarioError) as caught:
        emit(scenario(*faults), CLUSTER, Pace(), 1)
    told = "\n".join(caught.value.problems)
    for expected in ("kill_worker: Chaos Mesh kills pods", "--step-s", "freeze_node: ", "Job or StatefulSet"):
        assert expected in told
    with pytest.raises(ScenarioError, match="no faults to emit"):
        emit(scenario(), CLUSTER, PACE, 1)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["kill_node", "stop_node"]), st.integers(0, 4), st.floats(0, 1e5)),
        min_size=1,
        max_size=12,
    )
)
def test_any_number_of_faults_makes_a_closed_workflow(drawn: list[tuple[str, int, float]]) -> None:
    """Names are unique, children exist, waits grow by what was asked, and the YAML reads back as the same object."""
    faults = [Fault(kind=kind, node=node, after_s=after_s) for kind, node, after_s in drawn]  # type: ignore[arg-type]
    workflow, refused = emit(scenario(*faults), CLUSTER, PACE, 1)
    assert refused == []
    assert Workflow.model_validate(yaml.safe_load(as_yaml([workflow]))) == workflow
    assert len(specs(workflow)) == len(experiments(workflow)) == len(faults)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "A b", "templateType": "Suspend", "deadline": "1s"},
        {"name": "a", "templateType": "Suspend"},
        {"name": "a", "templateType": "Suspend", "deadline": "soon"},
        {"name": "a", "templateType": "PodChaos"},
        {"name": "a", "templateType": "Serial", "deadline": "1s"},
        {"name": "a", "templateType": "Suspend", "deadline": "1s", "colour": "red"},
    ],
)
def test_the_models_refuse_what_a_cluster_would(wrong: dict[str, object]) -> None:
    """Unknown keys, names that are none, durations that are none, and fields of other types."""
    with pytest.raises(ValidationError):
        Template.model_validate(wrong)


def test_a_workflow_has_to_be_closed_and_cuts_have_two_ends() -> None:
    """A child that is not there, a percentage beyond 100, and a cut from nobody are refused."""
    whole = {"metadata": {"name": "a", "namespace": "b"}, "spec": {"entry": "a", "templates": []}}
    one = {"name": "a", "templateType": "Serial", "children": ["b"]}
    for templates in ([], [one], [{**one, "children": ["a"]}, one]):
        with pytest.raises(ValidationError):
            Workflow.model_validate({**whole, "spec": {"entry": "a", "templates": templates}})
    pods = {"selector": {"namespaces": ["a"], "labelSelectors": {"a": "b"}}, "action": "partition", "mode": "one"}
    NetworkChaos.model_validate({**pods, "direction": "to"})
    for wrong in (
        {"direction": "from"},
        {"direction": "to", "mode": "fixed-percent", "value": "101"},
        {"direction": "x"},
    ):
        with pytest.raises(ValidationError):
            NetworkChaos.model_validate({**pods, **wrong})


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_packages_scenarios(path: Path, tmp_path: Path) -> None:
    """Each is emitted but for what is refused by name; files are written one a fault."""
    described = scenarios.load(path)
    try:
        workflow, refused = emit(described, CLUSTER, PACE, 1)
    except ScenarioError as error:
        assert len(error.problems) >= len(described.faults)
        return
    paths = write(workflow, tmp_path)
    assert len(paths) - 1 + len({why.partition(",")[0] for why in refused}) == len(described.faults)
    for experiment in paths[1:]:
        (tree,) = yaml.safe_load_all(experiment.read_text())
        assert tree["apiVersion"] == "chaos-mesh.org/v1alpha1"
        assert ("duration" in tree["spec"]) == (tree["spec"].get("action") != "pod-kill")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refusals are an error that tells all; --partial writes the rest; labels are read, or refused."""

    def leave(*arguments: str) -> int | str | None:
        with pytest.raises(SystemExit) as left:
            main(["emit", "shrink-and-regrow", *arguments])
        return left.value.code

    pace = ("--step-s", "0.5", "--steps", "500")
    assert leave(*pace) == 2
    told = capsys.readouterr().err
    assert "start_node: a pod that was killed" in told
    assert "--partial" in told
    assert leave(*pace, "--partial", "--pods", "app=a,tier=b", "--namespace", "c") == 0
    shown = capsys.readouterr()
    workflow = Workflow.model_validate(yaml.safe_load(shown.out))
    assert workflow.metadata.namespace == "c"
    assert shown.err.count("left out") == 2
    assert leave(*pace, "--partial", "--out", str(tmp_path)) == 0
    assert len(list((tmp_path / "experiments").glob("*.yaml"))) == 2
    assert leave("--pods", "app") == 2
    assert "KEY=VALUE" in capsys.readouterr().err
