"""Write rows to Parquet files: row groups bounded in rows and bytes, files in row groups."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.errors import ConfigError

ROWS_PER_GROUP = 512
BYTES_PER_GROUP = 2 << 20
"""Small enough that eight row groups per lane, which are shuffled together, fit into memory, even with images."""
GROUPS_PER_FILE = 128


class PartWriter:
    """Writes rows to part-00000.parquet, part-00001.parquet, ... in a folder, in order.

    A row group ends after `rows_per_group` rows or BYTES_PER_GROUP bytes, by mean row size.
    """

    def __init__(self, folder: Path, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._folder, self._rows_per_group = folder, rows_per_group
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting, self._num_bytes, self._num_groups, self.num_rows = 0, 0, 0, 0
        self._file: pq.ParquetWriter | None = None

    def __enter__(self) -> PartWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self._waiting:
            self._write_group()
        if self._file is not None:
            self._file.close()

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows; all must have the same schema."""
        row_bytes = max(1, rows.nbytes // max(1, rows.num_rows))
        while rows.num_rows:
            room = max(1, (BYTES_PER_GROUP - self._num_bytes) // row_bytes)
            taken = rows.slice(0, min(room, self._rows_per_group - self._num_waiting))
            rows = rows.slice(taken.num_rows)
            self._waiting.append(taken)
            self._num_waiting += taken.num_rows
            self._num_bytes += taken.nbytes
            if self._num_waiting >= self._rows_per_group or self._num_bytes + row_bytes > BYTES_PER_GROUP:
                self._write_group()

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._waiting)
        if self._num_groups % GROUPS_PER_FILE == 0:
            if self._file is not None:
                self._file.close()
            path = self._folder / f"part-{self._num_groups // GROUPS_PER_FILE:05d}.parquet"
            try:
                self._file = pq.ParquetWriter(path, table.schema, compression="zstd")
            except pa.ArrowNotImplementedError as error:  # as for an object without a field in any row
                raise ConfigError(
                    f"the rows cannot be stored as Parquet: {error} Or leave the column out of all rows"
                ) from error
        assert self._file is not None, "the first row group opens a file"
        self._file.write_table(table, row_group_size=len(table))
        self._num_groups += 1
        self.num_rows += len(table)
        self._waiting, self._num_waiting, self._num_bytes = [], 0, 0
