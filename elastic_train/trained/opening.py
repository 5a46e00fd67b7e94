"""A run's model as a commit has it, in its task: from the run's folder alone, without a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from elastic_train.checkpoint import CommitRecord, holding, read_state, verify
from elastic_train.checkpoint.commits.export import Weights, weights_in
from elastic_train.checkpoint.commits.lookup import find, open_run
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.system.wording import counted
from elastic_train.tracking.run_folder import CONFIG, RunFolder

_TRAINED: Mapping[str, Any] = {"weights": "trained", "early_stopping": None}
_ALONE: Mapping[str, Any] = {
    "device": "auto",
    "compile": False,
    "parallel": {"shards": "none", "tensor": 1, "sequence": False, "recompute": "none"},
    "checkpoint": {"keep_best": None},
    "optimizer": {"name": "sgd", "options": {}, "schedule": "constant", "ema": None},
}
"""What of a configuration is of no use here, and may not fit."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A commit's model in the state of a process that is alone."""

    plan: Plan
    state: AppliedState
    record: CommitRecord

    @property
    def model(self) -> nn.Module:
        return self.state.model


def open_trained(
    run: str,
    commit: str | None = None,
    *,
    train: Sequence[str] = (),
    validation: str | None = None,
    max_samples: int | None = None,
    weights: Weights = "trained",
) -> Trained:
    """Verify a commit of a run, the newest intact one by default, and put its weights into the task's model.

    `run` is a run's folder. `train` says where the training set is now, or all sources of a mixture in their order, if
    it has moved; `validation` is a set to evaluate, of which the first `max_samples` count; `weights` says whether the
    model gets the average of its weights in place of those that were trained. Raises ConfigError or DataError where
    task or training set cannot be read from here.
    """
    if "://" in run:
        raise ConfigError(f"{run}: give the run's folder (run.dir): its {CONFIG} says which task it trains")
    store, found = open_run(run), RunFolder(Path(run)).config()
    data = {"validation": validation, **(_moved(run, found, train) if train else {})}
    changes = {**_ALONE, "data": data, "validation": {"max_samples": max_samples, **_TRAINED}}
    plan = make_plan(_changed(found, changes, run))
    record = find(store, commit)
    with holding(store, record.key):
        verify(store, record)
        tensors = weights_in(read_state(store, record), record.key, weights)
    state = plan.build_state()
    try:
        state.model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(
            f"{run}: {record.key} does not fit the model that its task builds here; was the task, or the folder of its "
            f"model, changed? {error}"
        ) from error
    return Trained(plan, state, record)


def _moved(run: str, config: Mapping[str, Any], train: Sequence[str]) -> Mapping[str, Any]:
    """Return what the configuration says of the training data, at other places."""
    sources = config["data"].get("mixture")
    num = len(sources) if sources else 1
    if len(train) != num:
        what = f"the {num} sources of its mixture, in their order" if sources else "one training set"
        raise ConfigError(f"{run}: was trained on {what}: give --train {counted(num, 'time')}, not {len(train)}")
    if not sources:
        return {"train": train[0]}
    return {"mixture": [{**source, "source": url} for source, url in zip(sources, train, strict=True)]}


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any], run: str) -> Config:
    """Return the configuration with values of its sections, and of its top level, replaced."""
    tree = dict(config)
    for name, values in changes.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, Mapping) else values
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{run}/{CONFIG}: is of another version: {error}") from error
