"""Samples that cannot be used as they are: quarantine changes only what it lists; long rows are refused, or cut."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.accounting import CoverageSums, Hole, expected_sums
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order, Samples
from elastic_train.data.arrow.columns import Rows
from elastic_train.data.dataset.manifest import FileEntry, Manifest, load_manifest
from elastic_train.data.loading.lane_batch import AS_THEY_ARE, BatchBuilder, LaneBatch, SampleRules
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.reader import MixedReader, Reader
from elastic_train.data.loading.worker_processes import LaneDataset, LaneSlice
from elastic_train.errors import DataError, RowError, UnreadableError
from elastic_train.tasks.rows.token_rows import TokenColumns
from elastic_train.tasks.task import Batch
from elastic_train.world.quarantine import make_hole
from tests.conftest import write_rows

pytestmark = pytest.mark.slow

NUM_EPOCHS = 3


class Storage:
    """Row groups in memory, of which some cannot be read from a step on; stands where a Reader does."""

    def __init__(self, order: Order, broken: dict[int, int]) -> None:
        self.first_id, self._rows, self.broken, self.step = order.group_first_id, order.group_rows, broken, 0

    def rows_of(self, group: int) -> Rows:
        if self.step >= self.broken.get(group, 1 << 30):
            raise UnreadableError(f"row group {group} is gone")
        first = int(self.first_id[group])
        return Rows(pa.table({"id": pa.array(range(first, first + int(self._rows[group])), pa.int64())}))

    def place_of(self, sample: int) -> str:
        return f"memory: sample {sample}"


def manifest_of(order: Order) -> Manifest:
    """Two files, so that row groups are named within theirs."""
    rows = tuple(order.group_rows.tolist())
    files = tuple(FileEntry(f"{n}.parquet", 1, "", "", part) for n, part in enumerate((rows[:1], rows[1:])) if part)
    return Manifest("memory://none", files, {"id": "int64"}, order.num_samples, CoverageSums())


def check_rows(rows: pa.Table, ids: np.ndarray) -> dict[str, object]:  # type: ignore[type-arg]
    assert rows.column("id").to_pylist() == ids.tolist()
    return {}


Steps = list[list[list[int]]]


def train(
    order: Order, micro_batch: int, worlds: list[tuple[int, int]], broken: dict[int, int], known: tuple[Hole, ...] = ()
) -> tuple[Steps, tuple[Hole, ...], list[CoverageSums], int]:
    """Do what the trainer does with data: worlds follow each other, and what any rank cannot read becomes a hole.

    Returns every step's ids by lane, the holes, the sums at the epochs' ends, and how many places were left out.
    """
    storage, manifest, holes = Storage(order, broken), manifest_of(order), known
    applied: Steps = []
    sums, at_ends, left_out, end = CoverageSums(), [], 0, NUM_EPOCHS * order.num_steps(micro_batch)
    turns = [min(size, order.num_lanes) for size, steps in worlds for _ in range(steps)]
    while (step := len(applied)) < end:
        size = turns[step] if step < len(turns) else 1
        storage.step, cursor = step, order.cursor_at(step, micro_batch)
        rules = SampleRules(tuple((hole.group, hole.since) for hole in holes), quarantines=True)
        batches: list[LaneBatch] = []
        for rank in range(size):
            dataset = LaneDataset(storage, order, check_rows, micro_batch, rules)  # type: ignore[arg-type]
            lanes = owned_lanes(rank, size, order.num_lanes)
            lo, hi = cursor.offset, cursor.offset + micro_batch
            batches += dataset.__getitems__([LaneSlice(cursor.epoch, lane, lo, hi) for lane in lanes])
        missing = {group: why for batch in batches for group, why in batch.unreadable.items()}
        if missing:
            assert all(batch.tensors is None for batch in batches if batch.unreadable)
            holes += tuple(make_hole(order, manifest, micro_batch, step, group, missing[group]) for group in missing)
            continue
        applied.append([batch.ids.tolist() for batch in batches])
        sums += CoverageSums.of_ids(np.concatenate([batch.ids for batch in batches]))
        left_out += sum(batch.num_left_out for batch in batches)
        for batch in batches:
            assert len(batch.ids) + batch.num_left_out == batch.hi - batch.lo
        if (step + 1) % order.num_steps(micro_batch) == 0:
            at_ends.append(sums)
    return applied, holes, at_ends, left_out


shapes = st.tuples(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 9)), max_size=4),
)


@settings(deadline=None, max_examples=40)
@given(shapes, st.data())
def test_quarantine_skips_only_the_listed_samples(
    shape: tuple[list[int], int, int, int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Whatever breaks, and when: every step applies its samples in their order, but for those that the holes list.

    In worlds of one rank the same holes come of it, and the sums are the closed form's less the listed samples.
    """
    group_rows, num_lanes, block, micro_batch, worlds = shape
    order = Order(group_rows, num_lanes=num_lanes, seed=3, block_row_groups=block)
    end = NUM_EPOCHS * order.num_steps(micro_batch)
    broken = data.draw(st.dictionaries(st.integers(0, len(group_rows) - 1), st.integers(0, end), max_size=4))
    applied, holes, at_ends, left_out = train(order, micro_batch, worlds, broken)
    assert (applied, holes) == train(order, micro_batch, [], broken)[:2]

    since = {hole.group: hole.since for hole in holes}
    assert all(since[group] >= broken[group] for group in since)
    group_of = np.repeat(np.arange(len(group_rows)), group_rows)
    for step, lanes in enumerate(applied):
        cursor = order.cursor_at(step, micro_batch)
        for lane, ids in enumerate(lanes):
            whole = order.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + micro_batch).tolist()
            assert ids == [id_ for id_ in whole if step < since.get(int(group_of[id_]), end)]
    for num_epochs, sums in enumerate(at_ends, 1):
        assert sums == expected_sums(CoverageSums.of_all(order.num_samples), holes, num_epochs)
    listed = sum(hi - lo for hole in holes for epoch in range(NUM_EPOCHS) for lo, hi in hole.left_out_of(epoch))
    assert left_out == listed


@settings(deadline=None, max_examples=15)
@given(shapes, st.data())
def test_a_hole_known_from_the_beginning_gives_the_same_steps(
    shape: tuple[list[int], int, int, int, list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Row groups that never could be read give the same steps whether they are found on the way or known before."""
    group_rows, num_lanes, block, micro_batch, worlds = shape
    order = Order(group_rows, num_lanes=num_lanes, seed=4, block_row_groups=block)
    broken = dict.fromkeys(data.draw(st.sets(st.integers(0, len(group_rows) - 1), max_size=3)), 0)
    manifest = manifest_of(order)
    known = tuple(make_hole(order, manifest, micro_batch, 0, group, "known") for group in broken)
    found, holes, _, _ = train(order, micro_batch, worlds, broken)
    assert found == train(order, micro_batch, [], {}, known)[0]
    assert sorted(hole.group for hole in holes) == sorted(broken)
    assert all(hole.applied_before == () for hole in holes)


def test_a_hole_names_its_file_and_what_its_epoch_had_applied() -> None:
    """The row group is numbered within its file; a group that breaks when half of it is applied keeps that half."""
    order = Order([4, 8, 4], num_lanes=1, seed=1, block_row_groups=1)
    whole = order.epoch(0).ids(0, 0, 16).tolist()
    step = next(place for place, id_ in enumerate(whole) if 4 <= id_ < 12) // 4 + 1
    hole = make_hole(order, manifest_of(order), 4, step, 1, "gone")
    assert (hole.file, hole.row_group, hole.lo, hole.hi, hole.epoch) == ("1.parquet", 0, 4, 12, 0)
    kept = [id_ for lo, hi in hole.applied_before for id_ in range(lo, hi)]
    assert kept == sorted(id_ for id_ in whole[: step * 4] if 4 <= id_ < 12) and kept
    left_out = [id_ for lo, hi in hole.left_out_of(0) for id_ in range(lo, hi)]
    assert sorted(kept + left_out) == list(range(4, 12))
    assert (hole.left_out_of(1), str(hole)) == (
        ((4, 12),),
        f"row group 0 of 1.parquet, samples [4, 12), from step {step} on",
    )


def damage(folder: Path, file: str, row_group: int) -> None:
    """Overwrite the pages of one row group; the footer stays."""
    path = folder / file
    group = pq.read_metadata(path).row_group(row_group)
    content = bytearray(path.read_bytes())
    for place in range(group.num_columns):
        chunk = group.column(place)
        lo = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
        content[lo : lo + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(bytes(content))


def test_unreadable_row_groups_are_reported(tmp_path: Path) -> None:
    """A damaged row group leaves its micro-batches without tensors; as a hole it leaves the others as they were."""
    folder = write_rows(tmp_path / "rows", 101, group_rows=7)
    manifest = load_manifest(str(folder))
    order = Order(manifest.group_rows, num_lanes=4, seed=3, block_row_groups=2)
    bad = len(manifest.files[0].row_groups) + 1
    lo, hi = int(order.group_first_id[bad]), int(order.group_first_id[bad] + order.group_rows[bad])

    def steps(rules: SampleRules) -> list[list[LaneBatch]]:
        reader = Reader(manifest, ["label"])
        place = {"lanes": range(4), "micro_batch": 3, "cursor": order.cursor_at(0, 3), "num_steps": order.num_steps(3)}
        return list(LaneLoader(reader, order, no_tensors, rules=rules, **place))  # type: ignore[arg-type]

    whole = steps(SampleRules())
    damage(folder, "part-1.parquet", 1)
    with pytest.raises(DataError, match=r"part-1\.parquet: row group 1 is damaged"):
        steps(SampleRules())
    found, known = steps(SampleRules(quarantines=True)), steps(SampleRules(holes=((bad, 0),)))
    for was, now, without in zip(*([b for s in run for b in s] for run in (whole, found, known)), strict=True):
        missing = [id_ for id_ in was.ids.tolist() if lo <= id_ < hi]
        kept = [id_ for id_ in was.ids.tolist() if not lo <= id_ < hi]
        assert (list(now.unreadable), now.tensors is None) == ([bad] if missing else [], bool(missing) or not kept)
        assert (without.ids.tolist(), without.num_left_out) == (kept, len(missing))
        assert (without.lo, without.hi, without.tensors is None) == (was.lo, was.hi, not kept)


def no_tensors(rows: pa.Table, ids: np.ndarray) -> dict[str, object]:  # type: ignore[type-arg]
    assert len(rows) == len(ids)
    return {}


def test_a_changed_file_is_refused_even_under_quarantine(tmp_path: Path) -> None:
    """A file other than the manifest's is not damage that a hole could skip: nobody knows what is in it."""
    folder = write_rows(tmp_path / "rows", 60)
    manifest = load_manifest(str(folder))
    content = bytearray((folder / "part-0.parquet").read_bytes())
    content[-60] ^= 1
    (folder / "part-0.parquet").write_bytes(bytes(content))
    order = Order(manifest.group_rows, num_lanes=1, seed=1, is_shuffled=False)
    place = {"lanes": range(1), "micro_batch": 4, "cursor": order.cursor_at(0, 4), "num_steps": 1}
    loader = LaneLoader(Reader(manifest, ["label"]), order, no_tensors, rules=SampleRules(quarantines=True), **place)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"part-0\.parquet: the file changed") as refused:
        list(loader)
    assert not isinstance(refused.value, UnreadableError)


def test_a_failed_read_of_a_row_group_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three failed reads of a row group are retried, a fourth is raised; a changed file is not retried."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 60)))
    reader, calls = Reader(manifest, ["label"]), Counter[int]()
    decode = reader.groups.decode
    failures = {0: 3, 1: 4}

    def flaky(group: int) -> pa.Table:
        calls[group] += 1
        if calls[group] <= failures.get(group, 0):
            raise UnreadableError("try again") if group < 2 else DataError("changed")
        return decode(group)

    monkeypatch.setattr(reader.groups, "decode", flaky)
    assert reader.decode(0).num_rows == 17
    with pytest.raises(UnreadableError, match="try again"):
        reader.decode(1)
    failures[2] = 9
    with pytest.raises(DataError, match="changed"):
        reader.decode(2)
    assert calls == {0: 4, 1: 4, 2: 1}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=20), st.integers(1, 9))
def test_long_rows_are_cut_and_counted(lists: list[list[int]], longest: int) -> None:
    """Rows are cut at what the task takes, others stay, and the micro-batches count those that were cut."""
    order = Order([len(lists)], num_lanes=2, seed=1)
    rows = Rows(pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))}))
    storage = Storage(order, {})
    storage.rows_of = lambda group: rows  # type: ignore[method-assign]
    seen: dict[int, list[int]] = {}

    def keep(rows: pa.Table, ids: np.ndarray) -> dict[str, object]:  # type: ignore[type-arg]
        seen.update(zip(ids.tolist(), rows.column("input_ids").to_pylist(), strict=True))
        return {}

    rules = SampleRules(longest={"input_ids": longest}, truncates=True)
    dataset = LaneDataset(storage, order, keep, 3, rules)  # type: ignore[arg-type]
    slices = [LaneSlice(0, lane, lo, lo + 3) for lane in range(2) for lo in range(0, len(lists), 3)]
    num_truncated = sum(dataset[slice_].num_truncated for slice_ in slices)
    assert seen == {id_: row[:longest] for id_, row in enumerate(lists)}
    assert num_truncated == sum(len(row) > longest for row in lists)

    if num_truncated:
        refusing = LaneDataset(storage, order, keep, 3, SampleRules(longest={"input_ids": longest}))  # type: ignore[arg-type]
        returned = [one for slice_ in slices for one in refusing.__getitems__([slice_])]
        assert any(isinstance(one, RowError) for one in returned), "torch would add a traceback to what is raised"
        with pytest.raises(
            RowError, match=rf"memory: sample \d+: it has \d+ values in column 'input_ids', the task takes {longest}: "
        ):
            [refusing[slice_] for slice_ in slices]


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_row_that_cannot_be_collated_is_named(tmp_path: Path, is_alone: bool) -> None:
    """By dataset, file, row group and row, also of the second of two datasets; a task knows ids alone."""
    readers = [Reader(load_manifest(str(write_rows(tmp_path / name, 90))), ["label"]) for name in ("one", "two")]
    mixed = MixedReader(readers)

    def refuse(rows: pa.Table, ids: np.ndarray) -> dict[str, object]:  # type: ignore[type-arg]
        if 130 in ids and (is_alone or len(ids) > 1):
            raise DataError("sample 130: its label is a comet")
        return {}

    builder = BatchBuilder(mixed.first_id, 180, refuse, AS_THEY_ARE, seed=0, place_of=mixed.place_of)  # type: ignore[arg-type]
    taken = builder.take(0, Cursor(), 0, Samples(np.arange(90, 180), 0), mixed.rows_of)
    if is_alone:
        expected = rf"{tmp_path}/two: sample 40 \(part-1.parquet, row group 0, row 10\): its label is a comet$"
    else:
        expected = rf"{tmp_path}/two: sample 0 \(.*\), or one of the next 89 of its lane: sample 130: its label"
    with pytest.raises(RowError, match=expected):
        builder.batch(taken, 0)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_missing_token_is_named_wherever_it_is(micro_batch: int) -> None:
    """The rows around it, slices of the same memory, are collated."""
    rows, columns = Rows(pa.table({"ids": pa.array([[1], [2, None], [3]], pa.list_(pa.int32()))})), TokenColumns("ids")

    def collate(rows: pa.Table, ids: np.ndarray) -> Batch:  # type: ignore[type-arg]
        return columns.collate(rows, ids, 8, 10)

    place_of = "memory: sample {}".format
    builder = BatchBuilder(np.array([0]), micro_batch, collate, AS_THEY_ARE, seed=0, place_of=place_of)
    taken = builder.take(0, Cursor(), 0, Samples(np.arange(3), 0), lambda group: rows)
    for number in (0, 2) if micro_batch == 1 else ():
        made = builder.batch(taken, number).tensors
        assert made is not None and made["tokens"][0, 0] == 1 + number
    with pytest.raises(RowError, match=r"memory: sample 1: column 'ids': a value is missing \(null\) in sample 1"):
        builder.batch(taken, 1 if micro_batch == 1 else 0)
