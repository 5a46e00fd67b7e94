"""The reader: the rows of any ids, only the columns in use, few row groups kept, no foreign thread in a file."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.dataset.manifest import Manifest, build_manifest, load_manifest
from elastic_train.data.dataset.row_groups import check_columns
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet import sources
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.errors import DataError
from tests.conftest import write_rows

NUM_ROWS = 101


class WatchedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory that note every read: its path, its half-open range of bytes, its thread."""

    protocol = "watched"
    store: dict[str, Any] = {}  # noqa: RUF012 - of this class, not of every memory:// file
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    reads: list[tuple[str, int, int, threading.Thread]] = []  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: object) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "rb":
            content, reads = file.getvalue(), self.reads

            class Watched(type(file)):  # type: ignore[misc]
                def read(self, size: int = -1) -> bytes:
                    lo = self.tell()
                    taken: bytes = super().read(size)
                    reads.append((path, lo, lo + len(taken), threading.current_thread()))
                    return taken

            return Watched(self, path, content)
        return file

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        content: bytes = super().cat_file(path, start, end, **options)
        self.reads.append((path, start or 0, (start or 0) + len(content), threading.current_thread()))
        return content


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[WatchedFileSystem]]:
    """Register watched:// and forget its files afterwards; nothing that is late is asked for twice."""
    monkeypatch.setattr(sources, "SOONEST_HEDGE_S", 1e6)
    fsspec.register_implementation("watched", WatchedFileSystem, clobber=True)
    WatchedFileSystem.store.clear()
    WatchedFileSystem.reads.clear()
    yield WatchedFileSystem
    WatchedFileSystem.store.clear()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """101 rows in 3 files, 7 row groups to a file and a short one at each end."""
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("reader") / "rows", NUM_ROWS, group_rows=5)))


@pytest.fixture(scope="module")
def whole(dataset: Manifest) -> list[dict[str, object]]:
    """Every row in file order, read by pyarrow alone."""
    tables = [pq.read_table(f"{dataset.url}/{file.path}") for file in dataset.files]
    rows: list[dict[str, object]] = pa.concat_tables(tables).to_pylist()
    return rows


def put(url: str, table: pa.Table, *, group_rows: int) -> Manifest:
    """Write one file and its manifest to an fsspec URL."""
    with fsspec.open(f"{url}/a.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=group_rows)
    return build_manifest(url)


def ids_of(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


@pytest.mark.heavy
@settings(deadline=None)
@given(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=40))
def test_rows_of_any_ids(dataset: Manifest, whole: list[dict[str, object]], ids: list[int]) -> None:
    """Rows come in the order of the ids, repeats included, and the ids read are the ids asked for."""
    rows, read_ids = Reader(dataset, list(dataset.columns)).read(ids_of(*ids))
    assert rows.to_pylist() == [whole[i] for i in ids]
    assert read_ids.tolist() == ids


@pytest.mark.parametrize("protocol", ["file", "watched"])
@pytest.mark.parametrize("columns", [["meta.lang"], ["meta"], ["id", "meta.lang"], ["place"]])
def test_a_columns_name_may_have_dots(
    tmp_path: Path, watched: type[WatchedFileSystem], protocol: str, columns: list[str]
) -> None:
    """It is not confused with a nested column's path, in local and remote files."""
    places = pa.StructArray.from_arrays([pa.array([7, 8, 9]), pa.array(["x", None, "z"])], ["x", "y"])
    table = pa.table({"id": [0, 1, 2], "meta.lang": ["a", "b", "c"], "place": places, "metadata": [1, 2, 3]})
    table = table.append_column("meta", pa.array([4, 5, 6])) if columns == ["meta"] else table
    url = f"file://{tmp_path}" if protocol == "file" else "watched://dots"
    rows, _ = Reader(put(url, table, group_rows=2), columns).read(ids_of(2, 0))
    assert rows.select(columns).to_pylist() == table.select(columns).take([2, 0]).to_pylist()


@pytest.mark.heavy
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=6), min_size=1, max_size=6))
def test_results_do_not_depend_on_earlier_reads(
    dataset: Manifest, whole: list[dict[str, object]], requests: list[list[int]]
) -> None:
    """One reader that keeps a single row group gives the same rows, request after request."""
    reader = Reader(dataset, ["label"], max_row_groups=1)
    for ids in requests:
        assert reader.read(ids_of(*ids))[0].column("label").to_pylist() == [whole[i]["label"] for i in ids]


def test_rows_with_missing_metadata_are_kept(dataset: Manifest, whole: list[dict[str, object]]) -> None:
    """A read of all ids gives all rows, those with missing values among them."""
    rows, _ = Reader(dataset, ["size", "kind"]).read(np.arange(NUM_ROWS))
    assert rows.num_rows == NUM_ROWS
    for name in ("size", "kind"):
        num_missing = sum(row[name] is None for row in whole)
        assert (rows.column(name).null_count, num_missing > 0) == (num_missing, True)


def test_row_groups_of_one_row(tmp_path: Path) -> None:
    """The smallest row groups are read as any others."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 13, num_files=2, group_rows=1)))
    assert manifest.group_rows.tolist() == [1] * 13
    expected = [pq.read_table(f"{manifest.url}/{file.path}", columns=["label"]) for file in manifest.files]
    rows, read_ids = Reader(manifest, ["label"], max_row_groups=2).read(np.arange(13)[::-1].copy())
    assert rows.column("label").to_pylist() == pa.concat_tables(expected).column("label").to_pylist()[::-1]
    assert read_ids.tolist() == list(range(13))[::-1]


def test_only_the_columns_in_use_are_read(watched: type[WatchedFileSystem]) -> None:
    """A reader of a small column reads none of the bytes of a large one."""
    noise = np.random.default_rng(0).bytes(200_000)
    texts = [noise[i : i + 1000] for i in range(0, len(noise), 1000)]
    manifest = put("watched://columns", pa.table({"small": range(200), "large": texts}), group_rows=200)
    watched.reads.clear()
    rows, _ = Reader(manifest, ["small"]).read(np.arange(200))
    assert rows.column_names == ["small"]
    assert sum(hi - lo for _, lo, hi, _ in watched.reads) < 20_000 < manifest.files[0].size


@pytest.mark.parametrize("has_footers", [True, False], ids=["with footers", "without"])
def test_a_file_is_verified_once_and_its_footer_read_once(watched: type[WatchedFileSystem], has_footers: bool) -> None:
    """The footer's bytes are read once, with the first row group where footers are stored beside the manifest."""
    manifest = put("watched://footers", pa.table({"a": range(40)}), group_rows=10)
    if not has_footers:
        del watched.store[next(key for key in watched.store if key.endswith(FOOTERS))]
    watched.reads.clear()
    assert Reader(manifest, ["a"]).read(np.arange(40))[0].column("a").to_pylist() == list(range(40))
    last_byte = manifest.files[0].size - 1
    reads = [(lo, hi) for path, lo, hi, _ in watched.reads if path.endswith(".parquet")]
    assert len([lo for lo, hi in reads if lo <= last_byte < hi]) == (1 if has_footers else 2)
    assert len(reads) == (4 if has_footers else 5)


def test_no_arrow_thread_reads_a_python_file(watched: type[WatchedFileSystem]) -> None:
    """No thread of pyarrow's own runs the code of a Python file: it could be cancelled in it when the process ends."""
    table = pa.table({"a": range(400), "label": [i % 3 for i in range(400)]})
    put("watched://threads", table, group_rows=50)
    manifest = build_manifest("watched://threads", label_column="label")
    Reader(manifest, ["a", "label"]).read(np.arange(400))
    names = Counter(thread.name.rsplit("_", 1)[0] for *_, thread in watched.reads)
    assert names["fetch"] == 8
    assert not [name for name in names if name.startswith("Dummy")]


def count_groups_read(watched: type[WatchedFileSystem], manifest: Manifest) -> int:
    """Count the reads that are not of the footer: one to a row group, for a single column."""
    size = manifest.files[0].size
    return sum(1 for path, lo, _, _ in watched.reads if path.endswith(".parquet") and lo < size - 1000)


@pytest.mark.parametrize(("max_row_groups", "num_reads"), [(1, 6), (2, 3), (3, 3)])
def test_row_groups_are_kept_up_to_the_bound(
    watched: type[WatchedFileSystem], max_row_groups: int, num_reads: int
) -> None:
    """Going to and fro between two row groups, then to a third, decodes each once if two are kept, else every time."""
    values = np.random.default_rng(0).integers(0, 2**60, 3000)
    manifest = put(f"watched://kept-{max_row_groups}", pa.table({"a": values}), group_rows=1000)
    reader = Reader(manifest, ["a"], max_row_groups=max_row_groups)
    watched.reads.clear()
    for id_ in (0, 1000, 1, 1001, 2, 2000):
        assert reader.read(ids_of(id_))[0].column("a").to_pylist() == [values[id_]]
    assert count_groups_read(watched, manifest) == num_reads


def test_the_number_of_kept_row_groups_is_bounded(dataset: Manifest) -> None:
    """Memory is bounded: a pass over everything leaves the last few row groups."""
    reader = Reader(dataset, ["label"], max_row_groups=3)
    reader.read(np.arange(NUM_ROWS))
    assert list(reader._rows) == [len(dataset.group_rows) - 3 + i for i in range(3)]


def test_a_reader_is_pickled_without_its_open_files(dataset: Manifest) -> None:
    """A reader that has read something can be sent to a worker process, and reads the same there."""
    reader = Reader(dataset, ["label", "input_ids"])
    rows, _ = reader.read(np.arange(NUM_ROWS))
    travelled = pickle.loads(pickle.dumps(reader))
    assert len(travelled._rows) == 0
    assert travelled.read(np.arange(NUM_ROWS))[0].equals(rows)


def test_reading_through_fsspec() -> None:
    """A dataset at memory:// is read by URL alone."""
    manifest = put("memory://reader-fsspec", pa.table({"a": range(25)}), group_rows=4)
    rows, read_ids = Reader(load_manifest("memory://reader-fsspec"), ["a"]).read(ids_of(24, 0, 13))
    assert (rows.column("a").to_pylist(), read_ids.tolist(), manifest.num_rows) == ([24, 0, 13], [24, 0, 13], 25)


def test_a_missing_column_is_named(dataset: Manifest) -> None:
    """The message names the missing columns and those that are there."""
    with pytest.raises(DataError, match=r"no column 'speed', 'colour'; it has input_ids, kind, label, size"):
        check_columns(dataset, ["label", "speed", "colour"])
    with pytest.raises(DataError, match="no column 'speed'"):
        Reader(dataset, ["speed"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def change_the_footer(path: Path) -> None:
    """Flip one bit of a footer, as a file of the same size with other values has it."""
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(bytes(content))


def damage_pages(path: Path) -> None:
    """Overwrite the pages after the leading magic bytes; the footer stays."""
    content = bytearray(path.read_bytes())
    content[4:300] = b"\xff" * 296
    path.write_bytes(bytes(content))


HARM = {
    truncate: r"part-0\.parquet: is truncated: \d+ bytes of \d+; copy it again",
    grow: r"part-0\.parquet: the file changed since the manifest was made; restore it, or build the manifest again",
    change_the_footer: r"part-0\.parquet: the file changed since the manifest was made",
    damage_pages: r"row group 0 is damaged: bytes \[4, .* column 'input_ids.*`elastic-train data verify`",
    Path.unlink: r"part-0\.parquet: cannot be opened",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_a_damaged_file_is_named(tmp_path: Path, harm: Any) -> None:
    """A file that changed under its manifest is refused by name, with what to do."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 60)))
    harm(tmp_path / "rows" / "part-0.parquet")
    with pytest.raises(DataError, match=HARM[harm]):
        Reader(manifest, list(manifest.columns)).read(np.arange(60))


def test_other_files_are_still_read(tmp_path: Path) -> None:
    """Damage to one file is met when that file is needed, not before."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 60)))
    truncate(tmp_path / "rows" / "part-0.parquet")
    assert Reader(manifest, ["label"]).read(np.arange(20, 60))[0].num_rows == 40
