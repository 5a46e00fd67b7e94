"""grain: ArrayRecord files, MapDataset with a global index shuffle, read-ahead by its threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from array_record.python.array_record_module import ArrayRecordWriter

from benchmarks.data.peers.peer import SEED, Batch, World, files_of, pad

Sample = npt.NDArray[np.int32]


def decode(record: bytes) -> Sample:
    """Return (label, tokens ...) as one array."""
    return np.frombuffer(record, dtype=np.int32)


def collate(samples: Sequence[Sample]) -> Batch:
    return pad([sample[1:] for sample in samples]), torch.tensor([int(sample[0]) for sample in samples])


class Grain:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        for number, path in enumerate(files_of(rows)):
            writer = ArrayRecordWriter(str(out / f"{number:03d}.array_record"), "group_size:1")
            table = pq.read_table(path, columns=["input_ids", "label"])
            for tokens, label in zip(table.column("input_ids"), table.column("label").to_numpy(), strict=True):
                writer.write(np.concatenate(([label], tokens.values.to_numpy())).astype(np.int32).tobytes())
            writer.close()

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Loader:
        source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(out.glob("*.array_record"))])
        dataset = grain.MapDataset.source(source).shuffle(seed=SEED)[world.rank :: world.size].map(decode)
        dataset = dataset.batch(world.batch, batch_fn=collate)
        return Loader(dataset.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=500)), state)


class Loader:
    """Iterates over a grain iterator."""

    def __init__(self, dataset: Any, state: Any | None) -> None:
        self._iterator = iter(dataset)
        if state is not None:
            self._iterator.set_state(state)

    def __iter__(self) -> Iterator[Batch]:
        return self._iterator  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self._iterator.get_state()


PEER = Grain()
