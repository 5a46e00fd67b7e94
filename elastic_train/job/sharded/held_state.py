"""The applied state in shards: each rank holds the optimizer's moments of its seat's grains, and updates these alone.

What counts as held are a seat's grains, their weights included. Weights are whole on every rank (ZeRO-1 and 2): after
an update each rank gives the others of its group those that it has updated. Or they are gathered, unit by unit, when a
pass needs them (ZeRO-3). A seat is taken with everything that belongs to it, or not at all: what arrives for a new seat
touches nothing of the old one.

No cut shows in a bit: updates are element by element, the norm is by grains, and a shard begins at a multiple of the
layout's alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, contiguous
from elastic_train.job.sharded.elementwise import moments_of
from elastic_train.job.sharded.flat_model import FlatModel
from elastic_train.job.sharded.held_tree import HeldRun, Spare, TensorPieces, count_of, names_of, pieces_of, run_around
from elastic_train.job.sharded.settings import Settings
from elastic_train.job.sharded.shared_norm import norm_of_grains
from elastic_train.job.sharded.shared_scaler import SharedScaler
from elastic_train.job.sharded.shared_weights import check_copies, gather_whole, grain_run, shared_digest
from elastic_train.job.sharded.units import recording_order
from elastic_train.job.state_shards import stillness_of
from elastic_train.parallel.dealt_sum import DealtSum
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.owned_sum import OwnedSum, Shares
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.deal import lanes_of
from elastic_train.shards.grains import Layout
from elastic_train.shards.holdings import Run, by_flat, circle_of, held, runs_of
from elastic_train.shards.norm import clip_factor, grain_squares
from elastic_train.shards.owners import owned_of
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat

T = TypeVar("T")


class HeldState:
    """What a rank holds of weights and moments, by its seat; `copies` groups of ranks hold everything once each."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        scaler: SharedScaler,
        layout: Layout,
        copies: int,
        *,
        is_dealt: bool = False,
        is_gathered: bool = False,
    ) -> None:
        """With `is_dealt` gradients are held like moments, by lanes that are dealt out (ZeRO-2); with `is_gathered`
        weights are, too (ZeRO-3)."""
        self.model, self.optimizer = model, optimizer
        self.layout, self.circle, self.copies = layout, circle_of(layout), copies
        self.flat = FlatModel(model, layout, is_dealt=is_dealt, is_gathered=is_gathered)
        self.settings = Settings(model, optimizer, scheduler, scaler)
        self._dealt: DealtSum | None = None
        self._units: UnitWeights | None = None
        self.seating: Seating | None = None
        self.runs: list[HeldRun] = []
        self.spare = Spare()
        self._written: list[Int64s] = []
        self._named: Mapping[str, TensorPieces] | None = None
        self.order: list[str] | None = None
        """The blocks in the order of a forward pass, once one was recorded."""
        self.trained_in = 0
        """The last world in which this rank trained, by its term."""
        self._names, self._kinds = names_of(model, optimizer), moments_of(optimizer)
        self._views: list[Tensor] = []
        for group in optimizer.param_groups:  # the optimizer never sees the model's own parameters
            group["params"] = []
        optimizer.state.clear()

    @property
    def seat(self) -> Seat | None:
        """This rank's seat; None before its first world."""
        return None if self.seating is None else self.seating.seat

    @property
    def holds_nothing(self) -> bool:
        return self.seating is not None and not self.seating.seat.arcs

    @property
    def num_copies(self) -> int:
        """How many ranks hold each grain: as many as there are groups."""
        return 1 + max(seat.group for seat in self._seated().seats)

    def seating_of(self, seats: Sequence[Seat], rank: int) -> Seating:
        return Seating(self.layout, self.circle, seats, rank)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return recording_order(self.model, self._take_order) if self.flat.is_gathered else contextlib.nullcontext()

    def _take_order(self, names: list[str]) -> None:
        self.order = [name for name in names if name in self.flat.block_names]

    def agree_on_order(self, group: Group) -> None:
        """Exchange the blocks in the order that the first rank that knows one has recorded."""
        if self.flat.is_gathered:
            known = [order for order in group.all_gather_objects(self.order) if order is not None]
            self.flat.block_names = known[0] if known else self.flat.block_names

    def room_for(self, seating: Seating) -> list[HeldRun]:
        """Return the runs of this rank's seat that have memory of their own, moments as they are before the first step.

        Weights that are whole are in it, others are not.
        """
        grains = seating.held if self.flat.is_gathered else seating.trained[seating.rank]
        return [self.new_run(run) for run in runs_of(self.layout, grains)]

    def new_run(self, run: Run) -> HeldRun:
        weights = self.flat.memory_of(run)
        kinds = self._kinds if self.layout.flats[run.flat].group is not None else ()
        return HeldRun(run, weights, {name: torch.zeros_like(weights) for name in kinds})

    def sit(
        self,
        seating: Seating,
        runs: Sequence[HeldRun],
        num_updates: Sequence[float] | None = None,
        spare: Spare | None = None,
    ) -> None:
        """Take a seat whose weights are in place and whose moments `runs` have.

        `num_updates` is how many updates each parameter group has had; as many as so far if it is not given. `spare` is
        what is held beside the seat, for peers that may not have got it.
        """
        counts = self.settings.num_updates() if num_updates is None else list(num_updates)
        self.spare = spare or Spare()
        self.seating, self.runs, self._named = seating, list(runs), None
        if self.flat.is_dealt:
            self.flat.make_homes([one.run for one in self._trained_runs()])
        self.flat.release()
        self.optimizer.state.clear()
        for number, group in enumerate(self.optimizer.param_groups):
            mine = [one for one in self.runs if self.layout.flats[one.run.flat].group == number]
            group["params"] = [self._parameter(one, counts[number]) for one in mine] or [
                self._nothing(number, counts[number])
            ]
        grains = seating.trained[seating.rank].tolist()
        self._views = [self.flat.gradients_at(grain_run(self.layout, number)) for number in grains]

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        if not self.flat.is_dealt:
            return contiguous(num_replicas, num_lanes)
        seats = self._seated().seats
        return tuple(lanes_of(seat, len(seats), num_lanes) for seat in seats)

    def sum_of(self, replicas: Group, num_lanes: int) -> GradientSum:
        """Bind the gradients, and return the sum over all lanes that leaves a mean where it is held."""
        seating = self._seated()
        if self.flat.is_dealt:
            if self._dealt is not None:
                self._dealt.close()
            self._units = self._units_of(replicas) if self.flat.is_gathered else None
            self._dealt = DealtSum(self.flat.units(), self.flat.homes, replicas, num_lanes, seating, self._units)
            return self._dealt
        shares = Shares(seating.owned_runs(), seating.given_runs())
        return OwnedSum(self.flat.bind(), replicas, num_lanes, shares)

    def _units_of(self, replicas: Group) -> UnitWeights:
        """Return what gathers weights over this rank's group, instead of what did so in the world before."""
        if self._units is not None and self._units.close():
            self.flat.renew()
        seating, held = self._seated(), {one.run: one.weights for one in self.runs}
        ranks = (seating.rank, *seating.neighbours())
        shares = {rank: by_flat(runs_of(self.layout, seating.holdings[rank])) for rank in ranks}
        return UnitWeights(*self.flat.blocks(), replicas, shares, held.__getitem__)

    def refresh(self, group: Group, *, everything: bool = False) -> None:
        """Get the weights that peers have updated; with `everything`, also those that nobody updates."""
        if self.flat.is_gathered:
            return
        seating = self._seated()
        holdings = seating.holdings if everything else seating.trained
        runs = {rank: runs_of(self.layout, holdings[rank]) for rank in (*seating.neighbours(), seating.rank)}
        sends = [(rank, self.flat.weights_at(run)) for rank in seating.neighbours() for run in runs[seating.rank]]
        receives = [(rank, self.flat.weights_at(run)) for rank in seating.neighbours()[::-1] for run in runs[rank]]
        if sends or receives:
            group.exchange(sends, receives)

    def measure(self) -> Tensor:
        """Return the sums of the squares of this rank's grains, filled up with zeros to the most that a rank has."""
        seating = self._seated()
        squares = torch.zeros(max(1, *(grains.size for grains in seating.trained)), dtype=torch.float64)
        if self._views:
            squares[: len(self._views)] = grain_squares(self._views)
        return squares

    def norm_of(self, gathered: Tensor) -> Tensor:
        return self.norm_from(gathered, list(enumerate(self._seated().trained)))

    def norm_from(self, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Tensor:
        """Return the norm from the squares of those rows' grains; every trained grain must be in one.

        Raises WeightsDifferError if two copies of a grain have different gradients.
        """
        return norm_of_grains(self.layout, gathered, holders)

    def norm_alone(self, measured: Tensor) -> Tensor | None:
        """Only all ranks together know the norm."""
        return None

    def trained_by(self, seat: Seat | None) -> Int64s:
        """Return the trained grains that a seat holds, ascending."""
        grains = np.empty(0, dtype=np.int64) if seat is None else held(self.circle, seat)
        return np.intersect1d(grains, self.layout.trained, assume_unique=True)

    def clip(self, limit: float, norm: Tensor) -> None:
        if (factor := clip_factor(float(norm), limit)) != 1.0:
            for one in self._trained_runs():
                self.flat.gradients_at(one.run).mul_(factor)

    def weights(self) -> Mapping[str, Tensor]:
        known = {name for place in self.layout.tensors for name in place.names} if not self.flat.is_whole else ()
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in known}

    def digest(self, group: Group) -> str:
        if self.flat.is_whole:
            return weights_digest(self.model)
        return shared_digest(group, self._seated(), self._grain_at, self.weights())

    def digest_alone(self) -> str:
        return weights_digest(self.model) if self.flat.is_whole else ""

    def check_copies(self, group: Group, step: int) -> None:
        if not self.flat.is_whole:
            check_copies(group, self._seated(), self._grain_at, step)

    def make_whole(self, group: Group) -> None:
        if not self.flat.is_whole:
            if group.rank == 0:
                self.flat.allocate()
            gather_whole(group, self._seated(), self._held_at, self.flat.weights_at)

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        return items if self._units is None else self._units.turns(items, group)

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks write commits; all do where these hold less than everything: then those that cannot say so."""
        seating = self._seated()
        try:
            by_rank = owned_of(seating.holdings, self.layout.span, writers)
        except LookupError:
            writers = range(len(seating.seats))
            by_rank = owned_of(seating.holdings, self.layout.span, writers)
        self._written, self._named = [by_rank[rank] for rank in writers], None
        return writers

    def stand_alone(self) -> bool:
        if self.seating is None or self.seating.held.size < self.layout.num_grains:
            return False
        self.assign([self.seating.rank])
        return True

    def held(self) -> State:
        counts = zip(self._names, self.settings.num_updates(), strict=True)
        steps = {name: torch.tensor(count) for names, count in counts for name in names}
        named = self._pieces()
        moments = {name: {"step": step, **named[name].moments} for name, step in steps.items() if named[name].moments}
        groups = zip(self.settings.groups(), self._names, strict=True)
        model: dict[str, object] = dict(self.model.state_dict())
        if self.flat.is_gathered:
            model |= {name: pieces.weights for name, pieces in named.items()}
        return {
            "model": model,
            "optimizer": {
                "state": moments,
                "param_groups": [{**group, "params": list(names)} for group, names in groups],
            },
            **self.settings.plain(),
        }

    def stillness(self) -> Callable[[StatePath], bool]:
        return stillness_of(self.model)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Fill what the seat holds from a commit; see `StateShards.take`. The seat must have been taken."""
        held = self.held()
        moments: Mapping[str, Mapping[str, object]] = held["optimizer"]["state"]  # type: ignore[index]
        tree: State = {"model": held["model"], "optimizer": {"state": moments}, "scheduler": {}, "scaler": {}}
        fill(tree)
        self.settings.take(tree["optimizer"]["param_groups"], tree, keeps_rates=keeps_rates)  # type: ignore[index]
        counts = [count_of([moments[name]["step"] for name in names if name in moments]) for names in self._names]
        self.sit(self._seated(), self.runs, counts)

    def _pieces(self) -> Mapping[str, TensorPieces]:
        """Return the pieces of every tensor under each of its names; the same objects as long as the seat is."""
        if self._named is None:
            held, self._named = self._seated().held, {}
            for place in self.layout.tensors:
                is_trained = self.layout.flats[place.flat].group is not None
                if is_trained or self.flat.is_gathered:
                    kinds = self._kinds if is_trained else ()
                    pieces = pieces_of(self.layout, place, kinds, held, self.runs, self._written)
                    self._named |= dict.fromkeys(place.names, pieces)
        return self._named

    def _seated(self) -> Seating:
        assert self.seating is not None, "no seat has been taken"
        return self.seating

    def _parameter(self, one: HeldRun, num_updates: float) -> nn.Parameter:
        parameter = nn.Parameter(one.weights)
        parameter.grad = self.flat.gradients_at(one.run)
        if self._kinds:
            self.optimizer.state[parameter] = {"step": torch.tensor(num_updates), **one.moments}
        return parameter

    def _nothing(self, number: int, num_updates: float) -> nn.Parameter:
        """Return what stands for a parameter group of which nothing is held, so that its updates are counted."""
        flat = next(place for place, flat in enumerate(self.layout.flats) if flat.group == number)
        run = Run(flat, 0, 0)
        return self._parameter(self.new_run(run), num_updates)

    def _trained_runs(self) -> list[HeldRun]:
        return [one for one in self.runs if self.layout.flats[one.run.flat].group is not None]

    def _held_at(self, run: Run) -> Tensor:
        return run_around(self.runs, run).cut(run).weights

    def _grain_at(self, number: int) -> Tensor:
        return self._held_at(grain_run(self.layout, number))
