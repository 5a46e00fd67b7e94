"""Reading ahead: the pure order at any shapes and worlds, what is held is bounded, and what goes wrong is told."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.data import ahead
from elastic_train.data.blocks import BLOCKS_AHEAD, BlockSchedule
from elastic_train.data.loader import LaneLoader
from elastic_train.data.manifest import Manifest, build_manifest, load_manifest
from elastic_train.data.reader import Reader
from elastic_train.data.synthetic import synthesise
from elastic_train.errors import DataError
from elastic_train.lanes import owned_lanes
from elastic_train.order import Cursor, Order
from tests.conftest import ROOT, write_rows

Ids = npt.NDArray[np.int64]


def dataset_of(group_rows: list[int]) -> Manifest:
    """Write a dataset with row groups of these sizes to memory; a column holds each row's id."""
    first = 0
    with fsspec.open("memory://ahead/a.parquet", "wb") as file, pq.ParquetWriter(file, SCHEMA) as writer:
        for rows in group_rows:
            writer.write_table(pa.table({"id": pa.array(range(first, first + rows), pa.int64())}), row_group_size=rows)
            first += rows
    return build_manifest("memory://ahead")


SCHEMA = pa.schema([("id", pa.int64())])


def count_rows(rows: pa.Table, ids: Ids) -> dict[str, Tensor]:
    assert rows.column("id").to_pylist() == ids.tolist()
    return {}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=14),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4),
    st.sampled_from([0, 100, 1 << 20]),
)
def test_any_worlds_read_every_sample_once(
    group_rows: list[int], num_lanes: int, block: int, micro_batch: int, worlds: list[tuple[int, int]], prefetch: int
) -> None:
    """Worlds of any size follow each other at any steps over row groups of any shapes, and the rows are those named."""
    manifest = dataset_of(group_rows)
    order = Order(manifest.group_rows, num_lanes=num_lanes, seed=1, block_row_groups=block)
    step, end, seen = 0, 2 * order.num_steps(micro_batch), Counter[int]()
    for world_size, steps in [*worlds, (1, end)]:
        num_steps = min(steps, end - step)
        for rank in range(min(world_size, num_lanes)):
            loader = LaneLoader(
                Reader(manifest, ["id"]),
                order,
                count_rows,
                lanes=owned_lanes(rank, min(world_size, num_lanes), num_lanes),
                micro_batch=micro_batch,
                cursor=order.cursor_at(step, micro_batch),
                num_steps=num_steps,
                prefetch_bytes=prefetch,
            )
            seen.update(id_ for taken in loader for batch in taken for id_ in batch.ids.tolist())
        step += num_steps
    assert seen == Counter(dict.fromkeys(range(manifest.num_rows), 2))


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=14), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_a_block_holds_the_samples_of_its_offsets(
    group_rows: list[int], num_lanes: int, block_row_groups: int, is_shuffled: bool
) -> None:
    """Blocks of a lane follow each other without a gap, and name just the row groups that their ids lie in."""
    order = Order(group_rows, num_lanes=num_lanes, seed=2, block_row_groups=block_row_groups, is_shuffled=is_shuffled)
    group_of = np.repeat(np.arange(len(group_rows)), group_rows)
    for lane in range(num_lanes):
        lo, end = order.lane_bounds(lane)
        offset = 0
        while offset < end - lo:
            block = order.epoch(1).block_at(lane, offset)
            assert block.lo == offset
            ids = order.epoch(1).ids(lane, block.lo, block.hi)
            assert set(group_of[ids].tolist()) == set(block.groups.tolist())
            assert len(ids) == block.hi - block.lo > 0
            offset = block.hi


class Inline:
    """Runs what it is given at once, and counts it."""

    def __init__(self) -> None:
        self.num_tasks = 0

    def submit(self, task: object, *arguments: object) -> object:
        from concurrent.futures import Future

        self.num_tasks += 1
        future: Future[object] = Future()
        assert callable(task)
        future.set_result(task(*arguments))
        return future


def test_what_is_read_ahead_is_bounded(tmp_path: Path) -> None:
    """Blocks are decoded up to a bound, in the order of need, released behind their last step, and never too late."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 400, num_files=2, group_rows=10)))
    order = Order(manifest.group_rows, num_lanes=2, seed=1, block_row_groups=2)
    schedule, pool = BlockSchedule(Reader(manifest, ["label"]), order, range(2), 5, range(40)), Inline()
    assert [len(blocks) for blocks in schedule.require(0, 1, pool)] == [1, 1]  # type: ignore[arg-type]
    assert pool.num_tasks == 4
    assert schedule.row_bytes == 4.2, "an int32, and the place where a missing one would be told"
    schedule.prefetch(0, 0, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == 4
    schedule.prefetch(0, 260, pool)  # type: ignore[arg-type]
    schedule.prefetch(0, 260, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == 4 + 6, "three blocks of two row groups, 20 rows of 4.2 bytes each"
    schedule.release(4)
    needed = schedule.require(4, 40, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == len(manifest.group_rows)
    assert [blocks[0].first for blocks in needed] == [4, 4]


def test_small_rows_are_not_read_ahead_without_end(tmp_path: Path) -> None:
    """Rows of a few bytes, and epochs without end, never fill the bytes that may be held: blocks are counted, too."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 40, num_files=1, group_rows=10)))
    order = Order(manifest.group_rows, num_lanes=2, seed=1, block_row_groups=1)
    schedule, pool = BlockSchedule(Reader(manifest, ["label"]), order, range(2), 5, range(100_000)), Inline()
    schedule.require(0, 1, pool)  # type: ignore[arg-type]
    for _ in range(2):
        schedule.prefetch(0, 1 << 27, pool)  # type: ignore[arg-type]
        assert pool.num_tasks == 2 + BLOCKS_AHEAD * 2


def test_damage_ends_the_loader_with_the_files_name(tmp_path: Path) -> None:
    """What fails in a thread is raised where steps are asked for, behind the steps that were whole."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 60)))
    (tmp_path / "rows" / "part-0.parquet").unlink()
    order = Order(manifest.group_rows, num_lanes=3, seed=1, block_row_groups=1, is_shuffled=False)
    for lane, is_damaged in ((0, True), (2, False)):
        loader = LaneLoader(
            Reader(manifest, ["label"]),
            order,
            lambda rows, ids: {},
            lanes=range(lane, lane + 1),
            micro_batch=4,
            cursor=Cursor(),
            num_steps=order.num_steps(4),
        )
        if is_damaged:
            with pytest.raises(DataError, match=r"part-0\.parquet: cannot be opened"):
                list(loader)
        else:
            assert sum(len(batch.ids) for step in loader for batch in step) == 20


def test_a_loader_that_is_given_up_leaves_no_work_behind(tmp_path: Path) -> None:
    """Behind a closed iterator nothing more is decoded: a world that ends does not read on for the one that it was."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 600, group_rows=3)))
    order = Order(manifest.group_rows, num_lanes=1, seed=1)
    reading = ahead.ReadAhead(Reader(manifest, ["label"]), order, lambda rows, ids: {}, lanes=range(1), micro_batch=2)
    steps = reading.steps(Cursor(), order.num_steps(2))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert list(steps) == []


def test_metadata_only_has_the_size_and_every_row(tmp_path: Path) -> None:
    """Row groups share bytes, yet rows, footers and manifest are those of the whole; 1.3 million rows take 2 MB."""
    manifest = synthesise(str(tmp_path / "a"), 1_310_000, rows_per_group=2000, metadata_only=True)
    whole = synthesise(str(tmp_path / "b"), 4500, rows_per_file=4500, rows_per_group=2000)
    short = synthesise(str(tmp_path / "c"), 4500, rows_per_file=4500, rows_per_group=2000, metadata_only=True)
    assert manifest.num_rows == int(manifest.group_rows.sum()) == 1_310_000
    assert sum(file.size for file in manifest.files) < 5_000_000
    assert short.group_rows.tolist() == whole.group_rows.tolist() == [2000, 2000, 500]
    rows, expected = (Reader(each, ["input_ids", "label"]).read(np.arange(4500))[0] for each in (short, whole))
    assert rows.slice(0, 2000).equals(expected.slice(0, 2000))
    assert rows.slice(2000, 2000).equals(rows.slice(0, 2000))
    assert rows.slice(4000).equals(expected.slice(4000))
    places = np.random.default_rng(0).integers(0, 1_310_000, 20)
    assert Reader(manifest, ["label"]).read(places)[1].tolist() == places.tolist()


def test_the_example_goes_on_at_another_world_size(tmp_path: Path) -> None:
    """The example's ranks of two worlds print every id of the epoch once."""
    run = [sys.executable, "examples/own_loop.py", str(tmp_path / "prices")]
    subprocess.run([sys.executable, "examples/own_task/make_data.py", str(tmp_path / "prices")], cwd=ROOT, check=True)
    seen: Counter[int] = Counter()
    for arguments in (["4", "50"], ["3", "1000"]):
        command = [*run, *arguments, str(tmp_path / "state.json")]
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        seen.update(map(int, printed.split()))
    assert seen == Counter(range(2000))


FIRST_BATCH = """
import sys
from elastic_train.data.loader import LaneLoader
from elastic_train.data.manifest import load_manifest
from elastic_train.data.padding import pad_lists
from elastic_train.data.reader import Reader
from elastic_train.order import Cursor, Order

manifest = load_manifest(sys.argv[1])
order = Order(manifest.group_rows, num_lanes=2, seed=1)
collate = lambda rows, ids: dict(zip("ab", pad_lists(rows.column("input_ids"), max_width=9)))
loader = LaneLoader(
    Reader(manifest, list(manifest.columns)), order, collate,
    lanes=range(2), micro_batch=4, cursor=Cursor(), num_steps=2,
)
assert len(list(loader)) == 2
sys.exit("pandas" in sys.modules)
"""


def test_a_first_batch_does_not_wait_for_pandas(tmp_path: Path) -> None:
    """pyarrow imports pandas for several of its conversions, which took longer than all else of a resume."""
    folder = write_rows(tmp_path / "rows", 60)
    assert subprocess.run([sys.executable, "-c", FIRST_BATCH, str(folder)], cwd=ROOT, check=False).returncode == 0
