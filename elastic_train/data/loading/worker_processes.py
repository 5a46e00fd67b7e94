"""Feeding lanes from worker processes: torchdata's StatefulDataLoader as the carrier.

One item of the carrier is one lane's micro-batch of one step. Its sampler yields `LaneSlice`s, a pure function of the
cursor and the lanes; the dataset turns a slice into ids, rows and tensors in a worker. The carrier's own state is never
saved: a loader begins at any cursor, with any number of workers, for any lanes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_train.core.order import Cursor, Order
from elastic_train.data.loading.batch_builder import BatchBuilder
from elastic_train.data.loading.lane_batch import Collate, LaneBatch
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.sample_rules import SampleRules

warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)  # torchdata's own call

LONGEST_END_S = 5.0

_reading: weakref.WeakSet[Generator[list[LaneBatch], None, None]] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class LaneSlice:
    """Which samples a lane takes in one step: offsets [lo, hi) of its part of the epoch, clipped at its end."""

    epoch: int
    lane: int
    lo: int
    hi: int


class LaneDataset:
    """Maps a slice to its micro-batch; the carrier calls `__getitems__` once for each."""

    def __init__(self, reader: Reader, order: Order, collate: Collate, micro_batch: int, rules: SampleRules) -> None:
        self._reader, self._order, self._micro_batch = reader, order, micro_batch
        self._builder = BatchBuilder(reader.first_id, micro_batch, collate, rules)

    def __getitem__(self, slice_: LaneSlice) -> LaneBatch:
        ids = self._order.epoch(slice_.epoch).ids(slice_.lane, slice_.lo, slice_.hi)
        cursor = Cursor(slice_.epoch, slice_.lo)
        step = self._order.step_of(cursor, self._micro_batch)
        return self._builder.batch(self._builder.take(slice_.lane, cursor, step, ids, self._reader.rows_of), 0)

    def __getitems__(self, slices: list[LaneSlice]) -> list[LaneBatch]:
        return [self[slice_] for slice_ in slices]


class LaneSampler:
    """Yields, step after step, the slice of every owned lane, each as a batch of one."""

    def __init__(self, order: Order, lanes: range, micro_batch: int, cursor: Cursor, num_steps: int) -> None:
        self._order, self._lanes, self.micro_batch = order, lanes, micro_batch
        self.cursor, self.num_steps = cursor, num_steps

    def __len__(self) -> int:
        return self.num_steps * len(self._lanes)

    def __iter__(self) -> Iterator[list[LaneSlice]]:
        cursor = self.cursor
        for _ in range(self.num_steps):
            for lane in self._lanes:
                yield [LaneSlice(cursor.epoch, lane, cursor.offset, cursor.offset + self.micro_batch)]
            cursor = self._order.advance(cursor, self.micro_batch)


def read_in_workers(
    dataset: LaneDataset, sampler: LaneSampler, *, num_lanes: int, num_workers: int
) -> Iterator[list[LaneBatch]]:
    """Return the sampler's steps, read by worker processes, which end with it, or with this process."""
    carrier: StatefulDataLoader[LaneBatch] = StatefulDataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_only,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="spawn",
        worker_init_fn=_set_up_worker,
    )
    steps = _read(carrier, num_lanes)
    _reading.add(steps)
    return steps


def _read(carrier: StatefulDataLoader[LaneBatch], num_lanes: int) -> Generator[list[LaneBatch], None, None]:
    others = set(multiprocessing.active_children())
    batches = iter(carrier)
    workers = set(multiprocessing.active_children()) - others
    step: list[LaneBatch] = []
    try:
        for batch in batches:
            step.append(batch)
            if len(step) == num_lanes:
                yield step
                step = []
    finally:
        del batches, carrier  # which asks the workers to end
        for worker in workers:
            worker.join(LONGEST_END_S)
            worker.kill()


@atexit.register
def _end() -> None:
    """Have the workers end: multiprocessing would send them SIGTERM, to which they are deaf, and wait for ever."""
    for steps in list(_reading):
        steps.close()


def _only(batches: list[LaneBatch]) -> LaneBatch:
    return batches[0]


def _set_up_worker(worker: int) -> None:
    """Leave signals to the trainer: a worker that died first would take the last commit with it."""
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
