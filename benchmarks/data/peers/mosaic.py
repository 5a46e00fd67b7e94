"""mosaicml-streaming: MDS shards, StreamingDataset with its default shuffle, StreamingDataLoader in the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

# PyPI's torchvision is built for CUDA; with a CPU build of torch, its operators must be declared before the import.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.batching import generate_work  # noqa: E402
from streaming.base.world import World as BatchingWorld  # noqa: E402

from benchmarks.data.peers.peer import SEED, Batch, World, files_of, pad  # noqa: E402

RESIZE_BATCH = 8
SHUFFLE_BLOCK = 1 << 18  # its default for one canonical node


def collate(samples: list[dict[str, Any]]) -> Batch:
    return pad([sample["input_ids"] for sample in samples]), torch.tensor([int(sample["label"]) for sample in samples])


class Mosaic:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        with MDSWriter(out=str(out / "rows"), columns={"input_ids": "ndarray:int32", "label": "int32"}) as writer:
            for path in files_of(rows):
                table = pq.read_table(path, columns=["input_ids", "label"])
                for tokens, label in zip(table.column("input_ids"), table.column("label").to_numpy(), strict=True):
                    writer.write({"input_ids": tokens.values.to_numpy(), "label": label})

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Loader:
        dataset = StreamingDataset(
            local=str(out / "rows"), shuffle=True, shuffle_seed=SEED, batch_size=world.batch, num_canonical_nodes=1
        )
        loader = StreamingDataLoader(dataset, batch_size=world.batch, collate_fn=collate)
        if state is not None:
            loader.load_state_dict(state)
        return Loader(loader)


class Loader:
    """Iterates over a StreamingDataLoader."""

    def __init__(self, loader: StreamingDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


PEER = Mosaic()


def resize(rows: Path, out: Path, stages: list[list[int]]) -> Counter[int]:
    """Count the samples per rank by the library's own partitioning, as one process can be only one rank."""
    applied: Counter[int] = Counter()
    dataset = StreamingDataset(
        local=str(out / "rows"),
        shuffle=True,
        shuffle_seed=SEED,
        batch_size=RESIZE_BATCH,
        num_canonical_nodes=1,
        shuffle_block_size=SHUFFLE_BLOCK,
    )
    ids = [int(dataset[place]["input_ids"][0]) - 1 for place in range(len(dataset))]
    done = 0
    for size, steps in stages:
        work = generate_work("random", dataset, BatchingWorld(1, size, 1, 0), 0, done)  # nodes, ranks, workers, ...
        batches = work.reshape(size, -1, RESIZE_BATCH)[:, : steps or None]
        applied.update(ids[place] for place in batches.flatten().tolist() if place >= 0)
        done += steps * size * RESIZE_BATCH
    return applied
