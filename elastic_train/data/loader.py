"""Feeding lanes: torchdata's StatefulDataLoader as the carrier, the cursor as the only truth.

One item of the carrier is one lane's micro-batch of one step. Its sampler yields `LaneSlice`s, a pure function of the
cursor and the lanes; the dataset turns a slice into ids, rows and tensors, here or in a worker process. The carrier's
own state is never saved: a loader begins at any cursor, with any number of workers, for any lanes.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_train.data.reader import Reader
from elastic_train.mixing import Int64s
from elastic_train.order import Cursor, Order

Collate = Callable[[pa.Table, npt.NDArray[np.int64]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LaneSlice:
    """Which samples a lane takes in one step: offsets [lo, hi) of its part of the epoch, clipped at its end."""

    epoch: int
    lane: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """One lane's micro-batch; `ids` are those actually read, `tensors` is None where the lane has no sample left."""

    lane: int
    epoch: int
    lo: int
    hi: int
    ids: Int64s
    tensors: dict[str, Tensor] | None = field(repr=False)


class LaneDataset:
    """Maps a slice to its micro-batch; the carrier calls `__getitems__` once for each."""

    def __init__(self, reader: Reader, order: Order, collate: Collate) -> None:
        self._reader, self._order, self._collate = reader, order, collate

    def __getitem__(self, slice_: LaneSlice) -> LaneBatch:
        ids = self._order.epoch(slice_.epoch).ids(slice_.lane, slice_.lo, slice_.hi)
        if not len(ids):
            return LaneBatch(slice_.lane, slice_.epoch, slice_.lo, slice_.lo, ids, None)
        rows, read_ids = self._reader.read(ids)
        return LaneBatch(
            slice_.lane, slice_.epoch, slice_.lo, slice_.lo + len(ids), read_ids, self._collate(rows, read_ids)
        )

    def __getitems__(self, slices: list[LaneSlice]) -> list[LaneBatch]:
        return [self[slice_] for slice_ in slices]


warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)  # torchdata's own call


class LaneSampler:
    """Yields, step after step, the slice of every owned lane, each as a batch of one."""

    def __init__(self, order: Order, lanes: range, micro_batch: int, cursor: Cursor, num_steps: int) -> None:
        self._order, self._lanes, self._micro_batch = order, lanes, micro_batch
        self.cursor, self.num_steps = cursor, num_steps

    def __len__(self) -> int:
        return self.num_steps * len(self._lanes)

    def __iter__(self) -> Iterator[list[LaneSlice]]:
        cursor = self.cursor
        for _ in range(self.num_steps):
            for lane in self._lanes:
                yield [LaneSlice(cursor.epoch, lane, cursor.offset, cursor.offset + self._micro_batch)]
            cursor = self._order.advance(cursor, self._micro_batch)


class LaneLoader:
    """Yields one list a step: a `LaneBatch` for every owned lane, in lane order."""

    def __init__(
        self,
        reader: Reader,
        order: Order,
        collate: Collate,
        *,
        lanes: range,
        micro_batch: int,
        cursor: Cursor,
        num_steps: int,
        num_workers: int = 0,
    ) -> None:
        self._order, self._lanes, self._micro_batch, self._num_workers = order, lanes, micro_batch, num_workers
        self._dataset = LaneDataset(reader, order, collate)
        self._cursor, self._num_steps = cursor, num_steps

    def __iter__(self) -> Iterator[list[LaneBatch]]:
        sampler = LaneSampler(self._order, self._lanes, self._micro_batch, self._cursor, self._num_steps)
        carrier: StatefulDataLoader[LaneBatch] = StatefulDataLoader(
            self._dataset,
            batch_sampler=sampler,
            collate_fn=_only,
            num_workers=self._num_workers,
            multiprocessing_context="spawn" if self._num_workers else None,
            worker_init_fn=_set_up_worker if self._num_workers else None,
        )
        step: list[LaneBatch] = []
        for batch in carrier:
            step.append(batch)
            if len(step) == len(self._lanes):
                self._cursor = self._order.advance(self._cursor, self._micro_batch)
                self._num_steps -= 1
                yield step
                step = []

    def state_dict(self) -> dict[str, int]:
        """Return the cursor behind the last step that was yielded: two integers, whatever the lanes and workers."""
        return {"epoch": self._cursor.epoch, "offset": self._cursor.offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a cursor; the number of steps left stays as it is."""
        self._cursor = Cursor(state["epoch"], state["offset"])


def _only(batches: list[LaneBatch]) -> LaneBatch:
    return batches[0]


def _set_up_worker(worker: int) -> None:
    """Leave signals to the trainer: a worker that died first would take the last commit with it."""
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
