"""Synthetic datasets of any size: seeded, written row group by row group, in constant memory.

A row group is a pure function of (seed, first row), so two calls write equal files. Labels follow a golden-ratio
sequence over row numbers, so shares are nearly exact at every size, even rare ones. A row's tokens are long-tailed
noise; a share of them, which varies by row, is drawn from the words of its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.core.arrays import Int64s
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.data.dataset.schemas import (
    LONG_TAIL,
    POLICY,
    QUALITY,
    QUALITY_CLASSES,
    SCHEMAS,
    Schema,
)
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent

VOCABULARY = 4096
POSITIVE_SHARE = 0.18
MISSING_SHARE = 0.07
_WORDS_PER_CLASS = 48
_GOLDEN = 0.6180339887498949
_MAX_ROWS_PER_FILE = 1 << 17
_MIN_FILES = 4
_EPOCH_US = 1_735_689_600_000_000  # 2025-01-01, the date of the first synthetic row

CATEGORIES = {
    "language": ("en", "de", "fr", "es", "zh", "ja"),
    "source_surface": ("chat", "api", "mobile", "batch"),
    "model_family": ("small", "medium", "large"),
    "kind": ("module", "class", "function", "method"),
    "visibility": ("public", "private"),
    "area": ("core", "io", "math", "web", "plot", "test"),
    "style": ("plain", "numpy", "google", "sphinx"),
}


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows [lo, hi) of one row group, and the number of its file."""

    file: int
    lo: int
    hi: int


def synthesise(
    url: str,
    rows: int,
    schema: str = "quality",
    seed: int = 0,
    *,
    rows_per_group: int = 2048,
    rows_per_file: int | None = None,
    track: Track = silent,
) -> Manifest:
    """Write `rows` rows of the *quality* or *policy* schema below `url`, and their manifest last.

    Without `rows_per_file` there are at least four files if the rows suffice. Raise ConfigError for impossible numbers.
    """
    check(rows, schema, seed, rows_per_group, rows_per_file)
    if rows_per_file is None:
        rows_per_file = min(_MAX_ROWS_PER_FILE, -(-rows // _MIN_FILES))
    layout = SCHEMAS[schema]
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    num_groups = sum(-(-(hi - lo) // rows_per_group) for lo, hi in _cut(0, rows, rows_per_file))
    groups = track(_groups(rows, rows_per_group, rows_per_file), "writing", num_groups, "row groups")
    for number, of_file in itertools.groupby(groups, key=lambda group: group.file):
        with (
            fs.open(f"{root}/part-{number:05d}.parquet", "wb") as file,
            pq.ParquetWriter(file, layout.columns, compression="zstd") as writer,
        ):
            for group in of_file:
                writer.write_table(_table(layout, group, seed), row_group_size=rows_per_group)
    labels = QUALITY_CLASSES if layout is QUALITY else tuple(f"class-{kind}" for kind in range(len(LONG_TAIL)))
    return build_manifest(
        url,
        label_column=layout.label,
        schema_name=layout.name,
        labels=labels,
        numeric_columns=layout.numeric,
        categorical_columns=layout.categorical,
        vocabulary_size=VOCABULARY,
    )


def check(rows: int, schema: str, seed: int, rows_per_group: int, rows_per_file: int | None = None) -> None:
    """Raise ConfigError for impossible numbers."""
    if schema not in SCHEMAS:
        raise ConfigError(f"schema must be one of {', '.join(SCHEMAS)}, not '{schema}'")
    if rows < 1 or rows_per_group < 1 or (rows_per_file is not None and rows_per_file < 1):
        raise ConfigError(f"rows, rows per group and rows per file must be at least 1; rows is {rows}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, not {seed}")


def _cut(lo: int, hi: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(lo, hi, size):
        yield start, min(start + size, hi)


def _groups(rows: int, rows_per_group: int, rows_per_file: int) -> Iterator[_Group]:
    for number, (first, end) in enumerate(_cut(0, rows, rows_per_file)):
        for lo, hi in _cut(first, end, rows_per_group):
            yield _Group(number, lo, hi)


def _table(schema: Schema, group: _Group, seed: int) -> pa.Table:
    rng = np.random.default_rng([seed, group.lo])
    shares = LONG_TAIL if schema is POLICY else (1 - POSITIVE_SHARE, POSITIVE_SHARE)
    labels = rng.permutation(_labels(group.lo, group.hi, seed, shares))
    input_ids, lengths = _tokens(rng, labels)
    num_rows = group.hi - group.lo
    columns: dict[str, pa.Array] = {"input_ids": input_ids, schema.label: pa.array(labels, pa.int32())}
    for name in schema.numeric:
        values = np.rint(lengths * rng.lognormal(0.0, 0.5, num_rows) * (1 + 0.2 * (labels % 3)))
        is_missing = rng.random(num_rows) < MISSING_SHARE
        columns[name] = pa.array(values, schema.columns.field(name).type, mask=is_missing)
    for name in schema.categorical:
        values = np.array(CATEGORIES[name], dtype=object)
        picked = np.where(rng.random(num_rows) < 0.2, labels, rng.integers(0, len(values), num_rows)) % len(values)
        columns[name] = pa.array(values[picked], pa.string(), mask=rng.random(num_rows) < MISSING_SHARE)
    if schema is QUALITY:
        ids = np.arange(group.lo, group.hi)
        columns["shard_id"] = pa.array(np.full(num_rows, group.file), pa.int32())
        columns["created_at"] = pa.array(_EPOCH_US + ids * 1_000_000, schema.columns.field("created_at").type)
    return pa.table([columns[name] for name in schema.columns.names], schema=schema.columns)


def _labels(lo: int, hi: int, seed: int, shares: tuple[float, ...]) -> Int64s:
    """Return labels of the rows [lo, hi), with counts close to `shares` over any run of rows."""
    places = (np.arange(lo, hi) * _GOLDEN + (seed % 1000) / 1000) % 1.0
    bounds = np.cumsum(shares)[:-1]
    return np.searchsorted(bounds, places, side="right").astype(np.int64)


def _tokens(rng: np.random.Generator, labels: Int64s) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Draw token lists for the labels, with ids in [1, VOCABULARY); also return their lengths."""
    lengths = np.clip(rng.lognormal(3.4, 0.6, len(labels)), 4, 256).astype(np.int64)
    total = int(lengths.sum())
    noise = 1 + np.floor((VOCABULARY - 1) * rng.random(total) ** 3).astype(np.int64)
    words = 1 + labels * _WORDS_PER_CLASS
    telling_share = 0.05 + 0.35 * rng.random(len(labels))
    is_telling = rng.random(total) < np.repeat(telling_share, lengths)
    telling = np.repeat(words, lengths) + rng.integers(0, _WORDS_PER_CLASS, total)
    values = np.where(is_telling, telling, noise).astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)), lengths
