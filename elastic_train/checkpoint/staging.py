"""Staging: a rank's part of the applied state is copied to host memory, so that training goes on while it is written.

The memory is kept from save to save: fresh memory costs several times the copy. There are at most two buffers. A save
uses one; the second is for the next world's first save, should the writer of a broken world still be stuck in a store.

Only what an optimizer step alone changes may be copied beside the next step's forward and backward. The rest (buffers
that a forward pass may change) is cloned at once, at the step boundary.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.frames import bytes_of
from elastic_train.checkpoint.layout import Leaves, Part, Slot
from elastic_train.checkpoint.record import Path
from elastic_train.errors import StorageError

NUM_BUFFERS = 2
_ALIGNMENT = 64


class Buffers:
    """A process's staging memory, over all of its worlds."""

    def __init__(self) -> None:
        self._free: list[Tensor | None] = [None] * NUM_BUFFERS
        self._lock = threading.Lock()

    @property
    def has_free(self) -> bool:
        with self._lock:
            return bool(self._free)

    @contextlib.contextmanager
    def lease(self, num_bytes: int, *, is_pinned: bool) -> Iterator[Tensor]:
        """Lend a buffer of at least so many bytes, the last one if it is large enough.

        Raises StorageError if the host's memory is short.
        """
        with self._lock:
            assert self._free, "a save begins only if there is a free buffer"
            buffer = self._free.pop()
        try:
            if buffer is None or buffer.numel() < num_bytes or buffer.is_pinned() != is_pinned:
                buffer = None  # let go of it before the new one is there
                buffer = _allocate(num_bytes, is_pinned)
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)
                self._free.sort(key=lambda buffer: buffer is not None)


class Snapshot:
    """A part's tensors as they are at a step boundary; created there, and copied by `copy` before the next update."""

    def __init__(self, part: Part, leaves: Leaves, is_still: Callable[[Path], bool]) -> None:
        self._slots: Sequence[Slot] = part.slots
        self._tensors = [_at_boundary(leaves[slot.path], is_still(slot.path)) for slot in part.slots]
        self._versions = [tensor._version for tensor in self._tensors]
        self._device = next((tensor.device for tensor in self._tensors if tensor.is_cuda), None)
        self._event = torch.cuda.Event() if self._device is not None else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        self.num_bytes = sum(_aligned(slot.frame.size) for slot in self._slots)

    @property
    def is_on_device(self) -> bool:
        return self._device is not None

    def copy(self, buffer: Tensor, check: Callable[[], None]) -> list[memoryview]:
        """Copy the tensors and let go of them; return the bytes of each. `check` may raise between two tensors.

        Raises StorageError if a tensor has changed since the boundary.
        """
        places, end = [], 0
        for slot in self._slots:
            places.append(buffer[end : end + slot.frame.size])
            end += _aligned(slot.frame.size)
        with self._stream():
            for slot, tensor, place in zip(self._slots, self._tensors, places, strict=True):
                check()
                place.view(slot.dtype).view(slot.shape).copy_(tensor, non_blocking=True)
        for slot, tensor, version in zip(self._slots, self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise StorageError(
                    f"state '{slot.index.fqn}' changed while it was copied; only an update may change it"
                )
        self._tensors = []
        return [bytes_of(place) for place in places]

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """Copy on a stream of its own, behind all that was launched before the boundary; wait for it at the end."""
        if self._event is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._event)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


def _allocate(num_bytes: int, is_pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise StorageError(
            f"no {num_bytes} bytes of host memory to stage a save: {str(error).splitlines()[0]}"
        ) from error


def _at_boundary(leaf: object, is_still: bool) -> Tensor:
    assert isinstance(leaf, Tensor), "the plan is of this state"
    return leaf.detach() if is_still else leaf.detach().clone()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
