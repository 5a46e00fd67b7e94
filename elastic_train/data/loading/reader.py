"""Read rows by sample id, through any fsspec URL, caching the last decoded row groups.

`read` also returns ids rebuilt from row group and row, so that the coverage sums prove what was read, not what was
requested. Row groups and ids are of one dataset, or of several numbered consecutively.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa
import tenacity

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.data.arrow.rows import Rows, gather
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.data.loading.row_cache import RowCache
from elastic_train.errors import UnreadableError
from rendezvous.pauses import RandomExponential

TRIES, FIRST_PAUSE_S = 3, 0.05


class RowSource(Protocol):
    """A source of row groups; picklable."""

    @property
    def first_id(self) -> Int64s:
        """The id of each row group's first sample; shape (row groups,)."""

    @property
    def digest(self) -> str:
        """Identifies its rows among datasets."""

    @property
    def is_remote(self) -> bool:
        """True if decoding threads mostly wait for a network."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group; thread-safe. Raise UnreadableError."""

    def rows_of(self, group: int) -> Rows:
        """Return the rows of a row group, cached; for one thread only."""

    def place_of(self, sample: int) -> str:
        """Return a description of a sample's dataset and file, for a message."""


class Reader:
    """Reads rows of one dataset; picklable, opens files on first use.

    Only `columns` are read. `max_row_groups` bounds the decoded row groups that `read` caches; `cache`, for the same
    manifest and columns, shares them between all processes of the node. Raise DataError if a file has changed since the
    manifest was made, UnreadableError (a DataError) if it is missing or damaged, after three tries.
    """

    def __init__(
        self, manifest: Manifest, columns: Sequence[str], *, max_row_groups: int = 64, cache: RowCache | None = None
    ) -> None:
        self.groups = RowGroups(manifest, columns)
        self._cache, self._manifest = cache, manifest
        self.digest = manifest.digest
        self.first_id, self.num_rows = manifest.group_first_id, manifest.num_rows
        self._max_row_groups = max_row_groups
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    @property
    def is_remote(self) -> bool:
        return self.groups.is_remote

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": OrderedDict()}

    def read(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of `ids`, shape (n,), in order, and the ids of the places that were read."""
        return gather(self.rows_of, self.first_id, ids)

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group; thread-safe. Failed reads are retried a few times."""
        decode = partial(_again, self.groups.decode)
        return Rows(self._cache.get(group, decode) if self._cache else decode(group))

    def rows_of(self, group: int) -> Rows:
        """Return the rows of a row group, cached; for one thread only."""
        rows = self._rows.pop(group, None)
        if rows is None:
            rows = self.decode(group)
            while len(self._rows) >= self._max_row_groups:
                self._rows.popitem(last=False)
        self._rows[group] = rows
        return rows

    def place_of(self, sample: int) -> str:
        return self._manifest.place_of_sample(sample)


class MixedReader:
    """Reads several datasets with consecutively numbered row groups; all readers have the same columns."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self.digest = " ".join(reader.digest for reader in readers)
        sizes = np.array([len(reader.first_id) for reader in readers])
        self._first_group = np.cumsum(sizes) - sizes
        rows = np.array([reader.num_rows for reader in readers])
        firsts = np.cumsum(rows) - rows
        self.first_id = np.concatenate([reader.first_id + lo for reader, lo in zip(readers, firsts, strict=True)])

    @property
    def is_remote(self) -> bool:
        return any(reader.is_remote for reader in self._readers)

    def decode(self, group: int) -> Rows:
        number, within = self._place_of(group)
        return self._readers[number].decode(within)

    def rows_of(self, group: int) -> Rows:
        number, within = self._place_of(group)
        return self._readers[number].rows_of(within)

    def place_of(self, sample: int) -> str:
        number, _ = self._place_of(group_of(self.first_id, sample))
        return self._readers[number].place_of(sample - int(self.first_id[self._first_group[number]]))

    def _place_of(self, group: int) -> tuple[int, int]:
        """Return the dataset of a row group, and its number there."""
        number = group_of(self._first_group, group)
        return number, group - int(self._first_group[number])


_again = tenacity.Retrying(
    retry=tenacity.retry_if_exception_type(UnreadableError),
    stop=tenacity.stop_after_attempt(TRIES),
    wait=RandomExponential(multiplier=FIRST_PAUSE_S),
    reraise=True,
)
