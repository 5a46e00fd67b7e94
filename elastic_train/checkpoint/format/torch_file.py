"""Write a `torch.save` state dict tensor by tensor.

torch writes the file from tensors without memory and skips their bytes; at each skip the tensor is read and written. As
in `torch_frame`, the archive's CRCs of tensors stay zero; `torch.load` ignores them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_train.checkpoint.format.stored_tensors import Kind, ReadTensors
from elastic_train.checkpoint.format.torch_frame import bytes_of


def write_torch(file: IO[bytes], kinds: Mapping[str, Kind], read: ReadTensors) -> None:
    with FakeTensorMode():
        hollow = {name: torch.empty(kind.shape, dtype=kind.dtype) for name, kind in kinds.items()}
    filling = _Filling(file, read([name for name, kind in kinds.items() if kind.num_bytes]))
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(hollow, filling)  # type: ignore[arg-type]  # torch asks for no more
    except RuntimeError:
        if filling.error is None:
            raise
    if filling.error is not None:  # torch's own error would only mention the position
        raise filling.error


class _Filling(io.RawIOBase):
    """Writes what torch writes, and the next tensor wherever torch skips one."""

    def __init__(self, file: IO[bytes], tensors: Iterator[Tensor]) -> None:
        self._file, self._tensors = file, tensors
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: bytes | memoryview, /) -> int:  # type: ignore[override]  # what torch gives
        with self._kept():
            return self._file.write(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._kept():
            assert whence == os.SEEK_CUR, "torch skips a tensor's bytes"
            content = bytes_of(next(self._tensors))
            assert len(content) == offset, f"torch skips {offset} bytes, and the next tensor has {len(content)}"
            self._file.write(content)
            return self._file.tell()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an error that torch would lose."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error
            raise
