"""Describe a dataset: rows, files, labels, missing values, lengths; from its manifest and one pass over its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.schemas import TOKENS
from elastic_train.data.parquet.files import open_parquet, read_row_group
from elastic_train.errors import DataError
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.wording import sdk_errors

LENGTH_BOUNDS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Description:
    """A dataset in figures; `lengths[i]` counts the rows with at least LENGTH_BOUNDS[i] tokens, below the next."""

    url: str
    digest: str
    schema_name: str
    rows: int
    files: int
    row_groups: int
    size_bytes: int
    vocabulary_size: int | None
    label_column: str | None
    labels: dict[str, int]
    missing: dict[str, float]
    lengths: tuple[int, ...]
    mean_length: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the description for --json, with lengths keyed by range."""
        return {**asdict(self), "lengths": self.rows_by_length()}

    def rows_by_length(self) -> dict[str, int]:
        return dict(zip(_length_names(), self.lengths, strict=True))


def describe(manifest: Manifest, *, track: Track = silent) -> Description:
    """Count missing values of every column and lengths of `input_ids`, row group by row group, in constant memory."""
    missing = dict.fromkeys(manifest.columns, 0)
    lengths, num_tokens = np.zeros(len(LENGTH_BOUNDS), dtype=np.int64), 0
    has_tokens = plain_name(manifest.columns.get(TOKENS.name, "")).startswith(("list<", "large_list<"))
    for entry in track(manifest.files, "reading", len(manifest.files), "files"):
        path = f"{manifest.url.rstrip('/')}/{entry.path}"
        try:
            with fsspec.open(path, "rb") as raw:
                file = open_parquet(raw)
                for number in range(file.num_row_groups):
                    table = read_row_group(file, number)
                    for name in table.column_names:
                        missing[name] += table.column(name).null_count
                    if has_tokens:
                        of_group = _lengths(table.column(TOKENS.name))
                        lengths += _histogram(of_group)
                        num_tokens += int(of_group.sum())
        except sdk_errors(OSError, pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"{path}: cannot be read ({error}); check with `elastic-train data verify`") from error
    return Description(
        url=manifest.url,
        digest=manifest.digest,
        schema_name=manifest.schema_name,
        rows=manifest.num_rows,
        files=len(manifest.files),
        row_groups=len(manifest.group_rows),
        size_bytes=sum(entry.size for entry in manifest.files),
        vocabulary_size=manifest.vocabulary_size,
        label_column=manifest.label_column,
        labels=_labels(manifest),
        missing={name: count / manifest.num_rows for name, count in missing.items()},
        lengths=tuple(int(count) for count in lengths),
        mean_length=num_tokens / manifest.num_rows if has_tokens else None,
    )


def _labels(manifest: Manifest) -> dict[str, int]:
    if manifest.label_counts is None:  # it may name labels without naming their column
        return {}
    counts = manifest.label_counts
    names = manifest.labels or tuple(str(number) for number in range(len(counts)))
    return dict(zip(names, counts, strict=True))


def _lengths(column: pa.ChunkedArray) -> Int64s:
    lengths: Int64s = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def _histogram(lengths: Int64s) -> Int64s:
    places = np.searchsorted(LENGTH_BOUNDS, lengths, side="right") - 1
    return np.bincount(places, minlength=len(LENGTH_BOUNDS)).astype(np.int64)


def _length_names() -> list[str]:
    names = [f"{lo}-{hi - 1}" for lo, hi in pairwise(LENGTH_BOUNDS)]
    return [*names, f"{LENGTH_BOUNDS[-1]}+"]
