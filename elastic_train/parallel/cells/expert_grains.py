"""Grains of gradients of which ranks have a run of experts each, so that their squares add up as on one rank.

A grain is cut from a whole tensor, and may reach beyond a rank's experts. It comes together at the rank that has its
first element, which measures it; so neither a grain's sum nor their order depends on how many ranks there are. Where a
rank's run is a multiple of a grain, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.shards.grains import GRAIN


class _Begun(NamedTuple):
    """The grains that begin in a rank's run of a tensor, and what comes of the last one from the ranks after it."""

    grains: list[Tensor]
    others: list[Tensor]

    def whole(self) -> list[Tensor]:
        return [*self.grains[:-1], torch.cat([*self.grains[-1:], *self.others])] if self.others else self.grains


def num_begun(numel: int, rank: int) -> int:
    """Return how many grains begin in a rank's run of a tensor, of which each rank has so many elements."""
    return -(-(rank + 1) * numel // GRAIN) + -rank * numel // GRAIN


def begun_grains(runs: Sequence[Tensor], ranks: PointToPoint) -> Iterator[list[Tensor]]:
    """Yield the whole grains that begin in this rank's run of each tensor; all ranks call it, with runs of equal shape.

    Raises PeerLostError.
    """
    sends, receives, begun = list[tuple[int, Tensor]](), list[tuple[int, Tensor]](), list[_Begun]()
    for run in runs:
        flat, numel = run.reshape(-1), run.numel()
        lo, hi = ranks.rank * numel, (ranks.rank + 1) * numel
        num_before = min(-lo % GRAIN, numel)
        if num_before:
            sends.append((lo // GRAIN * GRAIN // numel, flat[:num_before]))
        grains = list(torch.split(flat[num_before:], GRAIN)) if num_before < numel else []
        end = min(-(-hi // GRAIN) * GRAIN, ranks.size * numel) if grains else hi
        after = range(ranks.rank + 1, -(-end // numel)) if numel else range(0)
        others = [(rank, flat.new_empty(min((rank + 1) * numel, end) - rank * numel)) for rank in after]
        receives += others
        begun.append(_Begun(grains, [memory for _, memory in others]))
    if sends or receives:
        ranks.exchange(sends, receives)
    for one in begun:
        yield one.whole()
