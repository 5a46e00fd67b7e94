"""Feed lanes from worker processes, with torchdata's StatefulDataLoader, whose state is the cursor.

One item is one lane's micro-batch of one step. The sampler yields `LaneSlice`s, a pure function of cursor and lanes; in
a worker, the dataset turns a slice into ids, rows and tensors. The sampler's iterator is stateful in torchdata's sense,
with the cursor as state: torchdata takes it when a slice is dispatched and releases it when the micro-batch is yielded,
so prefetched items are not included.

torchdata's own state also names the number of workers and their states, and cannot be loaded with another number.
`LaneDataLoader.state_dict` returns only the cursor, which can be: with any workers, lanes and world.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any, NoReturn

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import Collate, LaneBatch, SampleRules, builder_of
from elastic_train.data.loading.loader_state import LoaderStates, cursor_of
from elastic_train.data.loading.reader import RowSource
from elastic_train.data.worker_failures import NOTICED_S, are_at_work, ended_too_soon, need, need_no_more, needed
from elastic_train.errors import ElasticTrainError, UnfinishedError

warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)  # torchdata's own call

LONGEST_END_S = 5.0
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a process to leave; the trainer handles them and ends its workers itself."""

_reading: weakref.WeakSet[Generator[list[LaneBatch], None, None]] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class LaneSlice:
    """A lane's samples of one step: offsets [lo, hi) of its part of the epoch, clipped at its end."""

    epoch: int
    lane: int
    lo: int
    hi: int


class LaneDataset:
    """Maps a slice to its micro-batch; the loader calls `__getitems__` once for each."""

    def __init__(
        self, reader: RowSource, order: RunOrder, collate: Collate, micro_batch: int, rules: SampleRules
    ) -> None:
        self._reader, self._order, self._micro_batch = reader, order, micro_batch
        self._builder = builder_of(reader, order, collate, micro_batch, rules)

    @property
    def digest(self) -> str:
        """Identifies its rows among datasets."""
        return self._reader.digest

    def __getitem__(self, slice_: LaneSlice) -> LaneBatch:
        cursor = Cursor(slice_.epoch, slice_.lo)
        samples = self._order.samples(cursor, slice_.lane, slice_.hi - slice_.lo)
        step = self._order.step_of(cursor, self._micro_batch)
        try:
            return self._builder.batch(self._builder.take(slice_.lane, cursor, step, samples, self._reader.rows_of), 0)
        except SystemExit as error:  # torch would silently end the worker
            raise UnfinishedError(
                f"making step {step + 1} was to end a worker process with {error.code!r}, by sys.exit, quit or "
                "SystemExit in the task's collate or in a library: let that code raise an error, or return"
            ) from error

    def __getitems__(self, slices: list[LaneSlice]) -> list[LaneBatch | ElasticTrainError]:
        """Return the micro-batches; an error replaces one, as torch would put a traceback into its message."""
        return [self._made(slice_) for slice_ in slices]

    def _made(self, slice_: LaneSlice) -> LaneBatch | ElasticTrainError:
        try:
            return self[slice_]
        except ElasticTrainError as error:
            return error


class LaneSampler:
    """Yields, step after step, every owned lane's slice, each as a batch of one."""

    def __init__(self, order: RunOrder, lanes: range, micro_batch: int, cursor: Cursor, num_steps: int) -> None:
        self.order, self.lanes, self.micro_batch = order, lanes, micro_batch
        self.cursor, self.num_steps = cursor, num_steps
        self.states = LoaderStates(order, "", micro_batch)
        """Valid for any dataset with this order: a sampler reads none."""

    def __len__(self) -> int:
        return self.num_steps * len(self.lanes)

    def __iter__(self) -> LaneSlices:
        return LaneSlices(self)

    def state_dict(self) -> dict[str, int | str]:
        """Return the cursor at which an iterator starts, and the order's fingerprint."""
        return self.states.write(self.cursor)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Start iterators at a state's position, with the last step unchanged.

        Raise ConfigError if the state is malformed, of another order or micro-batch, or after that step.
        """
        cursor = self.states.read(state)
        self.num_steps = self.states.num_left(self.cursor, self.num_steps, cursor)
        self.cursor = cursor


class LaneSlices:
    """A sampler's iterator; its state is the cursor after the last step yielded for every lane."""

    def __init__(self, sampler: LaneSampler) -> None:
        self._sampler, self._cursor, self._num_steps = sampler, sampler.cursor, sampler.num_steps
        self._num_yielded = 0  # lanes of the step at the cursor

    def __iter__(self) -> LaneSlices:
        return self

    def __next__(self) -> list[LaneSlice]:
        sampler, cursor = self._sampler, self._cursor
        if self._num_steps <= 0:
            raise StopIteration
        slice_ = LaneSlice(
            cursor.epoch, sampler.lanes[self._num_yielded], cursor.offset, cursor.offset + sampler.micro_batch
        )
        self._num_yielded += 1
        if self._num_yielded == len(sampler.lanes):
            self._cursor, self._num_steps = sampler.order.advance(cursor, sampler.micro_batch), self._num_steps - 1
            self._num_yielded = 0
        return [slice_]

    def state_dict(self) -> dict[str, int | str]:
        return self._sampler.states.write(self._cursor)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a cursor, with the first lane, up to the sampler's last step."""
        self._sampler.load_state_dict(state)
        self._cursor, self._num_steps, self._num_yielded = self._sampler.cursor, self._sampler.num_steps, 0


class LaneDataLoader(StatefulDataLoader[LaneBatch]):  # type: ignore[misc]  # mypy does not follow torchdata
    """A StatefulDataLoader that yields the lanes' micro-batches, and whose state is the cursor.

    `state_dict()` returns the same as a `LaneLoader`'s: {"epoch", "offset", "order"}, the position after the last step
    yielded for every lane. `load_state_dict` takes the state of any loader of the same order, dataset and micro-batch,
    whatever its workers and lanes, and continues up to the step at which this loader would have ended; raise
    ConfigError for others.
    """

    def __init__(self, dataset: LaneDataset, sampler: LaneSampler, *, num_workers: int) -> None:
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=_only,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=WorkerContext() if num_workers else None,
            worker_init_fn=_set_up_worker,
            snapshot_every_n_steps=len(sampler.lanes),  # a torchdata step is one item, here one lane
        )
        self._lane_sampler = sampler
        self._states = LoaderStates(sampler.order, dataset.digest, sampler.micro_batch)

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:  # asking torchdata would start the workers
            return self._states.write(self._lane_sampler.cursor)
        state = super().state_dict()
        if self.num_workers:
            state = state["_snapshot"]["_main_snapshot"]
        return self._states.write(cursor_of(state["_sampler_iter_state"]))

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        self._lane_sampler.load_state_dict(self._lane_sampler.states.write(self._states.read(state_dict)))
        super().load_state_dict({})  # the next iterator begins where the sampler does

    def end(self) -> None:
        """End the workers; the state stays, and another iterator continues from it."""
        # Dropping the iterator is not enough: the traceback of a worker's error also refers to it.
        if self.num_workers and self._iterator is not None:
            self._iterator._shutdown_workers()
        self.load_state_dict(self.state_dict())


def read_in_workers(loader: LaneDataLoader, num_lanes: int) -> Generator[list[LaneBatch], None, None]:
    """Return the loader's steps, one list each; worker processes end with them, or with this process."""
    steps = _read(loader, num_lanes)
    _reading.add(steps)
    return steps


class WorkerProcess(SpawnProcess):
    """A worker that ignores requests to leave from its first instruction on, and ends as a forked one does.

    A terminal sends them to all processes, and a worker's imports take seconds. At its end, destructors of C++
    libraries would abort it if one of their threads still runs.
    """

    def start(self) -> None:
        ensure_running()  # it unblocks two signals when it starts something
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        need(self)

    def _bootstrap(self, parent_sentinel: int | None = None) -> NoReturn:
        os._exit(super()._bootstrap(parent_sentinel))  # type: ignore[misc]  # typeshed leaves it out


class WorkerContext(SpawnContext):
    """Starts `WorkerProcess`es."""

    Process = WorkerProcess


def _read(loader: LaneDataLoader, num_lanes: int) -> Generator[list[LaneBatch], None, None]:
    others = needed()
    step: list[LaneBatch] = []
    is_cut_short = True
    try:
        for batch in loader:
            if isinstance(batch, ElasticTrainError):
                raise batch
            step.append(batch)
            if len(step) == num_lanes:
                are_at_work()
                yield step
                step = []
        is_cut_short = False
    except GeneratorExit:
        is_cut_short = False
        raise
    except (RuntimeError, OSError, EOFError) as error:  # torch's errors for a lost worker
        if (why := ended_too_soon(NOTICED_S, needed() - others)) is not None:
            raise why from error
        raise
    finally:
        workers = needed() - others
        need_no_more(workers)
        with _unheard():
            if is_cut_short:
                _kill(workers)
            loader.end()
        for worker in workers:  # torch ends stubborn workers with a signal that they ignore
            worker.join(LONGEST_END_S)
            worker.kill()


@contextmanager
def _unheard() -> Iterator[None]:
    """Let workers end: torch's handler would mistake a killed or failing worker for a failure of the run."""
    is_heard = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_heard else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


def _kill(workers: Iterable[BaseProcess]) -> None:
    """Kill workers: this process has failed or is leaving, and those still importing respond to nothing else."""
    for worker in workers:
        worker.kill()
        worker.join(LONGEST_END_S)


@atexit.register
def _end() -> None:
    """End the workers at exit: multiprocessing would send SIGTERM, which they ignore, and wait for ever."""
    for steps in list(_reading):
        steps.close()


def _only(batches: list[LaneBatch | ElasticTrainError]) -> LaneBatch | ElasticTrainError:
    return batches[0]


def _set_up_worker(worker: int) -> None:
    """Ignore signals, which the trainer handles: a worker that died first would prevent the last commit."""
    torch.set_num_threads(1)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked since its start
