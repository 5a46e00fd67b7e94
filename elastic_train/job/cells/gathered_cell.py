"""The applied state of a rank of a cell whose weights are in shares, too: its part is gathered when it is used.

The ranks of a column gather a block's part of the weights among themselves; what the ranks of a cell exchange in the
block comes between, in the same order on all of them. Stages, and ranks with experts, gather all of their part for a
step (`keeps_whole`). Where whole tensors are asked for, the first cell has them for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from elastic_train.core.mesh import Mesh
from elastic_train.errors import WeightsDifferError
from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.cells.seated_cell import SeatedCellState
from elastic_train.job.sharded.gathered_state import GatheredState
from elastic_train.job.units.blocks import recording_order
from elastic_train.parallel.group import Group

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class GatheredCellState(SeatedCellState):
    """A place's part of a replica, of which this rank holds a share; whole only until its first seat."""

    _order: list[str] | None = None
    """In which order blocks run, once a pass has shown it."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return recording_order(self.model, self._take_order)

    def _take_order(self, names: list[str]) -> None:
        self._order = names

    def enter(self, mesh: Mesh, cell: Group, holders: Group, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        SeatedCellState.enter(self, mesh, cell, holders, weights)
        if self._order is not None and not self.keeps_whole:
            self._gathered.take_order(self._order)

    @property
    def _gathered(self) -> GatheredState:
        assert isinstance(self.share, GatheredState), "weights are in shares"
        return self.share

    def weights(self) -> Mapping[str, Tensor]:
        known = CellState.weights(self)
        return known if self._share is None else {name: known[name] for name in self._share.weights() if name in known}

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        return self.share.turns(self.column, CellState.turns(self, group, items))

    def computing(self, replicas: Collection[int]) -> contextlib.AbstractContextManager[None]:
        context = self.cell.context
        return self.share.computing([replica * context + at for replica in replicas for at in range(context)])

    def check_copies(self, group: Group, step: int) -> None:
        """Raise WeightsDifferError, on every rank, if two holders of a grain have different weights."""
        said = ""
        try:
            self.share.check_copies(self.column, step)
        except WeightsDifferError as error:
            said = str(error)
        if found := [one for one in group.all_gather_objects(said) if one]:
            raise WeightsDifferError(found[0])

    def digest(self, group: Group) -> str:
        with self._gathered.showing_whole(self.column, self.cell.context):
            found = CellState.digest(self, group) if self._mesh.replica == 0 else ""
        return str(group.broadcast_object(found, 0))

    def make_whole(self, group: Group) -> None:
        self._gathered.make_whole(self.column, self.cell.context)
        if self._mesh.replica == 0:
            self.cut.become_whole()
