"""Tensor parallelism: sums of partial results, and of gradients of shared tensors, within a lane.

Modules keep one `CellLinks` across worlds, to which the current group is bound, so a new world changes neither model
nor hooks. Sums follow a fixed tree: they are bit-identical on all ranks and depend only on the cell's size. All
exchanges raise PeerLostError if a peer is lost.

Compiled graphs end before an exchange within a cell and resume after it. So graphs know neither peers nor worlds, and
can be compiled before there are any, with a `LoneGroup` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from elastic_train.core.lanes import Part
from elastic_train.parallel.exchange import Scratch, Subtrees, exchange
from elastic_train.parallel.group import Group


class CellLinks:
    """The tensor-parallel group of this rank in the current world."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._scratch = Scratch()

    @property
    def group(self) -> Group:
        assert self._group is not None, "no cell has been formed"
        return self._group

    def bind(self, group: Group) -> None:
        """Exchange with the ranks of this group from now on."""
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
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
    """Return a replicated tensor for each rank's own use; its gradient is summed over the ranks."""
    return _Shared.apply(tensor, links)  # type: ignore[no-any-return, no-untyped-call]


def summed(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return the sum of all ranks' tensors; its gradient must be equal on all ranks."""
    return _Summed.apply(tensor, links)  # type: ignore[no-any-return, no-untyped-call]


P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Exclude a function from the compiled graphs around it.

    Equal to torch.compiler.disable, without its import of torch's compiler, which takes a second.
    """
    return _disable_dynamo(function)


class LoneGroup(Group):
    """The first of `size` ranks without peers: gathers and sums use its own tensor, and receives give zeros."""

    def __init__(self, size: int) -> None:
        super().__init__(0, 1, None, timeout_s=0.0)
        self.size, self._host = size, _Nobody()


class _Nobody:
    """A backend without connections; its operations are complete when they begin."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        return _Done()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        tensors[0].zero_()
        return _Done()

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> _Done:
        for place in gathered[0]:
            place.copy_(tensors[0])
        return _Done()

    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> _Done:
        return self.allgather(gathered, tensors)

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> _Done:
        return _Done()


class _Done:
    def wait(self) -> None: ...
