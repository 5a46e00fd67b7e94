"""`elastic-chaos emit`: a scenario's faults for a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from chaos import scenario as scenarios
from chaos.errors import ScenarioError
from chaos.mesh.emit import Pace, as_yaml, emit, write
from chaos.mesh.kinds import Cluster
from chaos.mesh.models import Labels


def command(
    scenario: str,
    *,
    out: Path | None = None,
    namespace: str = "default",
    pods: str = "app=elastic-train",
    index_label: str = "batch.kubernetes.io/job-completion-index",
    etcd: str = "app=etcd",
    volume: str = "/checkpoints",
    step_s: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    partial: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write SCENARIO's faults as Chaos Mesh objects: a Workflow with the moments, or, with --out, each by itself, too.

    A node is a pod: number N is that of --pods whose --index-label is N (StatefulSets: apps.kubernetes.io/pod-index);
    the roles leader and writer are pods that you have labelled elastic-train/role. --etcd are etcd's pods, --volume is
    where checkpoints are mounted. Moments are seconds since the workflow was applied: steps need --step-s, parts of
    the job --steps, too. Faults that Chaos Mesh cannot do are refused by name; --partial leaves them out.
    """
    described = scenarios.load(scenarios.find(scenario))
    cluster = Cluster(namespace, _labels("--pods", pods), index_label, _labels("--etcd", etcd), volume)
    workflow, refused = emit(described, cluster, Pace(step_s, steps), seed)
    if refused and not partial:
        raise ScenarioError(*refused, "nothing was written; --partial leaves these faults out")
    sys.stderr.write("".join(f"left out: {why}\n" for why in refused))
    if out is None:
        sys.stdout.write(as_yaml([workflow]))
    else:
        paths = write(workflow, out)
        sys.stdout.write(f"{paths[0]} has all {len(paths) - 1} faults; each by itself lies in {out / 'experiments'}\n")
    return 0


def _labels(option: str, text: str) -> Labels:
    """Read KEY=VALUE[,KEY=VALUE…]."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(key and separator and value for key, separator, value in pairs):
        raise ScenarioError(f"{option} {text}: write KEY=VALUE, several with commas between")
    return {key: value for key, _, value in pairs}
