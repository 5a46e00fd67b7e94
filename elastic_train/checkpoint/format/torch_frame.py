"""Frames: the bytes before and after a tensor's own, as in a `torch.save` of that tensor alone.

They depend on type and shape only, so a file's layout is known before any tensor, and a tensor's bytes move between
memory and file without a pickle. torch writes the frame with the tensor skipped. Readers must not rely on the zip
archive's CRC of the tensor: it stays zero, and torch ignores it.
"""

from __future__ import annotations

import functools
import io
import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a tensor's `size` bytes."""

    head: bytes
    size: int
    tail: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.size + len(self.tail)


@functools.lru_cache(maxsize=65536)
def frame_of(dtype: torch.dtype, shape: torch.Size, first: int = 0) -> Frame:
    """Return the frame of a tensor without allocating its size.

    The tensor is stored contiguously with dimension `first` moved to the front.
    """
    hollow = _Hollow()
    stored = torch.empty([*shape[first : first + 1], *shape[:first], *shape[first + 1 :]], dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(stored.movedim(0, first) if first else stored, hollow)  # type: ignore[arg-type]  # torch asks for no more
    size = dtype.itemsize * shape.numel()
    assert hollow.size == size, f"torch left out {hollow.size} bytes of {size}"
    return Frame(bytes(hollow.head), size, bytes(hollow.tail))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    assert tensor.is_contiguous(), "its bytes are elsewhere"
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # a single element is contiguous whatever its strides
    return flat.view(torch.uint8).numpy().data


class _Hollow(io.RawIOBase):
    """Collects what is written before and after the skipped range."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.size = 0
        self._is_behind = False

    def writable(self) -> bool:
        return True

    def write(self, content: object, /) -> int:
        view = memoryview(content)  # type: ignore[arg-type]  # any buffer
        (self.tail if self._is_behind else self.head).extend(view)
        return view.nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and not self._is_behind, "torch skips a tensor's bytes once"
        self._is_behind, self.size = True, offset
        return len(self.head) + offset
