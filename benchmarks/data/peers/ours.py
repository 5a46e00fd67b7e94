"""Our own loader, from the same Parquet files and their manifest; one lane on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.data.peers.peer import SEED, Batch, World
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.arrow.lists import pad_lists
from elastic_train.data.arrow.numbers import numbers_of
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.loader_state import cursor_of
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.row_cache import RowCache

COLUMNS = ["input_ids", "label"]


def collate(rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    tokens, _ = pad_lists(rows.column("input_ids"), max_width=4096)
    return {
        "tokens": torch.from_numpy(tokens),
        "label": torch.from_numpy(numbers_of(rows.column("label")).astype(np.int64)),
    }


class Ours:
    """Our own loader, from Parquet alone or with a cache of decoded row groups as after a first epoch."""

    num_lanes = 1

    def __init__(self, *, is_cached: bool = False) -> None:
        self._is_cached = is_cached

    def prepare(self, rows: Path, out: Path) -> None:
        """Fill the cache by reading an epoch, or do nothing: the manifest is part of the dataset."""
        if self._is_cached:
            for _ in self.open(rows, out, World(), None):
                pass

    def open(self, rows: Path, out: Path, world: World, state: Any | None) -> Lanes:
        return Lanes(rows, out / "cache" if self._is_cached else None, self.num_lanes, world, state)


class Lanes:
    """The lanes of one rank, for the rest of an epoch."""

    def __init__(self, rows: Path, cache: Path | None, num_lanes: int, world: World, state: Any | None) -> None:
        manifest = load_manifest(str(rows))
        order = Order(manifest.group_rows, num_lanes=num_lanes, seed=SEED)
        cursor = cursor_of(state) if state else Cursor()
        num_steps = order.num_steps(world.batch)
        self._loader = LaneLoader(
            Reader(manifest, COLUMNS, cache=RowCache(cache, manifest, COLUMNS) if cache else None),
            order,
            collate,
            lanes=owned_lanes(world.rank, world.size, num_lanes),
            micro_batch=world.batch,
            cursor=cursor,
            num_steps=num_steps - order.step_of(cursor, world.batch) % num_steps,
        )

    def __iter__(self) -> Iterator[Batch]:
        for step in self._loader:
            for batch in step:
                if batch.tensors is not None:
                    yield batch.tensors["tokens"], batch.tensors["label"]

    def state(self) -> dict[str, int | str]:
        return self._loader.state_dict()


PEER = Ours()
