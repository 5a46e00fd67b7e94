"""Rows that a task could not use are found before a run's first step: some of all datasets' rows, for a few seconds.

Each rank takes its own row groups, in an order that is random and always the same, so those that there is time for are
a random sample; of a dataset that is small enough they are all. Once a run has a step or a commit it is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from elastic_train import errors
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups, num_decoders
from elastic_train.errors import DataError, ElasticTrainError, UnreadableError
from elastic_train.tasks.task import Inspecting
from elastic_train.training.session import Inspected, Process, Unfit
from elastic_train.world.world import World

LIMIT_S, LIMIT_SHARE = 10.0, 0.25
"""For how long a rank inspects rows, and for which part of the time that peers wait for a silent one."""
_ROWS_AT_ONCE, _ROWS_PER_THREAD = 128, 16


def inspect_rows(process: Process, world: World) -> None:
    """Have the task inspect rows; raise DataError on every rank if any rank has found one that is unfit."""
    plan = process.plan
    if not isinstance(plan.task, Inspecting):
        return
    if not process.inspected:
        limit_s = min(LIMIT_S, LIMIT_SHARE * plan.config.peer_timeout_s)
        with process.watchdog.resting():
            mine = _inspect(plan.task, plan.feed.manifests, world.group.rank, world.group.size, limit_s)
        process.inspected.append(mine)
    found = [Inspected(*of_rank) for of_rank in world.group.all_gather_objects(process.inspected[0])]
    if wrong := [of_rank.unfit for of_rank in found if of_rank.unfit is not None]:
        number, sample, why = min(wrong)
        raise DataError(f"{_place(plan.feed.manifests[number], sample)}: {why}")
    if failed := [of_rank.failure for of_rank in found if of_rank.failure is not None]:
        name, text = failed[0]
        raise getattr(errors, name, DataError)(text)
    total = sum(manifest.num_rows for manifest in plan.feed.manifests)
    inspected = min(total, sum(of_rank.num_rows for of_rank in found))  # ranks of an earlier world divided it otherwise
    world.announce(f"{inspected:,} of {total:,} rows were inspected before the first step, and are fit for the task")


def _inspect(task: Inspecting, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float) -> Inspected:
    """Inspect a rank's row groups, for so long or until a row is unfit.

    What fails is returned like what is found: all ranks have to hear of it.
    """
    try:
        return Inspected(*_unfit_row(task, manifests, rank, num_ranks, limit_s))
    except ElasticTrainError as error:
        return Inspected(0, None, (type(error).__name__, str(error)))


def _unfit_row(
    task: Inspecting, manifests: Sequence[Manifest], rank: int, num_ranks: int, limit_s: float
) -> tuple[int, Unfit | None]:
    """Return how many rows were inspected, and the unfit one, if any."""
    readers = [RowGroups(manifest, task.inspected_columns()) for manifest in manifests]
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
            for lo in range(0, len(rows), _ROWS_AT_ONCE):
                if num_rows and time.monotonic() > until:
                    return num_rows, None
                begins = range(lo, min(len(rows), lo + _ROWS_AT_ONCE), _ROWS_PER_THREAD)
                parts = pool.map(task.unfit_rows, [rows.slice(begin, _ROWS_PER_THREAD) for begin in begins])
                for begin, found in zip(begins, parts, strict=True):
                    for row, why in found:
                        return num_rows, (number, first_id + begin + int(row), str(why))
                num_rows += min(len(rows) - lo, _ROWS_AT_ONCE)
    return num_rows, None


def _row_groups(manifests: Sequence[Manifest], rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield a rank's row groups, each with the number of its dataset; those of all ranks are all that there are."""
    ends = np.cumsum([len(manifest.group_rows) for manifest in manifests])
    for place in np.random.default_rng(0).permutation(int(ends[-1]))[rank::num_ranks].tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        yield number, place - (int(ends[number - 1]) if number else 0)


def _place(manifest: Manifest, sample: int) -> str:
    group = int(np.searchsorted(manifest.group_first_id, sample, side="right")) - 1
    number, within = manifest.place_of_group(group)
    row = sample - int(manifest.group_first_id[group])
    return f"{manifest.url}: sample {sample} ({manifest.files[number].path}, row group {within}, row {row})"
