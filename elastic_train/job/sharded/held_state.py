"""The applied state in shards: each rank holds the optimizer's moments of its seat's grains, and updates these alone.

Weights are whole on every rank (ZeRO-1): after an update each rank gives the others of its group the weights that it
has updated. What counts as held are a seat's grains, their weights included; the rest of a rank's weights is what its
peers have given. A seat is taken with everything that belongs to it, or not at all: what arrives for a new seat touches
nothing of the old one.

No cut shows in a bit: updates are element by element, the norm is by grains, and a shard begins at a multiple of the
layout's alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, contiguous
from elastic_train.job.parameter_groups import set_rates
from elastic_train.job.sharded.elementwise import moments_of
from elastic_train.job.sharded.flat_model import FlatModel
from elastic_train.job.sharded.held_tree import HeldRun, Spare, count_of, moment_pieces, names_of
from elastic_train.job.sharded.shared_norm import norm_of_grains
from elastic_train.job.sharded.shared_scaler import SharedScaler
from elastic_train.job.state_shards import stillness_of
from elastic_train.parallel.dealt_sum import DealtSum
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.owned_sum import OwnedSum, Shares
from elastic_train.shards.deal import lanes_of
from elastic_train.shards.grains import Layout
from elastic_train.shards.grains import Tensor as Place
from elastic_train.shards.holdings import Run, circle_of, held, runs_of
from elastic_train.shards.norm import clip_factor, grain_squares
from elastic_train.shards.owners import owned_of
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat


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
    ) -> None:
        """With `is_dealt` gradients are held like moments, by lanes that are dealt out (ZeRO-2)."""
        self.model, self.optimizer, self.scheduler, self.scaler = model, optimizer, scheduler, scaler
        self.layout, self.circle, self.copies = layout, circle_of(layout), copies
        self.flat = FlatModel(model, layout, is_dealt=is_dealt)
        self._dealt: DealtSum | None = None
        self.seating: Seating | None = None
        self.runs: list[HeldRun] = []
        self.spare = Spare()
        self._written: list[Int64s] = []
        self._named: Mapping[str, Mapping[str, Pieces]] | None = None
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

    def room_for(self, seating: Seating) -> list[HeldRun]:
        """Return the runs of this rank's seat, the moments as they are before the first step."""
        return [HeldRun(run, self.new_moments(run)) for run in runs_of(self.layout, seating.trained[seating.rank])]

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
        counts = self.num_updates() if num_updates is None else list(num_updates)
        self.spare = spare or Spare()
        self.seating, self.runs, self._named = seating, list(runs), None
        if self.flat.is_dealt:
            self.flat.make_homes([one.run for one in self.runs])
        self.optimizer.state.clear()
        for number, group in enumerate(self.optimizer.param_groups):
            mine = [one for one in self.runs if self.layout.flats[one.run.flat].group == number]
            group["params"] = [self._parameter(one, counts[number]) for one in mine] or [
                self._nothing(number, counts[number])
            ]
        self._views = [self._gradient_of(number) for number in seating.trained[seating.rank].tolist()]

    def num_updates(self) -> list[float]:
        """Return how many updates each parameter group has had."""
        groups = self.optimizer.param_groups
        states = [self.optimizer.state.get(group["params"][0], {}) if group["params"] else {} for group in groups]
        return [float(state.get("step", 0.0)) for state in states]

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
            self._dealt = DealtSum(self.flat.units(), self.flat.homes, replicas, num_lanes, seating)
            return self._dealt
        shares = Shares(seating.owned_runs(), seating.given_runs())
        return OwnedSum(self.flat.bind(), replicas, num_lanes, shares)

    def refresh(self, group: Group, *, everything: bool = False) -> None:
        """Get the weights that peers have updated; with `everything`, also those that nobody updates."""
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
            for one in self.runs:
                self.flat.gradients_at(one.run).mul_(factor)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

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
        counts = zip(self._names, self.num_updates(), strict=True)
        steps = {name: torch.tensor(count) for names, count in counts for name in names}
        moments = {name: {"step": steps[name], **pieces} for name, pieces in self._pieces().items()}
        settings = [{**group, "params": list(names)} for group, names in zip(self._groups(), self._names, strict=True)]
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": {"state": moments, "param_groups": settings},
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def stillness(self) -> Callable[[StatePath], bool]:
        return stillness_of(self.model)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Fill what the seat holds from a commit; see `StateShards.take`. The seat must have been taken."""
        held = self.held()
        moments: Mapping[str, Mapping[str, object]] = held["optimizer"]["state"]  # type: ignore[index]
        tree: State = {"model": held["model"], "optimizer": {"state": moments}, "scheduler": {}, "scaler": {}}
        fill(tree)
        self._take_settings(tree["optimizer"]["param_groups"], tree, keeps_rates=keeps_rates)  # type: ignore[index]
        counts = [count_of([moments[name]["step"] for name in names if name in moments]) for names in self._names]
        self.sit(self._seated(), self.runs, counts)

    def settings(self) -> State:
        """Return what all ranks have alike beside weights and moments."""
        return {
            "groups": self._groups(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "num_updates": self.num_updates(),
        }

    def take_settings(self, settings: Mapping[str, Any]) -> list[float]:
        """Take what another rank gave as its `settings`; return how many updates each parameter group has had."""
        self._take_settings(settings["groups"], settings, keeps_rates=False)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(settings["buffers"][name])
        return list(settings["num_updates"])

    def _take_settings(
        self, groups: Sequence[Mapping[str, Any]], tree: Mapping[str, Any], *, keeps_rates: bool
    ) -> None:
        own, bases = self._groups(), [float(base) for base in self.scheduler.base_lrs]
        if not keeps_rates:
            for mine, theirs in zip(self.optimizer.param_groups, groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
        self.scheduler.load_state_dict(tree["scheduler"])
        if tree["scaler"]:
            self.scaler.load_state_dict(tree["scaler"])
        if keeps_rates:
            set_rates(self.optimizer, self.scheduler, own, bases)

    def _pieces(self) -> Mapping[str, Mapping[str, Pieces]]:
        """Return the moments of every trained tensor by name; they are the same objects as long as the seat is."""
        if self._named is None:
            held, places = self._seated().held, self._places() if self._kinds else {}
            trained = [place for place in places.values() if self.layout.flats[place.flat].group is not None]
            self._named = {
                place.names[0]: moment_pieces(self.layout, place, self._kinds, held, self.runs, self._written)
                for place in trained
            }
        return self._named

    def _groups(self) -> list[dict[str, Any]]:
        return [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]

    def _places(self) -> Mapping[str, Place]:
        return {tensor.names[0]: tensor for tensor in self.layout.tensors}

    def _seated(self) -> Seating:
        assert self.seating is not None, "no seat has been taken"
        return self.seating

    def new_moments(self, run: Run) -> dict[str, Tensor]:
        return {name: torch.zeros_like(self.flat.weights_at(run)) for name in self._kinds}

    def _parameter(self, one: HeldRun, num_updates: float) -> nn.Parameter:
        parameter = nn.Parameter(self.flat.weights_at(one.run))
        parameter.grad = self.flat.gradients_at(one.run)
        if self._kinds:
            self.optimizer.state[parameter] = {"step": torch.tensor(num_updates), **one.moments}
        return parameter

    def _nothing(self, number: int, num_updates: float) -> nn.Parameter:
        """Return what stands for a parameter group of which nothing is held, so that its updates are counted."""
        flat = next(place for place, flat in enumerate(self.layout.flats) if flat.group == number)
        run = Run(flat, 0, 0)
        return self._parameter(HeldRun(run, self.new_moments(run)), num_updates)

    def _gradient_of(self, grain: int) -> Tensor:
        start = int(self.layout.start[grain])
        length = int(self.layout.hi[grain] - self.layout.lo[grain])
        return self.flat.gradients_at(Run(int(self.layout.flat_of[grain]), start, start + length))
