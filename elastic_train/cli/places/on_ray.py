"""`elastic-train ray`: a job on the Ray cluster of which this machine is a part."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from elastic_train.config import sources
from elastic_train.errors import ConfigError
from elastic_train.launch.on_ray import MOST_FAILURES, RayJob, run_on_ray
from elastic_train.launch.options import TIMEOUT_S
from elastic_train.system.extras import needed_for

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def ray(
    config: Path,
    *overrides: Overrides,
    nodes: str,
    cpus: float = 1.0,
    gpus: int = 0,
    resources: dict[str, float] | None = None,
    ranks: int | None = None,
    endpoint: str | None = None,
    run_id: Annotated[str | None, Parameter(name="--id")] = None,
    max_failures: int = MOST_FAILURES,
    grace_s: float = 30.0,
    timeout_s: float = TIMEOUT_S,
    address: str | None = None,
) -> int:
    """Train as CONFIG says on N or MIN:MAX --nodes, each of which is an actor of a Ray cluster; return at the end.

    --cpus, --gpus, --resources.NAME N: what each node takes of the cluster. --ranks: of each node (its GPUs, else 1). A
    node that is lost is replaced, and the others continue meanwhile; after more than --max-failures within an hour (20;
    -1: no limit) it is not. --endpoint HOST:PORT of an etcd; without, one is started here. --id: the job's name there.
    --grace-s: from a request to leave to the end. --timeout-s: how long to wait for places, and for MIN nodes (900);
    then the exit code is 77. --address: of the cluster (RAY_ADDRESS, else the one that runs here). All machines have to
    see the same paths. Any key of CONFIG can follow.
    """
    resolved = sources.load(config, environ=os.environ, arguments=overrides)
    amounts = {"CPU": cpus, "GPU": float(gpus), **(resources or {})}
    job = RayJob(
        resolved,
        nodes,
        amounts,
        ranks,
        run_id,
        endpoint,
        most_failures=max_failures,
        grace_s=grace_s,
        timeout_s=timeout_s,
    )
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    with needed_for("a job on Ray"):
        import ray as cluster
    try:
        cluster.init(address=address or os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster is reached from here ({error}): start this on one of its machines"
        ) from error
    return run_on_ray(job)[0]
