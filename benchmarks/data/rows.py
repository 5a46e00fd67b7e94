"""Write the rows that all loaders of `benchmarks.data` read, as Parquet with our manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.dataset.manifest import build_manifest

SCHEMA = pa.schema(
    [pa.field("input_ids", pa.list_(pa.int32()), nullable=False), pa.field("label", pa.int32(), nullable=False)]
)
NUM_FILES, ROWS_PER_GROUP = 8, 2000
Make = Callable[[np.random.Generator, int, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
VOCABULARY, MAX_TOKENS = 32_000, 2048


def write_rows(folder: Path, num_rows: int, *, rows_per_group: int = ROWS_PER_GROUP) -> None:
    """Write rows of 540 tokens on average, lognormal up to 2,048, with low ids more frequent."""
    _write(folder, num_rows, rows_per_group, _texts)


def write_numbered_rows(folder: Path, num_rows: int) -> None:
    """Write rows of one token, the row's number plus 1."""
    _write(folder, num_rows, 100, lambda _, lo, hi: (np.ones(hi - lo, dtype=np.int64), np.arange(lo + 1, hi + 1)))


def _texts(rng: np.random.Generator, lo: int, hi: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    lengths = np.clip(rng.lognormal(6.03, 0.75, hi - lo), 16, MAX_TOKENS).astype(np.int64)
    return lengths, 1 + np.floor((VOCABULARY - 1) * rng.random(int(lengths.sum())) ** 3)


def _write(folder: Path, num_rows: int, rows_per_group: int, make: Make) -> None:
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        rng = np.random.default_rng([0, number])
        first, end = num_rows * number // NUM_FILES, num_rows * (number + 1) // NUM_FILES
        with pq.ParquetWriter(folder / f"part-{number}.parquet", SCHEMA, compression="zstd") as writer:
            for lo, hi in _cut(first, end, rows_per_group):
                lengths, values = make(rng, lo, hi)
                offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
                tokens = pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.int32)))
                labels = pa.array(rng.integers(0, 2, hi - lo), pa.int32())
                writer.write_table(pa.table([tokens, labels], schema=SCHEMA), row_group_size=rows_per_group)
    build_manifest(str(folder), label_column="label")


def _cut(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(lo, hi, size):
        yield start, min(start + size, hi)
