"""Exchange a device's tensors through host memory, for ranks that share a device or networks without NCCL.

gloo does this for some operations; here it is done for all that ranks use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.point_to_point import Backend, Work


class Returning:
    """An operation on host copies; `wait` copies the results to the device."""

    def __init__(self, work: Work, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class ThroughHost:
    """A backend for device tensors, on top of one for host memory."""

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
