"""Find values outside a range by footer statistics, reading only row groups that have some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import lengths_of, numbers_of, whole
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.data.parquet.footer import load_footers


@dataclass(frozen=True, slots=True)
class Outlier:
    """A value outside a range, with its sample, and its row and row group in a file."""

    value: int
    sample: int
    row: int
    row_group: int
    file: str

    def __str__(self) -> str:
        return f"sample {self.sample} ({self.file}, row group {self.row_group}, row {self.row})"


def first_outside(manifest: Manifest, column: str, lo: int, hi: int) -> Outlier | None:
    """Return the first value of an integer column, or of lists of integers, outside [lo, hi); None if there is none.

    Row groups without statistics are skipped, as are datasets without stored footers.
    """
    footers = load_footers(manifest.url)
    if footers is None or len(footers) != len(manifest.files):
        return None
    for number, entry in enumerate(manifest.files):
        footer = footers[number]
        for within, num_rows in enumerate(entry.row_groups):
            if not _may_be_outside(footer.metadata_of(within, num_rows).row_group(0), column, lo, hi):
                continue
            group = int(manifest.first_group[number]) + within
            rows, values = outside(RowGroups(manifest, [column]).decode(group).column(0), lo, hi)
            if len(rows):
                row = int(rows[0])
                return Outlier(int(values[0]), int(manifest.group_first_id[group]) + row, row, within, entry.path)
    return None


def _may_be_outside(group: pq.RowGroupMetaData, column: str, lo: int, hi: int) -> bool:
    for place in range(group.num_columns):
        found = group.column(place)
        if f"{found.path_in_schema}.".startswith(f"{column}.") and (known := found.statistics) is not None:
            return bool(known.has_min_max and (known.min < lo or known.max >= hi))
    return False


def outside(
    column: pa.ChunkedArray, lo: int, hi: int, exempt: int | None = None
) -> tuple[Int64s, npt.NDArray[np.integer]]:
    """Return the rows of an integer column (or lists) with a value outside [lo, hi), and their first such value;
    `exempt` and missing values pass."""
    array = whole(column)
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    values = numbers_of(array.flatten() if is_list else array, missing=lo)
    is_outside = (values < lo) | (values >= hi)
    if exempt is not None:
        is_outside &= values != exempt
    places = np.flatnonzero(is_outside)
    rows = np.searchsorted(np.cumsum(lengths_of(column)), places, side="right") if is_list else places
    rows, firsts = np.unique(rows, return_index=True)
    return rows.astype(np.int64), values[places[firsts]]
