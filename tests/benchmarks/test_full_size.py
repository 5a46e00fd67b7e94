"""Datasets of full size: as many rows and row groups as a real one, all of them readable, on a small disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.data.full_size import write_full_size
from elastic_train.data.dataset.verify import verify
from elastic_train.data.loading.reader import Reader


def test_every_row_can_be_read(tmp_path: Path) -> None:
    """1.3 million rows take less than 5 MB; any of them is read from its own place; no file is damaged."""
    manifest = write_full_size(tmp_path / "full", 1_310_000, 2000)
    assert manifest.num_rows == int(manifest.group_rows.sum()) == 1_310_000
    assert [len(file.row_groups) for file in manifest.files] == [66] * 10
    assert sum(file.size for file in manifest.files) < 5_000_000
    places = np.random.default_rng(0).integers(0, 1_310_000, 20)
    assert Reader(manifest, ["label"]).read(places)[1].tolist() == places.tolist()
    assert [verdict.wrong for verdict in verify(manifest) if verdict.wrong] == []


@pytest.mark.parametrize(
    ("num_rows", "groups"),
    [(3, [[3]]), (10, [[10]]), (13, [[10, 3]]), (20, [[10, 10]]), (45, [[10] * 4, [5]]), (39, [[10, 10, 10, 9]])],
)
def test_row_groups_repeat_the_first(tmp_path: Path, num_rows: int, groups: list[list[int]]) -> None:
    """Every row group begins with the same rows; a file's last one holds what is left of them."""
    manifest = write_full_size(tmp_path / "full", num_rows, rows_per_group=10, rows_per_file=40)
    assert [list(file.row_groups) for file in manifest.files] == groups
    rows = [row for file in manifest.files for row in pq.read_table(tmp_path / "full" / file.path).to_pylist()]
    assert len(rows) == num_rows
    assert rows == [rows[place % 40 % 10] for place in range(num_rows)]
