"""The cache of decoded row groups: shared, bounded, least recently used out first, whole or absent after any crash."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading import reader as cache_module
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader, RowCache
from tests.conftest import PATIENCE_S, ROOT, write_rows

pytestmark = pytest.mark.slow

COLUMNS = ["input_ids", "label"]


def table_of(group: int, num_rows: int = 10) -> pa.Table:
    return pa.table({"a": pa.array([group] * num_rows, pa.int64())})


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("cache") / "rows", 60, group_rows=7)))


def entries(folder: Path) -> dict[int, int]:
    """Return the bytes of each row group's entry."""
    return {int(path.stem): path.stat().st_size for path in folder.glob("*/*.rows")}


class Decoder:
    """Counts what it decodes."""

    def __init__(self) -> None:
        self.decoded: Counter[int] = Counter()

    def __call__(self, group: int) -> pa.Table:
        self.decoded[group] += 1
        return table_of(group)


def test_an_entry_is_used_while_it_is_intact(tmp_path: Path, manifest: Manifest) -> None:
    """Cut anywhere, or with a bit flipped since it was written, in this boot or before: it is decoded again."""
    cache, decode = RowCache(tmp_path, manifest, COLUMNS), Decoder()
    assert cache.get(3, decode).equals(table_of(3))
    assert cache.get(3, decode).equals(table_of(3))
    assert decode.decoded[3] == 1
    (path,) = tmp_path.glob("*/3.rows")
    whole = path.read_bytes()
    content = range(0, len(whole) - cache_module._TRAILER.size + 16, 40)
    changed = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in content]
    for torn in [*changed, *(whole[:size] for size in range(0, len(whole), 97)), whole + b"\0", whole[:-8] + bytes(8)]:
        before = decode.decoded[3]
        path.unlink()
        path.write_bytes(torn)
        assert cache.get(3, decode).equals(table_of(3))
        assert decode.decoded[3] == before + 1
        assert path.read_bytes() == whole


def test_an_entry_that_cannot_be_read_is_made_again(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk with a bad sector, where a mapped page would end every process that uses it, one after the other."""
    cache, decode = RowCache(tmp_path, manifest, COLUMNS), Decoder()
    assert cache.get(3, decode).equals(table_of(3))
    (path,) = tmp_path.glob("*/3.rows")
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "_mark_used", lambda file: os.truncate(path, 0))
        assert cache.get(3, decode).equals(table_of(3))
    assert cache.get(3, decode).equals(table_of(3))
    assert decode.decoded[3] == 2


def test_columns_and_datasets_do_not_mix(tmp_path: Path, manifest: Manifest) -> None:
    """Readers of the same folder find the rows of their own dataset and columns."""
    other = load_manifest(str(write_rows(tmp_path / "other", 60, seed=9, group_rows=7)))
    for each, columns in ((manifest, ["label"]), (manifest, COLUMNS), (other, ["label"])) * 2:
        found, _ = Reader(each, columns, cache=RowCache(tmp_path / "cache", each, columns)).read(np.arange(60))
        assert found.equals(Reader(each, columns).read(np.arange(60))[0])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=40), st.integers(0, 12))
def test_the_least_recently_used_is_evicted_first(manifest: Manifest, gets: list[int], num_entries: int) -> None:
    """The bound is kept at all times, and nothing is deleted that was used later than something that stays."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, decode = Path(temporary), Decoder()
        RowCache(folder / "one", manifest, COLUMNS).get(0, decode)
        size = sum(entries(folder / "one").values())
        cache = RowCache(folder / "all", manifest, COLUMNS, max_bytes=num_entries * size + size // 2)
        last_use: dict[int, int] = {}
        for now, group in enumerate(gets):
            before = entries(folder / "all")
            assert cache.get(group, decode).equals(table_of(group))
            last_use[group] = now
            after = entries(folder / "all")
            assert sum(after.values()) <= num_entries * size + size // 2
            assert (group in after) == (num_entries > 0)
            gone, stayed = before.keys() - after.keys(), before.keys() & after.keys()
            if gone and stayed:
                assert max(last_use[each] for each in gone) < min(last_use[each] for each in stayed)
            assert not gone or len(before) + 1 > num_entries, "nothing goes while there is room"
            check_and_set_last_use(folder / "all", last_use, group)


def check_and_set_last_use(folder: Path, last_use: dict[int, int], used: int) -> None:
    """Check that a use marks the used entry alone, then set its time, which a coarse clock may give to several."""
    for path in folder.glob("*/*.rows"):
        group = int(path.stem)
        if group == used:
            assert path.stat().st_mtime > len(last_use) + 1000, "used just now"
            set_last_use(path, last_use[group])
        assert path.stat().st_mtime == last_use[group]


def set_last_use(path: Path, second: int) -> None:
    os.utime(path, (second, second))


def test_datasets_share_the_bound(tmp_path: Path, manifest: Manifest) -> None:
    """An entry of another dataset is deleted when it is the least recently used one, and not before."""
    decode = Decoder()
    other = RowCache(tmp_path, manifest, ["label"])
    other.get(0, decode)
    (of_other,) = tmp_path.glob("*/*.rows")
    cache = RowCache(tmp_path, manifest, COLUMNS, max_bytes=of_other.stat().st_size * 7 // 2)
    for group in range(2):
        cache.get(group, decode)
        (path,) = set(tmp_path.glob(f"*/{group}.rows")) - {of_other}
        set_last_use(path, 1 + group)
    set_last_use(of_other, 0)
    other.get(0, decode)
    cache.get(2, decode)
    assert sorted(path.name for path in tmp_path.glob("*/*.rows")) == ["0.rows", "1.rows", "2.rows"]
    assert of_other.exists(), "it was used later than row group 0 of this dataset"
    set_last_use(of_other, 0)
    cache.get(3, decode)
    assert sorted(path.name for path in tmp_path.glob("*/*.rows")) == ["1.rows", "2.rows", "3.rows"]
    assert not of_other.exists()


def test_leftovers_of_killed_processes_are_removed_before_any_entry(tmp_path: Path, manifest: Manifest) -> None:
    """A half-written file is useless, however new it is."""
    cache, decode = RowCache(tmp_path, manifest, COLUMNS), Decoder()
    cache.get(0, decode)
    (path,) = tmp_path.glob("*/*.rows")
    set_last_use(path, 0)
    litter = path.with_name("9.partial")
    litter.write_bytes(path.read_bytes())
    cache = RowCache(tmp_path, manifest, COLUMNS, max_bytes=path.stat().st_size * 7 // 2)
    for group in range(1, 4):
        cache.get(group, decode)
    assert not litter.exists()
    assert sorted(entries(tmp_path)) == [1, 2, 3]


def test_steps_do_not_touch_the_cache(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is marked as used when it is opened; how many steps read its rows makes no difference."""
    marks = Counter[str]()
    utime = os.utime

    def count(file: int | Path, *rest: object, **options: object) -> None:
        marks["used"] += isinstance(file, int)
        utime(file, *rest, **options)  # type: ignore[arg-type]

    order = Order(manifest.group_rows, num_lanes=2, seed=1, block_row_groups=2)
    place = {"lanes": range(2), "micro_batch": 1, "cursor": Cursor(), "num_steps": 30}
    for _ in range(2):
        reader = Reader(manifest, COLUMNS, cache=RowCache(tmp_path, manifest, COLUMNS))
        loader = LaneLoader(reader, order, lambda rows, ids: {}, **place)  # type: ignore[arg-type]
        assert len(list(loader)) == 30
        monkeypatch.setattr(os, "utime", count)
    shared, looked_up = 1, 4  # a row group across the lanes' boundary; those of the blocks of the first step
    assert 0 < marks["used"] <= len(manifest.group_rows) + shared + looked_up


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path, manifest: Manifest) -> None:
    """A folder that is a node's scratch space holds other people's files: they are neither counted nor deleted."""
    others = [tmp_path / "work" / "draft.tex", tmp_path / ("0" * 32) / "7.json", tmp_path / "work" / "5.partial"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1 << 20))
    cache, decode = RowCache(tmp_path, manifest, COLUMNS, max_bytes=1 << 15), Decoder()
    for group in range(9):
        cache.get(group, decode)
    assert all(path.stat().st_size == 1 << 20 for path in others)
    assert len(list(tmp_path.glob("*/*.rows"))) > 1
    assert not (tmp_path / "work" / "locks").exists()


def test_an_unusable_folder_disables_the_cache(
    tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are decoded as usual, and a warning is logged once."""
    (tmp_path / "file").write_text("")
    cache, decode = RowCache(tmp_path / "file", manifest, COLUMNS), Decoder()
    for _ in range(2):
        assert cache.get(1, decode).equals(table_of(1))
    assert decode.decoded[1] == 2
    assert [record.getMessage().count("decoded rows cannot be cached") for record in caplog.records] == [1]


CRASHES = """
import os, signal, sys
from pathlib import Path

import pyarrow as pa

from elastic_train.data.loading.reader import RowCache
from elastic_train.data.dataset.manifest import load_manifest

folder, manifest = Path(sys.argv[1]), load_manifest(sys.argv[2])
table = pa.table({"a": pa.array(range(100), pa.int64())})
decoded = []

def decode(group):
    decoded.append(group)
    return table

def open_cache(place, max_bytes=3500):
    return RowCache(folder / str(place), manifest, ["label"], max_bytes)

def die_after(num_lines):
    def trace(frame, event, argument):
        nonlocal num_lines
        if frame.f_code.co_filename.endswith(("loading/reader.py", "system/files.py")):
            num_lines -= event == "line"
            if num_lines < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def bytes_in(place):
    return sum(path.stat().st_size for path in (folder / str(place)).glob("*/*.*"))

for place in range(1000):
    cache = open_cache(place)
    for group in (3, 2):
        cache.get(group, decode)
    child = os.fork()
    if not child:
        die_after(place)
        cache.get(1, decode)
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert bytes_in(place) <= 3500
    for group in (1, 0, 1):
        assert open_cache(place).get(group, decode).equals(table)
        counted = int.from_bytes((folder / str(place) / "bytes").read_bytes()[:8], "little")
        assert bytes_in(place) <= counted <= 3500, (place, bytes_in(place), counted)
    open_cache(place, 3500).get(5, decode)
    assert not list((folder / str(place)).glob("*/*.partial")), place
    if os.WIFEXITED(status):
        print(place)
        break
"""


def test_the_cache_survives_a_kill_at_any_line(tmp_path: Path, manifest: Manifest) -> None:
    """SIGKILL before each line that runs: locks are free, entries whole, bytes never counted too low, no litter."""
    command = [sys.executable, "-c", CRASHES, str(tmp_path), manifest.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40, "so many lines run"


SHARING = """
import os, sys
from pathlib import Path

import fsspec, numpy as np
from fsspec.implementations.local import LocalFileSystem

from elastic_train.data.parquet import sources
from elastic_train.data.loading.reader import RowCache
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.reader import Reader

sources.SOONEST_HEDGE_S = 1e6  # what is late is not asked for twice

class Counted(LocalFileSystem):
    protocol = ("counted",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def cat_file(self, path, start=None, end=None, **options):
        with open(sys.argv[2], "a") as log:
            log.write(f"{Path(path).name}\\n")
        return super().cat_file(path, start, end)

fsspec.register_implementation("counted", Counted)
manifest = load_manifest("counted://" + sys.argv[1])
cache = RowCache(Path(sys.argv[3]), manifest, ["label"])
reader = Reader(manifest, ["label"], max_row_groups=1, cache=cache)
print(flush=True)
sys.stdin.readline()
rows, ids = reader.read(np.arange(manifest.num_rows))
assert ids.tolist() == list(range(manifest.num_rows))
print(rows.column("label").to_pylist())
"""


def test_concurrent_processes_make_one_request_per_row_group(tmp_path: Path, manifest: Manifest) -> None:
    """Two processes that want the same row groups at once make one request for each, and both have all rows."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", SHARING, manifest.url, str(log), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    readers = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for reader in readers:
        reader.stdout.readline()
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    printed = {reader.communicate(timeout=PATIENCE_S)[0] for reader in readers}
    labels = Reader(manifest, ["label"]).read(np.arange(60))[0].column("label").to_pylist()
    assert printed == {f"{labels}\n"}
    requests = log.read_text().split()
    assert len(requests) == len(manifest.group_rows), "a row group each"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what is read of files in memory, as if they were far away."""
    counted: Counter[str] = Counter()
    cat_file, open_ = MemoryFileSystem.cat_file, MemoryFileSystem._open

    def count_cat(self: MemoryFileSystem, path: str, *rest: object, **options: object) -> object:
        counted[Path(path).suffix] += 1
        return cat_file(self, path, *rest, **options)

    def count_open(self: MemoryFileSystem, path: str, *rest: object, **options: object) -> object:
        counted[Path(path).suffix] += 1
        return open_(self, path, *rest, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", count_cat)
    monkeypatch.setattr(MemoryFileSystem, "_open", count_open)
    yield counted


def test_a_warm_resume_reads_nothing_remote(tmp_path: Path, manifest: Manifest, reads: Counter[str]) -> None:
    """After a restart at another world size the lanes' blocks are there; so is all of the next epoch."""
    fs = fsspec.filesystem("memory")
    fs.put(manifest.url + "/", "/cache-rows/", recursive=True)
    remote = load_manifest("memory://cache-rows")
    order = Order(remote.group_rows, num_lanes=4, seed=1, block_row_groups=2)

    def read(world_size: int, step: int, num_steps: int) -> list[int]:
        """Return the ids that all ranks read, each with its own cache object over one folder."""
        seen = []
        for rank in range(world_size):
            loader = LaneLoader(
                Reader(remote, COLUMNS, cache=RowCache(tmp_path / "cache", remote, COLUMNS)),
                order,
                lambda rows, ids: {},
                lanes=owned_lanes(rank, world_size, 4),
                micro_batch=2,
                cursor=order.cursor_at(step, 2),
                num_steps=num_steps,
            )
            seen += [id_ for taken in loader for batch in taken for id_ in batch.ids.tolist()]
        return seen

    first = read(2, 0, 3)
    assert reads[".parquet"]
    reads.clear()
    assert not Counter(first) & Counter(again := read(3, 3, 1))
    assert len(again) == 8
    assert not reads, "the blocks of every lane were there"
    rest = read(1, 3, order.num_steps(2) - 3)
    assert Counter(first + rest) == Counter(range(60))
    reads.clear()
    assert Counter(read(4, order.num_steps(2), order.num_steps(2))) == Counter(range(60))
    assert not reads, "another epoch comes from the node as well"
