"""The seam between the trainer and a task whose model several ranks compute together.

A task says where modules are (`Placing`), and runs a piece of its model (`Running`). A task that has neither method
trains in every shard mode, at any number of replicas.
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
    """How many ranks share a model along each axis; `sequence` as in `parallel.sequence`.

    `stages` counts all stages of a pipeline, also where a rank has several (`schedule: interleaved`).
    """

    tensor: int = 1
    sequence: bool = False
    stages: int = 1
    context: int = 1


CutUse = Literal["column", "row", "partial"]
TokenUse = Literal["split", "enter", "tokens", "dropout", "gather", "join"]
Use = CutUse | TokenUse
"""How tensor ranks share a module.

`column`: a linear layer; each rank computes some outputs from the same input. `row`: a linear layer; each rank has some
inputs, and the outputs are added. `partial`: all ranks have the module's parameters and use each on their own part;
gradients are added.

With `Degrees.sequence` each rank has some tokens of every row between the layers that are cut; tensors are (rows,
tokens, size). `split`: each rank keeps its tokens of the module's output. `enter`: the module gets each rank's tokens
of its first argument. `tokens`: the module runs on each rank's tokens; its gradients are added. `dropout`: a dropout
that does, and draws for all tokens. `gather`: a module with column layers that gets all tokens. `join`: the module gets
all tokens again. Column layers get all tokens in any case, row layers return some."""
CUTS, TOKEN_USES = get_args(CutUse), get_args(TokenUse)


@dataclass(frozen=True, slots=True)
class Placements:
    """Where a model's modules are along each axis; a module that is not named is whole on every rank.

    `tensor`: the use of modules, by name; * stands for one part of a name. The cut ones must be the same at every
    degree, also at 1. Uses of tokens have no effect without `Degrees.sequence`.

    `stages`: the modules that each stage of a pipeline runs, in the order in which they run; each parameter is in one
    stage. A rank has one stage, or with `schedule: interleaved` several, which are not neighbours.

    `context`: whether `run` computes some tokens of each row (`Piece.part`).

    `found`: traits of the model that some features do not work with; those that are asked for are refused.
    """

    tensor: Mapping[str, Use] = field(default_factory=dict)
    stages: Sequence[Sequence[str]] = ()
    context: bool = False
    found: Sequence[Found] = ()

    def __post_init__(self) -> None:
        for name, use in self.tensor.items():
            if use not in (*CUTS, *TOKEN_USES):
                raise ValueError(f"`tensor` has '{name}': {use!r}; it knows {', '.join((*CUTS, *TOKEN_USES))}")
        if wrong := [one for one in self.stages if isinstance(one, str)]:
            raise TypeError(f"`stages` has '{wrong[0]}': give a list of modules for each stage")


def deal(modules: Sequence[str], num_stages: int, blocks: range | None = None) -> list[Sequence[str]]:
    """Deal modules, in the order in which they run, to stages of about as many blocks each; the last ones have more.

    `blocks` are the numbers of the blocks among them, all by default; a module before or after stays with the block
    next to it.
    """
    blocks = blocks or range(len(modules))
    ends = [blocks.start + stage * len(blocks) // num_stages for stage in range(num_stages + 1)]
    ends[0], ends[-1] = 0, len(modules)
    return [modules[lo:hi] for lo, hi in pairwise(ends)]


@runtime_checkable
class Placing(Protocol):
    """A task that says how ranks share its model (`parallel.tensor`, `sequence`)."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        """Place the model that `build_model` built; raise ConfigError if it cannot be placed at these degrees.

        Must depend on nothing but the task's parameters and the model. Every job asks for `Degrees()`: gradients and
        weights are measured by parts that all degrees of `tensor` have in common.
        """


@dataclass(frozen=True, slots=True)
class ContextPart:
    """Some tokens of each row, which one of several ranks computes: part `number` of `count`.

    `gather` returns all parts of a tensor, such as keys and values, of shape (…, tokens, size), one after the other
    along its tokens; all parts have as many. All ranks of a cell call it as often, in one order. The gradient of what
    a rank has given comes back from all. The number of tokens of a part must be a multiple of `multiple`: rows that are
    shorter are padded (`parallel.sequence` shares a part out between tensor ranks).
    """

    number: int
    count: int
    gather: Callable[[Tensor], Tensor]
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The share of a forward pass that one rank computes; without arguments the whole model, on whole rows.

    `modules` are those of a stage, all if there are none; `given` is the output of the stage before, None for the
    first; `part` is some tokens of each row, None for all. `is_last`: whether the modules end with the loss.
    """

    modules: Sequence[str] = ()
    given: Tensor | None = None
    part: ContextPart | None = None
    is_last: bool = True


@runtime_checkable
class Running(Placing, Protocol):
    """A task whose model runs in pieces (`parallel.pipeline`, `context`)."""

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
        """Run a piece; the last stage returns the loss, any other the tensor that the next one is given.

        All stages, one after the other, compute the loss of all modules, to the last bit; `Piece()` has the result
        of `loss`. Losses and weights of all parts add up to those of whole rows, to rounding; a forward pass of a part
        changes no buffer. Random numbers are drawn by torch's generator, whose state goes from stage to stage with the
        tensors, and is another one for each part. Parameters of other stages have no elements.
        """


def loss_of(task: Running, model: nn.Module, batch: Batch, part: ContextPart | None = None) -> LaneLoss:
    """Compute the loss of whole rows, or of a part of each, by the whole model."""
    loss = run_piece(task, model, batch, Piece(part=part))
    assert isinstance(loss, LaneLoss), "it is of the last modules"
    return loss


def run_piece(task: Running, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
    """Run a piece of a task's model; ConfigError if it returns a tensor in place of the loss, or a loss too early."""
    made, expected = task.run(model, batch, piece), LaneLoss if piece.is_last else Tensor
    if not isinstance(made, expected):
        raise ConfigError(
            f"task.path: `run` of {type(task).__name__} returns a {type(made).__name__} for the modules "
            f"{', '.join(piece.modules) or '(all)'}: return a LaneLoss where `piece.is_last`, else the Tensor that the "
            "next stage is given"
        )
    return made
