"""Host memory beside a device: what is kept there, and the copies from and to it, which run beside the computation.

A device works on three queues, each in its own order: copies *in*, computation, copies *out*. What has to come after
work of another queue says so by that work's event. A copy that was asked for may be made at any time from then on:
what it fills, and what it is made of, belongs to it until its event, or until `settle` for what the host reads.

CUDA's is here, and that of a CPU, which makes every copy at once. A test makes another, which makes them in any order
that the events allow.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from elastic_train.errors import ConfigError

ROOM_BYTES = 32 << 20
"""PCIe is at its full rate from a few megabytes on, and a block's kernels are hidden by its copies."""
_MOST_THREADS, _LEAST_SHARE = 8, 64 << 20
"""Which make pages, and of how many bytes each at least."""
Way = Literal["in", "out"]
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Where something is to be, and where it is."""
Event = object
"""A point of a queue; only the memory that has returned it knows what it is."""


class HostMemory(Protocol):
    """The memory of a rank's host, and the queues of its device.

    `room_bytes` is how much goes in and out at a time.
    """

    @property
    def room_bytes(self) -> int: ...

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory, from which a device copies by itself."""

    def room(self, num_bytes: int) -> Tensor:
        """Return bytes of the device's memory, for copies to go in and out of."""

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Event] = ()) -> Event:
        """Ask for copies, after some events; return their event."""

    def compute(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Ask for a computation, after all that this thread has computed and some events; return its event."""

    def join(self) -> None:
        """Let whatever this thread computes from now on come after all computations that were asked for."""

    def settle(self, way: Way = "out") -> None:
        """Return when all copies one way that were asked for are made."""


class CpuMemory:
    """For a CPU, to which all memory is the same."""

    room_bytes = ROOM_BYTES

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(np.zeros(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Event] = ()) -> Event:
        for place, source in pairs:
            place.copy_(source)
        return None

    def compute(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        work()
        return None

    def join(self) -> None:
        """Everything has been computed."""

    def settle(self, way: Way = "out") -> None:
        """Everything has been copied."""


class CudaMemory:
    """Pinned memory, and two streams beside the calling thread's own."""

    room_bytes = ROOM_BYTES

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

    def join(self) -> None:
        """The current stream has its own order."""

    def settle(self, way: Way = "out") -> None:
        self._streams[way].synchronize()


def host_memory_of(device: torch.device) -> HostMemory:
    """Return the memory beside a device."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory()


def _wait(stream: torch.cuda.Stream, events: Sequence[Event]) -> None:
    for event in events:
        stream.wait_event(cast(torch.cuda.Event, event))


def _event(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def pinned(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed bytes of host memory that a device copies to and from by itself; MemoryError if there are none.

    Any thread may call it: another device, which is where a new thread begins, is not used.

    Its pages are made by several threads before the driver is asked: as long as that makes them, by one thread, no
    other thread's kernels are launched. 12 GB take 1 s so, 4 s without, and 11 s as torch's own pinned memory, which
    also comes in powers of two.
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
    weakref.finalize(memory, _unpin, start, device).atexit = False  # a copy may be under way, and the driver ends it
    return torch.from_numpy(memory)


def _unpin(start: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]
