"""The part of the state that one rank holds: a whole copy of its column's part, or a shard of it.

The ranks that hold the same part are a *column* (shard group); without cells, all ranks are one column. `Share` is a
whole copy; ZeRO-1, 2 and 3 (`zero1_share`, `zero2_share`, `zero3_share`) replace what differs for a shard.
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
from elastic_train.checkpoint.format.state_tree import Pieces, StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Lanes
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import OWN, Names, OptimizerMemory, names_of
from elastic_train.job.optimizers.parameter_groups import FirstStates, regroup, set_rates
from elastic_train.job.sharded.held_tree import Cuts, HeldRun, Retained, cut_at, filled_parts, run_around, with_tensors
from elastic_train.parallel.devices.squares import in_memory_order, squares_of_tensors
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.placement.holdings import Run, grains_side_by_side
from elastic_train.placement.table import Table

T = TypeVar("T")


def _is_extra(name: str) -> bool:
    """Return True for the name of what a module's `get_extra_state` returns: a new tensor each time."""
    return name.rpartition(".")[2] == "_extra_state"


class Summed(NamedTuple):
    """Parameters whose gradients are summed along one tree; `leaves` has the leaves of each of the `ranks`.

    The ranks are those of the column, or `repeats` neighbours stand for one rank of it. A rank computes `per_turn`
    leaves at a time; the exchange overlaps with computation only if `is_beside`.
    """

    parameters: Sequence[nn.Parameter]
    ranks: Group
    leaves: Sequence[Lanes]
    repeats: int = 1
    per_turn: int = 1
    is_beside: bool = True


class Offloaded(NamedTuple):
    """Bytes kept in host memory, and bytes reserved on the device for the blocks being updated."""

    num_bytes: int
    room_bytes: int


class Share:
    """One rank's share of its column's part: all of it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        scaler: GradScaler,
        table: Table,
        memory: OptimizerMemory,
        first: FirstStates,
        bucket_bytes: float | None = None,
    ) -> None:
        """`table` is of a world in which this rank has no seat yet."""
        self.model, self.optimizer, self.scheduler, self.scaler = model, optimizer, scheduler, scaler
        self.table, (self.layout, self.circle) = table, table.parts.columns[table.part]
        self._memory, self._first, self._bucket_bytes = memory, first, bucket_bytes
        self._named: tuple[tuple[object, ...], Mapping[str, object], Names] | None = None
        self._cuts = {name: one.cut for one in self.layout.tensors for name in one.names}
        self.retained = Retained()
        self.first_weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
        """Source of the initial weights, one by one, for a model built without weights."""

    # Taking a seat.

    @property
    def runs(self) -> Sequence[HeldRun]:
        """Runs that this rank's seat holds, after pending copies have finished."""
        return ()

    def runs_for(self, table: Table, known: Sequence[HeldRun] = ()) -> list[HeldRun]:
        """Return the runs of this rank's seat in a table: equal ones of `known`, and new ones with zero moments.

        Weights of new runs are the live ones if weights are whole.
        """
        return []

    def cut_out(self, runs: Sequence[HeldRun], run: Run) -> HeldRun:
        """Return the contents of a run that held runs contain: a view if one does, else a copy put together."""
        return run_around(runs, run).cut(run)

    def begin(self, runs: Sequence[HeldRun], *, from_commit: bool) -> None:
        """Fill the runs of a first seat with values that neither the run nor the following commit provides.

        Whole weights are already in place. Raises StateLostError if this process no longer has these values.
        """

    def sit(
        self,
        table: Table,
        runs: Sequence[HeldRun] = (),
        num_updates: Sequence[float] | None = None,
        retained: Retained | None = None,
    ) -> None:
        """Take the seat of a table; its weights are in place, and `runs` has its moments.

        `num_updates` is the number of updates of each parameter group, by default unchanged. `retained` is the old
        shard, kept until all peers have received theirs.
        """
        self.table = table

    # What is saved and handed over.

    def held(self) -> State:
        """Return the held state as a nested dict, parameters by full name, with the live tensors."""
        memory = tuple(self._memory_of_weights())
        if self._named is None or memory != self._named[0] or any(map(_is_extra, self._named[1])):
            # Naming is the slowest part of a save at a step boundary, so names are cached while the tensors stay.
            self._named = (memory, get_model_state_dict(self.model), names_of(self.model))
        _, weights, names = self._named
        return {"model": dict(weights), "optimizer": self._memory.tree(names), **self._plain()}

    def _memory_of_weights(self) -> Iterator[object]:
        """Yield the identity and address of every weight and buffer."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield id(tensor), tensor.data_ptr()

    def _plain(self) -> State:
        """Return the part of the state that a commit has as plain values."""
        return {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        """Load state that `fill` reads into the pieces of a nested dict of whole tensors; gradients stay bound.

        `cuts` has the parameters of which this rank's place holds only a part. With `keeps_rates`, learning rate,
        betas, decay and parameter groups stay as built: the configuration or the task may have changed since the save.
        """
        tree: State = {"model": get_model_state_dict(self.model), "optimizer": {}, "scheduler": {}, "scaler": {}}
        if cuts:
            tree = self._filled_parts(tree, fill, cuts, place)
        else:
            fill(tree)
        self._take(tree, keeps_rates=keeps_rates)

    def common(self) -> State:
        """Return the state that is equal on all ranks of the column, for a rank that has none."""
        return self.held()

    def take_common(self, alike: Mapping[str, Any]) -> Sequence[float] | None:
        """Load another rank's result of `common`; return the update counts, as `sit` takes them."""
        self._take(alike, keeps_rates=False)
        return None

    def _take(self, tree: Mapping[str, Any], *, keeps_rates: bool) -> None:
        set_model_state_dict(self.model, tree["model"])
        saved, names = tree["optimizer"], names_of(self.model)
        state = regroup(saved, names, self.optimizer, self._first) if keeps_rates else saved["state"]
        own = saved.get(OWN, {})
        self._take_settings(saved["param_groups"], tree, own, names, state, keeps_rates=keeps_rates)
        self._named = None

    def _take_settings(
        self,
        groups: Sequence[Mapping[str, Any]],
        plain: Mapping[str, Any],
        own: Mapping[str, Any],
        names: Names,
        state: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        keeps_rates: bool,
    ) -> None:
        """Load group settings (unless `keeps_rates`), moments, the optimizer's own values, and plain values."""
        bases = [float(base) for base in self.scheduler.base_lrs]
        if not keeps_rates:
            for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        if state is not None:
            self._memory.take_state(state, names)
        self._memory.take_own(own, names)
        self.scheduler.load_state_dict(plain["scheduler"])
        if plain["scaler"]:
            self.scaler.load_state_dict(plain["scaler"])
        if keeps_rates:
            set_rates(self.optimizer, self.scheduler, bases)

    def _filled_parts(self, tree: State, fill: Callable[[State], None], cuts: Cuts, place: int) -> State:
        """Return this rank's state, filled from a commit's whole tensors or a peer's parts."""

        def emptied(path: StatePath, leaf: Tensor) -> Tensor:
            return leaf if cut_at(path, leaf, cuts, place) is None else torch.empty_like(leaf)

        weights = with_tensors({"model": tree["model"]}, emptied)
        moments = with_tensors({"optimizer": {"state": self._first_moments()}}, emptied)
        try:
            found = filled_parts({**tree, **weights, **moments}, fill, cuts, place)
        except ConfigError:  # nothing has changed yet: the saved moments are not this optimizer's
            found = filled_parts({**tree, **weights, "optimizer": {}}, fill, cuts, place)

        device = next(self.model.parameters()).device

        def part_of(path: StatePath, leaf: Tensor | Pieces) -> Tensor:
            if isinstance(leaf, Tensor):
                return leaf
            [memory] = [*leaf.held.values()] or [torch.empty(0, dtype=leaf.dtype, device=device)]
            return cuts[weight_of(path) or ""].shaped(memory, place)

        return with_tensors(found, part_of)

    def _first_moments(self) -> State:
        """Return the optimizer state that a commit has at least for this rank's parameters."""
        names, groups = names_of(self.model), enumerate(self.optimizer.param_groups)
        found = {names[id(one)]: self._first.of(number, one)[1] for number, group in groups for one in group["params"]}
        self._first.forget()
        return {name: dict(state) for name, state in found.items() if state}

    @property
    def offloaded(self) -> Offloaded | None:
        """Sizes of the state in host memory; None without offload."""
        return None

    def tensors(self) -> Iterator[OfPart]:
        """Yield the tensors held besides the model's own weights, each with its category of memory."""
        for kept in self.optimizer.state.values():
            yield from (("optimizer", value) for value in kept.values() if isinstance(value, Tensor))

    # Computing.

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction) -> GradientSum:
        """Bind the gradients and return the sum along some trees, which leaves each mean on the ranks that hold it."""
        made = [tree_of(kind, one.parameters, one.ranks, one.leaves) for one in trees]
        beside = [one._replace(is_beside=self.is_beside(of)) for one, of in zip(made, trees, strict=True)]
        return TreeSum(beside, self._bucket_bytes)

    def is_beside(self, one: Summed) -> bool:
        """Return True if gradients may be exchanged during a backward pass.

        Not if the pass itself exchanges between devices: their groups' operations could wait for one another, because
        ranks begin them in different orders.
        """
        return one.is_beside and (self.table.cell.size == 1 or not one.ranks.connects_devices)

    def close(self) -> None:
        """Stop changing the model's parameters."""

    def agree_on_order(self, group: Group, order: Sequence[str]) -> None:
        """Make all ranks gather blocks in the same order; `order` is the one that this rank knows, if any."""

    def refresh(self, column: Group, *, everything: bool = False) -> None:
        """Receive the weights that peers have updated; with `everything`, also frozen ones."""

    def turns(self, column: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield the items for forward passes outside a step; peers may have to take part."""
        return items

    def computing(self, ranks: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which some ranks of the column compute a lane outside a step's sum."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged(self, column: Group) -> Iterator[None]:
        """Use the averages of the weights in the model within the context; saved state is unaffected."""
        before = {one: one.data for one, kept in self.optimizer.state.items() if AVERAGE in kept}
        for parameter in before:
            parameter.data = self.optimizer.state[parameter][AVERAGE]
        try:
            yield
        finally:
            for parameter, weights in before.items():
                parameter.data = weights

    def measure(self) -> Tensor:
        """Return the sums of squares of the gradient's grains that this rank updates, by ascending grain."""
        named = self.model.named_parameters()
        return squares_of_tensors((one.grad, self._cuts[name]) for name, one in named if one.grad is not None)

    def gradients_of(self, number: int, grains: Int64s) -> Sequence[Tensor]:
        """Return the memory of the gradients of some grains of a tensor that this rank updates, in order."""
        tensor, gradient = self.layout.tensors[number], self._parameters[number].grad
        assert gradient is not None, "the sum has bound it"
        memory = in_memory_order(gradient, tensor.cut)
        runs = grains_side_by_side(self.layout, grains, ())
        return [memory[run.lo - tensor.start : run.hi - tensor.start] for run, _ in runs]

    # Weights.

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers that are whole on every rank of the column, by name."""
        return self.model.state_dict()

    @cached_property
    def _parameters(self) -> Sequence[nn.Parameter]:
        """The model's parameters by the number of their tensor in the layout."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return [named[one.names[0]] for one in self.layout.tensors]

    def weights_at(self, number: int, lo: int, hi: int) -> Tensor:
        """Return the memory of elements [lo, hi) of a tensor that this rank has, in memory order.

        They lie in grains of one section that the rank has.
        """
        return in_memory_order(self._parameters[number].detach(), self.layout.tensors[number].cut)[lo:hi]

    def make_whole(self, column: Group, num_ranks: int) -> None:
        """Gather the whole weights on the first `num_ranks` ranks of the column."""


LEAST_SCALE = 2.0**-14
"""Scale below which overflows are no longer attributed to it: 30 halvings from the initial scale."""
_OVERFLOWS = "num_overflows"


class SharedScaler(GradScaler):
    """torch's scaler, which gets the overflow from outside.

    It uses private per-step state of torch's class, as `torch.distributed.fsdp.sharded_grad_scaler` does; that class
    needs a process group of torch.
    """

    num_overflows = 0
    """Number of steps skipped while finding the scale; saved with it."""

    def is_own_overflow(self) -> bool:
        """Return True if a non-finite gradient may be due to the scale.

        A gradient that overflows at the least scale would overflow without scaling, too.
        """
        return self.is_enabled() and self.get_scale() > LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()  # empty without fp16, which earlier steps may have had
        return {**state, _OVERFLOWS: self.num_overflows} if state or self.num_overflows else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() - {_OVERFLOWS}:
            super().load_state_dict(state_dict)
        self.num_overflows = int(state_dict.get(_OVERFLOWS, 0))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients; initialize the scale on ranks without a loss, such as a pipeline's first stage."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def note_overflow(self, optimizer: Optimizer) -> None:
        """Mark the unscaled step as overflowed, on whichever rank it did; does nothing if scaling is off."""
        if self.is_enabled():
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    def forget_step(self) -> None:
        """Discard a step that was unscaled but is not applied."""
        if self.is_enabled():
            self._per_optimizer_states.clear()
