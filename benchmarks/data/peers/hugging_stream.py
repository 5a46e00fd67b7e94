"""Hugging Face datasets, streaming: from Parquet through a shuffle buffer, split by node, with its own state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node

from benchmarks.data.peers.peer import SEED, Batch, World, files_of, pad

BUFFER = 16_000


class Streaming:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        """Do nothing: it reads the Parquet files."""

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Examples:
        dataset = load_dataset("parquet", data_files=files_of(rows), split="train", streaming=True)
        dataset = split_dataset_by_node(dataset.shuffle(seed=SEED, buffer_size=BUFFER), world.rank, world.size)
        dataset = dataset.with_format("numpy")
        if state is not None:
            dataset.load_state_dict(state)
        return Examples(dataset, world.batch)


class Examples:
    """Collects examples into batches."""

    def __init__(self, dataset: IterableDataset, batch: int) -> None:
        self._dataset, self._batch = dataset, batch

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._dataset.iter(batch_size=self._batch):
            yield pad(list(batch["input_ids"])), torch.as_tensor(batch["label"]).long()

    def state(self) -> Any:
        return self._dataset.state_dict()


PEER = Streaming()
