"""Boundaries of compiled graphs: graphs end before an exchange within a cell and resume after it.

So graphs know neither peers nor worlds, and can be compiled before there are any, with a `LoneGroup` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from elastic_train.parallel.group import Group

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
