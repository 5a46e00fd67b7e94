"""Feeding lanes from any cursor on; the cursor is the only state.

Rows are read by threads of this process, since decoding releases the interpreter's lock and nothing has to be copied
between processes, or by worker processes, where collating is what takes the time. Either way the steps are the
same, and their number, the workers and the lanes may change at every resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic_train.core.mixture.dealing import RunOrder
from elastic_train.core.order import Cursor
from elastic_train.data.loading.collate import Collate, takes_draw
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.data.loading.read_ahead import PREFETCH_BYTES, ReadAhead
from elastic_train.data.loading.reader import RowSource
from elastic_train.data.loading.sample_rules import AS_THEY_ARE, SampleRules
from elastic_train.system.failpoints import reach

__all__ = ["Collate", "LaneBatch", "LaneLoader", "SampleRules"]


class LaneLoader:
    """Yields one list a step: a `LaneBatch` for every owned lane, in lane order.

    `lanes` are this rank's (`owned_lanes`), `micro_batch` the samples that each of them takes a step. It begins at
    `cursor` and ends after `num_steps` steps, across epochs. `collate(rows, ids)` or `collate(rows, ids, draw)` turns
    the rows of a micro-batch, a `pyarrow.Table`, and their ids, shape (n,), into named tensors. `draw` is a
    `SampleRandom`: random numbers that follow from the order's seed, the epoch and the sample ids alone. TypeError if
    the function takes other arguments.

    With `num_workers=0` rows are read ahead by threads, which hold up to about `prefetch_bytes` of decoded row groups
    (more where one block of every lane takes more), and `collate` is called by one of them (for the first step by the
    caller): it must not use torch's or numpy's global random numbers. Otherwise `num_workers` processes read, for a
    `collate` that is slow. `rules` say what happens to samples that cannot be used as they are; without rules a row
    group that cannot be read raises UnreadableError, and no row is too long.
    """

    def __init__(
        self,
        reader: RowSource,
        order: RunOrder,
        collate: Collate,
        *,
        lanes: range,
        micro_batch: int,
        cursor: Cursor,
        num_steps: int,
        num_workers: int = 0,
        prefetch_bytes: int = PREFETCH_BYTES,
        rules: SampleRules = AS_THEY_ARE,
    ) -> None:
        takes_draw(collate)  # raises here, where the function was passed, if it takes other arguments
        self._reader, self._order, self._collate = reader, order, collate
        self._lanes, self._micro_batch = lanes, micro_batch
        self._cursor, self._num_steps = cursor, num_steps
        self._num_workers, self._prefetch_bytes = num_workers, prefetch_bytes
        self._rules = rules

    def __iter__(self) -> Iterator[list[LaneBatch]]:
        for step in self._steps():
            reach("data")
            self._cursor = self._order.advance(self._cursor, self._micro_batch)
            self._num_steps -= 1
            yield step

    def _steps(self) -> Iterator[list[LaneBatch]]:
        if self._num_workers == 0:
            ahead = ReadAhead(
                self._reader,
                self._order,
                self._collate,
                lanes=self._lanes,
                micro_batch=self._micro_batch,
                prefetch_bytes=self._prefetch_bytes,
                rules=self._rules,
            )
            return ahead.steps(self._cursor, self._num_steps)
        from elastic_train.data.loading.worker_processes import (  # torchdata takes long to import
            LaneDataLoader,
            LaneDataset,
            LaneSampler,
            read_in_workers,
        )

        sampler = LaneSampler(self._order, self._lanes, self._micro_batch, self._cursor, self._num_steps)
        dataset = LaneDataset(self._reader, self._order, self._collate, self._micro_batch, self._rules)
        return read_in_workers(LaneDataLoader(dataset, sampler, num_workers=self._num_workers), len(self._lanes))

    def state_dict(self) -> dict[str, int]:
        """Return the cursor after the last step that was yielded: two integers, whatever the lanes and workers."""
        return {"epoch": self._cursor.epoch, "offset": self._cursor.offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a cursor; the number of steps left stays as it is."""
        self._cursor = Cursor(state["epoch"], state["offset"])
