"""Open a run's model from a commit, with its task, using only the run's folder and no world.

The commit is verified. Then only its weights are read, one after the other, without the rest of the training state.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from elastic_train.checkpoint.commits.lookup import find_trained, open_run
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import CommitWeights, Weights, open_weights
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.system.file_systems import absolute
from elastic_train.system.wording import counted
from elastic_train.tasks.task import Chatting, Generating, Sampling
from elastic_train.tracking.run_folder import CONFIG, RunFolder

log = logging.getLogger(__name__)
_KEPT = ("task", "data", "batch", "epochs", "max_steps", "reduction", "threads_per_rank")
_KEPT_OF_RUN = ("dir", "seed")
"""Configuration keys that determine the trained model, its data, and how kernels compute.

All other keys belong to the world that trained it (layout, devices, optimizer, logging), may not work here, and get
their defaults.
"""
_ALONE: Mapping[str, Any] = {"optimizer": {"name": "sgd", "schedule": "constant"}}
"""An optimizer without state."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run's task and data in a single process, with a commit's weights not read yet."""

    run: str
    plan: Plan
    record: CommitRecord
    weights: CommitWeights

    def check_fits(self, model: nn.Module) -> None:
        """Raise ConfigError unless names and shapes of the weights match the model."""
        here = {name: one.shape for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
        there = {name: kind.shape for name, kind in self.weights.kinds.items()}
        wrong = [
            f"{name} is {_shown(here.get(name))} here, and {_shown(there.get(name))} in the commit"
            for name in {**here, **there}
            if here.get(name) != there.get(name)
        ]
        if wrong:
            raise ConfigError(
                f"{self.run}: {self.record.key} does not fit the model that its task builds here; was the task, or the "
                f"folder of its model, changed? Of {len(here)} weights {len(wrong)} differ; {wrong[0]}"
            )

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Load the weights into a model, one after the other."""
        self.check_fits(model)
        found = model.state_dict()
        tensors = self.weights.read(list(self.weights.kinds))
        for name in self.weights.kinds:
            found[name].copy_(next(tensors))


def _shown(shape: torch.Size | None) -> str:
    return "none" if shape is None else f"of shape {tuple(shape)}"


@dataclass(frozen=True, slots=True)
class Trained:
    """A commit's model in the state of a single process."""

    plan: Plan
    state: AppliedState
    record: CommitRecord

    @property
    def model(self) -> nn.Module:
        return self.state.model


@contextmanager
def open_commit(
    run: str,
    commit: str | None = None,
    *,
    train: Sequence[str] = (),
    validation: str | None = None,
    max_samples: int | None = None,
    weights: Weights = "trained",
) -> Iterator[Opened]:
    """Verify a commit of a run, and hold it while its weights are read.

    The default is the newest intact commit, or the best one of a run that early stopping ended or that keeps its best
    (see `find_trained`).

    `run` is a run's folder. `train` gives the new location of the training set, or of all sources of a mixture in
    order, if moved; `validation` is a set to evaluate, limited to the first `max_samples`; `weights` selects the
    trained or the averaged weights. Raises ConfigError or DataError if the task or the training set cannot be read from
    here.
    """
    check_folder(run)
    store = open_run(run)
    plan = plan_of(run, train=train, validation=validation, max_samples=max_samples)
    record, why = find_trained(run, commit)
    if why is not None:
        log.warning("%s: %s", run, why)
    with open_weights(store, record, weights) as stored:
        yield Opened(run, plan, record, stored)


def check_folder(run: str) -> None:
    """Raise ConfigError for a URL of commits."""
    if "://" in run:
        raise ConfigError(f"{run}: give the run's folder (run.dir): its {CONFIG} says which task it trains")


def plan_of(
    run: str, *, train: Sequence[str] = (), validation: str | None = None, max_samples: int | None = None
) -> Plan:
    """Return the plan of a run for a single process, from whatever folder; see `open_commit`."""
    folder = RunFolder(Path(run))
    found = folder.config()
    data = {"validation": absolute(validation), **(_moved(run, found, train) if train else {})}
    _import_from(folder.started_in())
    return make_plan(_alone(found, data, max_samples, run).anchored(folder.from_here))


def _import_from(folder: Path | None) -> None:
    """Let a task be imported from the folder in which its run was started, before the working folder."""
    if folder is not None and str(folder) not in sys.path:
        here = os.getcwd()  # noqa: PTH109 - as it is in sys.path
        sys.path.insert(sys.path.index(here) if here in sys.path else len(sys.path), str(folder))


def open_trained(
    run: str,
    commit: str | None = None,
    *,
    train: Sequence[str] = (),
    validation: str | None = None,
    max_samples: int | None = None,
    weights: Weights = "trained",
) -> Trained:
    """Load a commit's weights into the task's model; see `open_commit`."""
    values = {"train": train, "validation": validation, "max_samples": max_samples, "weights": weights}
    with open_commit(run, commit, **values) as opened:  # type: ignore[arg-type]
        state = opened.plan.build_state()
        opened.fill(state.model)
    return Trained(opened.plan, state, opened.record)


def _moved(run: str, config: Mapping[str, Any], train: Sequence[str]) -> Mapping[str, Any]:
    """Return the configuration of the training data at its new locations."""
    sources = config["data"].get("mixture")
    num = len(sources) if sources else 1
    if len(train) != num:
        what = f"the {num} sources of its mixture, in their order" if sources else "one training set"
        raise ConfigError(f"{run}: was trained on {what}: give --train {counted(num, 'time')}, not {len(train)}")
    if not sources:
        return {"train": absolute(train[0])}
    return {"mixture": [{**source, "source": absolute(url)} for source, url in zip(sources, train, strict=True)]}


def _alone(config: Mapping[str, Any], data: Mapping[str, Any], max_samples: int | None, run: str) -> Config:
    """Return the configuration for a single process, with `data` replacing values of that section."""
    tree = {name: config[name] for name in _KEPT if name in config}
    tree["run"] = {name: value for name, value in config.get("run", {}).items() if name in _KEPT_OF_RUN}
    tree |= {**_ALONE, "data": {**config.get("data", {}), **data}, "validation": {"max_samples": max_samples}}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{run}/{CONFIG}: is of another version: {error}") from error


def complete(
    trained: Trained, prompt: str | Sequence[int], sampling: Sampling, *, is_chat: bool = False
) -> tuple[list[int], str | None]:
    """Return the generated token ids and their text; the text is None if `prompt` has ids and there is no tokenizer.

    With `is_chat`, the prompt is a user's message and the result is the answer. Raises ConfigError if the task does not
    generate, has no tokenizer for a text, or has none with a chat template.
    """
    task, model = trained.plan.task, trained.model.eval()
    if not isinstance(task, Generating):
        raise ConfigError(f"task.path: '{trained.plan.config.task.path}' does not generate: it is no language model")
    tokenizer = task.tokenizer()
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif tokenizer is None:
        raise ConfigError(
            f"{trained.plan.manifest.url}: has no tokenizer, and neither has the model: give token ids, --ids 5,6,7"
        )
    elif not is_chat:
        ids = tokenizer.encode(prompt)
    elif isinstance(tokenizer, Chatting):
        ids = tokenizer.encode_chat(prompt)
    else:
        raise ConfigError("--chat needs the tokenizer of a model's folder, and a chat template: leave --chat out")
    torch.manual_seed(sampling.seed)
    with torch.no_grad():
        found = task.continue_ids(model, ids, sampling)
    return found, None if tokenizer is None else tokenizer.decode(found)
