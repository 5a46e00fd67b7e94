"""Read some tensors of a checkpoint without reading the others, and write them as a safetensors file.

That file is written tensor by tensor, with the same bytes as the package's own `save_file`.

`save_file` needs all tensors in memory. The format does not: the size of the header in eight bytes, the header (JSON
with type, shape and offset of every tensor), then the tensors' bytes.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic_train.checkpoint.format.layout import bytes_of
from elastic_train.checkpoint.format.reading import read_metadata, read_named
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.stores.store import FileRecord, Store
from elastic_train.errors import ConfigError

ReadTensors = Callable[[Sequence[str]], Iterator[Tensor]]
"""Yields tensors on the CPU by name, in order."""

Name = TypeVar("Name")
_ALIGNMENT = 64


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
