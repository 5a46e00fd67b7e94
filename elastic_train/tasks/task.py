"""The seam between the trainer and what it trains: six methods, brought by a dotted path in the configuration.

A task never sees a rank, a world or a device count. It turns rows into tensors, tensors into one *summed* loss with
its weight, and names the metrics of a validation. The trainer divides by the sum of weights of the whole step after
the reduction, so short micro-batches and token-weighted losses are exact.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor, nn

from elastic_train.config.schema import TaskConfig, nearest
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError

if TYPE_CHECKING:  # torchmetrics takes over a second to import, which every recovery would wait for
    from torchmetrics import Metric

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LaneLoss:
    """The loss of one micro-batch.

    `total` is the *sum* over samples (or tokens), a scalar; `weight` is what the step's sum of totals is divided by,
    summed over all lanes (a count of samples, of tokens, a sum of class weights); all weights 0 means: do not divide.
    `predictions` and `targets` feed the metrics; shapes are the metrics' own.
    """

    total: Tensor
    weight: float
    predictions: Tensor | None = None
    targets: Tensor | None = None


class Task(Protocol):
    """What a user brings: a class with these six methods; it need not derive from this one.

    It is built once per process, before any other method is called: `Task(**params)`, with `task.params` of the
    configuration.
    """

    def prepare(self, manifest: Manifest) -> None:
        """Take what is needed from the training set (labels, vocabulary); raise ConfigError or DataError if unfit."""

    def columns(self) -> Sequence[str]:
        """Name the columns that `collate` reads; no other is read from storage."""

    def build_model(self) -> nn.Module:
        """Build the model on the CPU; random numbers are seeded before."""

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        """Turn rows, in order, into tensors whose shapes depend on the rows alone."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        """Compute the summed loss of one micro-batch."""

    def metrics(self) -> Mapping[str, Metric]:
        """Return fresh validation metrics whose states are summed integers (counts), so that any world agrees."""


@runtime_checkable
class Finishing(Protocol):
    """A task that leaves something behind at the end."""

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Write results below the run's folder; called once, on rank 0, behind the last commit.

        An OSError is told, and the job is done without them; any other error fails the process.
        """


@runtime_checkable
class Limited(Protocol):
    """A task that takes lists up to a length."""

    def longest(self) -> Mapping[str, int]:
        """Return how many values of such a column a row may have; `data.too_long` says what becomes of longer ones."""


@runtime_checkable
class Matching(Protocol):
    """A task that knows what makes a validation set one of the same kind as the training set."""

    def check_held_out(self, manifest: Manifest) -> None:
        """Raise ConfigError or DataError if what was prepared cannot be judged by this set; called before training."""


def load_task(config: TaskConfig) -> Task:
    """Import and build the configured task; raise ConfigError naming the path, the parameter, and the nearest one."""
    module_name, _, class_name = config.path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task.path: '{config.path}' cannot be imported ({error}); write module:Class of a module on PYTHONPATH"
        ) from error
    parameters = inspect.signature(factory).parameters
    known = list(parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in config.params if name not in known and not takes_any]
    if unknown:
        raise ConfigError(*(f"task.params: '{config.path}' has no '{name}'{nearest(name, known)}" for name in unknown))
    try:
        task: Task = factory(**config.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.params: '{config.path}' refuses them: {error}") from error
    missing = [
        name for name in ("prepare", "columns", "build_model", "collate", "loss", "metrics") if not hasattr(task, name)
    ]
    if missing:
        raise ConfigError(f"task.path: '{config.path}' is no Task, it lacks {', '.join(missing)}")
    return task


__all__ = ["Batch", "Finishing", "LaneLoss", "Limited", "Matching", "Task", "load_task"]
