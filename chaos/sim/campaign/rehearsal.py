"""Turn a scenario, the file that breaks real nodes, into a case of the simulator.

Roles become nodes drawn from the seed; the time that a lost node stays away is scaled by the modelled step time.
Features that only real runs have are rejected, all in one error.
"""

from __future__ import annotations

import random
from dataclasses import replace

from chaos.errors import ScenarioError
from chaos.scenario.kinds import KINDS
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due, schedule
from chaos.sim.campaign.simulate import Case
from chaos.sim.job.fault import AT_POINTS, SimFault
from chaos.sim.job.kinds import KINDS as SIMULATED
from chaos.sim.job.shape import Shape

EPOCHS = 12
"""Least number of epochs of a job; more if the scenario needs more steps."""
_FOR_S = 1.0
"""Duration in seconds of a fault for which the scenario gives none."""


def rehearse(scenario: Scenario, seed: int) -> Case:
    """Return a case with the scenario's nodes and faults; raise ScenarioError with all that the simulator lacks."""
    problems = [] if scenario.soak is None else ["a soak lists no faults to simulate: run `elastic-chaos sim --seeds`"]
    if scenario.executor == "slurm":
        problems.append("jobs on Slurm are not simulated: `elastic-chaos run` does it")
    for number, fault in enumerate(scenario.faults):
        if fault.kind != "start_node" and fault.kind not in (AT_POINTS if fault.at_point else SIMULATED):
            problems.append(f"'faults.{number}': {fault.kind} is not simulated")
    if problems:
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in problems))
    nodes, kinds = scenario.nodes, {fault.kind for fault in scenario.faults}
    lanes = max(6, nodes.count * nodes.ranks)
    shape = Shape(
        nodes.count,
        nodes.ranks,
        nodes.min,
        lanes=lanes,
        epochs=1,
        ttl_s=nodes.lease_ttl_s,
        keep_last=4,
        recovery=nodes.recovery,
        max_restarts=nodes.max_restarts,
        unreadable="quarantine" if "bad_row_group" in kinds and not _fails(scenario) else "fail",
        tracked="tracker_outage" in kinds,
    )
    shape = replace(shape, epochs=max(EPOCHS, -(-_least_steps(scenario) // shape.total_steps)))
    due = schedule(scenario, seed, shape.total_steps, shape.commit_every)
    return Case(seed, shape, _faults(due, shape, random.Random(f"{seed} roles")))


def _least_steps(scenario: Scenario) -> int:
    """Return the least number of steps: the scenario's own, and one more than any step that a fault names."""
    max_steps = scenario.set.get("max_steps")
    return max(
        [
            max_steps if isinstance(max_steps, int) else 0,
            *(fault.at_step + 1 for fault in scenario.faults if fault.at_step),
        ]
    )


def _fails(scenario: Scenario) -> bool:
    """Return True if the scenario wants unreadable data to end the job."""
    data = scenario.set.get("data")
    nested = data.get("quarantine") if isinstance(data, dict) else None
    return [] in (nested, scenario.set.get("data.quarantine"))


def _faults(due: list[Due], shape: Shape, draws: random.Random) -> tuple[SimFault, ...]:
    step_s = shape.lane_s * -(-shape.lanes // (shape.nodes * shape.ranks))
    began_s = shape.warm_s + 3.0
    faults: list[SimFault] = []
    now_s, step, since_s = 0.0, 0, 0.0
    lost: dict[int, float] = {}  # when a fault, by index, stopped a node for good
    for fault in due:
        if fault.step is not None:
            now_s = since_s = max(now_s, began_s + fault.step * step_s)
            step = fault.step
        elif fault.at_s is not None:
            now_s, step, since_s = began_s + fault.at_s, 0, 0.0
        else:
            now_s += fault.after_s or 0.0
        if fault.kind == "start_node":
            place = next((p for p in lost if fault.target in ("lost", faults[p].node)), None)
            if place is not None:
                faults[place] = replace(faults[place], for_s=round(now_s - lost.pop(place), 3))
            continue
        for node in _nodes(fault, shape, draws):
            if fault.point is not None:
                faults.append(
                    SimFault(fault.kind, point=fault.point.name, nth=fault.point.nth, for_s=fault.for_s or _FOR_S)
                )
                continue
            if fault.kind in ("kill_node", "stop_node") and fault.for_s is None:
                lost[len(faults)] = now_s
            other = (node + 1) % shape.nodes if node >= 0 else 1 % shape.nodes
            at_s, for_s, rank = round(now_s - since_s, 3), fault.for_s or _left(fault), shape.ranks - 1
            faults.append(SimFault(fault.kind, at_s, step=step, node=node, rank=rank, other=other, for_s=for_s))
    # A node that is never started again stays away until long after the job's end.
    for place in lost:
        faults[place] = replace(faults[place], for_s=10 * shape.span_s)
    return tuple(faults)


def _left(fault: Due) -> float:
    """Return the duration of a fault that states none: unreadable data stay unreadable."""
    return 0.0 if fault.kind == "bad_row_group" else _FOR_S


def _nodes(fault: Due, shape: Shape, draws: random.Random) -> list[int]:
    """Return the nodes of a target; -1 stands for the node that leads at the time."""
    everyone = range(shape.nodes)
    sizes = {"one": 1, "minority": max(1, (shape.nodes - 1) // 2), "majority": shape.nodes // 2 + 1}
    if isinstance(fault.target, int):
        return [fault.target]
    if fault.target is None or fault.target in ("leader", "writer") or KINDS[fault.kind].aim in ("etcd", "storage"):
        return [-1]
    if fault.target == "other":
        return [shape.nodes - 1]
    return sorted(draws.sample(everyone, sizes.get(fault.target, shape.nodes)))
