"""Reading rows by sample id, through any fsspec URL: the few row groups decoded last are kept.

`read` returns the ids of the places it took rows from, rebuilt from row group and row, so that the coverage sums
testify to what was read and not to what was asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from elastic_train.data.groups import RowGroups
from elastic_train.data.manifest import Manifest
from elastic_train.data.rows import Rows, gather
from elastic_train.mixing import Int64s


class Reader:
    """Reads rows of one dataset; picklable, and opens its files where it is used first.

    `max_row_groups` bounds the decoded row groups that `read` keeps.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str], *, max_row_groups: int = 64) -> None:
        self.groups = RowGroups(manifest, columns)
        self.first_id: Int64s = np.concatenate(([0], np.cumsum(manifest.group_rows)[:-1]))
        self._max_row_groups = max_row_groups
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": OrderedDict()}

    def read(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of the given ids, in their order, and the ids of the places that were read."""
        return gather(self._row_group, self.first_id, ids)

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group; from any thread."""
        return Rows(self.groups.decode(group))

    def _row_group(self, group: int) -> Rows:
        rows = self._rows.pop(group, None)
        if rows is None:
            rows = self.decode(group)
            while len(self._rows) >= self._max_row_groups:
                self._rows.popitem(last=False)
        self._rows[group] = rows
        return rows
