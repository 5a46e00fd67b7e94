"""The applied state of a rank that has a place in a cell: its part of each cut tensor, and all that is not cut.

Peers of equal place in other cells hold the same, and so do places that differ in their tokens alone. Where ranks give
one another the state, they give what they hold; a commit has whole tensors, as that of any other job, of which each
part is written by a rank that holds it. What is read from one are parts again, so commits continue at any degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.weights_digest import checksum, digest_of, join_digests
from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.errors import ConfigError, WeightsDifferError
from elastic_train.job.cells.cut_model import Cut, CutModel
from elastic_train.job.cells.state_parts import cut_at, filled_parts, in_whole, with_tensors, written_by_turns
from elastic_train.job.majority import name_others
from elastic_train.job.state_shards import ReplicatedState
from elastic_train.parallel.devices.squares import squares_of_tensors
from elastic_train.parallel.gradient_sum import GradientSum, TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.shards import grains as shards
from elastic_train.shards.norm import lengths_of, total_norm

Float64s = npt.NDArray[np.float64]
T = TypeVar("T")


class Measured(NamedTuple):
    """Which of the grains that a place has measured are a parameter's, and the first place that holds the same of it;
    None if this one holds nothing."""

    grains: slice
    first: int | None


@dataclass(slots=True, kw_only=True)
class CellState(ReplicatedState):
    """A place's part of a replica; `cut` is the model, which has no part until a world gives this rank a place."""

    cut: CutModel
    mesh: Mesh | None = None
    """Where this rank is in the present world."""
    trained_in: int = 0
    """The last world in which this rank trained, by its term."""
    _holders: Group | None = None
    """The ranks that hold the same part."""
    _writers: Sequence[int] = ()
    _measured: dict[str, Sequence[Measured]] = field(default_factory=dict)

    def holds_part_of(self, mesh: Mesh) -> bool:
        """Say whether this rank holds the part already that it is to hold in a world."""
        place, cell = self.cut.place, mesh.cell
        return place is not None and cell.part_of(place) == cell.part_of(mesh.place)

    def enter(self, mesh: Mesh, cell: Group, holders: Group, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Take the place that a world gives this rank, of `weights` to begin with where it does not have them.

        `holders` are the ranks that hold the same part, by replica.
        """
        holds_it = self.holds_part_of(mesh)
        self.mesh, self._holders = mesh, holders
        self.cut.become_part()  # at the end of a world that broke it may have become whole
        self.cut.bind(mesh, cell)
        if holds_it:
            self.cut.place = mesh.place
        else:
            self.cut.take_place(mesh.place, weights)
            self.optimizer.state.clear()
            self._named = None

    @property
    def cell(self) -> Cell:
        """The shape of a replica."""
        return self._mesh.cell

    def outlined(self) -> Mapping[str, Tensor]:
        return self.cut.outline

    def weights(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in self.cut.cuts}

    def cut_weights(self) -> Mapping[str, Tensor]:
        """Return the parts that other ranks do not have, by name."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in self.cut.cuts}

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        return self._mesh.assigned(num_lanes)

    def sum_of(self, replicas: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        """Sum over the ranks that hold the same: `replicas` has one of each owner of lanes."""
        assert self._holders is not None, "no world has given this rank a place"
        if self._sum is not None:
            self._sum.close()
        experts, lanes = self.cut.experts, self._mesh.assigned(num_lanes)
        ranks = replicas if experts or self.cell.context == self.cut.plan.num_chunks == 1 else self._holders
        leaves, by_cell = leaves_of(lanes, self.cell.context), lanes_by_cell(lanes, self.cell.expert)
        chunks = list(self.cut.by_spread()) if experts else [(chunk, []) for chunk in self.cut.by_chunk()]
        trees = [tree_of(kind, whole, ranks, leaves) for whole, _ in chunks]
        if experts:  # all of a cell's lanes give to the experts of a place
            trees += [tree_of(kind, parts, self._holders, by_cell)._replace(placed=()) for _, parts in chunks]
        self._sum = TreeSum(trees, self.bucket_bytes)
        return self._sum

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield with the turns of the cell's other ranks, which need this one's experts."""
        is_alone = self.cell.stage == 1 and self.cut.experts  # stages agree on turns as they go
        return self.cut.experts[0].turns(items) if is_alone else items

    def measure(self) -> Tensor:
        """Return the sums of squares of the grains of what this rank holds of the gradient, and zeros after them."""
        measured = torch.zeros(self.num_grains, dtype=torch.float64)
        squares = squares_of_tensors(self._measurable())
        measured[: len(squares)] = squares
        return measured

    def _measurable(self) -> Iterator[tuple[Tensor, shards.Cut | None]]:
        """Yield this rank's gradients, and where grains may not cross in them."""
        for name, one in self.model.named_parameters():
            if one.grad is not None:
                yield one.grad, self.cut.laid(name, one, self._mesh.place).cut

    def norm_of(self, gathered: Tensor) -> Tensor:
        rows = gathered.numpy().reshape(-1, self._mesh.cell.size, gathered.shape[1])
        for replica in range(1, len(rows)):
            self._check_alike(rows[0], rows[replica], f"cell {replica} of {len(rows)}")
        return self.norm_of_places(rows[0])

    def norm_of_places(self, rows: Float64s) -> Tensor:
        """Return the norm from what each place of a cell has measured; shape (places, grains)."""
        squares: list[Float64s] = []
        for by_place in self._grains().values():
            for place, (grains, first) in enumerate(by_place):
                measured = rows[place][grains]
                if first == place:
                    squares.append(measured)
                elif first is not None:
                    who = f"place {place} of {len(rows)}"
                    self._check_alike(rows[first][by_place[first][0]], measured, who)
        return torch.tensor(total_norm(np.concatenate(squares) if squares else np.zeros(0)), dtype=torch.float64)

    def _check_alike(self, one: Float64s, other: Float64s, who: str) -> None:
        if not np.array_equal(one, other, equal_nan=True):
            raise WeightsDifferError(
                f"{who} has other gradients than the first, of what both hold: memory or a connection is damaged, or a "
                "device computes wrongly. The step is not applied: all ranks end, and the next start continues from "
                "the last commit"
            )

    def norm_alone(self, measured: Tensor) -> Tensor | None:
        """Only all places of a cell together know the norm."""
        return None

    def _grains(self) -> Mapping[str, Sequence[Measured]]:
        """Return for each parameter that is trained which of a place's measured grains are its, by place."""
        if not self._measured:
            ends = [0] * self.cell.size
            for name, one in self.model.named_parameters():
                if one.requires_grad:
                    places = range(self.cell.size)
                    self._measured[name] = [self._grains_at(place, name, one, ends) for place in places]
        return self._measured

    def _grains_at(self, place: int, name: str, one: Tensor, ends: list[int]) -> Measured:
        (shape, cut), whole = self.cut.laid(name, one, place), self.cut.cuts.get(name)
        start, ends[place] = ends[place], ends[place] + len(lengths_of(tuple(shape), cut))
        return Measured(slice(start, ends[place]), 0 if whole is None else whole.first_with(place))

    @property
    def num_grains(self) -> int:
        """How many grains the place with most of them measures."""
        ends = [[grains.stop for grains, _ in by_place] for by_place in self._grains().values()]
        return max((max(stops) for stops in ends), default=0)

    def digest(self, group: Group) -> str:
        named = self.model.state_dict().items()
        dims = self.cut.plan.dims
        return join_digests({name: digest_of(self._whole(name, tensor), dims.get(name)) for name, tensor in named})

    def digest_alone(self) -> str:
        return ""

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return self.cut.whole(name, tensor) if name in self.cut.cuts else tensor

    def check_copies(self, group: Group, step: int) -> None:
        """Raise WeightsDifferError on every rank if ranks that hold one part have other weights of it."""
        mine = torch.tensor([checksum(tensor) for tensor in self.cut_weights().values()], dtype=torch.int64)
        gathered, cell = group.all_gather(torch.tensor(checksum(mine))).flatten(), self._mesh.cell
        by_part = gathered.view(-1, cell.num_parts, cell.context)
        if bool((by_part == by_part[:1, :, :1]).all()):
            return
        seen = gathered.tolist()
        for part, ranks in enumerate(self._mesh.by_part):
            of_part = [seen[rank] for rank in ranks]
            if len(set(of_part)) > 1:
                who, _ = name_others(of_part, ranks=ranks)
                raise WeightsDifferError(
                    f"step {step}: of the ranks {list(ranks)}, which hold part {part} of the model, {who}: a kernel is "
                    "not deterministic, or a device computes wrongly. The last commit is intact: all ranks end, and "
                    "the next start continues from it"
                )

    def make_whole(self, group: Group) -> None:
        self.cut.become_whole()

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks write commits; all do where these do not have every part."""
        parts = {self.cell.part_of(rank % self.cell.size) for rank in writers}
        self._writers = tuple(writers if len(parts) == self.cell.num_parts else range(self._mesh.size))
        return self._writers

    def stand_alone(self) -> bool:
        """It holds a part of most tensors."""
        return False

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        """Whether all ranks leave that hold one and the same part."""
        return any(all(leaving[rank] for rank in ranks) for ranks in self._mesh.by_part)

    def to_save(self) -> State:
        """Return the whole state, cut tensors in pieces: what this rank holds of them, and who writes what."""
        held, turns = self.held(), count()

        def whole(path: StatePath, leaf: Tensor | Pieces) -> Tensor | Pieces:
            cut = cut_at(path, leaf, self.cut.cuts, self._mesh.place)
            return self._to_write(path, leaf, cut, turns)

        return with_tensors(held, whole)

    def _to_write(
        self, path: StatePath, leaf: Tensor | Pieces, cut: Cut | None, turns: Iterator[int]
    ) -> Tensor | Pieces:
        """Return a leaf as a commit has it; what places hold as a whole they write by turns."""
        if cut is None or not cut.shape.numel():
            return leaf
        places = [rank % self.cell.size for rank in self._writers]
        return in_whole(leaf, cut, self._mesh.place, written_by_turns(cut, places, next(turns)))

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        ReplicatedState.take(self, lambda tree: self._fill_parts(tree, fill), keeps_rates=keeps_rates)

    def _fill_parts(self, tree: State, fill: Callable[[State], None]) -> None:
        """Fill a tree with what this rank holds, from a commit's whole tensors or a peer's parts."""
        place, cuts = self._mesh.place, self.cut.cuts

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

        tree.update(with_tensors(found, part_of))

    def _first_moments(self) -> State:
        """Return what a commit has at least of the parameters that this rank holds a part of."""
        names = self.names()
        groups = enumerate(self.optimizer.param_groups)
        found = {names[id(one)]: self.first.of(number, one)[1] for number, group in groups for one in group["params"]}
        self.first.forget()
        return {name: dict(state) for name, state in found.items() if state}

    @property
    def _mesh(self) -> Mesh:
        assert self.mesh is not None, "no world has given this rank a place"
        return self.mesh
