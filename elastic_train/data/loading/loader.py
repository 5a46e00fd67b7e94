"""Feed lanes from any cursor on; the cursor is the only state, stored with its order's fingerprint.

Rows are read by threads of this process, since decoding releases the interpreter's lock and needs no copies between
processes; or by worker processes, if collating dominates. The steps are the same either way, and workers and lanes may
change at every resume.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TypeVar

from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import AS_THEY_ARE, Collate, LaneBatch, SampleRules, takes_draw
from elastic_train.data.loading.loader_state import LoaderStates, check_place
from elastic_train.data.loading.read_ahead import PREFETCH_BYTES, ReadAhead
from elastic_train.data.loading.reader import RowSource
from elastic_train.errors import AwayError, ConfigError
from elastic_train.system.failpoints import reach

__all__ = ["Collate", "LaneBatch", "LaneLoader", "SampleRules"]

T = TypeVar("T")
LOOK_AGAIN_S = 1.0
_LOG = logging.getLogger(__name__)


class LaneLoader:
    """Yields one list per step: a `LaneBatch` for every owned lane, in lane order.

    `lanes` are this rank's (`owned_lanes`), `micro_batch` the samples per lane and step. It starts at `cursor` and ends
    after `num_steps` steps, across epochs. `collate(rows, ids)` or `collate(rows, ids, draw)` turns the rows of a
    micro-batch, a `pyarrow.Table`, and their ids, shape (n,), into named tensors. `draw` is a `SampleRandom`: random
    numbers that depend on the order's seed, the epoch and the sample ids only. Raise TypeError if the function takes
    other arguments, ConfigError if no step begins at the cursor.

    With `num_workers=0` rows are read ahead by threads, which hold about `prefetch_bytes` of decoded row groups (more
    if one block per lane takes more), and `collate` runs on one of them (for the first step in the caller): it must not
    use torch's or numpy's global random numbers. Otherwise `num_workers` processes read, for a slow `collate`. `rules`
    handle unusable samples; without rules an unreadable row group raises UnreadableError, and no row is too long.
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
        if micro_batch < 1:
            raise ConfigError(f"micro_batch must be at least 1, not {micro_batch}")
        check_place(order, micro_batch, cursor)
        takes_draw(collate)  # raises here, where the function was passed, for other arguments
        self._reader, self._order, self._collate = reader, order, collate
        self._lanes, self._micro_batch = lanes, micro_batch
        self._cursor, self._num_steps = cursor, num_steps
        self._num_workers, self._prefetch_bytes = num_workers, prefetch_bytes
        self._rules = rules
        self._newest = self._turn = 0
        self._states = LoaderStates(order, reader.digest, micro_batch)
        self._is_used_up = False

    def __iter__(self) -> Iterator[list[LaneBatch]]:
        """Yield the remaining steps from the cursor on; only the newest iterator is valid.

        It follows a state loaded meanwhile. Raise ConfigError if all steps were yielded, or in an iterator used after a
        newer one has begun.
        """
        if self._is_used_up:
            raise ConfigError(
                f"this loader has yielded all of its steps, up to epoch {self._cursor.epoch}, offset "
                f"{self._cursor.offset}: load a state, or make another loader for the steps that follow"
            )
        self._newest += 1
        return self._from(self._newest)

    def _from(self, number: int) -> Iterator[list[LaneBatch]]:
        turn = None
        while turn != self._turn:  # again after a state was loaded
            turn = self._turn
            with contextlib.closing(
                self._steps()
            ) as steps:  # threads and workers end here, not with the last reference
                for step in steps:
                    self._check_newest(number)
                    reach("data")
                    self._cursor = self._order.advance(self._cursor, self._micro_batch)
                    self._num_steps -= 1
                    self._is_used_up = self._num_steps == 0
                    yield step
                    self._check_newest(number)
                    if turn != self._turn:
                        break

    def _check_newest(self, number: int) -> None:
        if number != self._newest:
            raise ConfigError(
                "a newer iterator of this loader has begun, and both would move one cursor: make a loader for each"
            )

    def _steps(self) -> Generator[list[LaneBatch], None, None]:
        if self._num_workers == 0 or not self._lanes:
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
        from elastic_train.data.loading.worker_processes import (  # torchdata is slow to import
            LaneDataLoader,
            LaneDataset,
            LaneSampler,
            read_in_workers,
        )

        sampler = LaneSampler(self._order, self._lanes, self._micro_batch, self._cursor, self._num_steps)
        dataset = LaneDataset(self._reader, self._order, self._collate, self._micro_batch, self._rules)
        return read_in_workers(LaneDataLoader(dataset, sampler, num_workers=self._num_workers), len(self._lanes))

    def state_dict(self) -> dict[str, int | str]:
        """Return the cursor after the last yielded step, and the fingerprint of its order and dataset.

        The same for all lanes of a step, and for any way of reading.
        """
        return self._states.write(self._cursor)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a state's position, up to the step at which this loader would have ended.

        Raise ConfigError if the state is malformed, of another order, dataset or micro-batch, or after that step.
        Without a fingerprint it is accepted only at the beginning of an epoch, which is the same in all orders.
        """
        cursor = self._states.read(state)
        self._num_steps = self._states.num_left(self._cursor, self._num_steps, cursor)
        self._cursor, self._is_used_up = cursor, False
        self._turn += 1


def patiently(
    steps: Iterable[T], limit_s: float, resting: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[T]:
    """Yield a loader's steps; while the storage of the data is away, wait for it, `resting`, and continue.

    Raise AwayError if it is away for longer than `limit_s`.
    """
    since_s: float | None = None
    while True:
        try:
            for step in steps:
                if since_s is not None:
                    _LOG.warning("the storage of the data is back after %.0f s", time.monotonic() - since_s)
                    since_s = None
                yield step
            return
        except AwayError as error:
            if since_s is None:
                since_s = time.monotonic()
                _LOG.warning("%s. Waiting for it, up to %.0f s", error, limit_s)
            if time.monotonic() - since_s >= limit_s:
                raise
        with resting():
            time.sleep(min(LOOK_AGAIN_S, limit_s))
