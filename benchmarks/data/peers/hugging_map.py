"""Hugging Face datasets, map-style: memory-mapped Arrow, shuffled, split by node, batches in the arrow format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, load_dataset, load_from_disk
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.data.peers.peer import SEED, World, files_of, pad_table
from benchmarks.data.peers.plain import Loader


class Batched:
    """Reads a dataset's rows batch by batch, as tables."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: int) -> pa.Table:
        return self._dataset[place]

    def __getitems__(self, places: list[int]) -> pa.Table:
        return self._dataset[places]


class MapStyle:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        dataset = load_dataset("parquet", data_files=files_of(rows), split="train", cache_dir=str(out / "cache"))
        dataset.save_to_disk(str(out / "rows"))

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Loader:
        dataset = split_dataset_by_node(load_from_disk(str(out / "rows")).shuffle(seed=SEED), world.rank, world.size)
        loader = StatefulDataLoader(Batched(dataset), batch_size=world.batch, collate_fn=pad_table)
        if state is not None:
            loader.load_state_dict(state)
        return Loader(loader)


PEER = MapStyle()
