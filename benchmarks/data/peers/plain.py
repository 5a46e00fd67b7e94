"""torchdata's StatefulDataLoader and StatefulDistributedSampler over a pyarrow table in memory.

The fastest hand-written loader while all rows fit into memory; it cannot handle larger datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.data.peers.peer import SEED, Batch, World, files_of, pad_table


class Rows:
    """Reads a table's rows batch by batch."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, place: int) -> pa.Table:
        return self._table.slice(place, 1)

    def __getitems__(self, places: list[int]) -> pa.Table:
        return self._table.take(pa.array(places))


class Table:
    """The peer."""

    def prepare(self, rows: Path, out: Path) -> None:
        """Do nothing: it reads the Parquet files."""

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Loader:
        table = pa.concat_tables([pq.read_table(path, columns=["input_ids", "label"]) for path in files_of(rows)])
        return loader_of(Rows(table.combine_chunks()), world, state)


class Loader:
    """Iterates over a StatefulDataLoader."""

    def __init__(self, loader: StatefulDataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()


def loader_of(dataset: Any, world: World, state: Any | None) -> Loader:
    """Return a loader of a dataset whose `__getitems__` returns tables."""
    sampler = StatefulDistributedSampler(dataset, world.size, world.rank, shuffle=True, seed=SEED)
    loader = StatefulDataLoader(dataset, batch_size=world.batch, sampler=sampler, collate_fn=pad_table)
    if state is not None:
        loader.load_state_dict(state)
    return Loader(loader)


PEER = Table()
