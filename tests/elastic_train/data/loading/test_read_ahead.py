"""Reading ahead: the pure order at any shapes and worlds, what is held is bounded, and errors are raised."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, build_manifest, load_manifest
from elastic_train.data.loading import read_ahead
from elastic_train.data.loading.lane_batch import AS_THEY_ARE
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.loader_state import cursor_of
from elastic_train.data.loading.read_ahead import BLOCKS_AHEAD, BlockSchedule
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.worker_processes import LaneDataset, LaneSampler
from elastic_train.errors import DataError
from rendezvous.etcd.server import free_ports
from tests.conftest import PATIENCE_S, ROOT, run_ranks, run_source, write_rows

pytestmark = pytest.mark.slow

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
    st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 9), st.integers(0, 4)), max_size=4),
    st.sampled_from([0, 100, 1 << 20]),
)
def test_worlds_of_any_size_read_every_sample_once_in_the_same_order(
    group_rows: list[int],
    num_lanes: int,
    block: int,
    micro_batch: int,
    worlds: list[tuple[int, bool, int, int]],
    prefetch: int,
) -> None:
    """Worlds of any size, read by threads or as workers do, are killed after any steps, and go back some of them.

    Each resumes from a loader's saved state, read ahead of what was applied. Whatever they were: every step has
    the ids of the pure order, lane by lane; every epoch has every sample once; and the rows are those named.
    """
    manifest = dataset_of(group_rows)
    order = Order(manifest.group_rows, num_lanes=num_lanes, seed=1, block_row_groups=block)
    end, applied = 2 * order.num_steps(micro_batch), []  # type: tuple[int, list[list[list[int]]]]
    for wanted, is_by_workers, steps, lost in [*worlds, (1, False, end, 0)]:
        world_size, first = min(wanted, num_lanes), len(applied)
        num_steps = min(steps, end - first)
        by_rank = []
        for rank in range(world_size):
            lanes, cursor = owned_lanes(rank, world_size, num_lanes), order.cursor_at(first, micro_batch)
            if is_by_workers:
                by_rank.append(as_workers_read(manifest, order, lanes, micro_batch, cursor, num_steps))
                continue
            place = {"lanes": lanes, "micro_batch": micro_batch, "cursor": cursor, "num_steps": end - first}
            loader = LaneLoader(Reader(manifest, ["id"]), order, count_rows, prefetch_bytes=prefetch, **place)  # type: ignore[arg-type]
            steps_of = iter(loader)
            by_rank.append([[batch.ids.tolist() for batch in next(steps_of)] for _ in range(num_steps)])
            assert cursor_of(loader.state_dict()) == order.cursor_at(first + num_steps, micro_batch)
            steps_of.close()  # type: ignore[attr-defined]  # killed: what was read ahead is lost
        applied += [[ids for lanes_of in step for ids in lanes_of] for step in zip(*by_rank, strict=True)]
        del applied[max(0, len(applied) - lost) :]

    assert len(applied) == end
    for step, by_lane in enumerate(applied):
        at = order.cursor_at(step, micro_batch)
        whole = [order.epoch(at.epoch).ids(lane, at.offset, at.offset + micro_batch) for lane in range(num_lanes)]
        assert by_lane == [ids.tolist() for ids in whole]
    for epoch in (applied[: end // 2], applied[end // 2 :]):
        assert Counter(id_ for step in epoch for ids in step for id_ in ids) == Counter(range(manifest.num_rows))


def as_workers_read(
    manifest: Manifest, order: Order, lanes: range, micro_batch: int, cursor: Cursor, num_steps: int
) -> list[list[list[int]]]:
    """Read steps as worker processes do: each item by itself, from a dataset that has travelled."""
    sampler = LaneSampler(order, lanes, micro_batch, cursor, num_steps)
    dataset = pickle.loads(
        pickle.dumps(LaneDataset(Reader(manifest, ["id"]), order, count_rows, micro_batch, AS_THEY_ARE))
    )
    ids = [dataset[slice_].ids.tolist() for (slice_,) in sampler]
    return [ids[lo : lo + len(lanes)] for lo in range(0, len(ids), len(lanes))]


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=14), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_a_block_holds_the_samples_of_its_offsets(
    group_rows: list[int], num_lanes: int, block_row_groups: int, is_shuffled: bool
) -> None:
    """Blocks of a lane follow each other without a gap, and name exactly the row groups that hold their ids."""
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

    def shutdown(self, **_: bool) -> None:
        """Do nothing: no task is left."""


def test_what_is_read_ahead_is_bounded(tmp_path: Path) -> None:
    """Blocks are decoded up to a bound, in the order of need, released after their last step, and never late."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 400, num_files=2, group_rows=10)))
    order = Order(manifest.group_rows, num_lanes=2, seed=1, block_row_groups=2)
    schedule, pool = BlockSchedule(Reader(manifest, ["label"]), order, range(2), 5, range(40)), Inline()
    assert [len(blocks) for blocks in schedule.require(0, 1, pool)] == [1, 1]  # type: ignore[arg-type]
    assert pool.num_tasks == 4
    assert schedule.row_bytes == 4.2, "an int32, and the bitmap for missing values"
    schedule.prefetch(0, 0, 32, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == 4
    schedule.prefetch(0, 260, 32, pool)  # type: ignore[arg-type]
    schedule.prefetch(0, 260, 32, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == 4 + 6, "three blocks of two row groups, 20 rows of 4.2 bytes each"
    schedule.release(4)
    needed = schedule.require(4, 40, pool)  # type: ignore[arg-type]
    assert pool.num_tasks == len(manifest.group_rows)
    assert [blocks[0].first for blocks in needed] == [4, 4]


def test_read_ahead_of_small_rows_is_bounded(tmp_path: Path) -> None:
    """Rows of a few bytes, and epochs without end, never fill the bytes that may be held: blocks are counted, too."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 100, num_files=1, group_rows=10)))
    for num_lanes, groups_ahead in ((2, 32), (10, 10 * BLOCKS_AHEAD)):
        order = Order(manifest.group_rows, num_lanes=num_lanes, seed=1, block_row_groups=1)
        lanes, steps, pool = range(num_lanes), range(100_000), Inline()
        schedule = BlockSchedule(Reader(manifest, ["label"]), order, lanes, 5, steps)
        schedule.require(0, 1, pool)  # type: ignore[arg-type]
        for _ in range(2):
            schedule.prefetch(0, 1 << 27, 32, pool)  # type: ignore[arg-type]
            assert pool.num_tasks == num_lanes + groups_ahead


def test_damage_is_raised_with_the_files_name(tmp_path: Path) -> None:
    """An error in a thread is raised to the caller, after the complete steps."""
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


def test_little_is_made_ahead_of_a_worlds_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About as much as was taken: thousands of small steps at once would keep the processor from the first one."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 600, group_rows=60)))
    order, num_made = Order(manifest.group_rows, num_lanes=1, seed=1), [0]

    def collate(rows: pa.Table, ids: Ids) -> dict[str, Tensor]:
        num_made[0] += 1
        return {}

    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", lambda *_: Inline())
    steps = read_ahead.ReadAhead(Reader(manifest, ["label"]), order, collate, lanes=range(1), micro_batch=1).steps(
        Cursor(), 600
    )
    made = [next(steps) and num_made[0] for _ in range(40)]
    assert made[:4] == [1, 6, 7, 8], "five steps ahead"
    assert 70 < made[-1] < 90, "40 that were taken, and five chunks of a quarter of that"
    steps.close()


def test_a_slow_collate_holds_up_its_own_step_alone(tmp_path: Path) -> None:
    """Steps that were made before it are had: without, a rank whose rows come late waits seldom and long."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 600, group_rows=60)))
    order, is_let_go, num_made = Order(manifest.group_rows, num_lanes=1, seed=1), threading.Event(), [0]

    def collate(rows: pa.Table, ids: Ids) -> dict[str, Tensor]:
        num_made[0] += 1
        assert num_made[0] < 5 or is_let_go.wait(PATIENCE_S), "the steps before were not had"
        return {}

    reading = read_ahead.ReadAhead(Reader(manifest, ["label"]), order, collate, lanes=range(1), micro_batch=4)
    steps = reading.steps(Cursor(), 20)
    first = [next(steps) for _ in range(4)]
    is_let_go.set()
    assert len([*first, *steps]) == 20


def test_an_abandoned_loader_stops_decoding(tmp_path: Path) -> None:
    """After an iterator is closed nothing more is decoded: an ended world does not keep reading ahead."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 600, group_rows=3)))
    order = Order(manifest.group_rows, num_lanes=1, seed=1)
    reading = read_ahead.ReadAhead(
        Reader(manifest, ["label"]), order, lambda rows, ids: {}, lanes=range(1), micro_batch=2
    )
    steps = reading.steps(Cursor(), order.num_steps(2))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert list(steps) == []


def run_example(rank: int, size: int, folder: Path, port: int, *arguments: str) -> None:
    """Run the example as one of torchrun's ranks, which adds the ids that it prints to its file in `folder`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["examples/own_loop.py", str(folder / "prices"), *arguments, str(folder / "state.json")]
    with (folder / f"ids-{size}-{rank}").open("w") as ids, contextlib.redirect_stdout(ids):
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


def test_the_example_resumes_at_another_world_size(tmp_path: Path) -> None:
    """The example's ranks of two worlds print every id of the epoch once."""
    script = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    assert run_source(script, "examples/own_task/make_data.py", str(tmp_path / "prices")).returncode == 0
    for size, steps in ((4, "50"), (3, "1000")):
        run_ranks(run_example, size, tmp_path, *free_ports(1), steps)
    ids = [each.read_text().split() for each in tmp_path.glob("ids-*")]
    assert len(ids) == 7 and all(ids)
    assert Counter(int(each) for rank in ids for each in rank) == Counter(range(2000))


FIRST_BATCH = """
import sys
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.arrow.numbers import pad_lists
from elastic_train.data.loading.reader import Reader
from elastic_train.core.order import Cursor, Order

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


RICH = pa.table(
    {
        "blob": pa.array([b"\x00", None, b"abc"] * 20, pa.binary()),
        "when": pa.array([1, 2, None] * 20, pa.timestamp("us", tz="UTC")),
        "price": pa.array(["1.25", None, "3.50"] * 20).cast(pa.decimal128(9, 2)),
        "where": pa.array([{"x": 1.5, "tags": ["a", None]}, None, {"x": None, "tags": []}] * 20),
        "kind": pa.array(["a", "b", None] * 20).dictionary_encode(),
        "boxes": pa.array([[[1, 2], []], None, [[3]]] * 20, pa.list_(pa.large_list(pa.int16()))),
        "vector": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]] * 20, pa.list_(pa.float32(), 2)),
        "sizes": pa.array([[("a", 1)], [], None] * 20, pa.map_(pa.string(), pa.int32())),
        "flag": pa.array([True, None, False] * 20),
        "holey": pa.array([[1, None, 3], [], None] * 20, pa.list_(pa.int32())),
    }
)


def test_any_schema_with_a_custom_collate(tmp_path: Path) -> None:
    """Rows of nested, missing, decimal, dictionary and other columns come as pyarrow reads them, whatever the order."""
    (tmp_path / "rich").mkdir()
    pq.write_table(RICH, tmp_path / "rich" / "a.parquet", row_group_size=7)
    manifest = build_manifest(str(tmp_path / "rich"))
    expected = pq.read_table(tmp_path / "rich" / "a.parquet").to_pylist()
    order = Order(manifest.group_rows, num_lanes=3, seed=2, block_row_groups=3)
    seen: dict[int, dict[str, object]] = {}

    def collate(rows: pa.Table, ids: Ids) -> dict[str, Tensor]:
        seen.update(zip(ids.tolist(), rows.to_pylist(), strict=True))
        return {"mine": torch.from_numpy(ids)}

    place = {"lanes": range(3), "micro_batch": 4, "cursor": Cursor(), "num_steps": order.num_steps(4)}
    steps = list(LaneLoader(Reader(manifest, RICH.column_names), order, collate, **place))  # type: ignore[arg-type]
    assert [seen[id_] for id_ in range(60)] == expected
    assert all(
        batch.tensors["mine"].tolist() == batch.ids.tolist() for step in steps for batch in step if batch.tensors
    )
