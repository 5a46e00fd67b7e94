"""What a group of ranks has to know of an accelerator: which tensors it has, the order of its work, how it connects.

CUDA's is here. A test makes another, whose work ends when the test says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from elastic_train.parallel.point_to_point import Backend, Work

_OWN_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""NCCL's own threads in torch look for errors, too, and end the process or abort operations by themselves: here a group
that is broken does, after which nothing that came of an aborted operation is used."""


_HANGS: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
    ((0,), (2, 22), "communicators are ended one after another, and may wait for each other (pytorch#119797)"),
    ((2, 31), (99,), "ending a communicator whose peer is gone has hung, when it was shrunk (pytorch#194679)"),
)
"""From one version of NCCL until before another: what is known to hang."""


class Communicator(Backend, Protocol):
    """A backend whose operations run on a device, after the calls that enqueue them have returned."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def abort(self) -> None: ...


class Queue(Protocol):
    """The order in which a device does what one thread asks of it: in CUDA's words, that thread's current stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Let what this thread asks of the device, whichever thread it is, be done in this order."""

    def mark(self) -> Callable[[], bool]:
        """Return what says whether the device has done all that it has been asked by now; it returns at once."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, as a group sees it.

    `holds` says whether a tensor is there, `queue` returns that of the calling thread, and `connect` makes the backend
    of (store, rank, size, timeout), which has no connections yet; without it tensors go through host memory.
    """

    torch_device: torch.device
    holds: Callable[[Tensor], bool]
    queue: Callable[[], Queue]
    connect: Callable[[Store, int, int, timedelta], Communicator] | None


class CudaQueue:
    """The stream that is current on the thread that makes this."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return cast("Callable[[], bool]", event.query)


def connect_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Return NCCL's backend, none of whose calls waits for peers: communicators are made in the background."""
    os.environ.update(_OWN_SETTINGS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return cast(Communicator, dist.ProcessGroupNCCL(store, rank, size, options))


def nccl_hazard() -> str | None:
    """Say how torch's version of NCCL is known to hang after a fault, and what to do; None if it is not."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    what = next((what for first, after, what in _HANGS if first <= version < after), None)
    if what is None:
        return None
    return (
        f"NCCL {'.'.join(map(str, version))}: {what}. A process that hangs so is replaced after some seconds; "
        "install a torch with another version of NCCL to spare it, or set parallel.transport to gloo"
    )


def device_of(device: torch.device, transport: str) -> Device | None:
    """Return what a group needs of a rank's device; None for the CPU, whose tensors gloo takes as they are."""
    if device.type != "cuda":
        return None
    is_direct = transport != "gloo"
    return Device(device, _is_cuda, partial(CudaQueue, device), connect_nccl if is_direct else None)


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda
