"""Export a commit's weights as safetensors or a plain torch state dict, for use without this package."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.weights import Weights, open_weights
from elastic_train.checkpoint.format.safetensors_file import write_safetensors
from elastic_train.checkpoint.format.stored_tensors import Kind, ReadTensors
from elastic_train.checkpoint.format.torch_frame import bytes_of
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.atomic_files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent

Format = Literal["safetensors", "torch"]


def export(
    store: Store,
    record: CommitRecord,
    target: Path,
    kind: Format,
    weights: Weights = "trained",
    track: Track = silent,
) -> int:
    """Verify a commit and stream its model's tensors to a new file; return their number.

    Raise ConfigError if averages are requested and the commit has none.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another file")
    unfinished = draft_of(target)
    try:
        with open_weights(store, record, weights) as found, unfinished.open("wb") as file:
            read = found.tracked(track, f"writing {target.name}")
            if kind == "torch":
                write_torch(file, found.kinds, read)
            else:
                write_safetensors(file, found.kinds, read, _origin(record, weights))
        publish(unfinished, target)
    except OSError as error:
        raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(found.kinds)


def _origin(record: CommitRecord, weights: Weights) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    found = {"commit": record.key, "digest": record.digest, "cut_dims": json.dumps(record.cut_dims or {})}
    return found | ({"weights": "ema"} if weights == "ema" else {"weights_sha256": record.weights_sha256})


def write_torch(file: IO[bytes], kinds: Mapping[str, Kind], read: ReadTensors) -> None:
    """Write a `torch.save` state dict, reading its tensors one by one.

    torch writes the file from tensors without memory and skips their bytes; at each skip the tensor is read and
    written. As in `torch_frame`, the archive's CRCs of tensors stay zero; `torch.load` ignores them.
    """
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
