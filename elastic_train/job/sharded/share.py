"""What one rank holds of a part of the state: all of it, or a share by its seat.

The ranks that hold the same part are a *column*; where there are no cells, all ranks are one. What is here is what a
`StateShards` asks of a share, with the answers of one whose weights are whole on every rank of the column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, Lanes
from elastic_train.core.mesh import Cell
from elastic_train.errors import ConfigError
from elastic_train.job.cells.state_parts import Cuts, cut_at, filled_parts, with_tensors
from elastic_train.job.optimizers.optimizer_memory import OWN, Names, OptimizerMemory, names_of
from elastic_train.job.optimizers.parameter_groups import FirstStates, regroup, set_rates
from elastic_train.job.sharded.held_tree import Cuts as Spans
from elastic_train.job.sharded.held_tree import HeldRun, Retained
from elastic_train.parallel.devices.squares import squares_of_tensors
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.placement.holdings import Column, Run
from elastic_train.placement.seating import Seating
from elastic_train.placement.seats import Seat

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


class Share:
    """One rank's share of what its column holds."""

    is_whole = False
    """Whether every rank of the column holds all of it, each parameter as the tensor that the model computes with."""
    is_shared_out = False
    """Whether no rank need have all of the weights."""
    copies = 1
    """How many groups of ranks hold what is held by seats, once each."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, column: Column) -> None:
        self.model, self.optimizer, self.column = model, optimizer, column
        self.layout, self.circle = column
        self.retained = Retained()
        self.made = dict[StatePath, tuple[Pieces, Pieces]]()
        """What commits are given of the pieces that are held, by path, as long as seat and writers are the same."""

    @property
    def seat(self) -> Seat | None:
        """This rank's seat; None before its first world, and where every rank holds all."""
        return None

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

    def begin(self, runs: Sequence[HeldRun]) -> None:
        """Put into the runs of a first seat what a run begins with; whole weights are there already."""

    def begin_from_commit(self, runs: Sequence[HeldRun]) -> None:
        """Put into the runs of a seat what the commit that it begins with does not hold; see `begin`.

        Raises StateLostError if this process does not have that any more.
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
    def has_offload(self) -> bool:
        """Whether host memory keeps some of it in place of a device's."""
        return False

    def offloaded_bytes(self) -> int:
        """Return how much this rank has in host memory in place of its device's."""
        return 0

    def room_bytes(self) -> int:
        """Return how much of the device's memory is kept for updates of what is in host memory."""
        return 0

    @property
    def rank(self) -> int:
        """This rank's number in the column of the world that gave it its seat."""
        return 0

    @property
    def holds_nothing(self) -> bool:
        """Whether this rank has a seat at which it holds nothing."""
        return False

    def held(self) -> State:
        """Return what is held as a nested dict, parameters by their full names; its tensors are the live ones."""
        raise NotImplementedError

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        """Take over what `fill` reads into the pieces of a nested dict of whole tensors; gradients stay bound.

        `cuts` says of which parameters the place that this rank has holds a part.
        """
        raise NotImplementedError

    def assigned(self, num_replicas: int, num_lanes: int, cell: Cell) -> Assignment:
        """Return the lanes of every owner of a world of replicas of a shape."""
        raise NotImplementedError

    def begin_sums(self) -> None:
        """Make gradients ready for the sums of a new world."""

    def sum_over(
        self, trees: Sequence[Summed], kind: Reduction, weights: UnitWeights | None, *, by_turn: bool
    ) -> GradientSum:
        """Return the sum along some trees that leaves a mean where it is held, once `begin_sums` was called.

        `weights` are gathered for a turn, or for a step.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""

    def gathering(self, column: Group, *, by_unit: bool) -> UnitWeights | None:
        """Return what gathers weights, unit by unit for a pass, or all for a step; None if they are whole."""
        return None

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

    def digest(self, column: Group) -> str:
        """Return the digest of all weights and buffers of the part; all ranks of the column call it."""
        return self.digest_alone()

    def digest_alone(self) -> str:
        """Return the digest as far as this rank can say; empty if it holds but a share of the weights."""
        return weights_digest(self.model, self.column.layout.dims)

    def check_copies(self, column: Group, step: int) -> None:
        """Raise WeightsDifferError, on every rank of the column, if two hold other weights that are not whole."""

    def showing_whole(self, column: Group, num_ranks: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the first ranks of the column have whole weights."""
        return contextlib.nullcontext()

    def make_whole(self, column: Group, num_ranks: int) -> None:
        """Make the weights whole on the first ranks of the column."""

    def measure(self) -> Tensor:
        """Return the sums of the squares of the gradient's grains that this rank updates, ascending."""
        raise NotImplementedError

    def updated(self, column: Column, num_ranks: int) -> Sequence[Int64s]:
        """Return the grains that each rank of a column of this world updates."""
        raise NotImplementedError

    def clip(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor."""
        raise NotImplementedError

    def written(self, columns: Sequence[Column], writers: Sequence[Sequence[int]]) -> Sequence[Spans]:
        """Return by column which spans of each of its tensors each rank speaks for, if some ranks of each write.

        Raises LookupError if these do not hold everything. Nothing is returned where parts are held as a whole.
        """
        raise NotImplementedError

    def holds_all(self) -> bool:
        """Say whether this rank holds all of the part."""
        raise NotImplementedError

    def are_sole_holders(self, column: Column, leaving: Sequence[bool]) -> bool:
        """Say whether ranks of a column of this world, marked by rank, hold something that no other rank of it does."""
        raise NotImplementedError

    def num_copies(self, column: Column) -> int:
        """Return how many ranks of a column of this world hold each share, at least."""
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

    def assigned(self, num_replicas: int, num_lanes: int, cell: Cell) -> Assignment:
        return cell.assigned(num_replicas, num_lanes)

    def sum_over(
        self, trees: Sequence[Summed], kind: Reduction, weights: UnitWeights | None, *, by_turn: bool
    ) -> GradientSum:
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

    def updated(self, column: Column, num_ranks: int) -> Sequence[Int64s]:
        return [column.layout.trained] * num_ranks

    def clip(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def written(self, columns: Sequence[Column], writers: Sequence[Sequence[int]]) -> Sequence[Spans]:
        if not all(writers):
            raise LookupError("no writer holds some part")
        return ()

    def holds_all(self) -> bool:
        return True

    def are_sole_holders(self, column: Column, leaving: Sequence[bool]) -> bool:
        return all(leaving)

    def tensors(self) -> Iterator[OfPart]:
        for kept in self.optimizer.state.values():
            yield from (("optimizer", value) for value in kept.values() if isinstance(value, Tensor))
