"""Interface of an accelerator to a group of ranks: which tensors it holds, its queue, its transport, and its times.

This module has CUDA's. Tests use another whose work ends on command.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection
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
"""Settings of NCCL's threads in torch, which would end the process or abort operations when they find errors.

A broken group aborts by itself, and never uses the results of an aborted operation.
"""


_HANGS: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
    ((0,), (2, 22), "communicators are ended one after another, and may wait for each other (pytorch#119797)"),
    ((2, 31), (99,), "ending a communicator whose peer is gone has hung, when it was shrunk (pytorch#194679)"),
)
"""Known hangs of NCCL: first affected version, first unaffected version, description."""


class Communicator(Backend, Protocol):
    """A backend whose operations run on a device after the calls that enqueue them have returned."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Work: ...
    def abort(self) -> None: ...


class Queue(Protocol):
    """The order in which a device executes one thread's work: for CUDA, that thread's current stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which any calling thread's work is enqueued here."""

    def mark(self) -> Callable[[], bool]:
        """Return a function that says, without waiting, if all work enqueued so far is done."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as used by a group.

    `holds` returns True if a tensor is on it, `queue` returns the calling thread's queue, and `connect` makes an
    unconnected backend from (store, rank, size, timeout); if it is None, tensors go through host memory.
    """

    torch_device: torch.device
    holds: Callable[[Tensor], bool]
    queue: Callable[[], Queue]
    connect: Callable[[Store, int, int, timedelta], Communicator] | None


class CudaQueue:
    """The current CUDA stream of the thread that creates it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return cast("Callable[[], bool]", event.query)


def connect_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Return NCCL's backend with non-blocking calls: communicators are made in the background."""
    os.environ.update(_OWN_SETTINGS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    return cast(Communicator, dist.ProcessGroupNCCL(store, rank, size, options))


def nccl_hazard() -> str | None:
    """Describe the known hang after faults of torch's NCCL version, and the remedy; None if there is none."""
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
    """Return a rank's accelerator; None for the CPU, whose tensors gloo takes directly."""
    if device.type != "cuda":
        return None
    is_direct = transport != "gloo"
    return Device(device, _is_cuda, partial(CudaQueue, device), connect_nccl if is_direct else None)


def _is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


class DeviceTimes:
    """Measures a GPU's time per phase: points in the queue of the thread that creates it, and the time between them.

    A host's clock would measure only the enqueueing, and one wait at the end of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._noted: deque[tuple[str, torch.cuda.Event]] = deque()

    def note(self, phase: str) -> None:
        """Attribute the device work since the last call to a phase; returns at once."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._noted.append((phase, event))

    def take(self, phases: Collection[str]) -> dict[str, float]:
        """Return the seconds per phase since the last call, as far as the device has come; does not wait.

        A step whose lanes have no samples reads nothing from the device, which may still run the last update.
        """
        spent = dict.fromkeys(phases, 0.0)
        while len(self._noted) > 1 and self._noted[1][1].query():  # type: ignore[no-untyped-call]
            _, before = self._noted.popleft()
            phase, now = self._noted[0]
            if phase in spent:
                spent[phase] += 1e-3 * before.elapsed_time(now)
        return spent


def device_times_of(device: torch.device) -> DeviceTimes | None:
    """Return the timer of a device; None for a CPU, whose calls are synchronous."""
    return DeviceTimes(device) if device.type == "cuda" else None
