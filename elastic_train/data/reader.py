"""Reading rows by sample id: only the columns in use, by row group, through any fsspec URL.

A file's fingerprint is compared when it is opened, so a dataset that changed under a manifest is refused by name. The
few row groups decoded last are kept. `read` returns the ids of the places it took rows from, rebuilt from file, row
group and row, so that the coverage sums testify to what was read and not to what was asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.manifest import Manifest
from elastic_train.data.parquet import footer_sha256, open_parquet, parse_footer, read_footer, read_row_group
from elastic_train.errors import DataError
from elastic_train.failpoints import reach
from elastic_train.mixing import Int64s

MAX_OPEN_FILES = 16


def check_columns(manifest: Manifest, columns: Sequence[str]) -> None:
    """Refuse columns that the dataset does not have."""
    missing = [name for name in columns if name not in manifest.columns]
    if missing:
        raise DataError(
            f"{manifest.url}: no column {', '.join(map(repr, missing))}; it has {', '.join(manifest.columns)}"
        )


class Reader:
    """Reads rows of one dataset; picklable, and opens its files where it is used first.

    `max_row_groups` bounds the decoded row groups that are kept: a rank reads K of them at a time for each of its
    lanes (`Order.block_row_groups`).
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str], *, max_row_groups: int = 64) -> None:
        check_columns(manifest, columns)
        self._manifest = manifest
        self._columns = list(columns)
        self._max_row_groups = max_row_groups
        self._first_id = np.concatenate(([0], np.cumsum(manifest.group_rows)[:-1]))
        sizes = [len(file.row_groups) for file in manifest.files]
        self._first_group = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": OrderedDict(), "_tables": OrderedDict()}

    def read(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of the given ids, in their order, and the ids of the places that were read."""
        reach("data")
        groups = np.searchsorted(self._first_id, ids, side="right") - 1
        tables, read_ids = [], np.empty_like(ids)
        taken = np.argsort(groups, kind="stable")
        for group in np.unique(groups):
            places = taken[groups[taken] == group]
            rows = ids[places] - self._first_id[group]
            tables.append(self._row_group(int(group)).take(pa.array(rows)))
            read_ids[places] = self._first_id[group] + rows
        order = np.empty_like(taken)
        order[taken] = np.arange(len(taken))
        table = pa.concat_tables(tables).combine_chunks()
        return (
            table if len(tables) == 1 and (order == np.arange(len(order))).all() else table.take(pa.array(order))
        ), read_ids

    def _row_group(self, group: int) -> pa.Table:
        table = self._tables.pop(group, None)
        if table is None:
            table = self._decode(group)
            while len(self._tables) >= self._max_row_groups:
                self._tables.popitem(last=False)
        self._tables[group] = table
        return table

    def _decode(self, group: int) -> pa.Table:
        number = int(np.searchsorted(self._first_group, group, side="right")) - 1
        entry = self._manifest.files[number]
        within = group - int(self._first_group[number])
        try:
            table = read_row_group(self._file(number), within, self._columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{self._manifest.url}/{entry.path}: row group {within} cannot be read ({error}); "
                "the file is damaged, restore it and check with `elastic-train data verify`"
            ) from error
        if len(table) != entry.row_groups[within]:
            raise DataError(f"{self._manifest.url}/{entry.path}: row group {within} has {len(table)} rows")
        return table

    def _file(self, number: int) -> pq.ParquetFile:
        file = self._files.pop(number, None)
        if file is None:
            file = self._open(number)
            while len(self._files) >= MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close(force=True)
        self._files[number] = file
        return file

    def _open(self, number: int) -> pq.ParquetFile:
        """Open a file and compare its fingerprint with the manifest's."""
        entry = self._manifest.files[number]
        path = f"{self._manifest.url.rstrip('/')}/{entry.path}"
        try:
            raw = fsspec.open(path, "rb").open()
        except OSError as error:
            raise DataError(f"{path}: cannot be opened: {error}") from error
        size = raw.seek(0, 2)
        if size < entry.size:
            raise DataError(f"{path}: is truncated: {size} bytes of {entry.size}; copy it again")
        footer = read_footer(raw, size, path) if size == entry.size else b""
        if footer_sha256(footer) != entry.footer_sha256:
            raise DataError(
                f"{path}: the file changed since the manifest was made; "
                "restore it, or build the manifest anew and start another run"
            )
        return open_parquet(raw, parse_footer(footer, path))
