"""Full-size datasets on a small disk: Parquet files whose row groups all point at the same bytes.

Footers, row counts and fingerprints are those of a full-size dataset, and every row can be read; only the payload is
small. For measurements that depend on the number of rows and not on their bytes.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.corpora.synthetic import synthesise
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.data.parquet.files import MAGIC

ROWS_PER_FILE = 1 << 17


def write_full_size(folder: Path, num_rows: int, rows_per_group: int, rows_per_file: int = ROWS_PER_FILE) -> Manifest:
    """Write `num_rows` synthetic rows and their manifest to a new folder; return the manifest.

    All row groups hold the same rows; a file's last one may hold fewer. 42 million rows take about 80 MB.
    """
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        model = synthesise(temporary, rows_per_group, rows_per_group=rows_per_group, rows_per_file=rows_per_group)
        rows = pq.read_table(Path(temporary) / model.files[0].path)
    for number, first in enumerate(range(0, num_rows, rows_per_file)):
        content = file_of(rows, min(rows_per_file, num_rows - first))
        (folder / f"part-{number:05d}.parquet").write_bytes(content)
    return build_manifest(
        str(folder),
        label_column=model.label_column,
        schema_name=model.schema_name,
        labels=model.labels,
        numeric_columns=model.numeric_columns,
        categorical_columns=model.categorical_columns,
        vocabulary_size=model.vocabulary_size,
    )


def file_of(rows: pa.Table, num_rows: int) -> bytes:
    """Return a Parquet file of `num_rows` rows: row groups that share the bytes of `rows`, then a shorter one."""
    times, rest = divmod(num_rows, len(rows))
    content = _written(*[rows] * min(times, 1), *[rows.slice(0, rest)] * min(rest, 1))
    if times < 2:
        return content
    metadata, first, both = (pq.read_metadata(pa.BufferReader(each)) for each in (_written(rows),) * 2 + (content,))
    for _ in range(times - 2):
        metadata.append_row_groups(first)
    metadata.append_row_groups(both)
    footer = io.BytesIO()
    metadata.write_metadata_file(footer)
    payload = content[: len(content) - 8 - int.from_bytes(content[-8:-4], "little")]
    return payload + footer.getvalue().removeprefix(MAGIC)


def _written(*groups: pa.Table) -> bytes:
    """Return a Parquet file with one row group per table."""
    content = io.BytesIO()
    with pq.ParquetWriter(content, groups[0].schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group, row_group_size=len(group))
    return content.getvalue()
