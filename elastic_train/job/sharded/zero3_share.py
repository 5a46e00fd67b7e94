"""ZeRO-2 and ZeRO-3: gradients are sharded like moments, lanes are assigned by seat, and ZeRO-3 also shards weights.

Each unit's weights are gathered when a pass needs them. Until its first seat a rank has the whole initial weights, and
a pass over them records the order of the blocks. Then each held run gets memory of its own.

Frozen weights that commits do not hold, such as the base of adapters, come from the process's initial weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.layout import AVERAGE, State
from elastic_train.errors import ConfigError, StateLostError
from elastic_train.job.sharded.held_tree import HeldRun, run_around
from elastic_train.job.sharded.share import Summed
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.parallel.exchange import Reduction, move
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum, ReduceScatterTree, within
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import Run

T = TypeVar("T")


class Zero2Share(Zero1Share):
    """No gradient is whole: for each flat vector there is only a `home` for this rank's part of its mean."""

    _homes: dict[int, Tensor]
    _dealt: ReduceScatterSum | None = None

    def make_gradients(self) -> None:
        """Allocate nothing until a seat is taken."""
        self._homes = {}

    def make_room(self) -> None:
        sizes = dict.fromkeys((number for number, flat in enumerate(self.layout.flats) if flat.group is not None), 0)
        for one in self.trained_runs:
            sizes[one.run.flat] += one.run.hi - one.run.lo
        for number, size in sizes.items():
            if number not in self._homes or self._homes[number].numel() != size:
                self._homes[number] = self.flat.zeros(number, size)

    def gradients_at(self, run: Run) -> Tensor:
        return within(run, self._homes[run.flat], [one.run for one in self._runs if one.run.flat == run.flat])

    def _begin_sums(self) -> None:
        if self._dealt is not None and self._dealt.is_dirty:  # pending receives still write to the old memory
            self._homes = {}
            self.make_room()
            self.bind_gradients()
        self._dealt = None

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction) -> GradientSum:
        assert kind == "canonical", "copies have to have the same bits"
        self._begin_sums()
        dealt, by_turn = [self._dealt_tree(one) for one in trees], self.table.gathers_by_unit
        self._dealt = ReduceScatterSum(dealt, self._homes, self.gathering(column), self._wire, by_turn=by_turn)
        return self._dealt

    def gathering(self, column: Group) -> UnitWeights | None:
        """Return the gatherer of weights; None if weights are whole."""
        return None

    def _dealt_tree(self, one: Summed) -> ReduceScatterTree:
        numbers = self.flats_of(one.parameters)
        units = [[flat for flat in unit if flat.number in numbers] for unit in self.flat.units()]
        return ReduceScatterTree(
            [unit for unit in units if unit or self.table.gathers_by_unit],
            one.ranks,
            one.leaves,
            self.seating_of_all(one.ranks, one.repeats),
            one.per_turn,
            one.is_beside and one.repeats == 1,  # expert-parallel ranks are at different points of a pass
        )


class Zero3Share(Zero2Share):
    """Weights are whole only before the first seat."""

    _shows_averages = False
    _units: UnitWeights | None = None

    def begin(self, runs: Sequence[HeldRun], *, from_commit: bool) -> None:
        saved = set(self.model.state_dict()) if from_commit else set[str]()
        if all(not one.grains or not saved.isdisjoint(one.names) for one in self.layout.tensors):
            return
        if self.first_weights is not None:
            fill(self.layout, runs, self.first_weights())
        elif from_commit and not self.flat.is_whole:
            raise StateLostError(
                "commits do not hold the frozen weights, and this process has a share of them alone: it ends, and "
                "the next one builds the model with all of them"
            )
        if self.first_weights is not None and not from_commit:
            for one in runs:
                if AVERAGE in one.moments:
                    one.moments[AVERAGE].copy_(one.weights)

    def agree_on_order(self, group: Group, order: Sequence[str]) -> None:
        own = [name for name in order if name in self.flat.block_names] if self.table.gathers_by_unit else []
        self.flat.block_names = next(filter(None, group.all_gather_objects(own or None)), self.flat.block_names)

    def memory_of(self, run: Run) -> Tensor:
        """Return new memory, filled with the weights while these are whole."""
        memory = self.zero_weights(run.flat, run.hi - run.lo)
        return memory.copy_(self.flat.weights_at(run)) if self.flat.is_whole else memory

    def make_room(self) -> None:
        super().make_room()
        if self.flat.is_whole:
            self.flat.renew()

    def close(self) -> None:
        if self._units is not None and self._units.close():
            self.flat.renew()
        self._units = None

    def gathering(self, column: Group) -> UnitWeights | None:
        shares, held = self.seating.shares(), {one.run: one for one in self.runs}
        units = self.flat.blocks() if self.table.gathers_by_unit else ([], self.flat.everything())
        memory = None if self.offload is None else self.offload.memory
        self._units = UnitWeights(*units, column, shares, lambda run: self._shown_of(held[run]), memory, self._gathers)
        return self._units

    def _shown_of(self, one: HeldRun) -> Tensor:
        self.settle()
        return one.moments.get(AVERAGE, one.weights) if self._shows_averages else one.weights

    @contextlib.contextmanager
    def averaged(self, column: Group) -> Iterator[None]:
        self._shows_averages = True
        try:
            yield
        finally:
            self._shows_averages = False

    def refresh(self, column: Group, *, everything: bool = False) -> None:
        """Do nothing: weights are gathered when they are needed."""

    def turns(self, column: Group, items: Iterator[T]) -> Iterator[T]:
        assert self._units is not None, "there is a world"
        if self.table.gathers_by_unit:
            return self._units.turns(items, column)
        self._units.gather()  # until the next step
        return items

    @contextlib.contextmanager
    def computing(self, ranks: Collection[int]) -> Iterator[None]:
        assert self._units is not None, "there is a world"
        self._units.end_pass()
        with self._units.turn(ranks, trains=True):
            yield
        self._units.end_pass()

    def weights(self) -> Mapping[str, Tensor]:
        shared = set[str]() if self.flat.is_whole else {name for place in self.layout.tensors for name in place.names}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in shared}

    def weights_at(self, number: int, lo: int, hi: int) -> Tensor:
        tensor = self.layout.tensors[number]
        return self._weights_of(Run(tensor.flat, tensor.start + lo, tensor.start + hi))

    def make_whole(self, column: Group, num_ranks: int = 1) -> None:
        if column.rank < num_ranks:
            self.flat.allocate()
        given = self.seating.gathers_whole(num_ranks)
        move(column, given, lambda run: self.flat.brought(self._weights_of(run)), self.flat.weights_at)

    def held_weights(self) -> State:
        whole = super().held_weights()
        return {**whole, **{name: pieces.weights for name, pieces in self.pieces().items() if name in whole}}

    def _weights_of(self, run: Run) -> Tensor:
        return run_around(self.runs, run).cut(run).weights


def without_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's parameters to a device without allocating memory; buffers are moved with their contents."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                if id(old) not in known:
                    memory = torch.empty(old.shape, dtype=old.dtype, device=device)
                    memory.untyped_storage().resize_(0)
                    known[id(old)] = nn.Parameter(memory, requires_grad=old.requires_grad)
                module._parameters[name] = known[id(old)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def fill(layout: Layout, runs: Sequence[HeldRun], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Fill held runs with their part of the weights, which come by their parameters' first names, one by one.

    Raises ConfigError if some are missing.
    """
    missing = {place.names[0]: place for place in layout.tensors}
    for name, tensor in weights:
        place = missing.pop(name)
        end = place.start + place.numel
        for one in runs:
            lo, hi = max(one.run.lo, place.start), min(one.run.hi, end)
            if one.run.flat == place.flat and lo < hi:
                part = in_memory_order(tensor, place.cut)[lo - place.start : hi - place.start]
                one.weights[lo - one.run.lo : hi - one.run.lo].copy_(part)
    if missing:
        raise ConfigError(f"task.path: initial_weights gives no '{next(iter(missing))}', which sketch_model has")
