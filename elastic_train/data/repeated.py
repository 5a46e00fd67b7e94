"""Parquet files of full size on a small disk: row groups that all point at the bytes of one.

Footer and row counts are those of a file of that size, and every row can be read; there is just little payload. For
measuring what depends on the number of rows, and nothing that depends on their bytes.
"""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.parquet import MAGIC


def repeated_file(first: pa.Table, times: int, last: pa.Table | None) -> bytes:
    """Return a file whose first `times` row groups are one and the same, and behind them `last`, if given."""
    one, both = _written(first), _written(*(table for table in (first, last) if table is not None))
    metadata, of_one, of_both = (pq.read_metadata(pa.BufferReader(content)) for content in (one, one, both))
    if last is None:
        for _ in range(times - 1):
            metadata.append_row_groups(of_one)
    elif times == 1:
        metadata = of_both
    else:
        for _ in range(times - 2):
            metadata.append_row_groups(of_one)
        metadata.append_row_groups(of_both)
    footer = io.BytesIO()
    metadata.write_metadata_file(footer)
    payload = both[: len(both) - 8 - int.from_bytes(both[-8:-4], "little")]
    return payload + footer.getvalue().removeprefix(MAGIC)


def _written(*groups: pa.Table) -> bytes:
    """Write tables, each as one row group."""
    content = io.BytesIO()
    with pq.ParquetWriter(content, groups[0].schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group, row_group_size=len(group))
    return content.getvalue()
