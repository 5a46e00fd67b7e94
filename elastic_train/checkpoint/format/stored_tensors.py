"""Read some tensors of a checkpoint without reading the others."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic_train.checkpoint.format.reading import read_metadata, read_named
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.store import Store

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
