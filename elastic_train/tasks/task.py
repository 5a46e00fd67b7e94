"""The interface between the trainer and what it trains: six methods of a class that the configuration names by path.

A task never sees a rank, a world or a device count. It turns rows into tensors, tensors into one *summed* loss with its
weight, and names the validation metrics. The trainer divides by the whole step's sum of weights after the reduction, so
short micro-batches and token-weighted losses are exact.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from elastic_train.config.schema import TaskConfig
from elastic_train.config.section import wrong_arguments
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.loading.lane_batch import Collate, takes_draw
from elastic_train.errors import ConfigError
from elastic_train.system.extras import import_named
from elastic_train.system.wording import did_you_mean, nearest

if TYPE_CHECKING:  # torchmetrics takes over a second to import, which would delay every recovery
    import pyarrow as pa
    from torchmetrics import Metric

Batch = dict[str, Tensor]
_REPLACED = {
    **dict.fromkeys(("tensor_plan", "sequence_plan", "stage_plan", "check_parts"), "placements(model, degrees)"),
    **dict.fromkeys(("run_stage", "loss_of_part", "run_stage_of_part"), "run(model, batch, piece)"),
}
"""Methods that the trainer no longer calls, and their replacements (`tasks.placements`)."""
OWN_VALUES = ("loss", "samples")
"""Values that a validation reports besides the task's metrics, whose names must differ."""


@dataclass(frozen=True, slots=True)
class LaneLoss:
    """The loss of one micro-batch.

    `total` is the *sum* over samples (or tokens), a scalar; `weight`, summed over all lanes, divides the step's sum of
    totals (a count of samples or tokens, a sum of class weights); None, in all lanes, for no division. Weights that sum
    to 0 mean that there is no target, and the loss is undefined. `predictions` and `targets` are inputs of the metrics,
    in their shapes.
    """

    total: Tensor
    weight: float | None
    predictions: Tensor | None = None
    targets: Tensor | None = None


ON_HOST = "_on_host"
"""End of the names of a micro-batch's tensors that stay in host memory."""


def on_device(batch: Mapping[str, Tensor], device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a micro-batch on a device, except for tensors that stay on the host."""
    return {
        name: tensor if name.endswith(ON_HOST) else tensor.to(device, non_blocking=non_blocking)
        for name, tensor in batch.items()
    }


def weight_of(loss: LaneLoss) -> float:
    """Return a loss's weight, NaN for no division; raise ConfigError if it is invalid."""
    if loss.weight is None:
        return math.nan
    if not 0.0 <= loss.weight < math.inf:
        raise ConfigError(f"task.path: `loss` returns the weight {loss.weight}: it must be a number of at least 0")
    return loss.weight


def mean_loss(total: float, weight: float) -> float | None:
    """Return the loss of lanes with this sum of weights (`weight_of`); None if they have no target."""
    if math.isnan(weight):
        return total
    return None if weight == 0.0 else total / weight


class Task(Protocol):
    """A user's task: a class with these six methods; it need not derive from this one.

    It is built once per process, before any other method is called: `Task(**params)`, with `task.params` of the
    configuration.
    """

    def prepare(self, manifest: Manifest) -> None:
        """Take what is needed from the training set (labels, vocabulary); raise ConfigError or DataError if it does not
        fit.

        For a mixture it is one manifest of all sources, with numbered paths. Before that, other objects of the class
        are prepared with each source alone.
        """

    def columns(self) -> Sequence[str]:
        """Return the columns that `collate` reads; no other is read from storage."""

    def build_model(self) -> nn.Module:
        """Build the model on the CPU; random numbers are seeded before.

        Modules in eval mode inside one in training mode stay in eval mode while the model trains.
        """

    @property
    def collate(self) -> Collate:
        """A method `collate(rows, ids)` or `collate(rows, ids, draw)`: turn rows, in order, into tensors.

        `rows` is a pyarrow.Table with the columns, `ids` are its sample ids, int64 of shape (rows,), and `draw` is a
        `SampleRandom` for augmentation: its numbers depend on the run's seed, the epoch and the sample ids. Tensor
        shapes may depend only on these. It is called in a thread or worker process.
        """

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        """Compute the summed loss of one micro-batch."""

    def metrics(self) -> Mapping[str, Metric]:
        """Return new validation metrics, each a single number, with states that any world combines to the same bits.

        States are integer tensors that are summed, or one list of tensors whose integer rows are sorted. A metric's
        `remark` is shown with its value, and the output of `details()`, numbers by name, is reported as well.
        """


@runtime_checkable
class Finishing(Protocol):
    """A task that writes results at the end."""

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Write results below the run's folder; called once, on rank 0, after the last commit.

        An OSError is logged, and the job ends normally without them; any other error fails the process.
        """


@runtime_checkable
class Limited(Protocol):
    """A task that limits the length of lists."""

    def longest(self) -> Mapping[str, int]:
        """Return the most values per row of such columns; `data.too_long` decides what happens to longer ones."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of the model, by full name, with their own training settings.

    Their learning rate is the configured one, after warm-up and schedule, times `lr_factor`. `weight_decay` replaces
    the configured one; None keeps it. Frozen parameters get no gradient and no optimizer memory, but are saved and
    exchanged with the others; buffers changed by a forward pass still change. A tied parameter may be given by any of
    its names.
    """

    names: Sequence[str]
    lr_factor: float = 1.0
    weight_decay: float | None = None
    is_frozen: bool = False


@runtime_checkable
class Grouping(Protocol):
    """A task that sets learning rate, decay or freezing by parameter."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        """Return the groups of the model from `build_model`; other parameters are trained as configured.

        Must depend only on the task's parameters and the model, so that all ranks return the same.
        """


@runtime_checkable
class Counting(Protocol):
    """A task whose model counts in integer buffers during its forward pass."""

    def summed_buffers(self) -> Sequence[str]:
        """Return the full names of integer buffers that a step changes by the sum of every lane's addition.

        All other integer buffers must be equal in every lane after a step, as BatchNorm's `num_batches_tracked`.
        """


@runtime_checkable
class Matching(Protocol):
    """A task that checks that a validation set matches the training set."""

    def check_held_out(self, manifest: Manifest) -> None:
        """Raise ConfigError or DataError if this set cannot validate what was prepared; called before training.

        Also called for each source of a mixture except the first.
        """


@runtime_checkable
class Inspecting(Protocol):
    """A task that detects rows which `collate` would reject, at a fraction of its cost.

    Before a run's first step, each rank inspects some rows of all datasets, for a few seconds at most.
    """

    def inspected_columns(self) -> Sequence[str]:
        """Return the columns that `unfit_rows` reads."""

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        """Return the ascending indices of unfit rows, with the reason for each; called by threads.

        The reason follows "row 3: " in a message, and ends with the remedy.
        """


@runtime_checkable
class Predicting(Protocol):
    """A task that names its model's results for a row, for `elastic-train predict`.

    For other tasks `predict` writes `LaneLoss.predictions`, if they have an entry per row.
    """

    def begin_predicting(self, manifest: Manifest) -> None:
        """Prepare for a dataset to be predicted; from now on read no labels if predictions need none."""

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        """Return named columns with an entry per row of a micro-batch; 'id' is reserved."""


@runtime_checkable
class Deferring(Protocol):
    """A task that creates its model's weights one by one, so that no process needs all of them."""

    def sketch_model(self) -> nn.Module | None:
        """Return the same as `build_model`, with parameters on the meta device; None if these cannot be created one by
        one.

        Its buffers are `build_model`'s, on the CPU. Its blocks, the entries of `nn.ModuleList`s, run in list order.
        """

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by its first name, on the CPU, bit-identical to `build_model`'s.

        It may have another type: a rank converts what it keeps. Random values come from torch's generator, in the same
        state as for `build_model`.
        """


def sketch_of(task: Task) -> nn.Module | None:
    """Return a task's model without weights; None if it cannot be made, or if a subclass builds another model."""
    if not isinstance(task, Deferring) or replaces(type(task), "build_model", but_not="sketch_model"):
        return None
    return task.sketch_model()


def replaces(kind: type, method: str, *, but_not: str) -> bool:
    """Return True if a class replaces one method and inherits another, which no longer fits it."""
    return next((name for one in kind.__mro__ for name in (but_not, method) if name in vars(one)), "") == method


@runtime_checkable
class Exporting(Protocol):
    """A task whose model transformers can load."""

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        """Write the model, on the CPU, to an empty folder for `from_pretrained`, with its tokenizer.

        With `is_merged` adapters are merged into their base's weights. Raise ConfigError if that is impossible.
        """


@runtime_checkable
class ExportingSome(Exporting, Protocol):
    """A task with some models that transformers cannot load."""

    def why_not_exported(self) -> str | None:
        """Return why transformers cannot load the prepared task's model, and the remedy; None if it can."""


@runtime_checkable
class ExportingByName(Deferring, Exporting, Protocol):
    """A task whose model can be exported to transformers without building it: weights are written one by one."""

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        """Write a model's folder except for its weights, and return their names there, by our names.

        They are in the order in which files are filled; omitted ones are tied to others. Return None, writing nothing,
        if the model must be built (`export`). Raise ConfigError if export is impossible.
        """


class Tokenizer(Protocol):
    """Converts between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """Return a text's ids, including tokens that the tokenizer puts before it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


@runtime_checkable
class Chatting(Tokenizer, Protocol):
    """A tokenizer with a chat template."""

    def encode_chat(self, message: str) -> list[int]:
        """Return the ids of a user's message, up to where the assistant's answer begins."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choose at most `num_tokens` tokens: the likeliest at temperature 0; above it, one of the `top_k` likeliest (0: of
    all), drawn from torch's generator seeded with `seed`."""

    num_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


@runtime_checkable
class Generating(Protocol):
    """A task whose model continues a text."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model, or of the training set; None if there is none."""

    def continue_ids(self, model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
        """Return the following tokens; fewer if the model ends the text. Raise ConfigError for unknown ids."""


def load_task(config: TaskConfig) -> Task:
    """Import and build the configured task; raise ConfigError with the path or parameter, and the nearest name."""
    factory = cast(Callable[..., Task], import_named("task.path", config.path, "module:Class"))
    parameters = inspect.signature(factory).parameters
    known = list(parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in config.params if name not in known and not takes_any]
    if unknown:
        raise ConfigError(
            *(f"task.params: '{config.path}' has no '{name}'{did_you_mean(nearest(name, known))}" for name in unknown)
        )
    try:
        task: Task = factory(**config.params)
    except (TypeError, ValueError) as error:
        why = "; ".join(wrong_arguments(factory, config.params)) or error
        raise ConfigError(f"task.params: '{config.path}' refuses them: {why}") from error
    missing = [
        name for name in ("prepare", "columns", "build_model", "collate", "loss", "metrics") if not hasattr(task, name)
    ]
    if missing:
        raise ConfigError(f"task.path: '{config.path}' is not a Task, it lacks {', '.join(missing)}")
    if old := [name for name in _REPLACED if hasattr(task, name)]:
        raise ConfigError(
            *(
                f"task.path: '{config.path}' has `{name}`, which is not called: write `{_REPLACED[name]}` instead "
                "(elastic_train.tasks.placements)"
                for name in old
            )
        )
    try:
        takes_draw(task.collate)
    except TypeError as error:
        raise ConfigError(f"task.path: '{config.path}': {error}") from error
    return task


__all__ = [
    "OWN_VALUES",
    "Batch",
    "Chatting",
    "Counting",
    "Deferring",
    "Exporting",
    "Finishing",
    "Generating",
    "Grouping",
    "Inspecting",
    "LaneLoss",
    "Limited",
    "Matching",
    "ParameterGroup",
    "Predicting",
    "Sampling",
    "Task",
    "Tokenizer",
    "load_task",
    "mean_loss",
    "weight_of",
]
