"""What the ranks of a cell exchange where each computes some tokens of every row: keys and values for attention.

All of a row's keys and values come to each rank, one block at a time (as in Llama 3, Grattafiori et al. 2024, section
3.3.2), and the gradients of a rank's own come back from all, added along a fixed tree of the places. A peer that is
lost ends either with PeerLostError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from elastic_train.core.lanes import lane_additions
from elastic_train.parallel.cells.graph_edges import outside_of_graphs
from elastic_train.parallel.group import Group

TOKENS = -2


class Gathering:
    """The function that brings together what the places of a group have; of one class in every world, and before."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @outside_of_graphs
    def __call__(self, tensor: Tensor) -> Tensor:
        return gathered(tensor, self._group)


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """Return all places' tensors (…, tokens, size), which have equal shapes, one after the other along their tokens."""
    return _Gathered.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gather(tensor.detach(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_of_own(gradients[0], ctx.group), None


def gather(tensor: Tensor, group: Group) -> Tensor:
    """Return all places' tensors, of equal shapes, one after the other along their tokens."""
    return torch.cat(group.all_gather(tensor.contiguous()).unbind(0), TOKENS)


def sum_of_own(tensor: Tensor, group: Group) -> Tensor:
    """Give each place what this one has of its tokens, and return the sum of what all have of this one's."""
    parts = [part.contiguous() for part in tensor.chunk(group.size, TOKENS)]
    mine = group.rank
    found = [part if place == mine else torch.empty_like(part) for place, part in enumerate(parts)]
    arriving, leaving = group.begin_exchange(
        [(place, part) for place, part in enumerate(parts) if place != mine],
        [(place, part) for place, part in enumerate(found) if place != mine],
    )
    group.wait(arriving + leaving)
    for left, right in lane_additions(group.size):
        found[left] = found[left] + found[right]
    return found[0]
