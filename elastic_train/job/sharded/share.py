"""What one rank holds of a part of the state: all of it, or a share by its seat.

The ranks that hold the same part are a *column*; where there are no cells, all ranks are one. What is here is what a
`StateShards` asks of a share, with the answers of one whose weights are whole on every rank of the column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE, State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.lanes import Lanes
from elastic_train.errors import ConfigError
from elastic_train.job.cells.state_parts import Cuts, cut_at, filled_parts, with_tensors
from elastic_train.job.optimizers.optimizer_memory import OWN, Names, OptimizerMemory, names_of
from elastic_train.job.optimizers.parameter_groups import FirstStates, regroup, set_rates
from elastic_train.job.sharded.held_tree import HeldRun, Retained
from elastic_train.parallel.devices.squares import squares_of_tensors
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.placement.holdings import Column, Run
from elastic_train.placement.norm import in_memory_order
from elastic_train.placement.seating import Seating

T = TypeVar("T")


class Summed(NamedTuple):
    """Parameters whose gradients are added along one tree: `leaves` are those of each of the `ranks`.

    The ranks are those of the column, or `repeats` neighbours hold what one of it does. A rank computes `per_turn`
    leaves at a time, and nothing is exchanged meanwhile unless `is_beside`.
    """

    parameters: Sequence[nn.Parameter]
    ranks: Group
    leaves: Sequence[Lanes]
    repeats: int = 1
    per_turn: int = 1
    is_beside: bool = True


class Offloaded(NamedTuple):
    """How many bytes the host's memory keeps, and how many of the device's are kept for what is updated at a time."""

    num_bytes: int
    room_bytes: int


class Share:
    """One rank's share of what its column holds."""

    is_whole = False
    """Whether every rank of the column holds all of it, each parameter as the tensor that the model computes with."""
    is_shared_out = False
    """Whether no rank need have all of the weights."""
    deals_lanes = False
    """Whether lanes are dealt out by seats."""
    copies = 1
    """How many groups of ranks hold what is held by seats, once each."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, column: Column) -> None:
        self.model, self.optimizer, self.column = model, optimizer, column
        self.layout, self.circle = column
        self.retained = Retained()

    def begin_with(self, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Begin a run with weights that come one by one, where the model was built without."""
        raise NotImplementedError("weights are whole")

    # Taking a seat.

    @property
    def runs(self) -> Sequence[HeldRun]:
        """What this rank holds by its seat, after all that was on its way there."""
        return ()

    def room_for(self, seating: Seating, known: Sequence[HeldRun] = ()) -> Sequence[HeldRun]:
        """Return the runs of this rank's seat: those of `known` that are the same, and new ones, moments zero."""
        return ()

    def new_run(self, run: Run) -> HeldRun:
        """Return a run to hold."""
        raise NotImplementedError("nothing is held by seats")

    def begin(self, runs: Sequence[HeldRun], *, from_commit: bool) -> None:
        """Put into the runs of a first seat what a run, or the commit that follows, does not bring.

        Whole weights are there already. Raises StateLostError if this process does not have that any more.
        """

    def sit(
        self,
        seating: Seating,
        runs: Sequence[HeldRun],
        num_updates: Sequence[float] | None = None,
        retained: Retained | None = None,
    ) -> None:
        """Take a seat whose weights are in place and whose moments `runs` have.

        `num_updates` is how many updates each parameter group has had; as many as so far if it is not given.
        `retained` is
        what is held beside the seat, for peers that may not have got it.
        """

    def common(self) -> State:
        """Return what all ranks of the column have alike, for one that has nothing yet."""
        raise NotImplementedError

    def take_common(self, alike: State) -> Sequence[float] | None:
        """Take what another rank gave as `alike`; return the counts of updates, as `sit` takes them."""
        raise NotImplementedError

    @property
    def offloaded(self) -> Offloaded | None:
        """What this rank has in host memory in place of its device's; None without offload."""
        return None

    def held(self) -> State:
        """Return what is held as a nested dict, parameters by their full names; its tensors are the live ones."""
        raise NotImplementedError

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        """Take over what `fill` reads into the pieces of a nested dict of whole tensors; gradients stay bound.

        `cuts` says of which parameters the place that this rank has holds a part.
        """
        raise NotImplementedError

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction, *, by_turn: bool) -> GradientSum:
        """Bind the gradients, and return the sum along some trees that leaves a mean where it is held.

        Weights in shares are gathered for a turn, or for a step.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""

    def take_order(self, names: Sequence[str]) -> None:
        """Learn in which order a pass runs the model's blocks."""

    def agree_on_order(self, group: Group) -> None:
        """Let all ranks gather blocks in one order."""

    def refresh(self, column: Group, *, everything: bool = False) -> None:
        """Get the weights that peers alone have updated; with `everything`, also those that nobody updates."""

    def turns(self, column: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield what this rank runs forward passes with outside of a step; peers may take part in it."""
        return items

    def computing(self, ranks: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which some ranks of the column compute a lane outside of a step's sum."""
        return contextlib.nullcontext()

    def averaged(self, column: Group) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model has the averages of its weights."""
        raise NotImplementedError

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers that are whole on every rank of the column, by name."""
        return self.model.state_dict()

    @cached_property
    def _parameters(self) -> Sequence[nn.Parameter]:
        """The model's parameters by the number of their tensor in the layout."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return [named[one.names[0]] for one in self.layout.tensors]

    def weights_at(self, number: int, lo: int, hi: int) -> Tensor:
        """Return the memory of the elements [lo, hi) of a tensor that this rank has, in memory order."""
        return in_memory_order(self._parameters[number].detach(), self.layout.tensors[number].cut)[lo:hi]

    def make_whole(self, column: Group, num_ranks: int) -> None:
        """Make the weights whole on the first ranks of the column."""

    def measure(self) -> Tensor:
        """Return the sums of the squares of the gradient's grains that this rank updates, ascending."""
        raise NotImplementedError

    def clip(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor."""
        raise NotImplementedError

    def tensors(self) -> Iterator[OfPart]:
        """Yield what is held beside the model's own weights, each with the part of memory that it belongs to."""
        raise NotImplementedError


class WholeShare(Share):
    """A whole copy of a column's part."""

    is_whole = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        scaler: GradScaler,
        memory: OptimizerMemory,
        first: FirstStates,
        column: Column,
        bucket_bytes: float | None = None,
    ) -> None:
        super().__init__(model, optimizer, column)
        self.scheduler, self.scaler = scheduler, scaler
        self._memory, self._first, self._bucket_bytes = memory, first, bucket_bytes
        self._named: tuple[tuple[object, ...], Mapping[str, object], Names] | None = None
        self._cuts = {name: one.cut for one in column.layout.tensors for name in one.names}

    def held(self) -> State:
        memory = tuple(self._memory_of_weights())
        if self._named is None or memory != self._named[0]:
            # Naming takes longer than all else that a save does at a step boundary, and holds while the tensors do.
            self._named = (memory, get_model_state_dict(self.model), names_of(self.model))
        return {
            "model": dict(self._named[1]),
            "optimizer": self._memory.tree(self._named[2]),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _memory_of_weights(self) -> Iterator[object]:
        """Yield where the memory of every weight and buffer is."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield id(tensor), tensor.data_ptr()

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        tree: State = {"model": get_model_state_dict(self.model), "optimizer": {}, "scheduler": {}, "scaler": {}}
        if cuts:
            tree = self._filled_parts(tree, fill, cuts, place)
        else:
            fill(tree)
        self._take(tree, keeps_rates=keeps_rates)

    def common(self) -> State:
        return self.held()

    def take_common(self, alike: State) -> Sequence[float] | None:
        self._take(alike, keeps_rates=False)
        return None

    def _take(self, tree: State, *, keeps_rates: bool) -> None:
        bases = [float(base) for base in self.scheduler.base_lrs]
        set_model_state_dict(self.model, tree["model"])  # type: ignore[arg-type]
        self._take_optimizer(tree["optimizer"], keeps_rates=keeps_rates)  # type: ignore[arg-type]
        self.scheduler.load_state_dict(tree["scheduler"])  # type: ignore[arg-type]
        if tree["scaler"]:
            self.scaler.load_state_dict(tree["scaler"])  # type: ignore[arg-type]
        if keeps_rates:
            set_rates(self.optimizer, self.scheduler, bases)
        self._named = None

    def _take_optimizer(self, saved: Mapping[str, Any], *, keeps_rates: bool) -> None:
        names = names_of(self.model)
        if keeps_rates:
            state = regroup(saved, names, self.optimizer, self._first)
        else:
            state = saved["state"]
            for group, given in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in given.items() if key != "params"})
        self._memory.take_state(state, names)
        self._memory.take_own(saved.get(OWN, {}), names)

    def _filled_parts(self, tree: State, fill: Callable[[State], None], cuts: Cuts, place: int) -> State:
        """Return a tree of what this rank holds, filled from a commit's whole tensors or a peer's parts."""

        def emptied(path: StatePath, leaf: Tensor) -> Tensor:
            return leaf if cut_at(path, leaf, cuts, place) is None else torch.empty_like(leaf)

        weights = with_tensors({"model": tree["model"]}, emptied)
        moments = with_tensors({"optimizer": {"state": self._first_moments()}}, emptied)
        try:
            found = filled_parts({**tree, **weights, **moments}, fill, cuts, place)
        except ConfigError:  # nothing has changed yet; other moments were saved than this optimizer has
            found = filled_parts({**tree, **weights, "optimizer": {}}, fill, cuts, place)

        device = next(self.model.parameters()).device

        def part_of(path: StatePath, leaf: Tensor | Pieces) -> Tensor:
            if isinstance(leaf, Tensor):
                return leaf
            [memory] = [*leaf.held.values()] or [torch.empty(0, dtype=leaf.dtype, device=device)]
            return cuts[weight_of(path) or ""].shaped(memory, place)

        return with_tensors(found, part_of)

    def _first_moments(self) -> State:
        """Return what a commit has at least of the parameters that this rank holds."""
        names, groups = names_of(self.model), enumerate(self.optimizer.param_groups)
        found = {names[id(one)]: self._first.of(number, one)[1] for number, group in groups for one in group["params"]}
        self._first.forget()
        return {name: dict(state) for name, state in found.items() if state}

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction, *, by_turn: bool) -> GradientSum:
        made = [tree_of(kind, one.parameters, one.ranks, one.leaves) for one in trees]
        beside = [one if of.is_beside else one._replace(placed=()) for one, of in zip(made, trees, strict=True)]
        return TreeSum(beside, self._bucket_bytes)

    @contextlib.contextmanager
    def averaged(self, column: Group) -> Iterator[None]:
        before = {one: one.data for one, kept in self.optimizer.state.items() if AVERAGE in kept}
        for parameter in before:
            parameter.data = self.optimizer.state[parameter][AVERAGE]
        try:
            yield
        finally:
            for parameter, weights in before.items():
                parameter.data = weights

    def measure(self) -> Tensor:
        named = self.model.named_parameters()
        return squares_of_tensors((one.grad, self._cuts[name]) for name, one in named if one.grad is not None)

    def clip(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def tensors(self) -> Iterator[OfPart]:
        for kept in self.optimizer.state.values():
            yield from (("optimizer", value) for value in kept.values() if isinstance(value, Tensor))
