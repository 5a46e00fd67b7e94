"""All footers of a dataset in one file next to its manifest, cut at row groups, with checksums of column chunks.

With it a reader needs no request before the first row group's own bytes. It is not part of the manifest's identity:
each footer is compared with its fingerprint in the manifest, and a dataset without the file is read footer by footer.
Without it, or if it predates checksums, row groups are read unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.parquet.footer import Footer
from elastic_train.system.wording import sdk_errors

NAME = "manifest.footers"
_SUMS = "chunk_crc32"
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("num_bytes", pa.int32(), nullable=False),
        pa.field("zstd", pa.binary(), nullable=False),
        pa.field("num_rows_at", pa.list_(pa.int32(), 2), nullable=False),
        pa.field("list_at", pa.int32(), nullable=False),
        pa.field("bounds", pa.list_(pa.int32()), nullable=False),
        pa.field("chunk_crc32", pa.list_(pa.uint32())),
    ]
)


class Footers:
    """The footers of a dataset's files, in manifest order; compressed until used."""

    def __init__(self, table: pa.Table) -> None:
        if _SUMS not in table.column_names:
            table = table.append_column(_SCHEMA.field(_SUMS), pa.nulls(len(table), _SCHEMA.field(_SUMS).type))
        self._columns = [table.column(name).combine_chunks() for name in _SCHEMA.names]

    @property
    def have_sums(self) -> bool:
        """True if every file has checksums."""
        return bool(self._columns[-1].null_count == 0)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Footer:
        path, num_bytes, zstd, num_rows_at, list_at, bounds, sums = (column[number].as_py() for column in self._columns)
        content = pa.decompress(zstd, num_bytes, codec="zstd", asbytes=True)
        return Footer(path, content, tuple(num_rows_at), list_at, tuple(bounds), sums)


def write_footers(url: str, footers: Sequence[Footer]) -> None:
    """Write the footers of a dataset beside its manifest."""
    columns = [
        [footer.path for footer in footers],
        [len(footer.content) for footer in footers],
        [pa.compress(footer.content, codec="zstd", asbytes=True) for footer in footers],
        [list(footer.num_rows_at) for footer in footers],
        [footer.list_at for footer in footers],
        [list(footer.bounds) for footer in footers],
        [footer.sums for footer in footers],
    ]
    table = pa.table(columns, schema=_SCHEMA)
    with fsspec.open(f"{url.rstrip('/')}/{NAME}", "wb") as file:
        pq.write_table(table, file, compression="none", write_page_checksum=True)


def load_footers(url: str) -> Footers | None:
    """Read a dataset's footers; None without them, or if they cannot be read."""
    try:
        with fsspec.open(f"{url.rstrip('/')}/{NAME}", "rb") as file:
            content = file.read()
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        return Footers(file.read(use_threads=False))
    except sdk_errors(OSError, pa.ArrowInvalid, KeyError):
        return None
