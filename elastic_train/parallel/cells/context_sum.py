"""The gradient sum of cells each of whose ranks computes some tokens of every row.

What a rank computes of a lane is a leaf of one tree over all lanes and places: `leaf_of`. The leaves of a place are
neighbours, so a rank keeps no more partial sums than one that computes whole rows, and cells are in no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from elastic_train.core.lanes import Assignment
from elastic_train.parallel.buckets import Turns
from elastic_train.parallel.gradient_sum import CanonicalSum, OfPart, place_gradients
from elastic_train.parallel.group import Group


def leaf_of(lane: int, place: int, num_lanes: int) -> int:
    """Return the number of what a place computes of a lane, in [0, places * num_lanes)."""
    return place * num_lanes + lane


class ContextSum:
    """Sums gradients that ranks have of some tokens each; see `GradientSum`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ranks: Group,
        lanes: Assignment,
        degree: int,
        bucket_bytes: float | None,
        turns: Turns | None = None,
    ) -> None:
        """`ranks` are those of all cells that hold these parameters, by cell, and `lanes` the cells'."""
        num_lanes = sum(map(len, lanes))
        self._first = leaf_of(0, ranks.rank % degree, num_lanes)
        leaves = tuple(
            range(leaf_of(of_cell.start, place, num_lanes), leaf_of(of_cell.stop, place, num_lanes))
            for of_cell in lanes
            for place in range(degree)
        )
        flats, placed = place_gradients(parameters)
        self._sum = CanonicalSum(flats, ranks, leaves)
        self._sum.exchange_beside(placed, bucket_bytes, turns)

    def begin(self, lanes: range) -> None:
        self._sum.begin(range(self._first + lanes.start, self._first + lanes.stop))

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        return self._sum.lane(self._first + lane)

    def serve(self) -> None:
        """Ranks of a cell compute in step."""

    def finish(self, divisor: float) -> None:
        self._sum.finish(divisor)

    def close(self) -> None:
        self._sum.close()

    def tensors(self) -> Iterator[OfPart]:
        return self._sum.tensors()
