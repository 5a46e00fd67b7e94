"""Lengths beside the manifest, and orders that follow them: every sample once, alike in all lanes, less padding."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.cli.datasets import verify_
from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import mix64_array
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import LengthBuckets, Order
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.data.dataset.row_lengths import NAME, load_lengths, make_lengths, write_lengths
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import Reader
from elastic_train.errors import ConfigError, DataError
from tests.conftest import write_rows

pytestmark = pytest.mark.slow


def length_of(ids: Int64s) -> Int64s:
    """A length with a long tail that follows from the id alone."""
    return (mix64_array(ids.astype(np.uint64)) % np.uint64(97)).astype(np.int64) ** 2 // 97


def bucketed(rows: list[int], num_lanes: int, block: int, micro_batch: int, window_steps: int, seed: int = 3) -> Order:
    buckets = LengthBuckets(length_of, micro_batch, window_steps=window_steps)
    return Order(rows, num_lanes=num_lanes, seed=seed, block_row_groups=block, arrangement=buckets)


shapes = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=15),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 5),
)


@settings(deadline=None)
@given(shapes, st.integers(0, 2))
def test_every_sample_stays_in_its_window(shape: tuple[list[int], int, int, int, int], epoch: int) -> None:
    """An arranged lane has the samples of the shuffled one, window by window: so every sample once an epoch."""
    order, plain = bucketed(*shape), Order(shape[0], num_lanes=shape[1], seed=3, block_row_groups=shape[2])
    size = shape[3] * shape[4]
    seen: Counter[int] = Counter()
    for lane in range(order.num_lanes):
        for lo in range(0, order.num_samples, size):
            ids = order.epoch(epoch).ids(lane, lo, lo + size).tolist()
            assert Counter(ids) == Counter(plain.epoch(epoch).ids(lane, lo, lo + size).tolist())
            seen.update(ids)
    assert seen == Counter(range(order.num_samples))


@settings(deadline=None)
@given(shapes, st.data())
def test_arranged_ids_do_not_depend_on_the_request_bounds(
    shape: tuple[list[int], int, int, int, int], data: st.DataObject
) -> None:
    """Any places of a lane give that slice of it: the order is a pure function of the cursor."""
    order = bucketed(*shape)
    lane = data.draw(st.integers(0, order.num_lanes - 1))
    whole = order.epoch(1).ids(lane, 0, order.num_samples + 9)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.size + 9), max_size=6)))
    pieces = [order.epoch(1).ids(lane, lo, hi) for lo, hi in itertools.pairwise([0, *cuts, whole.size + 9])]
    assert np.concatenate(pieces).tolist() == whole.tolist()


@settings(deadline=None)
@given(shapes)
def test_a_step_takes_the_same_rank_by_length_from_every_lane(shape: tuple[list[int], int, int, int, int]) -> None:
    """Within a window no two micro-batches of a lane overlap in length, and all lanes have them in the same turn."""
    order, micro_batch, window_steps = bucketed(*shape), shape[3], shape[4]
    shared = order.num_samples // order.num_lanes // micro_batch
    for first in range(0, shared, window_steps):
        turns = []
        for lane in range(order.num_lanes):
            ids = order.epoch(0).ids(lane, first * micro_batch, min(shared, first + window_steps) * micro_batch)
            batches = length_of(ids).reshape(-1, micro_batch)
            turn = np.lexsort((batches.max(axis=1), batches.min(axis=1)))
            in_turn = batches[turn]
            assert (in_turn[:-1].max(axis=1) <= in_turn[1:].min(axis=1)).all()
            turns.append(batches)
        for one, other in itertools.pairwise(turns):
            ranks = [
                np.argsort(np.argsort(batches.sum(axis=1), kind="stable"), kind="stable") for batches in (one, other)
            ]
            if len(set(one.sum(axis=1))) == len(one) and len(set(other.sum(axis=1))) == len(other):
                assert ranks[0].tolist() == ranks[1].tolist()


@settings(deadline=None, max_examples=12)
@given(shapes, st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), max_size=4), st.sampled_from([0, 1 << 20]))
def test_worlds_of_any_size_read_the_arranged_order(
    shape: tuple[list[int], int, int, int, int], worlds: list[tuple[int, int]], prefetch: int
) -> None:
    """The loader gives worlds of any size, that follow each other at any step, the rows of just this order."""
    rows, micro_batch = shape[0], shape[3]
    first = 0
    with fsspec.open("memory://bucketed/a.parquet", "wb") as file, pq.ParquetWriter(file, SCHEMA) as writer:
        for size in rows:
            writer.write_table(pa.table({"id": pa.array(range(first, first + size), pa.int64())}), row_group_size=size)
            first += size
    manifest, order = build_manifest("memory://bucketed"), bucketed(*shape)
    step, end = 0, 2 * order.num_steps(micro_batch)
    for world_size, steps in [*worlds, (1, end)]:
        num_steps, size = min(steps, end - step), min(world_size, order.num_lanes)
        for rank in range(size):
            lanes, cursor = owned_lanes(rank, size, order.num_lanes), order.cursor_at(step, micro_batch)
            place = {"lanes": lanes, "micro_batch": micro_batch, "cursor": cursor, "num_steps": num_steps}
            loader = LaneLoader(Reader(manifest, ["id"]), order, check_rows, prefetch_bytes=prefetch, **place)  # type: ignore[arg-type]
            for number, batches in enumerate(loader):
                at = order.cursor_at(step + number, micro_batch)
                expected = [order.epoch(at.epoch).ids(lane, at.offset, at.offset + micro_batch) for lane in lanes]
                assert [batch.ids.tolist() for batch in batches] == [ids.tolist() for ids in expected]
        step += num_steps


SCHEMA = pa.schema([("id", pa.int64())])


def check_rows(rows: pa.Table, ids: Int64s) -> dict[str, object]:
    assert rows.column("id").to_pylist() == ids.tolist()
    return {}


def padded_share(order: Order, micro_batch: int) -> float:
    """Return the share of padding in an epoch of micro-batches that are as wide as their longest sample."""
    places = values = 0
    for lane in range(order.num_lanes):
        lengths = length_of(order.epoch(0).ids(lane, 0, order.num_samples))
        for lo in range(0, len(lengths), micro_batch):
            part = lengths[lo : lo + micro_batch]
            places, values = places + int(part.max()) * len(part), values + int(part.sum())
    return 1 - values / places


def test_padding_falls_and_steps_stay_mixed() -> None:
    """A long tail padded to the longest wastes half; buckets waste a tenth, and long steps come in no order."""
    rows = [50] * 80
    plain, arranged = Order(rows, num_lanes=4, seed=1), bucketed(rows, 4, 8, 8, 32, seed=1)
    assert padded_share(plain, 8) > 0.5
    assert padded_share(arranged, 8) < 0.12
    lengths = length_of(arranged.epoch(0).ids(0, 0, 1000)).reshape(-1, 8).mean(axis=1)
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.3


def test_golden_arranged_order() -> None:
    """An arranged order is as it was frozen: stored runs depend on it."""
    order = bucketed([3, 1, 5, 2, 4, 7, 1], 3, 2, 2, 2, seed=5)
    assert [order.epoch(0).ids(lane, 0, 99).tolist() for lane in range(3)] == GOLDEN


GOLDEN = [[5, 7, 4, 6, 22, 8, 9], [0, 16, 3, 10, 2, 1, 17, 15], [14, 12, 21, 18, 19, 13, 20, 11]]


@pytest.mark.parametrize("url", ["folder", "memory://lengths"])
def test_lengths_are_those_of_the_rows(tmp_path: Path, url: str) -> None:
    """Of any ids, in any order, from a folder or a URL, and after a journey to another process."""
    folder = write_rows(tmp_path / "rows", 101, group_rows=7)
    manifest = load_manifest(str(folder))
    expected = np.concatenate(
        [
            [len(row) for row in pq.read_table(folder / file.path).column("input_ids").to_pylist()]
            for file in manifest.files
        ]
    )
    if url != "folder":
        files = fsspec.filesystem("memory")
        files.put(str(folder), "/lengths", recursive=True)
        manifest = load_manifest(url)
    assert make_lengths(manifest, "input_ids").column == "input_ids"
    lengths = load_lengths(manifest)
    ids = np.random.default_rng(0).permutation(101)
    for opened in (lengths, pickle.loads(pickle.dumps(lengths))):
        assert opened(ids).tolist() == expected[ids].tolist()
    assert lengths.fingerprint == load_lengths(manifest).fingerprint != make_lengths(manifest, "label").fingerprint


def test_long_lengths_take_four_bytes(tmp_path: Path) -> None:
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 20, num_files=1, group_rows=10)))
    lengths = write_lengths(manifest, "input_ids", [np.arange(10), np.arange(10) + (1 << 20)])
    assert lengths(np.array([19, 0])).tolist() == [(1 << 20) + 9, 0]


def test_lengths_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, of another dataset, damaged, or of a column without lengths: the error says what to do."""
    folder = write_rows(tmp_path / "rows", 60)
    manifest = load_manifest(str(folder))
    with pytest.raises(DataError, match=r"no manifest\.lengths there.*elastic-train data verify"):
        load_lengths(manifest)
    for column in ("kind", "size"):
        with pytest.raises(ConfigError, match=f"column '{column}' is"):
            make_lengths(manifest, column)
    assert verify_(str(folder), add_lengths="input_ids") == 0
    assert "lengths of 60 rows, from 'input_ids'" in capsys.readouterr().out
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="is damaged; make it again"):
        load_lengths(manifest)(np.arange(60))
    other = load_manifest(str(write_rows(tmp_path / "other", 60, seed=9)))
    (tmp_path / "other" / NAME).write_bytes(content)
    with pytest.raises(DataError, match="is not of this manifest"):
        load_lengths(other)
    (folder / NAME).write_bytes(b"{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_lengths(manifest)
