"""Read the weights of a verified commit one by one, without the rest of its state, such as moments.

Export a commit's weights as safetensors or a plain torch state dict, for use without this package.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_train.checkpoint.commits.reader import verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import holding
from elastic_train.checkpoint.format.layout import AVERAGE, MODEL, bytes_of
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.stored_tensors import Kind, ReadTensors, StoredTensors, write_safetensors
from elastic_train.checkpoint.format.weights_digest import digest_of
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import CommitError, ConfigError, StorageError
from elastic_train.system.atomic_files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent

Weights = Literal["trained", "ema"]
"""Weights as trained, or their average over the steps."""
_BATCH_BYTES = 8 << 20
"""Tensors below this size are read together, so that neighbours in a file need one request."""


@dataclass(frozen=True, slots=True)
class CommitWeights:
    """A commit's weights and buffers by name, in the model's order."""

    _stored: StoredTensors
    _paths: Mapping[str, StatePath]

    @classmethod
    def of(cls, store: Store, record: CommitRecord, weights: Weights = "trained") -> Self:
        """Find the weights as trained, or their averages where they exist; raise CommitError if there are none.

        Raise ConfigError if averages are requested and the commit has none.
        """
        source = store.near({f"{record.attempt}/{name}": file for name, file in record.files.items()})
        stored = StoredTensors(source, record.attempt, record.files)
        paths = {str(path[1]): path for path in stored.kinds if path[0] == MODEL and len(path) == 2}
        if not paths:
            raise CommitError(f"{record.key} holds no '{MODEL}'")
        return cls(stored, paths if weights == "trained" else _averaged(stored, paths, record.key))

    @property
    def kinds(self) -> dict[str, Kind]:
        return {name: self._stored.kinds[path] for name, path in self._paths.items()}

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return some of the weights under other names; `names` maps new names to old ones, in order."""
        return type(self)(self._stored, {new: self._paths[old] for old, new in names.items()})

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield tensors in this order, on the CPU, reading ahead some megabytes at most.

        Raise CommitError if bytes do not match their checksums, StorageError if the store cannot be read.
        """
        kinds, batch, num_bytes = self.kinds, list[str](), 0
        for name in names:
            if batch and num_bytes + kinds[name].num_bytes > _BATCH_BYTES:
                yield from self._read(batch)
                batch, num_bytes = [], 0
            batch.append(name)
            num_bytes += kinds[name].num_bytes
        yield from self._read(batch)

    def tracked(self, track: Track, what: str) -> ReadTensors:
        return lambda names: iter(track(self.read(names), what, len(names), "tensors"))

    def _read(self, names: Sequence[str]) -> Iterator[Tensor]:
        tensors = self._stored.read([self._paths[name] for name in names])
        while tensors:
            yield tensors.pop(0)


@contextmanager
def open_weights(store: Store, record: CommitRecord, weights: Weights = "trained") -> Iterator[CommitWeights]:
    """Verify all files of a commit, and protect it from retention while its weights are read."""
    with holding(store, record.key):
        verify(store, record)
        yield CommitWeights.of(store, record, weights)


def _averaged(stored: StoredTensors, paths: Mapping[str, StatePath], key: str) -> dict[str, StatePath]:
    """Return the paths of the averages, and of weights without one.

    The average of a tied parameter is stored under its first name; other names are matched by equal bits.
    """
    averages = {str(path[2]): path for path in stored.kinds if path[:2] == ("optimizer", "state") and _is_average(path)}
    if not averages:
        raise ConfigError(f"{key} holds no average of the weights: the run has no optimizer.ema_decay")
    digests: dict[StatePath, str] = {}

    def digest(path: StatePath) -> str:
        if path not in digests:
            digests[path] = digest_of(stored.read([path])[0])
        return digests[path]

    def find(path: StatePath) -> StatePath:
        alike = [name for name in averages if name in paths and stored.kinds[paths[name]] == stored.kinds[path]]
        same = [averages[name] for name in alike if digest(paths[name]) == digest(path)]
        return same[-1] if same else path

    return {name: averages.get(name) or find(path) for name, path in paths.items()}


def _is_average(path: StatePath) -> bool:
    return len(path) == 4 and path[3] == AVERAGE


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
