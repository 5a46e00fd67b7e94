"""What ranks make of rows that are inspected before the first step: the same, whatever any of them has met."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.errors import DataError, ElasticTrainError, StorageError
from elastic_train.training.opening.inspection import inspect_rows


class Inspects:
    """A task whose rows are fit, or are not, or cannot be looked at."""

    def __init__(self, error: Exception | None = None, unfit: int | None = None) -> None:
        self.error, self.unfit, self.num_rows = error, unfit, 0

    def inspected_columns(self) -> list[str]:
        return ["label"]

    def unfit_rows(self, rows: pa.Table) -> list[tuple[int, str]]:
        self.num_rows += len(rows)
        if self.error is not None:
            raise self.error
        return [] if self.unfit is None else [(self.unfit, "is not what it should be")]


def inspected(task: Inspects, rows: Path, other: object, process: Any = None) -> tuple[list[str], Any]:
    """Have rank 0 of two inspect its rows, when the other one's say `other`."""
    manifest = load_manifest(str(rows / "train"))
    said = list[str]()
    group = SimpleNamespace(rank=0, size=2, all_gather_objects=lambda mine: json.loads(json.dumps([mine, other])))
    config = SimpleNamespace(peer_timeout_s=1e6)
    plan = SimpleNamespace(task=task, config=config, feed=SimpleNamespace(manifests=[manifest]))
    process = process or SimpleNamespace(
        plan=plan, inspected=[], watchdog=SimpleNamespace(resting=contextlib.nullcontext)
    )
    inspect_rows(process, SimpleNamespace(group=group, announce=said.append))  # type: ignore[arg-type]
    return said, process


def test_all_rows_of_both_ranks_are_said_and_a_process_does_it_once(rows: Path) -> None:
    task = Inspects()
    (line,), process = inspected(task, rows, [100_000, None, None])
    total = load_manifest(str(rows / "train")).num_rows
    assert line.startswith(f"{total:,} of {total:,} rows were inspected") and 0 < task.num_rows < total
    before = task.num_rows
    inspected(task, rows, [5, None, None], process)
    assert task.num_rows == before


@pytest.mark.parametrize("error", [DataError("a file has changed"), StorageError("the store hangs")])
def test_what_one_rank_cannot_look_at_ends_all_of_them_alike(rows: Path, error: ElasticTrainError) -> None:
    """The one that met it, and one that hears of it."""
    for task, other in (
        (Inspects(error), [9, None, None]),
        (Inspects(), [0, None, [type(error).__name__, str(error)]]),
    ):
        with pytest.raises(type(error), match=str(error)):
            inspected(task, rows, other)


def test_of_unfit_rows_all_ranks_name_the_first(rows: Path) -> None:
    with pytest.raises(DataError, match=r"sample 0 .*: is of the other rank"):
        inspected(Inspects(unfit=3), rows, [1, [0, 0, "is of the other rank"], None])
