"""A device's tensors through host memory: for ranks that share a device, and networks that NCCL cannot use.

What gloo would do by itself for some operations is done here for all that ranks use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.point_to_point import Backend, Work


class Returning:
    """An operation on copies in host memory; what it gives is copied to where it belongs when it is waited for."""

    def __init__(self, work: Work, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class ThroughHost:
    """The operations of a backend that knows host memory alone, for tensors that are on a device."""

    def __init__(self, host: Backend) -> None:
        self._host = host

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Returning:
        return Returning(self._host.send([tensor.cpu() for tensor in tensors], rank, tag), ())

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Returning:
        copies = [tensor.new_empty(tensor.shape, device="cpu") for tensor in tensors]
        return Returning(self._host.recv(copies, rank, tag), list(zip(tensors, copies, strict=True)))

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> Returning:
        copies = [[part.new_empty(part.shape, device="cpu") for part in parts] for parts in gathered]
        work = self._host.allgather(copies, [tensor.cpu() for tensor in tensors])
        return Returning(work, [pair for pairs in map(zip, gathered, copies) for pair in pairs])

    def allreduce(self, tensors: list[Tensor]) -> Returning:
        copies = [tensor.cpu() for tensor in tensors]
        return Returning(self._host.allreduce(copies), list(zip(tensors, copies, strict=True)))

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Returning:
        copies = [tensor.cpu() for tensor in tensors]
        return Returning(self._host.broadcast(copies, options), list(zip(tensors, copies, strict=True)))
