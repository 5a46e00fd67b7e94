"""Layouts that a storm breaks: state that is sharded, and ranks that compute together. Each is a changed soak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chaos.errors import ScenarioError
from chaos.scenario.model import Scenario, Soak, find, load
from chaos.scenario.networks import NETWORKS

BURST = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """A soak with other keys, on so many nodes of so many ranks."""

    soak: str
    keys: Mapping[str, object]
    nodes: int = 2
    ranks: int = 2

    def scenario(self, name: str, faults: int) -> Scenario:
        """Return the soak of so many faults in this layout."""
        shipped = load(find(self.soak))
        assert shipped.soak is not None, "layouts are of soaks"
        nodes = shipped.nodes.model_copy(update={"count": self.nodes, "ranks": self.ranks})
        soak = Soak(faults=faults, burst=BURST, heal_s=shipped.soak.heal_s)
        changed = {"name": f"storm-{name}", "set": {**shipped.set, **self.keys}, "nodes": nodes, "soak": soak}
        return shipped.model_copy(update=changed)


def behind(scenario: Scenario, network: str | None) -> Scenario:
    """Return a scenario whose last node is behind a link; raise ScenarioError if that is not possible."""
    if network is None:
        return scenario
    if network not in NETWORKS:
        raise ScenarioError(f"--network {network}: there are {', '.join(NETWORKS)}")
    if scenario.executor != "local":
        raise ScenarioError(f"--network {network}: {scenario.name} has nodes of Slurm, whose network is their own")
    return scenario.model_copy(update={"network": network})


def _sharded(shards: str) -> Layout:
    return Layout("soak", {"parallel.shards": shards, "parallel.copies": 2}, nodes=3, ranks=1)


LAYOUTS: Mapping[str, Layout] = {
    "whole": Layout("soak", {"parallel.shards": "none"}, nodes=3, ranks=1),
    "optimizer": _sharded("optimizer"),
    "gradients": _sharded("gradients"),
    "parameters": _sharded("parameters"),
    "tensor": Layout("soak-cells", {}),
    "tensor-optimizer": Layout("soak-shares", {}),
    "pipeline": Layout("soak-stages", {}),
    "expert": Layout(
        "soak-cells",
        {
            "parallel.tensor": 1,
            "parallel.expert": 2,
            "task.params.model.experts": 4,
            "task.params.model.expert_hidden": 16,
        },
    ),
    "context": Layout("soak-cells", {"parallel.tensor": 1, "parallel.context": 2}),
}
