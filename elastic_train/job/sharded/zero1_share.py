"""ZeRO-1: a rank holds the moments of its seat's grains, and updates only these.

Weights are whole on every rank: after an update, each rank sends the weights it has updated to the others of its group.
A rank counts as holder only of its seat's grains, weights included. A seat is taken completely or not at all: data that
arrives for a new seat does not touch the old one. ZeRO-2 and ZeRO-3 (`zero3_share`) also shard gradients and weights.

The sharding does not affect any bit: updates are elementwise, or of tensors held whole; the norm is computed per grain;
and a shard begins at a multiple of the layout's alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE, State
from elastic_train.core.arrays import Int64s
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import OWN, OptimizerMemory, settings_of
from elastic_train.job.optimizers.parameter_groups import FirstStates
from elastic_train.job.sharded.elementwise import Slots, depends_on_parts
from elastic_train.job.sharded.flat_model import FlatModel
from elastic_train.job.sharded.held_tree import (
    Cuts,
    Held,
    HeldRun,
    Retained,
    TensorPieces,
    count_of,
    filled_parts,
    is_within,
    keep,
    names_of,
    pieces_of,
    shaped,
    spans_of,
    tree_to_fill,
)
from elastic_train.job.sharded.moment_positions import positions_of
from elastic_train.job.sharded.share import Offloaded, Share, SharedScaler, Summed
from elastic_train.job.sharded.streamed_update import Offload, StreamedUpdate, Updated
from elastic_train.parallel.buckets import Wire
from elastic_train.parallel.devices.squares import squares_of_vectors
from elastic_train.parallel.exchange import AtOwners, Reduction, move
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, Tree, TreeSum, reduce_of
from elastic_train.parallel.group import Group
from elastic_train.placement.grain_tables import Lengths
from elastic_train.placement.grains import Tensor as Place
from elastic_train.placement.holdings import Run, grains_side_by_side
from elastic_train.placement.seating import Seating, by_flats
from elastic_train.placement.table import Table

T = TypeVar("T")


class Zero1Share(Share):
    """A rank's shard of the moments, by its seat."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        scaler: SharedScaler,
        table: Table,
        first: FirstStates,
        slots: Sequence[Slots],
        bucket_bytes: float | None = None,
        wire: Wire = "exact",
        offload: Offload | None = None,
        gathers: torch.dtype | None = None,
    ) -> None:
        """With `gathers`, whoever gathers weights for a pass rounds them to this dtype."""
        memory = OptimizerMemory(optimizer, {})  # its parameters stand for runs, and have no names
        super().__init__(model, optimizer, scheduler, scaler, table, memory, first, bucket_bytes)
        self.flat, self._wire, self._gathers = FlatModel(model, self.layout), wire, gathers
        self.make_gradients()
        self._runs: list[HeldRun] = []
        self._pieces: Mapping[str, TensorPieces] | None = None
        self._names, self._slots = names_of(model, optimizer), slots
        """Per parameter group: the names of its parameters, and the optimizer's slots."""
        self._positions = positions_of(self.layout, slots)
        """Positions of the moments of each flat vector."""
        self._gradients: list[tuple[Tensor, Lengths]] = []
        """Gradients for the norm: adjacent grains of a tensor, and their lengths."""
        self._updated: list[Updated] = []
        for group in optimizer.param_groups:  # the optimizer never sees the model's own parameters
            group["params"] = []
        optimizer.state.clear()
        self.offload = offload
        self._stream = None if offload is None else StreamedUpdate(optimizer, offload)

    @property
    def runs(self) -> list[HeldRun]:
        self.settle()
        return self._runs

    def settle(self) -> None:
        """Wait until host memory has the result of the last update; returns at once without offload."""
        if self.offload is not None:
            self.offload.memory.settle()

    @property
    def offloaded(self) -> Offloaded | None:
        if self.offload is None or self._stream is None:
            return None
        weights = [one.weights for one in self._runs] if self.offload.with_weights else []
        moments = [moment for one in self._runs for moment in one.moments.values()]
        return Offloaded(sum(tensor.nbytes for tensor in (*weights, *moments)), self._stream.room_bytes)

    def runs_for(self, table: Table, known: Sequence[HeldRun] = ()) -> list[HeldRun]:
        kept = {one.run: one for one in known}
        return [kept.get(run) or self._new_run(run) for run in table.runs()]

    def cut_out(self, runs: Sequence[HeldRun], run: Run) -> HeldRun:
        if is_within(run, runs):
            return super().cut_out(runs, run)
        joined = self._new_run(run)
        keep(joined, runs)
        return joined

    def _new_run(self, run: Run) -> HeldRun:
        weights, positions = self.memory_of(run), self._positions[run.flat]
        names = (*self._moments_of(run.flat), *positions.ends)
        begun = {name: self.kept_zeros(run.flat, positions.size(name, run), weights.dtype) for name in names}
        if AVERAGE in begun:
            begun[AVERAGE].copy_(weights)
        return HeldRun(run, weights, begun, positions)

    def kept_zeros(self, flat: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros of a flat vector, in the memory that holds the optimizer's state."""
        return self.flat.zeros(flat, numel) if self.offload is None else self.offload.memory.zeros(numel, dtype)

    def zero_weights(self, flat: int, numel: int) -> Tensor:
        """Return zeros for weights of a flat vector, in the memory that holds weights of which a rank has a share."""
        keeps = self.offload is not None and self.offload.with_weights
        return self.kept_zeros(flat, numel, self.flat.weights[flat].dtype) if keeps else self.flat.zeros(flat, numel)

    def memory_of(self, run: Run) -> Tensor:
        """Return memory for the weights of a run of this rank."""
        return self.flat.weights_at(run)

    def sit(
        self,
        table: Table,
        runs: Sequence[HeldRun] = (),
        num_updates: Sequence[float] | None = None,
        retained: Retained | None = None,
    ) -> None:
        counts = self._num_updates() if num_updates is None else list(num_updates)
        self.retained = retained or Retained()
        self.table, self._runs, self._pieces = table, list(runs), None
        self.make_room()
        self.optimizer.state.clear()
        self._updated = []
        for number, group in enumerate(self.optimizer.param_groups):
            mine = [one for one in self.runs if self.layout.flats[one.run.flat].group == number]
            whole = self._whole(mine) if self._slots[number].is_atomic else ((one, None) for one in mine)
            group["params"] = [self._parameter(number, one, counts[number], place) for one, place in whole]
            group["params"] += [] if group["params"] else self._nothing(number, counts[number])
        self.bind_gradients()
        if self._stream is not None:
            self._stream.take(self._updated)

    def bind_gradients(self) -> None:
        """Bind the held runs' gradients to the optimizer's parameters and to the norm."""
        for one in self._updated:
            run = one.held.run
            is_empty = run.lo == run.hi
            one.parameter.grad = (
                torch.zeros_like(one.parameter) if is_empty else shaped(self.gradients_at(run), one.whole)
            )
        trained = self.seating.trained[self.seating.rank]
        runs = grains_side_by_side(self.layout, trained, [one.run for one in self._runs])
        self._gradients = [(self.gradients_at(run), lengths) for run, lengths in runs]

    def _num_updates(self) -> list[float]:
        """Return the number of updates of each parameter group."""
        groups = self.optimizer.param_groups
        states = [self.optimizer.state.get(group["params"][0], {}) if group["params"] else {} for group in groups]
        return [float(state.get("step", 0.0)) for state in states]

    def common(self) -> State:
        buffers, groups = dict(self.model.named_buffers()), list(map(settings_of, self.optimizer.param_groups))
        found = {"groups": groups, "buffers": buffers, "num_updates": self._num_updates()}
        return {**self._plain(), **found, OWN: self._memory.own({})}

    def take_common(self, alike: Mapping[str, Any]) -> Sequence[float] | None:
        self._take_settings(alike["groups"], alike, alike.get(OWN, {}), {}, keeps_rates=False)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(alike["buffers"][name])
        return list(alike["num_updates"])

    def make_gradients(self) -> None:
        """Allocate the gradients that lanes are added to: whole ones."""
        self.flat.make_gradients()

    def make_room(self) -> None:
        """Allocate memory that the seat's runs need besides weights and moments: none, as gradients are whole."""

    def gradients_at(self, run: Run) -> Tensor:
        """Return the gradient of a run that this rank holds."""
        return self.flat.gradients[run.flat][run.lo : run.hi]

    def gradients_of(self, number: int, grains: Int64s) -> Sequence[Tensor]:
        runs = grains_side_by_side(self.layout, grains, [one.run for one in self._runs])
        return [self.gradients_at(run) for run, _ in runs]

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction) -> GradientSum:
        assert kind == "canonical" or self.table.num_copies == column.size, "copies have to have the same bits"
        self.flat.bind()
        return TreeSum([self._tree_of(one, kind) for one in trees], self._bucket_bytes)

    def _tree_of(self, one: Summed, kind: Reduction) -> Tree:
        numbers, seating = self.flats_of(one.parameters), self.seating_of_all(one.ranks, one.repeats)
        owned = [[run for run in runs if run.flat in numbers] for runs in seating.owned_runs()]
        [deliveries] = by_flats(seating.deliveries(), [numbers])
        flats = [flat if number in numbers else flat[:0] for number, flat in enumerate(self.flat.gradients)]
        placed = [each for each in self.flat.placed() if each.flat in numbers]
        reduce = AtOwners(owned, deliveries) if kind == "canonical" else reduce_of(kind)
        return Tree(flats, one.ranks, one.leaves, reduce, placed, self.is_beside(one))

    def flats_of(self, parameters: Sequence[nn.Parameter]) -> Collection[int]:
        """Return the numbers of the flat vectors that contain some parameters."""
        some = {id(one) for one in parameters}
        return {one.flat for one in self.flat.placed() if id(one.parameter) in some}

    def seating_of_all(self, ranks: Group, repeats: int) -> Seating:
        """Return the seats of `ranks`, where `repeats` neighbours each stand for one rank of the column."""
        if repeats == 1:
            return self.seating
        seats = [seat for seat in self.seating.seats for _ in range(repeats)]
        return Seating(self.layout, self.circle, seats, ranks.rank)

    def refresh(self, column: Group, *, everything: bool = False) -> None:
        seating = self.seating
        move(column, seating.gathers(seating.holdings) if everything else seating.refreshes, self.flat.weights_at)

    def measure(self) -> Tensor:
        vectors, lengths = [one for one, _ in self._gradients], [lengths for _, lengths in self._gradients]
        return squares_of_vectors(vectors, lengths)

    @contextlib.contextmanager
    def averaged(self, column: Group) -> Iterator[None]:
        trained = [number for number, flat in enumerate(self.layout.flats) if flat.group is not None]
        vectors = {flat: self.flat.zeros(flat, self.layout.flats[flat].numel) for flat in trained}
        for one in self.trained_runs:
            vectors[one.run.flat][one.run.lo : one.run.hi].copy_(one.moments[AVERAGE])
        move(column, self.seating.refreshes, lambda run: vectors[run.flat][run.lo : run.hi])
        with self.flat.showing(vectors):
            yield

    def tensors(self) -> Iterator[OfPart]:
        for one in (*self._runs, *self.retained.runs):
            yield "weights", one.weights
            yield from (("optimizer", moment) for moment in one.moments.values())
        if self._stream is not None:
            yield from (("optimizer", room) for room in self._stream.rooms)

    def held(self) -> State:
        self.settle()
        self._check_slots()
        named = self.pieces()
        groups = zip(self._names, self._slots, self._num_updates(), strict=True)
        kept = {name: own.filled(named[name].moments, count) for names, own, count in groups for name in names}
        moments = {name: kept[name] for name in (place.names[0] for place in self.layout.tensors) if kept.get(name)}
        named_groups = zip(self.optimizer.param_groups, self._names, strict=True)
        settings = [{**settings_of(group), "params": list(names)} for group, names in named_groups]
        own = self._memory.own({})
        optimizer = {"state": moments, "param_groups": settings, **({OWN: own} if own else {})}
        return {"model": self.held_weights(), "optimizer": optimizer, **self._plain()}

    def _check_slots(self) -> None:
        """Refuse state that the optimizer began to keep after its first steps: commits would lack it."""
        known = {name for slots in self._slots for name in slots.names}
        for kept in self.optimizer.state.values():
            if late := [key for key, value in kept.items() if key not in known and value is not None]:
                raise depends_on_parts(type(self.optimizer), f"it began to keep '{late[0]}' after its first steps")

    def held_weights(self) -> State:
        """Return weights and buffers as a commit has them."""
        return dict(self.model.state_dict())

    def take(self, fill: Callable[[State], None], cuts: Cuts, place: int, *, keeps_rates: bool) -> None:
        """Fill the state of the current seat from a commit; see `Share.take`.

        Averages that the commit lacks start from its weights.
        """
        tree = tree_to_fill(self.held())
        try:
            tree = filled_parts(tree, fill, cuts, place)
        except ConfigError:  # nothing has changed yet
            if AVERAGE not in self._slots[0].moments:
                raise
            tree = filled_parts(tree_to_fill(self.held(), leaving_out=AVERAGE), fill, cuts, place)
            for one in self.trained_runs:
                one.moments[AVERAGE].copy_(one.weights)
        moments: Mapping[str, Mapping[str, object]] = tree["optimizer"]["state"]  # type: ignore[index]
        optimizer: Mapping[str, Any] = tree["optimizer"]  # type: ignore[assignment]
        own = optimizer.get(OWN, {})
        self._take_settings(optimizer["param_groups"], tree, own, {}, keeps_rates=keeps_rates)
        steps = [[moments[name].get("step", 0.0) for name in names if name in moments] for names in self._names]
        self.sit(self.table, self.runs, [count_of(group) for group in steps])

    def pieces(self) -> Mapping[str, TensorPieces]:
        """Return the pieces of every tensor under each of its names; cached until the seat changes."""
        if self._pieces is None:
            spans = spans_of(self.layout, Held(self.seating.held, self.seating.sections_of(self.seating.rank)))
            self._pieces = {}
            for number, place in enumerate(self.layout.tensors):
                is_trained = self.layout.flats[place.flat].group is not None
                if is_trained or self.table.shares_weights:
                    group, whole = self.layout.flats[place.flat].group, self.table.parts.layout.tensors[number]
                    others = {} if group is None else self._slots[group].others_of(whole.shape)
                    moments, mine = self._moments_of(place.flat), spans.get(number, ())
                    pieces = pieces_of(self.layout, place, whole, moments, others, mine, self.runs)
                    self._pieces.update(dict.fromkeys(place.names, pieces))
        return self._pieces

    @property
    def seating(self) -> Seating:
        """The seats of the column."""
        return self.table.seating()

    @property
    def trained_runs(self) -> list[HeldRun]:
        """Held runs that are updated."""
        return [one for one in self.runs if self.layout.flats[one.run.flat].group is not None]

    def _whole(self, runs: Sequence[HeldRun]) -> Iterator[tuple[HeldRun, Place]]:
        """Yield the tensors in runs that consist of whole tensors."""
        for one in runs:
            for place in self.layout.tensors:
                run = Run(place.flat, place.start, place.start + place.numel)
                if place.numel and run.flat == one.run.flat and one.run.lo <= run.lo < one.run.hi:
                    yield one.cut(run), place

    def _parameter(self, group: int, one: HeldRun, num_updates: float, whole: Place | None = None) -> nn.Parameter:
        """Return an optimizer's parameter, of a run or a `whole` tensor, with its state."""
        parameter = nn.Parameter(self.flat.standing_for(shaped(one.weights, whole)))
        shapes = self._slots[group].shapes_of(parameter.shape)
        held = replace(one, moments={name: one.moments[name] for name in shapes})
        self._updated.append(updated := Updated(group, parameter, held, whole, shapes))
        if kept := self._slots[group].filled(updated.state_in(held.moments), num_updates):
            self.optimizer.state[parameter] = kept
        return parameter

    def _moments_of(self, flat: int) -> Sequence[str]:
        """Return the names of a flat vector's elementwise moments; empty if it is not trained."""
        group = self.layout.flats[flat].group
        return () if group is None else self._slots[group].moments

    def _nothing(self, number: int, num_updates: float) -> list[nn.Parameter]:
        """Return a stand-in for a parameter group without held runs, so that its updates are counted.

        It is empty, or has one element if parameters must be whole.
        """
        slots = self._slots[number]
        place = next(one for one in self.layout.tensors if self.layout.flats[one.flat].group == number)
        run = Run(place.flat, 0, 0)
        if not slots.is_atomic:
            return [self._parameter(number, self._new_run(run), num_updates)]
        if slots.count is None:
            return []
        one = replace(place, shape=(1,) * len(place.shape), cut=None)
        weights = self.zero_weights(run.flat, 1)
        moments = {name: self.kept_zeros(run.flat, 1, weights.dtype) for name in slots.shapes_of(one.shape)}
        return [self._parameter(number, HeldRun(run, weights, moments), num_updates, one)]
