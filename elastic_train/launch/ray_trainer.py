"""A replacement for Ray's TorchTrainer: same configurations and result, without its restarts.

TorchTrainer restarts all workers from the last checkpoint when one is lost. Here the others continue.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.config import sources
from elastic_train.config.section import Value
from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.launch.on_ray import MOST_FAILURES, RayJob, run_on_ray
from elastic_train.system.extras import needed_for

if TYPE_CHECKING:
    from ray.train import Result, RunConfig, ScalingConfig

SCALING = ("num_workers", "use_gpu", "resources_per_worker", "placement_strategy", "accelerator_type", "label_selector")
RUN = ("name", "failure_config", "worker_runtime_env")
STRATEGIES = {"PACK": "DEFAULT", "SPREAD": "SPREAD"}
"""Placement group strategies, and the nearest ones for actors placed individually."""


class ElasticTrainer:
    """Train as configured on a Ray cluster; `fit` returns the same as TorchTrainer's.

    A worker of `scaling_config` is a node of the job, with a rank per GPU, or one. `num_workers` may be (least, most);
    of `run_config`, `name` and `failure_config.max_failures` (per hour; -1: unlimited) are used. Settings without
    effect are rejected by name. `endpoint` is an etcd's; by default one is started here. `overrides` are values by
    dotted key, such as {"batch.micro_batch": 8}.
    """

    def __init__(
        self,
        config: str | Path,
        overrides: Mapping[str, Value] | None = None,
        *,
        scaling_config: ScalingConfig,
        run_config: RunConfig | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Raise ConfigError with everything that is wrong with the arguments."""
        resolved = sources.load(config, environ=os.environ, overrides=overrides)
        problems = [*_without_effect(scaling_config, SCALING), *_without_effect(run_config, RUN)]
        strategy = STRATEGIES.get(scaling_config.placement_strategy)
        if strategy is None:
            problems.append(f"placement_strategy has to be PACK or SPREAD, not {scaling_config.placement_strategy}")
        if isinstance(scaling_config.label_selector, list):
            problems.append("label_selector has to be one for all workers: each takes any other's place")
        options = {
            "scheduling_strategy": strategy,
            "accelerator_type": scaling_config.accelerator_type,
            "label_selector": scaling_config.label_selector,
            "runtime_env": None if run_config is None else run_config.worker_runtime_env,
        }
        failures = None if run_config is None else run_config.failure_config
        resources = dict(scaling_config.resources_per_worker or {"CPU": 1.0})
        if scaling_config.use_gpu:
            resources.setdefault("GPU", 1.0)  # use_gpu adds a GPU to other named resources, as in Ray
        self._job = RayJob(
            resolved,
            nodes=":".join(map(str, _both(scaling_config.num_workers))),
            resources=resources,
            run_id=None if run_config is None else run_config.name,
            endpoint=endpoint,
            most_failures=MOST_FAILURES if failures is None else failures.max_failures,
            options={name: value for name, value in options.items() if value is not None},
        )
        problems += self._job.problems()
        if problems:
            raise ConfigError(*problems)

    def fit(self) -> Result:
        """Train to the end; raise ElasticTrainError with the exit code if the job failed or was asked to leave."""
        with needed_for("a job on Ray"):
            import ray
            from ray.train import Result
        if not ray.is_initialized():
            ray.init()
        code, result = run_on_ray(self._job)
        if code != 0:
            error = ElasticTrainError(f"the job on Ray ended with exit code {code}: its nodes' logs say why")
            error.exit_code = code
            raise error
        return Result(metrics=result, checkpoint=None, error=None, path=self._job.config.checkpoint_url)


def _both(num_workers: Any) -> tuple[int, int]:
    return num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)


def _without_effect(given: Any, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the changed settings of one of Ray's configurations that have no effect here."""
    if given is None:
        return
    default = type(given)()
    for each in dataclasses.fields(given):
        if each.name not in known and getattr(given, each.name) != getattr(default, each.name):
            yield f"{type(given).__name__}.{each.name} has no effect here: leave it out"
