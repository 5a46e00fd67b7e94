"""Frames: the bytes around a tensor's own in a file, those of a `torch.save` of that tensor alone.

They follow from type and shape, so a file's layout is known before a byte of a tensor is, and a tensor's bytes go from
its memory to the file, and back, without passing through a pickle. torch writes them itself, with the tensor skipped.
What a reader must not rely on is the zip archive's own CRC of the tensor: it is left at zero, and torch ignores it.
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
    """What comes before and after the `size` bytes of a tensor that fills its memory."""

    head: bytes
    size: int
    tail: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.head) + self.size + len(self.tail)


@functools.lru_cache(maxsize=65536)
def frame_of(dtype: torch.dtype, shape: torch.Size, first: int = 0) -> Frame:
    """Return the frame of a tensor; no memory of its size is touched.

    It is stored contiguously, but that its dimension `first` comes before the others.
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
    """Keeps what is written before and after the place that is skipped."""

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
