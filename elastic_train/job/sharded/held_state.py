"""The applied state in shards: each rank holds the optimizer's moments of its seat's grains, and updates these alone.

Weights are whole on every rank (ZeRO-1): after an update each rank gives the others of its group the weights that it
has updated. What counts as held are a seat's grains, their weights included; the rest of a rank's weights is what its
peers have given. A seat is taken with everything that belongs to it, or not at all: what arrives for a new seat touches
nothing of the old one. Gradients may be held like moments (`dealt_state`), and weights, too (`gathered_state`).

No cut shows in a bit: updates are element by element, or of tensors that are held whole; the norm is by grains, and a
shard begins at a multiple of the layout's alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE, State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, Lanes
from elastic_train.core.mesh import ALONE, Cell
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import OWN
from elastic_train.job.sharded.elementwise import Slots
from elastic_train.job.sharded.flat_model import FlatModel
from elastic_train.job.sharded.held_tree import (
    Held,
    HeldRun,
    Spare,
    TensorPieces,
    count_of,
    cuts_of,
    names_of,
    pieces_of,
    shaped,
    spans_of,
    tree_to_fill,
)
from elastic_train.job.sharded.settings import Settings
from elastic_train.job.sharded.shared_scaler import SharedScaler
from elastic_train.job.sharded.streamed_update import Offload, StreamedUpdate, Updated
from elastic_train.job.state_shards import stillness_of
from elastic_train.parallel.devices.squares import squares_of_vectors
from elastic_train.parallel.gradient_sum import GradientSum, OfPart, Tree, TreeSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import Wire
from elastic_train.parallel.reductions import AtOwners, Reduction, Shares
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.grain_tables import Lengths
from elastic_train.shards.grains import Layout
from elastic_train.shards.grains import Tensor as Place
from elastic_train.shards.holdings import Run, column_of, grains_side_by_side, runs_of
from elastic_train.shards.norm import clip_factor, norm_of_grains
from elastic_train.shards.owners import owned_by_some
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat

T = TypeVar("T")


class OfFlats(NamedTuple):
    """Flat vectors, by number, whose gradients are added along one tree: `leaves` are those of each of the `ranks`.

    A rank computes `per_turn` of them at a time, and nothing is exchanged meanwhile unless `is_beside`. `seating` has
    what each rank holds, if they are not the ranks of the state's own.
    """

    numbers: Container[int]
    ranks: Group
    leaves: Sequence[Lanes]
    seating: Seating | None = None
    per_turn: int = 1
    is_beside: bool = True


class HeldState:
    """What a rank holds of weights and moments, by its seat; `copies` groups of ranks hold everything once each."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        scaler: SharedScaler,
        layout: Layout,
        slots: Sequence[Slots],
        copies: int,
        bucket_bytes: float | None = None,
        wire: Wire = "exact",
        offload: Offload | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.columns = (column_of(layout),)
        """The one that all ranks are in, or those of this rank's place."""
        (self.layout, self.circle), self.copies = self.columns[0], copies
        self.flat, self._bucket_bytes, self._wire = FlatModel(model, layout), bucket_bytes, wire
        self._sum: GradientSum | None = None
        self.make_gradients()
        self.settings = Settings(model, optimizer, scheduler, scaler)
        self.seating: Seating | None = None
        self._runs: list[HeldRun] = []
        self.spare = Spare()
        self._written: list[Held] = []
        self._named: Mapping[str, TensorPieces] | None = None
        self.trained_in = 0
        """The last world in which this rank trained, by its term."""
        self._names, self._slots = names_of(model, optimizer), slots
        """Of each parameter group: its parameters, and what the optimizer keeps of each."""
        self._gradients: list[tuple[Tensor, Lengths]] = []
        """What it is measured by: neighbouring grains of a tensor, and how many elements each has."""
        self._updated: list[Updated] = []
        for group in optimizer.param_groups:  # the optimizer never sees the model's own parameters
            group["params"] = []
        optimizer.state.clear()
        self.offload = offload
        self._stream = None if offload is None else StreamedUpdate(optimizer, offload)

    def column_of(self, rank: int) -> int:
        """Return the column that a rank of a world is in: all are in one."""
        return 0

    @property
    def seat(self) -> Seat | None:
        """This rank's seat; None before its first world."""
        return None if self.seating is None else self.seating.seat

    @property
    def runs(self) -> list[HeldRun]:
        """What this rank holds, after all that was on its way there."""
        self.settle()
        return self._runs

    def settle(self) -> None:
        """Return when the host's memory has what the last update has come to; at once without offload."""
        if self.offload is not None:
            self.offload.memory.settle()

    def offloaded_bytes(self) -> int:
        """Return how much this rank has in host memory in place of its device's."""
        if self.offload is None:
            return 0
        weights = [one.weights for one in self._runs] if self.offload.with_weights else []
        return sum(tensor.nbytes for tensor in (*weights, *(m for one in self._runs for m in one.moments.values())))

    def room_bytes(self) -> int:
        """Return how much of the device's memory is kept for updates of what is in host memory."""
        return 0 if self._stream is None else self._stream.room_bytes

    @property
    def holds_nothing(self) -> bool:
        return self.seating is not None and not self.seating.seat.arcs

    def room_for(self, seating: Seating, known: Sequence[HeldRun] = ()) -> list[HeldRun]:
        """Return the runs of this rank's seat: those of `known` that are the same, and new ones, moments zero."""
        kept = {one.run: one for one in known}
        return [kept.get(run) or self.new_run(run) for run in seating.runs_at(seating.rank, self.grains_of(seating))]

    def grains_of(self, seating: Seating) -> Int64s:
        """Return of which grains this rank has runs: those that it updates."""
        return seating.trained[seating.rank]

    def new_run(self, run: Run) -> HeldRun:
        """Return a run to hold; its weights are live where they are whole."""
        weights, moments = self.memory_of(run), self._moments_of(run.flat)
        begun = {name: self.kept_zeros(run, weights.dtype) for name in moments}
        if AVERAGE in begun:
            begun[AVERAGE].copy_(weights)
        return HeldRun(run, weights, begun)

    def kept_zeros(self, run: Run, dtype: torch.dtype) -> Tensor:
        """Return zeros for a run, where what an optimizer keeps is."""
        if self.offload is None:
            return self.flat.zeros(run.flat, run.hi - run.lo)
        return self.offload.memory.zeros(run.hi - run.lo, dtype)

    def memory_of(self, run: Run) -> Tensor:
        """Return memory for the weights of a run that this rank is to hold."""
        return self.flat.weights_at(run)

    @property
    def is_shared_out(self) -> bool:
        """Whether no rank need have all of the weights."""
        return False

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
        self.seating, self._runs, self._named = seating, list(runs), None
        self.make_room()
        self.optimizer.state.clear()
        self._updated = []
        for number, group in enumerate(self.optimizer.param_groups):
            mine = [one for one in self.runs if self.layout.flats[one.run.flat].group == number]
            if self._slots[number].is_atomic:
                group["params"] = [self._parameter(number, one, 0.0, place) for one, place in self._whole(mine)]
            else:
                held = [self._parameter(number, one, counts[number]) for one in mine]
                group["params"] = held or [self._nothing(number, counts[number])]
        self.bind_gradients()
        if self._stream is not None:
            self._stream.take(self._updated)

    def bind_gradients(self) -> None:
        """Give the optimizer's parameters the gradients of what is held, and the norm those of its grains."""
        for one in self._updated:
            one.parameter.grad = shaped(self.gradients_at(one.held.run), one.whole)
        trained = self.seated.trained[self.seated.rank]
        runs = grains_side_by_side(self.layout, trained, [one.run for one in self._runs])
        self._gradients = [(self.gradients_at(run), lengths) for run, lengths in runs]

    def begin(self, runs: Sequence[HeldRun]) -> None:
        """Put into the runs of a first seat what a run begins with; whole weights are there already."""

    def begin_from_commit(self, runs: Sequence[HeldRun]) -> None:
        """Put into the runs of a seat what the commit that it begins with does not hold; see `begin`.

        Raises StateLostError if this process does not have that any more.
        """

    @property
    def has_weights(self) -> bool:
        """Whether the model was built with its weights, so that it can compute before there is a world."""
        return True

    def make_gradients(self) -> None:
        """Make room for gradients as they are while lanes add to them: whole."""
        self.flat.make_gradients()

    def make_room(self) -> None:
        """Make room for what the seat's runs need beside weights and moments: whole gradients are there already."""

    def gradients_at(self, run: Run) -> Tensor:
        """Return the gradient of a run that this rank holds."""
        return self.flat.gradients[run.flat][run.lo : run.hi]

    def assigned(self, num_replicas: int, num_lanes: int, cell: Cell = ALONE) -> Assignment:
        """Return the lanes of every owner: of replicas that are cells of this shape, several each with experts."""
        return cell.assigned(num_replicas, num_lanes)

    def sum_of(self, replicas: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        assert kind == "canonical", "copies have to have the same bits"
        self.close()
        self._sum = self.make_sum(replicas, num_lanes)
        return self._sum

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def make_sum(self, replicas: Group, num_lanes: int) -> GradientSum:
        """Return the sum that leaves the mean gradient where it is held."""
        self.begin_sums()
        lanes = self.assigned(replicas.size, num_lanes)
        weights = self.gathering(replicas)
        return self.sum_over([OfFlats(range(len(self.layout.flats)), replicas, lanes)], weights)

    def gathering(self, replicas: Group, *, by_unit: bool = True) -> UnitWeights | None:
        """Return what gathers weights, unit by unit for a pass, or all for a step; None if they are whole."""
        return None

    def begin_sums(self) -> None:
        """Make gradients ready for the sums of a new world."""
        self.flat.bind()

    def sum_over(
        self, trees: Sequence[OfFlats], weights: UnitWeights | None = None, *, by_turn: bool = True
    ) -> GradientSum:
        """Return the sum of flat vectors, once `begin_sums` was called; `weights` are gathered for a turn or a step."""
        return TreeSum([self._tree_of(one) for one in trees], self._bucket_bytes)

    def _tree_of(self, one: OfFlats) -> Tree:
        seated = self.seated if one.seating is None else one.seating
        shares = Shares(seated.owned_runs(), seated.given_runs(), seated.taken_runs())
        flats = [flat if number in one.numbers else flat[:0] for number, flat in enumerate(self.flat.gradients)]
        placed = [each for each in self.flat.placed() if each.flat in one.numbers] if one.is_beside else []
        return Tree(flats, one.ranks, one.leaves, AtOwners(shares.within(one.numbers)), placed)

    def refresh(self, group: Group, *, everything: bool = False) -> None:
        """Get the weights that peers have updated; with `everything`, also those that nobody updates."""
        self._share(group, self.seated.holdings if everything else self.seated.trained, self.flat.weights_at)

    def _share(self, group: Group, holdings: Sequence[Int64s], at: Callable[[Run], Tensor]) -> None:
        """Get what each rank of this copy holds, by rank, into whole vectors, and give them what this one does."""
        ranks, rank = self.seated.neighbours(), self.seated.rank
        runs = {one: runs_of(self.layout, holdings[one]) for one in (*ranks, rank)}
        sends = [(to, at(run)) for to in ranks for run in runs[rank]]
        receives = [(giver, at(run)) for giver in ranks[::-1] for run in runs[giver]]
        if sends or receives:
            group.exchange(sends, receives)

    def measure(self) -> Tensor:
        """Return the sums of the squares of this rank's grains, filled up with zeros to the most that a rank has."""
        seating = self.seated
        squares = torch.zeros(max(1, *(grains.size for grains in seating.trained)), dtype=torch.float64)
        vectors, lengths = [one for one, _ in self._gradients], [lengths for _, lengths in self._gradients]
        squares[: sum(map(len, lengths))] = squares_of_vectors(vectors, lengths)
        return squares

    def norm_of(self, gathered: Tensor) -> Tensor:
        return self.norm_of_rows(gathered, enumerate(self.seated.trained))

    def norm_of_rows(self, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Tensor:
        """Return the norm from rows of some ranks, which hold all of the grains that are trained."""
        return norm_of_grains(self.layout, gathered, holders)

    def norm_alone(self, measured: Tensor) -> Tensor | None:
        """Only all ranks together know the norm."""
        return None

    @contextlib.contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        vectors = {flat: self.flat.zeros(flat, self.layout.flats[flat].numel) for flat in self._trained_flats()}
        for one in self.trained_runs:
            vectors[one.run.flat][one.run.lo : one.run.hi].copy_(one.moments[AVERAGE])
        self._share(group, self.seated.trained, lambda run: vectors[run.flat][run.lo : run.hi])
        with self.flat.showing(vectors):
            yield

    def _trained_flats(self) -> list[int]:
        return [number for number, flat in enumerate(self.layout.flats) if flat.group is not None]

    def clip(self, limit: float, norm: Tensor) -> None:
        if (factor := clip_factor(float(norm), limit)) != 1.0:
            for one in self.trained_runs:
                self.gradients_at(one.run).mul_(factor)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def digest(self, group: Group) -> str:
        return self.digest_alone()

    def digest_alone(self) -> str:
        return weights_digest(self.model, self.layout.dims)

    def check_copies(self, group: Group, step: int) -> None:
        """All weights are whole on every rank."""

    def make_whole(self, group: Group) -> None:
        """They are."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def agree_on_order(self, group: Group) -> None:
        """Blocks are used in any order."""

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        return items

    def computing(self, replicas: Collection[int]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks write commits; all do where these hold less than everything: then those that cannot say so."""
        writers, by_rank = owned_by_some(self.seated.holdings, self.layout.span, writers)
        self._written = [Held(by_rank[rank], self.seated.sections_of(rank)) for rank in writers]
        self._named = None
        return writers

    def stand_alone(self) -> bool:
        if self.seating is None or self.seating.held.size < self.layout.num_grains:
            return False
        self.assign([self.seating.rank])
        return True

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        return self.seated.are_sole_holders(leaving)

    def tensors(self) -> Iterator[OfPart]:
        for one in (*self._runs, *self.spare.runs):
            yield "weights", one.weights
            yield from (("optimizer", moment) for moment in one.moments.values())
        if self._stream is not None:
            yield from (("optimizer", room) for room in self._stream.rooms)

    def held(self) -> State:
        self.settle()
        self._check_slots()
        named = self.pieces()
        groups = zip(self._names, self._slots, self.settings.num_updates(), strict=True)
        kept = {name: own.filled(named[name].moments, count) for names, own, count in groups for name in names}
        moments = {name: kept[name] for name in (place.names[0] for place in self.layout.tensors) if kept.get(name)}
        named_groups = zip(self.settings.groups(), self._names, strict=True)
        settings = [{**group, "params": list(names)} for group, names in named_groups]
        own = self.settings.own()
        optimizer = {"state": moments, "param_groups": settings, **({OWN: own} if own else {})}
        return {"model": self.held_weights(), "optimizer": optimizer, **self.settings.plain()}

    def _check_slots(self) -> None:
        """Refuse what an optimizer keeps since later than its first steps: no commit would have it."""
        counts = any(slots.count is not None for slots in self._slots)
        known = {name for slots in self._slots for name in slots.moments} | ({"step"} if counts else set())
        for kept in self.optimizer.state.values():
            if late := [key for key, value in kept.items() if key not in known and value is not None]:
                raise ConfigError(
                    f"{type(self.optimizer).__name__} keeps '{late[0]}' of parameters, which it did not in its first "
                    "steps: its state cannot be sharded, nor offloaded; continue from the last commit with "
                    "parallel.shards and parallel.offload none, or choose another optimizer"
                )

    def to_save(self) -> State:
        return self.held()

    def outlined(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def held_weights(self) -> State:
        """Return weights and buffers as a commit has them."""
        return dict(self.model.state_dict())

    def stillness(self) -> Callable[[StatePath], bool]:
        return stillness_of(self.model)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Fill what the seat holds from a commit; see `StateShards.take`. The seat must have been taken.

        Averages that a commit has not, because none were kept, begin with its weights.
        """
        tree = tree_to_fill(self.held())
        try:
            fill(tree)
        except ConfigError:  # nothing has changed yet
            if AVERAGE not in self._slots[0].moments:
                raise
            tree = tree_to_fill(self.held(), leaving_out=AVERAGE)
            fill(tree)
            for one in self.trained_runs:
                one.moments[AVERAGE].copy_(one.weights)
        moments: Mapping[str, Mapping[str, object]] = tree["optimizer"]["state"]  # type: ignore[index]
        optimizer: Mapping[str, Any] = tree["optimizer"]  # type: ignore[assignment]
        self.settings.take(optimizer["param_groups"], tree, optimizer.get(OWN, {}), keeps_rates=keeps_rates)
        steps = [[moments[name].get("step", 0.0) for name in names if name in moments] for names in self._names]
        self.sit(self.seated, self.runs, [count_of(group) for group in steps])

    def pieces(self) -> Mapping[str, TensorPieces]:
        """Return the pieces of every tensor under each of its names; the same objects as long as the seat is."""
        if self._named is None:
            spans = spans_of(self.layout, Held(self.seated.held, self.seated.sections_of(self.seated.rank)))
            cuts, self._named = cuts_of(self.layout, self._written), {}
            for number, place in enumerate(self.layout.tensors):
                is_trained = self.layout.flats[place.flat].group is not None
                if is_trained or self.is_shared_out:
                    moments = self._moments_of(place.flat)
                    mine = spans.get(number, ())
                    pieces = pieces_of(self.layout, place, moments, mine, self.runs, cuts[number])
                    self._named.update(dict.fromkeys(place.names, pieces))
        return self._named

    @property
    def seated(self) -> Seating:
        """The seating, once there is one."""
        assert self.seating is not None, "no seat has been taken"
        return self.seating

    @property
    def trained_runs(self) -> list[HeldRun]:
        """The held runs that are updated."""
        return [one for one in self.runs if self.layout.flats[one.run.flat].group is not None]

    def _whole(self, runs: Sequence[HeldRun]) -> Iterator[tuple[HeldRun, Place]]:
        """Yield the tensors of runs that have each of theirs as a whole."""
        for one in runs:
            for place in self.layout.tensors:
                run = Run(place.flat, place.start, place.start + place.numel)
                if place.numel and run.flat == one.run.flat and one.run.lo <= run.lo < one.run.hi:
                    yield one.cut(run), place

    def _parameter(self, group: int, one: HeldRun, num_updates: float, whole: Place | None = None) -> nn.Parameter:
        parameter = nn.Parameter(self.flat.standing_for(shaped(one.weights, whole)))
        self._updated.append(Updated(group, parameter, one, whole))
        moments = {name: shaped(moment, whole) for name, moment in one.moments.items()}
        if kept := self._slots[group].filled(moments, num_updates):
            self.optimizer.state[parameter] = kept
        return parameter

    def _moments_of(self, flat: int) -> Sequence[str]:
        """Return the names of the moments that a flat vector's elements have: none if it is not trained."""
        group = self.layout.flats[flat].group
        return () if group is None else self._slots[group].moments

    def _nothing(self, number: int, num_updates: float) -> nn.Parameter:
        """Return what stands for a parameter group of which nothing is held, so that its updates are counted."""
        flat = next(place for place, flat in enumerate(self.layout.flats) if flat.group == number)
        run = Run(flat, 0, 0)
        return self._parameter(number, self.new_run(run), num_updates)
