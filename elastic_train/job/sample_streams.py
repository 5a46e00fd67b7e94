"""The two sample streams of a run: training lanes from a cursor on, and the validation set in file order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from elastic_train.config.schema import Config
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, check_there, load_manifest
from elastic_train.data.dataset.row_groups import check_columns
from elastic_train.data.loading.lane_batch import SampleRules, takes_draw
from elastic_train.data.loading.loader import LaneBatch, LaneLoader
from elastic_train.data.loading.reader import MixedReader, Reader, RowCache, RowSource
from elastic_train.errors import AwayError, ConfigError, DataError, StorageError
from elastic_train.job.units.blocks import same_bits
from elastic_train.job.units.generators import moved_generators, states_of_generators, undisturbed
from elastic_train.tasks.task import Limited, Matching, Task


class Feed:
    """Builds loaders over the configured data sets; both share the run's lanes.

    `manifests` has the training set's manifest, or those of a mixture's sources.
    """

    def __init__(self, config: Config, task: Task, manifests: Sequence[Manifest]) -> None:
        self._config, self._task = config, task
        self._manifests, self._held_out = manifests, None
        for manifest in manifests:
            check_columns(manifest, task.columns())
        if config.data.validation is None:
            return
        self._held_out = held_out = load_manifest(config.data.validation)
        check_columns(held_out, task.columns())
        if isinstance(task, Matching):
            task.check_held_out(held_out)
        self._held_out_order = Order(
            _first_rows(held_out, config.validation.max_samples),
            num_lanes=config.batch.num_lanes,
            seed=0,
            is_shuffled=False,
        )

    @property
    def manifests(self) -> Sequence[Manifest]:
        """Manifests of the training set or its sources, then of the validation set."""
        return [*self._manifests, *([] if self._held_out is None else [self._held_out])]

    @property
    def validation_digest(self) -> str | None:
        """Digest of the validation set's manifest; None without one."""
        return None if self._held_out is None else self._held_out.digest

    def training(
        self, order: RunOrder, lanes: range, cursor: Cursor, num_steps: int, holes: Sequence[Hole] = ()
    ) -> Iterable[Sequence[LaneBatch]]:
        """Return the training steps from a cursor on, without samples in `holes`."""
        rules = self._rules(holes, quarantines="unreadable" in self._config.data.quarantine)
        reader = self._training_rows(_most_row_groups(order, lanes), self._config.data.cache_dir)
        return self._loader(reader, order, lanes, cursor, num_steps, rules)

    def why_unreadable(self, group: int) -> str:
        """Read a row group of the training set from its file, bypassing caches; return the error, or ""."""
        try:
            self._training_rows().decode(group)
        except DataError as error:
            return str(error) or type(error).__name__
        return ""

    def why_away(self, group: int) -> str:
        """Read the manifest of a row group's data set; return the error, or "": the storage of the data is there."""
        ends = np.cumsum([len(manifest.group_rows) for manifest in self._manifests])
        try:
            check_there(self._manifests[int(np.searchsorted(ends, group, side="right"))].url)
        except AwayError as error:
            return str(error)
        return ""

    def try_collate(self, order: RunOrder) -> None:
        """Collate the run's first micro-batch twice; raise ConfigError if the results differ.

        `collate` runs ahead in a varying number of threads or processes, whose global generators cannot be seeded.
        Unreadable data is left to the step that needs it.
        """
        rules = self._rules(quarantines=True)
        trial = _Trial(self._task)
        loader = LaneLoader(
            self._training_rows(),
            order,
            trial,
            lanes=range(1),
            micro_batch=self._config.batch.micro_batch,
            cursor=Cursor(),
            num_steps=1,
            rules=rules,
        )
        with undisturbed(), contextlib.suppress(DataError, StorageError):
            next(iter(loader))

    def validation(self, lanes: range) -> Iterable[Sequence[LaneBatch]] | None:
        """Return one pass over the validation set, None without one; unreadable data ends the run.

        The order has seed 0 and every pass is epoch 0, so a task's `collate` draws the same random numbers in every
        pass and run.
        """
        if self._held_out is None:
            return None
        order = self._held_out_order
        reader = Reader(self._held_out, self._task.columns(), max_row_groups=_most_row_groups(order, lanes))
        return self._loader(reader, order, lanes, Cursor(), self.num_validation_steps, self._rules())

    @property
    def num_validation_steps(self) -> int:
        """Number of steps of a pass over the validation set."""
        return self._held_out_order.num_steps(self._config.batch.micro_batch)

    def _training_rows(self, max_row_groups: int = 1, cache_dir: str | None = None) -> RowSource:
        """Return a reader of the training set."""
        columns = self._task.columns()
        readers = [
            Reader(
                manifest,
                columns,
                max_row_groups=max_row_groups,
                cache=RowCache(Path(cache_dir), manifest, columns) if cache_dir else None,
            )
            for manifest in self._manifests
        ]
        return readers[0] if len(readers) == 1 else MixedReader(readers)

    def _rules(self, holes: Sequence[Hole] = (), *, quarantines: bool = False) -> SampleRules:
        rows = np.concatenate([manifest.group_rows for manifest in self._manifests])
        return SampleRules(
            holes=tuple((hole.group, hole.since) for hole in holes if hole.hi - hole.lo == rows[hole.group]),
            left_out=tuple((hole.lo, hole.hi, hole.since) for hole in holes if hole.hi - hole.lo != rows[hole.group]),
            quarantines=quarantines,
            longest=self._task.longest() if isinstance(self._task, Limited) else {},
            truncates=self._config.data.too_long == "truncate",
        )

    def _loader(
        self,
        reader: RowSource,
        order: RunOrder,
        lanes: range,
        cursor: Cursor,
        num_steps: int,
        rules: SampleRules,
    ) -> LaneLoader:
        return LaneLoader(
            reader,
            order,
            self._task.collate,
            lanes=lanes,
            micro_batch=self._config.batch.micro_batch,
            cursor=cursor,
            num_steps=num_steps,
            num_workers=self._config.data.num_workers,
            rules=rules,
        )


class _Trial:
    """A task's `collate`, called twice on the same rows and compared."""

    def __init__(self, task: Task) -> None:
        self._collate, self._takes_draw = task.collate, takes_draw(task.collate)
        self._name = f"{type(task).__module__}:{type(task).__name__}.collate"

    def __call__(self, rows: pa.Table, ids: Int64s, draw: SampleRandom) -> dict[str, Tensor]:
        arguments = (rows, ids, draw) if self._takes_draw else (rows, ids)
        before = states_of_generators()
        first: dict[str, Tensor] = self._collate(*arguments)
        if moved := moved_generators(before):
            raise ConfigError(
                f"task.path: {self._name} draws from the global generator of {' and of '.join(moved)}, which no seed "
                f"reaches where rows are read ahead: the samples would differ from run to run. {_REMEDY}"
            )
        again: dict[str, Tensor] = self._collate(*arguments)
        if differing := [name for name in first if not same_bits(first[name], again.get(name))]:
            raise ConfigError(
                f"task.path: {self._name} returns another '{differing[0]}' when it is called again for the same rows "
                f"(samples {ids[:3].tolist()}…): a generator of the task, a counter or a clock decides it. {_REMEDY}"
            )
        return first


_REMEDY = "Add a third parameter `draw` and take random numbers from it (draw.uniform, draw.generator)"


def _most_row_groups(order: RunOrder, lanes: range) -> int:
    """Return the number of row groups that lanes read at a time: one block each, two if a step spans two blocks."""
    return len(lanes) * (2 * order.block_row_groups if order.is_shuffled else 2)


def _first_rows(manifest: Manifest, max_samples: int | None) -> Int64s:
    """Return the rows of each row group, cut after `max_samples` rows."""
    rows = manifest.group_rows
    if max_samples is None or max_samples >= manifest.num_rows:
        return rows
    ends = np.cumsum(rows)
    kept = rows[: int(np.searchsorted(ends, max_samples)) + 1].copy()
    kept[-1] -= int(ends[len(kept) - 1]) - max_samples
    return kept
