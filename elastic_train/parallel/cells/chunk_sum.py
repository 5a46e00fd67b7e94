"""The gradient sum of a stage that has several chunks of a model, each of which computes its lanes in their order.

A lane comes to one chunk while others are still at lanes before it, so each chunk has a tree of its own. Their last
lanes come in the opposite order of the chunks on all ranks of a column, whatever the number of their lanes, and so do
the exchanges beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from elastic_train.core.lanes import Lanes, contiguous
from elastic_train.parallel.buckets import Turns
from elastic_train.parallel.cells.context_sum import ContextSum, context_sum
from elastic_train.parallel.gradient_sum import (
    CanonicalSum,
    FastSum,
    GradientSum,
    OfPart,
    bind_gradients,
    place_gradients,
)
from elastic_train.parallel.group import Group
from elastic_train.parallel.unit_weights import UnitWeights


class ChunkSum:
    """Sums gradients by chunk; see `GradientSum`."""

    def __init__(self, chunks: Sequence[GradientSum], turns: Turns, weights: UnitWeights | None = None) -> None:
        """`chunks` are the sums of each; what they exchange beside the backward passes is in `turns`.

        With `weights` those of all chunks are whole from the beginning of a step to its end.
        """
        self.chunks, self._turns, self._weights = chunks, turns, weights

    def begin(self, lanes: Lanes) -> None:
        if self._weights is not None:
            self._weights.gather()
        for one in self.chunks:
            one.begin(lanes)

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in self.chunks:
                stack.enter_context(one.lane(lane))
            yield

    def serve(self) -> None:
        for one in self.chunks:
            one.serve()

    def finish(self, divisor: float) -> None:
        if self._weights is not None:
            self._weights.end_pass()
        for one in reversed(self.chunks):
            one.finish(divisor)

    def close(self) -> None:
        for one in self.chunks:
            one.close()
        self._turns.close()

    def tensors(self) -> Iterator[OfPart]:
        for one in self.chunks:
            yield from one.tensors()


def chunk_sum(
    chunks: Sequence[Sequence[nn.Parameter]],
    ranks: Group,
    num_lanes: int,
    bucket_bytes: float | None,
    degree: int = 1,
) -> ChunkSum:
    """Return the sum over the parameters of each chunk, which have elements in one of them alone.

    `ranks` hold the same, by cell, and so many of a cell compute some tokens of each row.
    """
    turns = Turns(ranks)
    return ChunkSum([_sum_of(one, ranks, num_lanes, bucket_bytes, degree, turns) for one in chunks], turns)


def _sum_of(
    parameters: Sequence[nn.Parameter],
    ranks: Group,
    num_lanes: int,
    bucket_bytes: float | None,
    degree: int,
    turns: Turns,
) -> CanonicalSum | ContextSum:
    lanes = contiguous(ranks.size // degree, num_lanes)
    if degree > 1:
        return context_sum(parameters, ranks, lanes, degree, bucket_bytes, turns)
    flats, placed = place_gradients(parameters)
    total = CanonicalSum(flats, ranks, lanes)
    total.exchange_beside(placed, bucket_bytes, turns)
    return total


def fast_sum(chunks: Sequence[Sequence[nn.Parameter]], ranks: Group) -> GradientSum:
    """Return the sum of gradients, by chunk, over ranks with the same parameters; rounding depends on the world."""
    sums = [FastSum(bind_gradients(one), ranks) for one in chunks]
    return sums[0] if len(sums) == 1 else ChunkSum(sums, Turns(ranks))


def by_chunk(total: GradientSum) -> Sequence[GradientSum]:
    """Return the sums that the chunks of a stage add to."""
    return total.chunks if isinstance(total, ChunkSum) else (total,)
