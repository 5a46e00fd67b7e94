"""litdata: chunks of 64 MB, StreamingDataset, and StreamingDataLoader within the process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.utilities.env import _DistributedEnv

from benchmarks.data.peers.peer import Batch, World, files_of, pad

logging.getLogger("litdata").setLevel(logging.ERROR)


def samples_of(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file."""
    table = pq.read_table(path, columns=["input_ids", "label"])
    for tokens, label in zip(table.column("input_ids"), table.column("label").to_pylist(), strict=True):
        yield {"input_ids": tokens.values.to_numpy(), "label": label}


def collate(samples: list[dict[str, Any]]) -> Batch:
    return pad([sample["input_ids"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])


class Lit:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        optimize(samples_of, files_of(rows), str(out / "rows"), chunk_bytes="64MB", num_workers=1, verbose=False)

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Loader:
        _DistributedEnv.detect = classmethod(  # as it would detect in a process group of that size on one node
            lambda cls: cls(world_size=world.size, global_rank=world.rank, num_nodes=1)
        )
        dataset = StreamingDataset(str(out / "rows"), shuffle=True, drop_last=False, seed=1)
        loader = StreamingDataLoader(dataset, batch_size=world.batch, collate_fn=collate, drop_last=False)
        if state is not None:
            loader.load_state_dict(state)
        return Loader(loader)


class Loader:
    """Iterates over a StreamingDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


PEER = Lit()
