"""Faults of the training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from chaos.real.acts.job_view import Act, JobView
from chaos.real.acts.outcome import Struck

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due


def bad_row_group(job: JobView, fault: Due) -> Struck | None:
    """Damage a row group of the run's own training set under the job."""
    assert job.around.data is not None, "the scenario has it, since the kind needs it"
    damage = job.around.data.spoil(job.draws)
    if damage is None:
        return None
    path, group = job.around.data.folder / str(damage["file"]), int(str(damage["row_group"]))
    return Struck([], recorded=damage, effect=lambda: _unreadable(path, group))


def flip_data(job: JobView, fault: Due) -> Struck | None:
    """Flip bits of a row group of the run's own training set under the job."""
    data = job.around.data
    assert data is not None, "the scenario has it, since the kind needs it"
    before = {path: path.read_bytes() for path in data.folder.glob("**/*.parquet")}
    damage = data.flip(job.draws)
    if damage is None:
        return None
    path, group = data.folder / str(damage["file"]), int(str(damage["row_group"]))
    return Struck([], recorded=damage, effect=lambda: _otherwise(path, group, before[path]))


def _otherwise(path: Path, group: int, before: bytes) -> str | None:
    """Return a proof that a row group has changed, and whether a plain reader notices."""
    was = pq.ParquetFile(pa.BufferReader(before)).read_row_group(group)
    try:
        reads = "reads with other values" if not pq.ParquetFile(path).read_row_group(group).equals(was) else None
    except (OSError, pa.ArrowException) as error:
        reads = f"cannot be decoded: {str(error)[:80]}"
    if reads is None and path.read_bytes() == before:
        return None
    return f"row group {group} of {path.name} {reads or 'differs'}"


def _unreadable(path: Path, group: int) -> str | None:
    """Return a proof that reading the row group fails."""
    try:
        pq.ParquetFile(path).read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        return f"row group {group} of {path.name} cannot be read: {str(error)[:80]}"
    return None


ACTS: dict[str, Act] = {"bad_row_group": bad_row_group, "flip_data": flip_data}
