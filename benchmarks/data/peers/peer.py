"""The protocol of a peer's module, and the padding that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from elastic_train.data.arrow.lists import pad_lists

BATCH, SEED = 32, 1
Batch = tuple[Tensor, Tensor]


class Stream(Protocol):
    """One rank's batches, starting from some state."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield (tokens, labels): shapes (rows, longest) and (rows,)."""

    def state(self) -> Any:
        """Return the state that `open` resumes from, as of the last batch that was yielded."""


@dataclass(frozen=True, slots=True)
class World:
    """The reader's rank, the number of ranks, and the rows per step."""

    rank: int = 0
    size: int = 1
    batch: int = BATCH


class Peer(Protocol):
    """A library's loader."""

    def prepare(self, rows: Path, out: Path) -> None:
        """Convert Parquet files into the library's preferred format."""

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Stream:
        """Open the dataset, from its start or from a state."""


def pad(rows: Sequence[npt.NDArray[np.int32]]) -> Tensor:
    """Pad rows to the longest one, by the fastest method found for a list of arrays."""
    lengths = [len(row) for row in rows]
    padded = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : lengths[place]] = row
    return torch.from_numpy(padded)


def pad_table(table: pa.Table) -> Batch:
    """Pad the rows of an Arrow table as our loader does, the fastest method found."""
    tokens, _ = pad_lists(table.column("input_ids"), max_width=4096)
    return torch.from_numpy(tokens), torch.from_numpy(table.column("label").to_numpy().astype(np.int64))


def files_of(rows: Path) -> list[str]:
    """Return the Parquet files of a dataset, in order."""
    return [str(path) for path in sorted(rows.glob("*.parquet"))]
