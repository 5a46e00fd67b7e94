"""Pinned host memory for offload, with copies to and from a device that overlap with computation.

A device has three queues, each in order: copies *in*, computation, copies *out*. Work that depends on another queue
waits for that work's event. A copy may run at any time after its call: its source and destination must not be touched
until its event or, on the host, until `settle`.

This module has CUDA's memory and a CPU's, which copies at once. Tests use another that copies in any order that the
events allow.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from elastic_train.errors import ConfigError

ROOM_BYTES = 32 << 20
"""Bytes per block: PCIe reaches its full rate at a few megabytes, and copies take longer than a block's kernels."""
_MOST_THREADS, _LEAST_SHARE = 8, 64 << 20
"""Number of threads that touch pages, and the least number of bytes for each."""
Way = Literal["in", "out"]
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs of destination and source."""
Event = object
"""A point in a queue; opaque except to the memory that returned it."""


class HostMemory:
    """The memory of a rank's host, and its device's queues; these are a CPU's, where both memories are the same."""

    room_bytes = ROOM_BYTES
    """Bytes copied at a time."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory that a device can access directly."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(np.zeros(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)

    def room(self, num_bytes: int) -> Tensor:
        """Return bytes of device memory to copy into and out of."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Event] = ()) -> Event:
        """Enqueue copies after some events; return their event."""
        for place, source in pairs:
            place.copy_(source)
        return None

    def compute(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Enqueue a computation after this thread's earlier ones and some events; return its event."""
        work()
        return None

    def join(self) -> None:
        """Make this thread's later computations wait for all enqueued ones."""

    def settle(self, way: Way = "out") -> None:
        """Wait for all enqueued copies in one direction."""


class CudaMemory(HostMemory):
    """Pinned memory, with two streams besides the calling thread's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[Way, torch.cuda.Stream] = {
            "in": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            "out": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return pinned(numel * dtype.itemsize, self._device).view(dtype)
        except MemoryError as error:
            raise ConfigError(
                f"parallel.offload: {error}: give the node more memory, raise its limit of locked memory (ulimit -l), "
                "or set parallel.offload to none"
            ) from error

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Event] = ()) -> Event:
        stream = self._streams[way]
        _wait(stream, after)
        with torch.cuda.stream(stream):
            for place, source in pairs:
                place.copy_(source, non_blocking=True)
        return _event(stream)

    def compute(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        stream = torch.cuda.current_stream(self._device)
        _wait(stream, after)
        work()
        return _event(stream)

    def settle(self, way: Way = "out") -> None:
        self._streams[way].synchronize()


def host_memory_of(device: torch.device) -> HostMemory:
    """Return the host memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def _wait(stream: torch.cuda.Stream, events: Sequence[Event]) -> None:
    for event in events:
        stream.wait_event(cast(torch.cuda.Event, event))


def _event(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def pinned(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed pinned host memory; raise MemoryError if there is none.

    Callable from any thread: the thread's default device is not used. Several threads touch the pages before the driver
    pins them, because no thread can launch kernels while the driver makes them. 12 GB take 1 s this way, 4 s with one
    thread, and 11 s as torch's own pinned memory, which also rounds up to powers of two.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)  # NumPy's has a stride of 0, and is no memory of another type
    memory = np.empty(num_bytes, dtype=np.uint8)
    share = max(_LEAST_SHARE, -(-num_bytes // min(_MOST_THREADS, len(os.sched_getaffinity(0)))))
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda lo: memory[lo : lo + share].fill(0), range(0, num_bytes, share)):
            pass
    start = memory.ctypes.data
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(start, num_bytes, 0))  # type: ignore[no-untyped-call]
    if status:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned (CUDA's error {status})")
    weakref.finalize(memory, _unpin, start, device).atexit = False  # a copy may be running, and the driver ends it
    return torch.from_numpy(memory)


def _unpin(start: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]
