"""The gradient sum of a cell whose ranks have some of the experts each.

Two sums along one tree of lanes: what every rank has, over all ranks, each of which adds its own lanes; and the experts
of a place, over the cells, each of which adds all of its lanes. In a turn a cell's ranks compute neighbouring lanes,
one each, so a cell's lanes come in ascending order; in a pipeline their backward passes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from elastic_train.core.lanes import Assignment, Lanes
from elastic_train.parallel.buckets import Turns
from elastic_train.parallel.cells.expert_links import ExpertLinks, Leaf
from elastic_train.parallel.gradient_sum import (
    CanonicalSum,
    GradientSum,
    OfPart,
    Reduction,
    bind_gradients,
    make_sum,
    place_gradients,
)
from elastic_train.parallel.group import Group


class ExpertSum:
    """Sums gradients of experts, which are parts, and of all else; see `GradientSum`."""

    def __init__(
        self,
        whole: GradientSum,
        parts: GradientSum,
        experts: Sequence[nn.Parameter],
        lanes: Lanes,
        links: ExpertLinks,
        *,
        is_staged: bool = False,
    ) -> None:
        """`whole` sums over all owners of lanes, `parts` the experts of this place over the cells, each of which adds
        all of its lanes; `lanes` are those of this rank's cell. Where the model is run in stages, forward passes are
        not between a lane's beginning and its end.

        Neither may wait for other ranks while a lane is computed, which has its own exchanges with them.
        """
        self._whole, self._parts = whole, parts
        self._experts = [one for one in experts if one.requires_grad]
        self._lanes, self._links, self._num_turns = lanes, links, 0
        self._is_staged = is_staged
        self.see: Callable[[int, Leaf], None] = lambda lane, leaf: None
        """Called with each lane of the cell, and what it gives to this rank's experts, before that is added."""

    def begin(self, lanes: Lanes) -> None:
        self._whole.begin(lanes)
        self._parts.begin(self._lanes)
        self._num_turns = 0

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        assert lane == self._turn[self._links.group.rank], "a rank's lanes come in their order"
        with self._whole.lane(lane), self._passes():
            yield
        self._end_turn()

    def serve(self) -> None:
        while self._turn:
            with self._passes():
                pass
            self._whole.serve()
            self._end_turn()
        self._whole.serve()  # in a turn of other cells
        self._parts.serve()

    def finish(self, divisor: float) -> None:
        self._whole.finish(divisor)
        self._parts.finish(divisor)

    def close(self) -> None:
        self._whole.close()
        self._parts.close()

    def tensors(self) -> Iterator[OfPart]:
        yield from self._whole.tensors()
        yield from self._parts.tensors()

    @property
    def _turn(self) -> Lanes:
        """The lanes of the present turn, by rank of the cell."""
        size = self._links.group.size
        return self._lanes[self._num_turns * size :][:size]

    def _passes(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of what a rank runs in a turn between a lane's beginning and its end."""
        return self._links.backward_pass(self._num_turns) if self._is_staged else self._links.turn(trains=True)

    def _end_turn(self) -> None:
        """Add what the turn's lanes have given to this place's experts, in their order."""
        for lane, leaf in zip(self._turn, self._links.leaves, strict=False):
            self.see(lane, leaf)
            with self._parts.lane(lane):
                for parameter in self._experts:
                    if (gradient := leaf.pop(id(parameter), None)) is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._links.leaves = ()
        self._num_turns += 1


def expert_sum(
    whole: Sequence[nn.Parameter],
    parts: Sequence[nn.Parameter],
    ranks: Group,
    column: Group,
    lanes: Assignment,
    links: ExpertLinks,
    bucket_bytes: float | None,
    turns: Turns | None = None,
    *,
    kind: Reduction = "canonical",
    is_staged: bool = False,
) -> ExpertSum:
    """Return the sum that is whole on every rank.

    `lanes` are those of every owner, of which `ranks` has one each; `column` has the ranks of this one's place in all
    cells. Sums of several chunks share `turns`.
    """
    by_cell = lanes_by_cell(lanes, links.group.size)
    flats, placed = place_gradients(whole)
    total = make_sum(kind, flats, ranks, lanes)
    if isinstance(total, CanonicalSum):
        total.exchange_beside(placed, bucket_bytes, turns)
    of_experts = make_sum(kind, bind_gradients(parts), column, by_cell)
    return ExpertSum(total, of_experts, parts, by_cell[column.rank], links, is_staged=is_staged)


def lanes_by_cell(lanes: Assignment, size: int) -> Sequence[Lanes]:
    """Return the lanes of every cell, from those of every owner, of which a cell has so many: neighbours in a turn."""
    cells = [lanes[first : first + size] for first in range(0, len(lanes), size)]
    return [tuple(sorted(lane for owner in cell for lane in owner)) for cell in cells]
