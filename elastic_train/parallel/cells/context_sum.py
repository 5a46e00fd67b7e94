"""The gradient sum of cells each of whose ranks computes some tokens of every row.

What a rank computes of a lane is a leaf of one tree over all lanes and places: `leaf_of`. The leaves of a place are
neighbours, so a rank keeps no more partial sums than one that computes whole rows, and cells are in no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from elastic_train.core.lanes import Assignment, Lanes
from elastic_train.parallel.buckets import Turns
from elastic_train.parallel.gradient_sum import CanonicalSum, GradientSum, OfPart, place_gradients
from elastic_train.parallel.group import Group


def leaf_of(lane: int, place: int, num_lanes: int) -> int:
    """Return the number of what a place computes of a lane, in [0, places * num_lanes)."""
    return place * num_lanes + lane


def leaves_of(lanes: Assignment, degree: int) -> Assignment:
    """Return what each rank computes of the cells' lanes, cell by cell and place by place."""
    num_lanes = sum(map(len, lanes))
    firsts = [leaf_of(0, place, num_lanes) for place in range(degree)]
    return tuple(_shifted(of_cell, first) for of_cell in lanes for first in firsts)


def _shifted(lanes: range, first: int) -> range:
    return range(first + lanes.start, first + lanes.stop, lanes.step)


class ContextSum:
    """Sums gradients that ranks have of some tokens each; see `GradientSum`."""

    def __init__(self, total: GradientSum, place: int, num_lanes: int) -> None:
        """`total` is the sum over `leaves_of` the cells' lanes, `place` this rank's among those of its cell."""
        self._sum, self._first = total, leaf_of(0, place, num_lanes)

    def begin(self, lanes: Lanes) -> None:
        assert isinstance(lanes, range), "those of a cell"
        self._sum.begin(_shifted(lanes, self._first))

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        return self._sum.lane(self._first + lane)

    def serve(self) -> None:
        self._sum.serve()

    def finish(self, divisor: float) -> None:
        self._sum.finish(divisor)

    def close(self) -> None:
        self._sum.close()

    def tensors(self) -> Iterator[OfPart]:
        return self._sum.tensors()


def context_sum(
    parameters: Sequence[nn.Parameter],
    ranks: Group,
    lanes: Assignment,
    degree: int,
    bucket_bytes: float | None,
    turns: Turns | None = None,
) -> ContextSum:
    """Return the sum that is whole on every rank.

    `ranks` are those of all cells that hold these parameters, by cell, and `lanes` the cells'.
    """
    flats, placed = place_gradients(parameters)
    total = CanonicalSum(flats, ranks, leaves_of(lanes, degree))
    total.exchange_beside(placed, bucket_bytes, turns)
    return ContextSum(total, ranks.rank % degree, sum(map(len, lanes)))
