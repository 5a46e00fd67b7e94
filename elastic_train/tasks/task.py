"""The seam between the trainer and what it trains: six methods of a class that the configuration names by its path.

A task never sees a rank, a world or a device count. It turns rows into tensors, tensors into one *summed* loss with
its weight, and names the metrics of a validation. The trainer divides by the sum of weights of the whole step after
the reduction, so short micro-batches and token-weighted losses are exact.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from elastic_train.config.schema import TaskConfig
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.loading.collate import Collate, takes_draw
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

if TYPE_CHECKING:  # torchmetrics takes over a second to import, which every recovery would wait for
    import pyarrow as pa
    from torchmetrics import Metric

Batch = dict[str, Tensor]
_REPLACED = {
    **dict.fromkeys(("tensor_plan", "sequence_plan", "stage_plan", "check_parts"), "placements(model, degrees)"),
    **dict.fromkeys(("run_stage", "loss_of_part", "run_stage_of_part"), "run(model, batch, piece)"),
}
"""Methods that no trainer calls any longer, and those that have taken their places (`tasks.placements`)."""
OWN_VALUES = ("loss", "samples")
"""What a validation reports besides the task's metrics; a task's metrics must not use these names."""


@dataclass(frozen=True, slots=True)
class LaneLoss:
    """The loss of one micro-batch.

    `total` is the *sum* over samples (or tokens), a scalar; `weight` is what the step's sum of totals is divided by,
    summed over all lanes (a count of samples, of tokens, a sum of class weights); None, in all lanes, for not to
    divide. Weights that add up to 0 say that there is no target, and then the loss is no number. `predictions` and
    `targets` feed the metrics; shapes are the metrics' own.
    """

    total: Tensor
    weight: float | None
    predictions: Tensor | None = None
    targets: Tensor | None = None


def weight_of(loss: LaneLoss) -> float:
    """Return a loss's weight, NaN for not to divide; ConfigError if it is none."""
    if loss.weight is None:
        return math.nan
    if not 0.0 <= loss.weight < math.inf:
        raise ConfigError(f"task.path: `loss` returns the weight {loss.weight}: it must be a number of at least 0")
    return loss.weight


def mean_loss(total: float, weight: float) -> float | None:
    """Return the loss of lanes whose weights (`weight_of`) add up to this; None if they have no target."""
    if math.isnan(weight):
        return total
    return None if weight == 0.0 else total / weight


class Task(Protocol):
    """What a user brings: a class with these six methods; it need not derive from this one.

    It is built once per process, before any other method is called: `Task(**params)`, with `task.params` of the
    configuration.
    """

    def prepare(self, manifest: Manifest) -> None:
        """Take what is needed from the training set (labels, vocabulary); raise ConfigError or DataError if unfit.

        Of a mixture it is one manifest of all sources, in whose paths each has its number. Before that, other objects
        of the class are prepared with each source alone.
        """

    def columns(self) -> Sequence[str]:
        """Name the columns that `collate` reads; no other is read from storage."""

    def build_model(self) -> nn.Module:
        """Build the model on the CPU; random numbers are seeded before.

        Modules in eval mode below one in training mode stay so while the model trains.
        """

    @property
    def collate(self) -> Collate:
        """A method `collate(rows, ids)` or `collate(rows, ids, draw)`: turn rows, in order, into tensors.

        `rows` is a pyarrow.Table with the columns, `ids` are its sample ids, int64 of shape (rows,), and `draw` is a
        `SampleRandom`, from which augmentation takes its random numbers: they follow from the run's seed, the epoch and
        the sample ids. The tensors' shapes may depend on these alone. It is called in a thread or a worker process.
        """

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        """Compute the summed loss of one micro-batch."""

    def metrics(self) -> Mapping[str, Metric]:
        """Return fresh validation metrics, each of one number, whose states any world puts together to the same bits.

        States are tensors of integers that are summed, or one list of tensors whose rows of integers are put in order.
        A metric's `remark` is said with its value, and what its `details()` returns, numbers by name, is reported, too.
        """


@runtime_checkable
class Finishing(Protocol):
    """A task that writes results at the end."""

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Write results below the run's folder; called once, on rank 0, after the last commit.

        An OSError is logged, and the job ends well without them; any other error fails the process.
        """


@runtime_checkable
class Limited(Protocol):
    """A task that takes lists up to a length."""

    def longest(self) -> Mapping[str, int]:
        """Return how many values of such a column a row may have; `data.too_long` says what becomes of longer ones."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of the model, by their full names, that are trained in a way of their own.

    Their learning rate is the configured one, after warm-up and schedule, times `lr_factor`. `weight_decay` replaces
    the configured one; None keeps it. Frozen parameters get no gradient and take no memory in the optimizer, but are
    saved and handed over with the others; buffers that a forward pass changes still change. A tied parameter may be
    named by any of its names.
    """

    names: Sequence[str]
    lr_factor: float = 1.0
    weight_decay: float | None = None
    is_frozen: bool = False


@runtime_checkable
class Grouping(Protocol):
    """A task that says which parameters get which rate and decay, and which are frozen."""

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        """Return the groups of the model that `build_model` built; parameters in none are trained as configured.

        Must depend on nothing but the task's parameters and the model, so that all ranks return the same.
        """


@runtime_checkable
class Counting(Protocol):
    """A task whose model counts something in integer buffers in its forward pass."""

    def summed_buffers(self) -> Sequence[str]:
        """Name the integer buffers, in full, that a step changes by the sum of what every lane adds.

        All other integer buffers must come out of a step alike in every lane, as BatchNorm's `num_batches_tracked`
        does.
        """


@runtime_checkable
class Matching(Protocol):
    """A task that knows what makes a validation set one of the same kind as the training set."""

    def check_held_out(self, manifest: Manifest) -> None:
        """Raise ConfigError or DataError if what was prepared cannot be judged by this set; called before training.

        It is asked of each source of a mixture, too, but for the first.
        """


@runtime_checkable
class Inspecting(Protocol):
    """A task that finds rows which `collate` would refuse, at a part of its cost.

    Before a run's first step, each rank has some of the rows of all datasets inspected, for a few seconds at most.
    """

    def inspected_columns(self) -> Sequence[str]:
        """Name the columns that `unfit_rows` reads."""

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        """Return the numbers of unfit rows among these, ascending, and what is wrong with each; called by threads.

        What is wrong follows "row 3: " in a message, and ends with the remedy.
        """


@runtime_checkable
class Predicting(Protocol):
    """A task that names what its model finds in a row, for `elastic-train predict`.

    Of any other task `predict` writes `LaneLoss.predictions`, if they have an entry for each row.
    """

    def begin_predicting(self, manifest: Manifest) -> None:
        """Take a dataset whose rows are to be predicted; from here on read no labels if predictions need none."""

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        """Return columns with an entry for each row of a micro-batch, by their names; 'id' is taken."""


@runtime_checkable
class Deferring(Protocol):
    """A task that makes its model's weights one after the other, so that no process need have all of them."""

    def sketch_model(self) -> nn.Module | None:
        """Return what `build_model` does, its parameters on the meta device; None if these cannot be made one by one.

        Its buffers are those of `build_model`, on the CPU. Its blocks, the entries of `nn.ModuleList`s, run in the
        order in which they are listed.
        """

    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by its first name, on the CPU, with the bits that `build_model` gives it.

        It may be of another type: what a rank holds of it is converted. What is drawn comes from torch's generator,
        which is where it is for `build_model`.
        """


@runtime_checkable
class Exporting(Protocol):
    """A task whose model transformers can load."""

    def export(self, model: nn.Module, folder: Path, *, is_merged: bool) -> None:
        """Write the model, on the CPU, to an empty folder as `from_pretrained` reads it, with its tokenizer.

        With `is_merged` adapters are added to their base's weights. Raises ConfigError if it cannot be done.
        """


@runtime_checkable
class ExportingSome(Exporting, Protocol):
    """A task that has models which transformers cannot load."""

    def why_not_exported(self) -> str | None:
        """Say why transformers cannot load the prepared task's model, and what to do; None if it can."""


@runtime_checkable
class ExportingByName(Deferring, Exporting, Protocol):
    """A task whose model need not be built for transformers to load it: its weights are written one after the other."""

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        """Write all of a model's folder but its weights, and return what these are called there, by their names here.

        They are in the order in which files are filled; one that is left out is tied to another. None, and nothing is
        written, if the model has to be built (`export`). Raises ConfigError if it cannot be done.
        """


class Tokenizer(Protocol):
    """Turns a text into token ids, and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts before one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


@runtime_checkable
class Chatting(Tokenizer, Protocol):
    """A tokenizer with a template of chats."""

    def encode_chat(self, message: str) -> list[int]:
        """Return the ids of a user's message, up to where the assistant's answer begins."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else one of the `top_k` likeliest (0: of all), drawn by
    torch's generator, which is at `seed`. At most `num_tokens`."""

    num_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0


@runtime_checkable
class Generating(Protocol):
    """A task whose model goes on with a text."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model, or of the training set; None if there is none."""

    def continue_ids(self, model: nn.Module, ids: Sequence[int], sampling: Sampling) -> list[int]:
        """Return the tokens that follow; fewer if the model ends the text. Raises ConfigError for ids that it lacks."""


def load_task(config: TaskConfig) -> Task:
    """Import and build the configured task; raise ConfigError naming the path, the parameter, and the nearest one."""
    module_name, _, class_name = config.path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task.path: '{config.path}' cannot be imported ({error}); write module:Class of a module "
            "in the working folder or on PYTHONPATH"
        ) from error
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
        raise ConfigError(f"task.params: '{config.path}' refuses them: {error}") from error
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
