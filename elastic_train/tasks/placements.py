"""The interface between the trainer and a task whose model is split over ranks.

A task places its modules (`Placing`), and runs pieces of its model (`Running`). A task with neither method trains in
every shard mode, at any number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import Tensor, nn

from elastic_train.config.combinations import Found
from elastic_train.errors import ConfigError
from elastic_train.tasks.task import Batch, LaneLoss


@dataclass(frozen=True, slots=True)
class Degrees:
    """Number of ranks that share a model along each axis; `sequence` as in `parallel.sequence`.

    `stages` counts all pipeline stages, even if a rank has several (`schedule: interleaved`).
    """

    tensor: int = 1
    sequence: bool = False
    stages: int = 1
    context: int = 1


CutUse = Literal["column", "row", "partial"]
TokenUse = Literal["split", "enter", "tokens", "dropout", "gather", "whole", "join"]
Use = CutUse | TokenUse
"""Ways in which tensor ranks share a module.

`column`: a linear layer; each rank computes some outputs from the same input. `row`: a linear layer; each rank has some
inputs, and outputs are added. `partial`: all ranks have the module's parameters, each uses them on its own part;
gradients are added.

With `Degrees.sequence` each rank has some tokens of every row between the layers that are cut; tensors are (rows,
tokens, size). `split`: each rank keeps its tokens of the module's output. `enter`: the module gets each rank's tokens
of its first argument. `tokens`: the module runs on each rank's tokens; its gradients are added. `dropout`: a dropout
that does so, and draws for all tokens. `gather`: a module with column layers that gets all tokens. `whole`: a module
of which a token's output depends on other tokens; it gets all of them, and each rank keeps its own of the result.
`join`: the module gets all tokens again. Column layers always get all tokens, row layers return some, except in a
module that is `whole`.
"""
Stream = Literal["shared", "own"]
"""Random numbers that all tensor ranks share, which is the default, or a rank's own."""
CUTS, TOKEN_USES = get_args(CutUse), get_args(TokenUse)


@dataclass(frozen=True, slots=True)
class Placements:
    """Placement of a model's modules along each axis; a module that is not named is whole on every rank.

    `tensor`: use of modules by name; * matches one component of a name. The cut ones must be the same at every degree,
    even at 1. Token uses have no effect without `Degrees.sequence`.

    `draws`: random numbers during and after a module, by name: a rank's own for dropout of what it has a part of.

    `stages`: modules of each pipeline stage, in running order; each parameter is in one stage,
    or tied in the first and last. A rank has one stage, or
    with `schedule: interleaved` several, which are not consecutive.

    `context`: True if `run` can compute some tokens of each row (`Piece.part`).

    `found`: traits of the model that are incompatible with some features; these are rejected if requested.
    """

    tensor: Mapping[str, Use] = field(default_factory=dict)
    stages: Sequence[Sequence[str]] = ()
    context: bool = False
    draws: Mapping[str, tuple[Stream, Stream]] = field(default_factory=dict)
    found: Sequence[Found] = ()

    def __post_init__(self) -> None:
        for name, use in self.tensor.items():
            if use not in (*CUTS, *TOKEN_USES):
                raise ValueError(f"`tensor` has '{name}': {use!r}; it knows {', '.join((*CUTS, *TOKEN_USES))}")
        if wrong := [one for one in self.stages if isinstance(one, str)]:
            raise TypeError(f"`stages` has '{wrong[0]}': give a list of modules for each stage")


def deal(modules: Sequence[str], num_stages: int, blocks: range | None = None) -> list[Sequence[str]]:
    """Distribute modules, in running order, to stages with about equally many blocks; the last ones have more.

    `blocks` are the indices of the blocks among them, by default all; other modules stay with the nearest block.
    """
    blocks = blocks or range(len(modules))
    ends = [blocks.start + stage * len(blocks) // num_stages for stage in range(num_stages + 1)]
    ends[0], ends[-1] = 0, len(modules)
    return [modules[lo:hi] for lo, hi in pairwise(ends)]


@runtime_checkable
class Placing(Protocol):
    """A task that says how ranks share its model (`parallel.tensor`, `sequence`)."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        """Place the model from `build_model`; raise ConfigError if it cannot be placed at these degrees.

        Must depend only on the task's parameters and the model. Every job asks for `Degrees()`: gradients and weights
        are measured by parts common to all degrees of `tensor`.
        """


@dataclass(frozen=True, slots=True)
class ContextPart:
    """Some tokens of each row, computed by one of several ranks: part `number` of `count`.

    `gather` returns all parts of a tensor, such as keys and values, of shape (…, tokens, size), concatenated along
    tokens; all parts have equally many. All ranks of a cell must call it equally often, in one order. Gradients of a
    rank's contribution return from all ranks. The number of tokens of a part must be a multiple of `multiple`: shorter
    rows are padded (`parallel.sequence` splits a part over tensor ranks).
    """

    number: int
    count: int
    gather: Callable[[Tensor], Tensor]
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's share of a forward pass; without arguments the whole model, on whole rows.

    `modules` are a stage's, all if empty; `given` is the previous stage's output, None for the first; `part` is some
    tokens of each row, None for all. `is_last`: True if the modules end with the loss.
    """

    modules: Sequence[str] = ()
    given: Tensor | None = None
    part: ContextPart | None = None
    is_last: bool = True


@runtime_checkable
class Running(Placing, Protocol):
    """A task whose model runs in pieces (`parallel.pipeline`, `context`)."""

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
        """Run a piece; the last stage returns the loss, any other the tensor for the next stage.

        All stages in order compute the same loss as all modules, bit for bit; `Piece()` gives the result of `loss`.
        Losses and weights of all parts add up to those of whole rows, up to rounding; a part's forward pass changes no
        buffer. Random numbers come from torch's generator, whose state moves between stages with the tensors, and
        differs for each part. Parameters of other stages have no elements.
        """


def loss_of(task: Running, model: nn.Module, batch: Batch, part: ContextPart | None = None) -> LaneLoss:
    """Compute the loss of whole rows, or of a part of each, by the whole model."""
    loss = run_piece(task, model, batch, Piece(part=part))
    assert isinstance(loss, LaneLoss), "it is of the last modules"
    return loss


def run_piece(task: Running, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
    """Run a piece of a task's model; raise ConfigError if it returns a tensor instead of the loss, or the reverse."""
    made, expected = task.run(model, batch, piece), LaneLoss if piece.is_last else Tensor
    if not isinstance(made, expected):
        raise ConfigError(
            f"task.path: `run` of {type(task).__name__} returns a {type(made).__name__} for the modules "
            f"{', '.join(piece.modules) or '(all)'}: return a LaneLoss where `piece.is_last`, else the Tensor that the "
            "next stage is given"
        )
    return made
