"""Cutting footers: each row group's part is a footer that reads that row group, whatever the columns hold."""

from __future__ import annotations

import errno
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.data.dataset import row_groups
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet.files import footer_sha256, parse_footer, read_footer
from elastic_train.data.parquet.footer import NAME, Footer, Footers, cut_footer, load_footers, read_footers
from elastic_train.errors import DataError
from tests.conftest import write_rows


def table_of(num_rows: int, num_columns: int) -> pa.Table:
    """Return a table of many kinds of columns, nested and missing values among them."""
    rng = np.random.default_rng(num_rows)
    kinds = [
        pa.array(rng.integers(0, 9, num_rows), pa.int32()),
        pa.array([None if i % 3 == 0 else f"text {i}" for i in range(num_rows)]),
        pa.array([[1, 2], None, []] * (num_rows // 3) + [[3]] * (num_rows % 3), pa.list_(pa.int32())),
        pa.array([{"x": i, "y": [float(i)]} for i in range(num_rows)]),
        pa.array(rng.random(num_rows) < 0.5),
        pa.array(rng.random(num_rows)),
    ]
    columns = {f"column {place}": kinds[place % len(kinds)] for place in range(num_columns)}
    return pa.table(columns).replace_schema_metadata({"owner": "x" * 300})


def write(path: Path, table: pa.Table, group_rows: int, **options: object) -> tuple[bytes, Footer]:
    pq.write_table(table, path, row_group_size=group_rows, **options)
    with path.open("rb") as file:
        footer = read_footer(file, path.stat().st_size, path.name)
    return footer, cut_footer(footer, path.name)


@pytest.mark.parametrize("options", [{}, {"write_page_index": True, "compression": "zstd"}, {"version": "1.0"}])
@pytest.mark.parametrize(("num_rows", "group_rows", "num_columns"), [(1, 1, 1), (60, 4, 6), (50, 3, 17), (31, 2, 1)])
def test_every_row_group_is_read_with_its_part_of_the_footer(
    tmp_path: Path, num_rows: int, group_rows: int, num_columns: int, options: dict[str, object]
) -> None:
    """A part says of its row group what the whole footer says, and reads the same rows."""
    path, table = tmp_path / "a.parquet", table_of(num_rows, num_columns)
    footer, cut = write(path, table, group_rows, **options)
    whole = parse_footer(footer, "whole")
    assert (len(cut.bounds) - 1, cut.sha256, cut.size) == (whole.num_row_groups, footer_sha256(footer), len(footer))
    for group in range(whole.num_row_groups):
        part = cut.metadata_of(group, whole.row_group(group).num_rows)
        assert (part.num_row_groups, part.num_rows) == (1, whole.row_group(group).num_rows)
        assert part.row_group(0).to_dict() == whole.row_group(group).to_dict()
        rows = pq.ParquetFile(path, metadata=part).read_row_group(0)
        assert rows.equals(table.slice(group * group_rows, group_rows))


def test_a_footer_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    """Thrift that is cut off names the file."""
    footer, _ = write(tmp_path / "a.parquet", table_of(20, 3), 5)
    with pytest.raises(DataError, match=r"a\.parquet: its footer cannot be read"):
        cut_footer(footer[: len(footer) // 2], "a.parquet")


def rows_of(folder: Path) -> list[int]:
    """Return a column of the dataset, as a reader gives it."""
    manifest = load_manifest(str(folder))
    labels: list[int] = Reader(manifest, ["label"]).read(np.arange(manifest.num_rows))[0].column("label").to_pylist()
    return labels


@pytest.mark.parametrize("harm", ["removed", "damaged", "of another dataset"])
def test_footers_beside_the_manifest_are_never_trusted(tmp_path: Path, harm: str) -> None:
    """Without them, with broken ones, or with another dataset's, the same rows are read."""
    folder, other = write_rows(tmp_path / "a", 60), write_rows(tmp_path / "b", 60, seed=9, group_rows=5)
    assert load_footers(str(folder)) is not None
    before, path = rows_of(folder), folder / NAME
    content = path.read_bytes()
    if harm == "removed":
        path.unlink()
    elif harm == "damaged":
        path.write_bytes(content[:200] + bytes(byte ^ 1 for byte in content[200:260]) + content[260:])
    else:
        path.write_bytes((other / NAME).read_bytes())
    assert rows_of(folder) == before


def test_footers_whose_storage_fails_once_are_read_with_the_next_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process would compare nothing that it reads with the checksums, to its end."""
    manifest = load_manifest(str(write_rows(tmp_path / "a", 60)))
    errors = [OSError(errno.EIO, "Input/output error")]

    def failing_once(url: str) -> Footers | None:
        if errors:
            raise errors.pop()
        return read_footers(url)

    monkeypatch.setattr(row_groups, "read_footers", failing_once)
    groups = row_groups.RowGroups(manifest, ["label"])
    assert [groups._footer(0, manifest.files[0]).sums is not None for _ in range(2)] == [False, True]


def test_footers_at_any_url() -> None:
    """Footers are found beside a manifest at an fsspec URL, and nothing is found where there are none."""
    assert load_footers("memory://nothing-here") is None
    with fsspec.open("memory://footers/a.parquet", "wb") as file:
        pq.write_table(table_of(9, 2), file, row_group_size=4)
    build_manifest("memory://footers")
    footers = load_footers("memory://footers")
    assert footers is not None
    assert (len(footers), footers[0].path, len(footers[0].bounds) - 1) == (1, "a.parquet", 3)
