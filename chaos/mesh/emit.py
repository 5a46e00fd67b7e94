"""From a scenario to a Chaos Mesh Workflow: every fault at its moment, beside the others, each as long as it lasts.

Chaos Mesh knows seconds, no steps: a moment that is a step needs the seconds that one takes. What cannot be said is
told, fault by fault, with what to write instead.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from chaos.errors import ScenarioError
from chaos.mesh.kinds import Aim, Cluster, Refused, maker_of
from chaos.mesh.models import ChaosType, Experiment, Metadata, Template, Workflow, WorkflowSpec
from chaos.scenario import Fault, Scenario

ROLE_LABEL = "elastic-train/role"
"""Chaos Mesh does not know who leads or writes: whoever watches the job labels that pod."""
_ONCE_S = 5.0
"""What a fault without an end is given to be done in."""
_FIELDS: Mapping[ChaosType, str] = {
    "PodChaos": "pod_chaos",
    "NetworkChaos": "network_chaos",
    "IOChaos": "io_chaos",
    "TimeChaos": "time_chaos",
    "StressChaos": "stress_chaos",
}


@dataclass(frozen=True, slots=True)
class Pace:
    """What turns steps into seconds: seconds of one step, and how many there are; None where nobody said."""

    step_s: float | None = None
    num_steps: int | None = None


def emit(scenario: Scenario, cluster: Cluster, pace: Pace, seed: int) -> tuple[Workflow, list[str]]:
    """Return the workflow, and every fault that it has not, with why; raise ScenarioError if it would be empty."""
    problems: list[str] = []
    templates: list[Template] = []
    before, draws = 0.0, random.Random(seed)
    for number, fault in enumerate(scenario.faults):
        moment = _moment(fault, before, pace, draws)
        before = before if isinstance(moment, Refused) else moment  # also of one that is refused, for those behind it
        aim = _aim(fault, cluster, scenario.nodes.count)
        make = maker_of(fault.kind)
        refused = [str(what) for what in (make, moment, aim) if isinstance(what, Refused)]
        if isinstance(make, Refused) or isinstance(moment, Refused) or isinstance(aim, Refused):
            problems += [f"{scenario.name}: 'faults.{number}', {fault.kind}: {why}" for why in refused]
            continue
        templates += _branch(number, fault, moment, make(cluster, aim, fault.for_s is not None))
    if not templates:
        raise ScenarioError(*(problems or [f"{scenario.name} has no faults to emit"]))
    branches = tuple(template.name for template in templates if template.template_type == "Serial")
    entry = Template(name="faults", template_type="Parallel", children=branches)
    metadata = Metadata(name=scenario.name, namespace=cluster.namespace, labels=dict(cluster.pods))
    return Workflow(metadata=metadata, spec=WorkflowSpec(entry=entry.name, templates=(entry, *templates))), problems


def _branch(number: int, fault: Fault, moment: float, chaos: object) -> list[Template]:
    """Return what one fault comes to: wait until it is due, then do it for as long as it lasts."""
    name = f"{number}-{fault.kind.replace('_', '-')}"
    kind: ChaosType = type(chaos).__name__  # type: ignore[assignment]
    lasts = _seconds(fault.for_s or _ONCE_S)
    done = Template.model_validate(
        {"name": name, "template_type": kind, "deadline": lasts, _FIELDS[kind]: chaos},
    )
    if moment == 0:
        return [Template(name=f"at-{name}", template_type="Serial", children=(name,)), done]
    wait = Template(name=f"wait-{name}", template_type="Suspend", deadline=_seconds(moment))
    return [Template(name=f"at-{name}", template_type="Serial", children=(wait.name, name)), wait, done]


def _moment(fault: Fault, before: float, pace: Pace, draws: random.Random) -> float | Refused:
    """Return when a fault is due, in seconds since the workflow was started."""
    if fault.at_point is not None:
        return Refused("Chaos Mesh knows no failpoints", "say after_s")
    if fault.at_s is not None:
        return fault.at_s
    if fault.after_s is not None:
        return before + fault.after_s
    if pace.step_s is None:
        return Refused("Chaos Mesh knows no steps", "say after_s, or how long a step takes: --step-s")
    if fault.at_step is not None:
        return fault.at_step * pace.step_s
    if pace.num_steps is None:
        return Refused("parts of a job need its length", "say after_s, or how many steps it has: --steps")
    assert fault.within is not None, "a fault has one moment"
    return draws.uniform(*fault.within) * pace.num_steps * pace.step_s


def _aim(fault: Fault, cluster: Cluster, num_nodes: int) -> Aim | Refused:
    """Return the pods of a fault's target: a node by its index, roles by how many there are, or by a label."""
    target = fault.node
    if isinstance(target, int):
        return Aim({**cluster.pods, cluster.index_label: str(target)}, "all")
    if target in ("leader", "writer"):
        return Aim({**cluster.pods, ROLE_LABEL: str(target)}, "one")
    if target == "lost":
        return Refused("a lost pod is not there", "leave the line out: its Job or StatefulSet starts another")
    counts = {"one": 1, "other": 1, "minority": (num_nodes - 1) // 2, "majority": num_nodes // 2 + 1}
    if target is None or target == "all":
        return Aim(cluster.pods, "all")
    if not counts[str(target)]:
        return Refused(f"{num_nodes} nodes have no {target}", "say one")
    return Aim(cluster.pods, "one") if counts[target] == 1 else Aim(cluster.pods, "fixed", str(counts[target]))


def experiments(workflow: Workflow) -> list[Experiment]:
    """Return every fault as an object of its own, to be applied by hand, in the order of the scenario."""
    found = []
    for template in workflow.spec.templates:
        if template.template_type in _FIELDS:
            kind: ChaosType = template.template_type  # type: ignore[assignment]
            spec = getattr(template, _FIELDS[kind]).model_dump(by_alias=True, exclude_none=True, mode="json")
            metadata = workflow.metadata.model_copy(update={"name": f"{workflow.metadata.name}-{template.name}"})
            is_once = spec.get("action") == "pod-kill"
            found.append(
                Experiment(
                    kind=kind, metadata=metadata, spec=spec if is_once else {**spec, "duration": template.deadline}
                )
            )
    return found


def write(workflow: Workflow, folder: Path) -> list[Path]:
    """Write workflow.yaml and, in experiments/, one file a fault; return their paths."""
    (folder / "experiments").mkdir(parents=True, exist_ok=True)
    paths = [folder / "workflow.yaml"]
    paths[0].write_text(as_yaml([workflow]))
    for experiment in experiments(workflow):
        path = folder / "experiments" / f"{experiment.metadata.name}.yaml"
        path.write_text(as_yaml([experiment]))
        paths.append(path)
    return paths


def as_yaml(objects: Sequence[Workflow | Experiment]) -> str:
    """Write objects as kubectl takes them."""
    trees = [item.model_dump(by_alias=True, exclude_none=True, mode="json") for item in objects]
    return yaml.safe_dump_all(trees, sort_keys=False, explicit_start=True)


def _seconds(seconds: float) -> str:
    """Write a duration as Go reads it."""
    return f"{max(1, round(seconds * 1000))}ms" if seconds % 1 else f"{seconds:.0f}s"
