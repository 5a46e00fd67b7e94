"""What the ranks of a cell exchange inside of a lane: sums of partial results, and of gradients of what they share.

Modules keep one `CellLinks` over all worlds; the group of the present one is bound to it, so a new world changes
neither model nor hooks. A sum is made along a fixed tree of the cell's places: it is the same on all of them, to the
last bit, and depends on nothing but the cell's size. A peer that is lost ends any exchange with PeerLostError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from elastic_train.core.lanes import Part
from elastic_train.parallel.exchange import Scratch, Subtrees, exchange
from elastic_train.parallel.group import Group


class CellLinks:
    """The group of this rank's cell in the present world."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._scratch = Scratch()

    @property
    def group(self) -> Group:
        assert self._group is not None, "no cell has been formed"
        return self._group

    def bind(self, group: Group) -> None:
        """Exchange with the ranks of this group from now on; a rank's number in it is its place."""
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all places' tensors."""
        group, total = self.group, tensor.detach().clone(memory_format=torch.contiguous_format)
        flat, layout = total.view(-1), [[Part(0, place)] for place in range(group.size)]
        subtrees = Subtrees(flat, 0, 0, flat.numel(), {Part(0, group.rank): [flat]}, layout, group.size)
        exchange(subtrees, group, self._scratch)
        return total


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, links: CellLinks) -> Tensor:
        ctx.links = links
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.links.sum(gradients[0]), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, links: CellLinks) -> Tensor:
        return links.sum(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def shared(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return a tensor that all places have, for each to use in its own way; its gradient is the sum of theirs."""
    return _Shared.apply(tensor, links)  # type: ignore[no-any-return, no-untyped-call]


def summed(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return the sum of all places' tensors, which all of them go on with alike."""
    return _Summed.apply(tensor, links)  # type: ignore[no-any-return, no-untyped-call]
