"""Checksums of row groups: no flipped bit is read as another value, at any URL, and old datasets can be given them."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.dataset import row_groups
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.dataset.verify import Damage, add_checksums, verify
from elastic_train.data.loading import reader
from elastic_train.data.loading.reader import Reader
from elastic_train.data.parquet.files import Chunk, all_chunks, chunks_of, digest
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.data.parquet.sources import Fetched, LocalSource, Range, RemoteSource
from elastic_train.errors import DataError, StorageError, UnreadableError
from tests.conftest import write_rows

COLUMNS = ["input_ids", "label"]
NUM_FLIPS = 200


@pytest.fixture(autouse=True)
def warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reader._again, "wait", lambda state: 0.0)
    row_groups._warn_unchecked.cache_clear()
    yield
    row_groups._warn_unchecked.cache_clear()


def drop_checksums(folder: Path) -> None:
    """Leave footers as versions without checksums wrote them."""
    table = pq.read_table(folder / FOOTERS)
    pq.write_table(table.drop_columns(["chunk_crc32"]), folder / FOOTERS, write_page_checksum=True)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def chunks_in(path: Path) -> list[tuple[int, Chunk]]:
    """Return a file's chunks with the number of their row group."""
    metadata = pq.read_metadata(path)
    return [(group, chunk) for group in range(metadata.num_row_groups) for chunk in chunks_of(metadata, group)]


@pytest.mark.slow
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_no_flipped_bit_is_read_as_another_value(tmp_path: Path, is_remote: bool) -> None:
    """Of 200 flips each is refused where its column is read, named by file, row group and bytes, and nowhere else."""
    folder, draws = write_rows(tmp_path / "rows", 200, num_files=1, group_rows=50), random.Random(1)
    path = folder / "part-0.parquet"
    whole, url = path.read_bytes(), f"memory://flips-{tmp_path.name}" if is_remote else str(folder)
    if is_remote:
        fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    manifest = load_manifest(url)
    rows, _ = Reader(manifest, COLUMNS).read(np.arange(200))
    for _ in range(NUM_FLIPS):
        group, chunk = draws.choice(chunks_in(path))
        bit = draws.randrange(8 * chunk.lo, 8 * chunk.hi)
        flip(path, bit)
        if is_remote:
            fsspec.filesystem("memory").pipe_file(f"{url}/part-0.parquet", path.read_bytes())
        if chunk.is_of(COLUMNS):
            named = rf"part-0\.parquet: row group {group} is damaged: bytes \[{chunk.lo}, {chunk.hi}\) of column"
            with pytest.raises(UnreadableError, match=named):
                Reader(manifest, COLUMNS).read(np.arange(200))
        else:
            assert Reader(manifest, COLUMNS).read(np.arange(200))[0].equals(rows)
        path.write_bytes(whole)


class FlippingOnce:
    """Opens files of which the first reading has a flipped bit."""

    def __init__(self, open_: Callable[..., Fetched]) -> None:
        self._open, self.calls = open_, list[bool]()

    def __call__(self, source: object, path: str, ranges: Sequence[Range], *, is_again: bool = False) -> Fetched:
        self.calls.append(is_again)
        file = self._open(source, path, ranges, is_again=is_again)
        if len(self.calls) > 1:
            return file
        parts = {}
        for lo, hi in ranges:
            content = bytearray(file.part(lo, hi))
            content[len(content) // 2] ^= 1 if lo == ranges[0][0] else 0
            parts[lo, hi] = memoryview(content)
        return Fetched(parts)


@pytest.mark.parametrize("source", [LocalSource, RemoteSource])
def test_a_flip_on_the_way_is_read_again(
    tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that differ once, but not when read again from the storage, are used with a warning."""
    folder = write_rows(tmp_path / "rows", 20, num_files=1)
    url = str(folder)
    if source is RemoteSource:
        url = f"memory://again-{tmp_path.name}"
        fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    expected, _ = Reader(load_manifest(url), COLUMNS).read(np.arange(20))
    opened = FlippingOnce(source.open)
    monkeypatch.setattr(source, "open", lambda *args, **options: opened(*args, **options))
    with caplog.at_level(logging.WARNING):
        assert Reader(load_manifest(url), COLUMNS).read(np.arange(20))[0].equals(expected)
    assert opened.calls == [False, True, False], "the first row group twice, the second once"
    assert "row group 0 differed from its checksums, and was whole when it was read again" in caplog.text


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_room_for_a_file_does_not_take_data_for_damaged(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process would fail there, so it is no reason to end with 65, after which no node comes back."""
    rows = Reader(load_manifest(str(write_rows(tmp_path / "rows", 20, num_files=1))), COLUMNS)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(LocalSource, "open", refuse)
        with pytest.raises(StorageError, match=r"cannot be opened .*: the data may be whole"):
            rows.read(np.arange(20))
    assert len(rows.read(np.arange(20))[1]) == 20


def test_a_dataset_without_checksums_is_read_and_can_be_given_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It loads as before, with one warning that names the command; added, checksums leave the manifest as it is."""
    folder = write_rows(tmp_path / "rows", 60)
    manifest = load_manifest(str(folder))
    expected, _ = Reader(manifest, COLUMNS).read(np.arange(60))
    drop_checksums(folder)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert Reader(manifest, COLUMNS).read(np.arange(60))[0].equals(expected)
    assert caplog.text.count(f"`elastic-train data verify {folder} --add-checksums`") == 1
    assert add_checksums(manifest) == sum(len(chunks_in(folder / entry.path)) for entry in manifest.files)
    assert load_manifest(str(folder)).digest == manifest.digest
    flip(folder / "part-1.parquet", 8 * chunks_in(folder / "part-1.parquet")[0][1].lo + 100)
    with pytest.raises(UnreadableError, match=r"part-1\.parquet: row group 0 is damaged"):
        Reader(manifest, COLUMNS).read(np.arange(60))


def test_checksums_are_not_made_of_damaged_files(tmp_path: Path) -> None:
    """A file that is not what the manifest was made of is refused by name, and the footers stay as they were."""
    folder = write_rows(tmp_path / "rows", 60)
    drop_checksums(folder)
    before = (folder / FOOTERS).read_bytes()
    flip(folder / "part-2.parquet", 8 * chunks_in(folder / "part-2.parquet")[0][1].lo + 100)
    with pytest.raises(DataError, match=r"part-2\.parquet: is not what the manifest was made of; restore it first"):
        add_checksums(load_manifest(str(folder)))
    assert (folder / FOOTERS).read_bytes() == before


def test_verify_names_the_row_group_and_the_bytes(tmp_path: Path) -> None:
    """All damaged chunks are named; what is damaged outside of them, and checksums that are wrong, are told apart."""
    folder = write_rows(tmp_path / "rows", 60, num_files=1)
    path = folder / "part-0.parquet"
    manifest, whole = load_manifest(str(folder)), path.read_bytes()
    damaged = [chunks_in(path)[place] for place in (1, 6)]
    for _, chunk in damaged:
        flip(path, 8 * chunk.lo + 3)
    verdict = verify(manifest)[0]
    assert verdict.damage == tuple(Damage(group, each.column, each.lo, each.hi) for group, each in damaged)
    group, chunk = damaged[1]
    assert f"row group {group}, '{chunk.column}', bytes [{chunk.lo}, {chunk.hi})" in str(verdict.wrong)
    path.write_bytes(whole)
    flip(path, 1)
    assert verify(manifest)[0].wrong == (
        "its content changed: bytes differ from those the manifest was made of, outside of its row groups"
    )
    path.write_bytes(whole)
    table = pq.read_table(folder / FOOTERS)
    sums = [[value ^ 1 for value in row] for row in table.column("chunk_crc32").to_pylist()]
    field = table.schema.field("chunk_crc32")
    table = table.set_column(table.column_names.index(field.name), field, pa.array(sums, field.type))
    pq.write_table(table, folder / FOOTERS)
    assert "is whole, but checksums in manifest.footers are not its own" in str(verify(manifest)[0].wrong)


@given(st.binary(max_size=400), st.data())
def test_one_pass_has_the_sums_of_all_ranges(content: bytes, data: st.DataObject) -> None:
    """Ranges may come in any order, and overlap; the rest of the file counts for the whole's digest."""
    bounds = st.tuples(*[st.integers(0, len(content))] * 2).map(sorted)
    ranges = data.draw(st.lists(bounds.filter(lambda pair: pair[0] < pair[1]), max_size=6))
    sha256, sums = digest(BytesIO(content), [Chunk("a", lo, hi) for lo, hi in ranges])
    assert sha256 == digest(BytesIO(content), [])[0]
    assert sums == [zlib.crc32(content[lo:hi]) for lo, hi in ranges]


def test_every_chunk_has_a_checksum_after_building(tmp_path: Path) -> None:
    """The sums beside the manifest are those of the files' chunks, in their order."""
    folder = write_rows(tmp_path / "rows", 60)
    stored = pq.read_table(folder / FOOTERS).column("chunk_crc32").to_pylist()
    names = [entry["path"] for entry in json.loads((folder / "manifest.json").read_text())["files"]]
    for name, sums in zip(names, stored, strict=True):
        content = (folder / name).read_bytes()
        chunks = all_chunks(pq.read_metadata(folder / name))
        assert sums == [zlib.crc32(content[chunk.lo : chunk.hi]) for chunk in chunks]
