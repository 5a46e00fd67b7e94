"""Read the weights of a verified commit one by one, without the rest of its state, such as moments, and export them.

An export is a safetensors file or a plain torch state dict, for use without this package. A safetensors file is written
tensor by tensor, with the same bytes as the package's own `save_file`, which needs all tensors in memory. The format
does not: the size of the header in eight bytes, the header (JSON with type, shape and offset of every tensor), then the
tensors' bytes.
"""

from __future__ import annotations

import io
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic_train.checkpoint.commits.reader import verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import holding
from elastic_train.checkpoint.format.dcp import digest_of
from elastic_train.checkpoint.format.layout import AVERAGE, MODEL, bytes_of
from elastic_train.checkpoint.format.reading import read_metadata, read_named
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.stores.store import FileRecord, Store
from elastic_train.errors import CommitError, ConfigError, StorageError
from elastic_train.system.files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent

Weights = Literal["trained", "ema"]
"""Weights as trained, or their average over the steps."""
_BATCH_BYTES = 8 << 20
"""Tensors below this size are read together, so that neighbours in a file need one request."""

ReadTensors = Callable[[Sequence[str]], Iterator[Tensor]]
"""Yields tensors on the CPU by name, in order."""

Name = TypeVar("Name")
_ALIGNMENT = 64


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


class Kind(NamedTuple):
    """Type and shape of a tensor before it is read."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


class StoredTensors:
    """The tensors of a checkpoint by path, in state order."""

    def __init__(self, store: Store, attempt: str, files: Mapping[str, FileRecord]) -> None:
        self._store, self._attempt, self._files = store, attempt, files
        self._metadata = metadata = read_metadata(store, attempt, files)
        self._names: dict[StatePath, str] = {tuple(path): name for name, path in metadata.planner_data.items()}
        self.kinds: dict[StatePath, Kind] = {
            tuple(metadata.planner_data[name]): Kind(stored.properties.dtype, stored.size)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, paths: Sequence[StatePath]) -> list[Tensor]:
        """Read some tensors whole, on the CPU; a repeated path shares one tensor.

        Raise CommitError if bytes do not match their checksums.
        """
        found = _room_for({path: self.kinds[path] for path in paths})
        wanted = {self._names[path]: tensor for path, tensor in found.items()}
        read_named(self._store, self._attempt, self._files, self._metadata, wanted)
        return [found[path] for path in paths]


def _room_for(kinds: Mapping[Name, Kind]) -> dict[Name, Tensor]:
    """Return tensors in separate memory pages, which return to the system when the last of them is freed.

    The same allocations on the heap would leave gaps of several times their size.
    """
    ends = [0]
    for kind in kinds.values():
        ends.append(ends[-1] + kind.num_bytes + -kind.num_bytes % _ALIGNMENT)
    room = torch.frombuffer(mmap.mmap(-1, max(1, ends[-1])), dtype=torch.uint8)
    return {
        name: room[start : start + kind.num_bytes].view(kind.dtype).view(kind.shape)
        for start, (name, kind) in zip(ends, kinds.items(), strict=False)
    }


_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's type names, in file order, which keeps every tensor aligned."""
_HEADER_ALIGNMENT = 8


def write_safetensors(
    file: IO[bytes], kinds: Mapping[str, Kind], read: ReadTensors, metadata: Mapping[str, str]
) -> None:
    """Write tensors as they are read; raise ConfigError, before writing, for an unsupported type."""
    if wrong := [f"{name} ({kind.dtype})" for name, kind in kinds.items() if kind.dtype not in _NAMES]:
        raise ConfigError(f"safetensors has no type for {', '.join(wrong)}: use --to torch, or --format torch")
    order = {dtype: place for place, dtype in enumerate(_NAMES)}
    names = sorted(kinds, key=lambda name: (order[kinds[name].dtype], name.encode()))
    file.write(_header({name: kinds[name] for name in names}, metadata))
    for tensor in read(names):
        file.write(bytes_of(tensor))
        del tensor  # free it before the next one is read


def _header(kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, kind in kinds.items():
        start, end = end, end + kind.num_bytes
        entries[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    return len(header).to_bytes(8, "little") + header
