"""Context parallelism: exchange of keys and values between ranks that each compute some tokens of every row.

Each rank all-gathers a row's keys and values, one block at a time (as in Llama 3, Grattafiori et al. 2024, section
3.3.2). In the backward pass, gradients are reduce-scattered along a fixed tree. Both raise PeerLostError if a peer is
lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from elastic_train.core.lanes import lane_additions
from elastic_train.parallel.cells.links import outside_of_graphs
from elastic_train.parallel.group import Group

TOKENS = -2


class Gathering:
    """Function that all-gathers the tensors of a group; of one class in every world, and before."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @outside_of_graphs
    def __call__(self, tensor: Tensor) -> Tensor:
        return gathered(tensor, self._group)


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """All-gather tensors (…, tokens, size) of equal shapes along their tokens."""
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
    """All-gather tensors of equal shapes along their tokens."""
    return torch.cat(group.all_gather(tensor.contiguous()).unbind(0), TOKENS)


def sum_of_own(tensor: Tensor, group: Group) -> Tensor:
    """Reduce-scatter a tensor along its tokens: return the sum over all ranks of this rank's tokens."""
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
