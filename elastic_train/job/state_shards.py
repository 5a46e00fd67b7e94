"""What of the applied state a rank holds: commits, hand-over, comparison and clipping go through these six questions.

By default every rank holds a whole copy, the state in one shard (`ReplicatedState`). Sharded states hold pieces, and a
place in a cell holds parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE, State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.lanes import Assignment, contiguous
from elastic_train.errors import WeightsDifferError
from elastic_train.job.majority import name_others
from elastic_train.job.optimizers.optimizer_memory import OWN, Names, OptimizerMemory, names_of
from elastic_train.job.optimizers.parameter_groups import FirstStates, regroup, set_rates
from elastic_train.parallel.devices.squares import squares_of_tensors
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, make_gradient_sum
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.shards.grains import CutDims, cut_along
from elastic_train.shards.norm import clip_factor, total_norm

T = TypeVar("T")


class Place(NamedTuple):
    """How far a state has come, and the term that applied its last step; 0 and 0 for one that has just been built."""

    step: int
    term: int


class Transfer(NamedTuple):
    """One rank gives what it holds to another."""

    giver: int
    taker: int


class StateShards(Protocol):
    """The pieces of weights, optimizer, scheduler and scaler that a rank holds."""

    def held(self) -> State:
        """Return this rank's pieces as a nested dict, parameters by their full names; its tensors are the live ones."""

    def to_save(self) -> State:
        """Return what a commit is made of, as `held` has it; all ranks of a world call it."""

    def stillness(self) -> Callable[[StatePath], bool]:
        """Return whether `apply` alone changes the tensor at a path of `held`; others a forward pass may change."""

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Take over what `held` gave to a commit or a peer, as `fill` reads it back; gradients stay bound.

        With `keeps_rates` learning rate, betas, decay and parameter groups stay those that the state was built with: a
        configuration or a task may have changed since what it takes over was saved.
        """

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers that every rank has as a whole, by name; all must have the same bits."""

    def outlined(self) -> Mapping[str, Tensor]:
        """Return all weights and buffers as they are in a whole model, by name; for names, shapes and types alone."""

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        """Return which lanes each replica runs."""

    def sum_of(self, replicas: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        """Bind the gradients, and return the sum over all lanes that leaves a mean where it is held.

        The sum of the world before is closed.
        """

    def refresh(self, group: Group) -> None:
        """Get what peers alone have updated."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass before the first world, from which the order of the model's parts is learnt."""

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield what this rank runs forward passes with outside of a step; peers may take part in it."""

    def computing(self, replicas: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which some replicas compute a lane, forward and backward, outside of a step's sum.

        All ranks of a world enter it, as what these need may be with others.
        """

    def averaged(self, group: Group) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model has the averages of its weights; all ranks enter and leave it.

        There must be averages, and nothing may change the state in it. What is saved stays as it is.
        """

    def digest(self, group: Group) -> str:
        """Return the digest of all weights and buffers (`weights_digest`); all ranks of the world call it."""

    def digest_alone(self) -> str:
        """Return the digest as far as this rank can say; empty if it holds but a share of the weights."""

    def check_copies(self, group: Group, step: int) -> None:
        """Raise WeightsDifferError on every rank if two hold other weights that `weights` does not have."""

    def make_whole(self, group: Group) -> None:
        """Make the model's weights whole on rank 0, for whoever reads them at the end; all ranks call it."""

    def measure(self) -> Tensor:
        """Return what this rank knows of the reduced gradient's norm, on the CPU; of equal shape on all ranks."""

    def norm_of(self, gathered: Tensor) -> Tensor:
        """Return the gradient's norm over the whole model from what all ranks have measured: a float64 on the CPU.

        It is that by grains (`shards.norm`), in which neither a cut nor a number of threads shows. Raises
        WeightsDifferError if ranks have measured the same otherwise.
        """

    def norm_alone(self, measured: Tensor) -> Tensor | None:
        """Return the norm from what this rank alone has measured, None if that does not say."""

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the reduced gradients, whose norm is `norm`, down to one of `limit` over the whole model."""

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks write commits, in the order of their places; return which ranks do."""

    def stand_alone(self) -> bool:
        """Say whether this rank holds everything; it is then the only one that writes commits."""

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        """Say whether ranks that leave the world, by rank, hold something that no other rank of it does."""

    def tensors(self) -> Iterator[OfPart]:
        """Yield what is held beside the model's own weights, each with the part of memory that it belongs to."""


def check_same_norm(gathered: Tensor) -> None:
    """Raise WeightsDifferError unless all ranks have measured one norm; one that is not a number equals any other."""
    norms = gathered.flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if not bool((norms == norms[0]).all()):
        who, _ = name_others(norms.view(torch.int64).tolist(), "gradients")
        raise WeightsDifferError(
            f"{who}, by the norm of the sum over all ranks: memory or a connection is damaged, or a device computes "
            "wrongly. The step is not applied: all ranks end, and the next start continues from the last commit"
        )


def whole_from_furthest(places: Sequence[Place]) -> list[Transfer]:
    """Let ranks that are at the furthest place give the whole state, in turn, to those that are not."""
    furthest = max(places)
    givers = [rank for rank, place in enumerate(places) if place == furthest]
    takers = [rank for rank, place in enumerate(places) if place != furthest]
    return [Transfer(givers[turn % len(givers)], taker) for turn, taker in enumerate(takers)]


@dataclass(slots=True)
class ReplicatedState:
    """A whole copy on every rank: the state in one shard."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: GradScaler
    memory: OptimizerMemory
    first: FirstStates
    bucket_bytes: float | None = None
    dims: CutDims = field(default_factory=dict)
    """The parameters that cells of some degree cut; here every rank has all of them."""
    _sum: GradientSum | None = None
    _named: tuple[tuple[object, ...], Mapping[str, object], Names] | None = None

    def names(self) -> Names:
        return names_of(self.model)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def outlined(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        return contiguous(num_replicas, num_lanes)

    def sum_of(self, replicas: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        if self._sum is not None:
            self._sum.close()
        self._sum = make_gradient_sum(kind, list(self.model.parameters()), replicas, num_lanes, self.bucket_bytes)
        return self._sum

    def refresh(self, group: Group) -> None:
        """Every rank has updated everything."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        return items

    def computing(self, replicas: Collection[int]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        before = {one: one.data for one, kept in self.optimizer.state.items() if AVERAGE in kept}
        for parameter in before:
            parameter.data = self.optimizer.state[parameter][AVERAGE]
        try:
            yield
        finally:
            for parameter, weights in before.items():
                parameter.data = weights

    def digest(self, group: Group) -> str:
        return weights_digest(self.model, self.dims)

    def digest_alone(self) -> str:
        return weights_digest(self.model, self.dims)

    def check_copies(self, group: Group, step: int) -> None:
        """All weights are whole on every rank."""

    def make_whole(self, group: Group) -> None:
        """They are."""

    def measure(self) -> Tensor:
        named = self.model.named_parameters()
        graded = [(name, gradient) for name, one in named if (gradient := one.grad) is not None]
        squares = squares_of_tensors((one, cut_along(one.shape, self.dims.get(name))) for name, one in graded)
        return torch.tensor(total_norm(squares.numpy()), dtype=torch.float64)

    def norm_of(self, gathered: Tensor) -> Tensor:
        check_same_norm(gathered)
        return gathered[0]

    def norm_alone(self, measured: Tensor) -> Tensor | None:
        return measured

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Any rank can write anything."""
        return writers

    def stand_alone(self) -> bool:
        return True

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        return all(leaving)

    def tensors(self) -> Iterator[OfPart]:
        for kept in self.optimizer.state.values():
            yield from (("optimizer", value) for value in kept.values() if isinstance(value, Tensor))

    def clip(self, limit: float, norm: Tensor) -> None:
        if (factor := clip_factor(float(norm), limit)) != 1.0:
            for gradient in self._gradients():
                gradient.mul_(factor)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def held(self) -> State:
        memory = tuple(self._memory_of_weights())
        if self._named is None or memory != self._named[0]:
            # Naming takes longer than all else that a save does at a step boundary, and holds while the tensors do.
            self._named = (memory, get_model_state_dict(self.model), self.names())
        return {
            "model": dict(self._named[1]),
            "optimizer": self.memory.tree(self._named[2]),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def to_save(self) -> State:
        return self.held()

    def _memory_of_weights(self) -> Iterator[object]:
        """Yield where the memory of every weight and buffer is."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield id(tensor), tensor.data_ptr()

    def stillness(self) -> Callable[[StatePath], bool]:
        return stillness_of(self.model)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        bases = [float(base) for base in self.scheduler.base_lrs]
        tensors: State = {"model": get_model_state_dict(self.model), "optimizer": {}, "scheduler": {}, "scaler": {}}
        fill(tensors)
        set_model_state_dict(self.model, tensors["model"])  # type: ignore[arg-type]
        self._take_optimizer(tensors["optimizer"], keeps_rates=keeps_rates)  # type: ignore[arg-type]
        self.scheduler.load_state_dict(tensors["scheduler"])  # type: ignore[arg-type]
        if tensors["scaler"]:
            self.scaler.load_state_dict(tensors["scaler"])  # type: ignore[arg-type]
        if keeps_rates:
            set_rates(self.optimizer, self.scheduler, bases)
        self._named = None

    def _take_optimizer(self, saved: Mapping[str, Any], *, keeps_rates: bool) -> None:
        names = self.names()
        if keeps_rates:
            state = regroup(saved, names, self.optimizer, self.first)
        else:
            state = saved["state"]
            for group, given in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in given.items() if key != "params"})
        self.memory.take_state(state, names)
        self.memory.take_own(saved.get(OWN, {}), names)


def stillness_of(model: nn.Module) -> Callable[[StatePath], bool]:
    """Return whether only an optimizer's step changes the tensor at a path: moments and weights, and no buffers."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return lambda path: path[0] == "optimizer" or (path[0] == "model" and path[1] in parameters)
