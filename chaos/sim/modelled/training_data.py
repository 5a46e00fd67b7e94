"""Simulated training data: readability of row groups per node, and the lanes made of them.

Ids come from the product's own order and sampler, missing samples from its own batch builder; there are no rows. A
loader holds what it has read for a while, so one rank may still have what another cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from chaos.sim.machine.kernel import Kernel
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.order import Cursor, Order, Samples
from elastic_train.data.arrow.columns import Rows
from elastic_train.data.loading.lane_batch import BatchBuilder, LaneBatch, SampleRules
from elastic_train.data.loading.worker_processes import LaneSampler, LaneSlice
from elastic_train.errors import UnreadableError
from elastic_train.system.failpoints import reach

EVERYWHERE = -1
MOST_HELD = 2
"""Row groups that a loader holds; a real one holds some blocks per lane, here that is everything."""


class Dataset:
    """Unreadable row groups, and from which nodes; `may_spoil` is True if the run has such faults."""

    def __init__(self, kernel: Kernel, *, may_spoil: bool) -> None:
        self._kernel, self.may_spoil = kernel, may_spoil
        self._bad: list[tuple[int, int]] = []
        self._own = set[int]()

    def spoil(self, group: int, node: int) -> None:
        self._bad.append((group, node))
        self._own.add(node)

    def mend(self, group: int, node: int) -> None:
        if (group, node) in self._bad:
            self._bad.remove((group, node))

    def is_own(self, node: int) -> bool:
        """Return True if a node has, or had, its own damaged copy."""
        return node in self._own

    def restore(self, node: int) -> None:
        """Give a node an intact copy, as an operator would."""
        self._bad = [(group, other) for group, other in self._bad if other != node]

    def is_bad(self, group: int) -> bool:
        """Return True if the running process's node cannot read a row group."""
        return (group, EVERYWHERE) in self._bad or (group, self._kernel.process.node) in self._bad


class ModelledFeed:
    """Stand-in for `elastic_train.job.sample_streams.Feed`."""

    validation_digest = None

    def __init__(self, data: Dataset, *, quarantines: bool) -> None:
        self._data, self._quarantines = data, quarantines

    def training(
        self, order: Order, lanes: range, cursor: Cursor, num_steps: int, holes: Sequence[Hole] = ()
    ) -> Iterable[Sequence[LaneBatch]]:
        left_out = tuple((hole.group, hole.since) for hole in holes)
        loader = _Loader(self._data, order, left_out, quarantines=self._quarantines)
        step: list[LaneBatch] = []
        for (slice_,) in LaneSampler(order, lanes, micro_batch_of(order), cursor, num_steps):
            step.append(loader.batch(slice_))
            if len(step) == len(lanes):
                reach("data")
                yield step
                step = []

    def try_collate(self, order: Order) -> None:
        """Do nothing: a modelled batch uses no random numbers."""

    def why_unreadable(self, group: int) -> str:
        return _why(group) if self._data.is_bad(group) else ""

    def why_away(self, group: int) -> str:
        """Return "": modelled storage is there, whatever it holds."""
        return ""

    def validation(self, lanes: range) -> None:
        return None


class _Loader:
    """Reads the row groups of slices, and holds the last ones."""

    def __init__(
        self, data: Dataset, order: Order, left_out: tuple[tuple[int, int], ...], *, quarantines: bool
    ) -> None:
        self._data, self._order, self._left_out, self._quarantines = data, order, left_out, quarantines
        self._held: dict[int, None] = {}

    def batch(self, slice_: LaneSlice) -> LaneBatch:
        order, epoch, lane, lo, hi = self._order, slice_.epoch, slice_.lane, slice_.lo, slice_.hi
        if not self._data.may_spoil and not self._left_out:
            return _batch(order, epoch, lane, lo, hi)
        step = order.step_of(Cursor(epoch, lo), micro_batch_of(order))
        groups = _groups_of(order, epoch, lane, lo, hi)
        absent = [group for group, since in self._left_out if since <= step]
        missed = tuple(group for group in groups if group not in absent and not self._has(group))
        if missed and not self._quarantines:
            raise UnreadableError(_why(missed[0]))
        if not missed and not any(group in absent for group in groups):
            return _batch(order, epoch, lane, lo, hi)
        return _sifted(order, epoch, lane, lo, hi, self._left_out, missed)

    def _has(self, group: int) -> bool:
        """Return True if a row group is held, or can be read and held from now on."""
        if group not in self._held and self._data.is_bad(group):
            return False
        self._held.pop(group, None)
        self._held[group] = None
        if len(self._held) > MOST_HELD:
            del self._held[next(iter(self._held))]
        return True


def micro_batch_of(order: Order) -> int:
    return int(order.micro_batch)  # type: ignore[attr-defined]  # set by `order_of`


@lru_cache(64)
def order_of(rows: tuple[int, ...], num_lanes: int, seed: int, micro_batch: int) -> Order:
    """Return the order of a run, cached by shape."""
    order = Order(rows, num_lanes=num_lanes, seed=seed, block_row_groups=2)
    order.micro_batch = micro_batch  # type: ignore[attr-defined]
    return order


@lru_cache(1 << 19)
def _batch(order: Order, epoch: int, lane: int, lo: int, hi: int) -> LaneBatch:
    ids = _ids_of_lane(order, epoch, lane)[lo:hi]
    return LaneBatch(lane, epoch, lo, lo + len(ids), ids, {} if len(ids) else None)


@lru_cache(1 << 17)
def _ids_of_lane(order: Order, epoch: int, lane: int) -> Int64s:
    """Return all of a lane's sample ids, cached: its ranks ask step by step."""
    return order.epoch(epoch).ids(lane, 0, -(-order.num_samples // order.num_lanes))


@lru_cache(1 << 14)
def _groups_of(order: Order, epoch: int, lane: int, lo: int, hi: int) -> tuple[int, ...]:
    ids = _batch(order, epoch, lane, lo, hi).ids
    return tuple(np.unique(group_of(order.group_first_id, ids)).tolist())


@lru_cache(1 << 12)
def _sifted(
    order: Order,
    epoch: int,
    lane: int,
    lo: int,
    hi: int,
    left_out: tuple[tuple[int, int], ...],
    missed: tuple[int, ...],
) -> LaneBatch:
    """Make a micro-batch as the product does, from a slice with unreadable samples or holes."""

    def rows_of(group: int) -> Rows:
        if group in missed:
            raise UnreadableError(_why(group))
        return _rows(int(order.group_rows[group]))

    cursor, micro_batch = Cursor(epoch, lo), micro_batch_of(order)
    samples = Samples(_batch(order, epoch, lane, lo, hi).ids, epoch)
    rules = SampleRules(left_out, quarantines=True)
    builder = BatchBuilder(order.group_first_id, micro_batch, lambda rows, ids: {}, rules, seed=order.seed)
    return builder.batch(builder.take(lane, cursor, order.step_of(cursor, micro_batch), samples, rows_of), 0)


@lru_cache(64)
def _rows(count: int) -> Rows:
    numbers = pa.py_buffer(np.arange(count))
    return Rows(pa.table({"row": pa.Array.from_buffers(pa.int64(), count, [None, numbers])}))  # avoids importing pandas


def _why(group: int) -> str:
    return f"row group {group} cannot be read"
