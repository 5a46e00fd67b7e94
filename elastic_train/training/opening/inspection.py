"""Rows that a task could not use are found before a run's first step: some of all datasets' rows, for a few seconds.

Lists that are too long for the task, or lack a value, are found so, and what a task that is `Inspecting` finds.

Each rank takes its own row groups, in an order that is random and always the same, so those that there is time for are
a random sample; of a dataset that is small enough they are all. Once a run has a step or a commit it is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from elastic_train import errors
from elastic_train.data.arrow.lists import first_incomplete, first_longer, lengths_of
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups, num_decoders
from elastic_train.data.dataset.row_lengths import find_lengths
from elastic_train.data.loading.batch_builder import too_long
from elastic_train.errors import DataError, ElasticTrainError, RowError, UnreadableError
from elastic_train.job.plan import Plan
from elastic_train.tasks.task import Inspecting, Limited
from elastic_train.training.session import Inspected, Process, Unfit
from elastic_train.world.world import World

LIMIT_S, LIMIT_SHARE = 10.0, 0.25
"""For how long a rank inspects rows, and for which part of the time that peers wait for a silent one."""
_ROWS_AT_ONCE, _ROWS_PER_THREAD = 128, 16


def inspect_rows(process: Process, world: World) -> None:
    """Have rows inspected; raise DataError on every rank if any rank has found one that is unfit."""
    plan, fitness = process.plan, _fitness_of(process.plan)
    if not fitness.columns:
        return
    if not process.inspected:
        limit_s = min(LIMIT_S, LIMIT_SHARE * plan.config.peer_timeout_s)
        with process.watchdog.resting():
            mine = _inspect(fitness, plan.feed.manifests, world.group.rank, world.group.size, limit_s)
        process.inspected.append(mine)
    found = [Inspected(*of_rank) for of_rank in world.group.all_gather_objects(process.inspected[0])]
    world.announce(_judged(plan, found))


def inspect_alone(plan: Plan) -> str:
    """Inspect rows of a plan's datasets without a world, and say how many; raise DataError for one that is unfit."""
    fitness = _fitness_of(plan)
    if not fitness.columns:
        return "no rows were inspected"
    return _judged(plan, [_inspect(fitness, plan.feed.manifests, 0, 1, LIMIT_S)])


def _judged(plan: Plan, found: Sequence[Inspected]) -> str:
    """Say how many rows are fit; raise what a rank has found."""
    if wrong := [of_rank.unfit for of_rank in found if of_rank.unfit is not None]:
        number, sample, why = min(wrong)
        raise RowError(f"{plan.feed.manifests[number].place_of_sample(sample)}: {why}")
    if failed := [of_rank.failure for of_rank in found if of_rank.failure is not None]:
        name, text = failed[0]
        raise getattr(errors, name, DataError)(text)
    total = sum(manifest.num_rows for manifest in plan.feed.manifests)
    inspected = min(total, sum(of_rank.num_rows for of_rank in found))  # ranks of an earlier world divided it otherwise
    return f"{inspected:,} of {total:,} rows were inspected before the first step, and are fit for the task"


@dataclass(frozen=True, slots=True)
class _Fitness:
    """What makes a row fit: a list column has at most so many values (None: any number), and none is missing."""

    longest: Mapping[str, int | None]
    task: Inspecting | None

    @property
    def columns(self) -> list[str]:
        """The columns that are inspected, each once."""
        return list(dict.fromkeys([*self.longest, *(self.task.inspected_columns() if self.task else ())]))

    def unfit_list(self, rows: pa.Table) -> tuple[int, str] | None:
        """Return the first row whose list is unfit, and what is wrong with it."""
        found = []
        for name, longest in self.longest.items():
            column = rows.column(name)
            if longest is not None and (row := first_longer(column, longest)) is not None:
                length = int(lengths_of(column)[row])
                found.append((row, too_long(length, name, longest)))
            if (row := first_incomplete(column)) is not None:
                found.append((row, f"a value within the list of column '{name}' is missing (null): {_REWRITE}"))
        return min(found, default=None)


_REWRITE = "write the data again without it, or leave the row out, and build the manifest again"


def _fitness_of(plan: Plan) -> _Fitness:
    """Return what is to be inspected for a plan's task."""
    task, longest = plan.task, dict[str, int | None]()
    if isinstance(task, Limited):
        cuts = plan.config.data.too_long == "truncate"
        longest = {name: None if cuts else most for name, most in task.longest().items()}
    return _Fitness(longest, task if isinstance(task, Inspecting) else None)


def _inspect(fitness: _Fitness, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float) -> Inspected:
    """Inspect a rank's row groups, for so long or until a row is unfit.

    What fails is returned like what is found: all ranks have to hear of it.
    """
    try:
        return Inspected(*_unfit_row(fitness, manifests, rank, num_ranks, limit_s))
    except ElasticTrainError as error:
        return Inspected(0, None, (type(error).__name__, str(error)))


def _unfit_row(
    fitness: _Fitness, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float
) -> tuple[int, Unfit | None]:
    """Return how many rows were inspected, and the unfit one, if any."""
    if rank == 0:
        for number, manifest in enumerate(manifests):
            if (unfit := _known_to_be_longer(fitness, manifest)) is not None:
                return 0, (number, *unfit)
    readers = [RowGroups(manifest, fitness.columns) for manifest in manifests]
    until, num_rows = time.monotonic() + limit_s, 0
    with ThreadPoolExecutor(num_decoders(), "inspect") as pool:
        for number, group in _row_groups(manifests, rank, num_ranks):
            if num_rows and time.monotonic() > until:
                break
            try:
                rows = readers[number].decode(group)
            except UnreadableError:
                continue  # what becomes of it is decided when its samples' turn comes (data.unreadable)
            first_id = int(manifests[number].group_first_id[group])
            if (unfit := fitness.unfit_list(rows)) is not None:
                return num_rows, (number, first_id + unfit[0], unfit[1])
            if fitness.task is None:
                num_rows += len(rows)
                continue
            for lo in range(0, len(rows), _ROWS_AT_ONCE):
                if num_rows and time.monotonic() > until:
                    return num_rows, None
                begins = range(lo, min(len(rows), lo + _ROWS_AT_ONCE), _ROWS_PER_THREAD)
                parts = pool.map(fitness.task.unfit_rows, [rows.slice(begin, _ROWS_PER_THREAD) for begin in begins])
                for begin, found in zip(begins, parts, strict=True):
                    for row, why in found:
                        return num_rows, (number, first_id + begin + int(row), str(why))
                num_rows += min(len(rows) - lo, _ROWS_AT_ONCE)
    return num_rows, None


def _known_to_be_longer(fitness: _Fitness, manifest: Manifest) -> tuple[int, str] | None:
    """Return the first of all samples that is too long by the lengths beside the manifest, if they are there."""
    known = find_lengths(manifest)
    longest = None if known is None else fitness.longest.get(known.column)
    if known is None or longest is None:
        return None
    for first, num_rows in zip(manifest.group_first_id, manifest.group_rows, strict=True):
        lengths = known(np.arange(first, first + num_rows))
        if lengths.max(initial=0) > longest:
            row = int((lengths > longest).argmax())
            return int(first) + row, too_long(int(lengths[row]), known.column, longest)
    return None


def _row_groups(manifests: Sequence[Manifest], rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield a rank's row groups, each with the number of its dataset; those of all ranks are all that there are."""
    ends = np.cumsum([len(manifest.group_rows) for manifest in manifests])
    for place in np.random.default_rng(0).permutation(int(ends[-1]))[rank::num_ranks].tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        yield number, place - (int(ends[number - 1]) if number else 0)
