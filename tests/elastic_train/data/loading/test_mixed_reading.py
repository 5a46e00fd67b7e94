"""Reading a mixture: the rows of its order in any world, from datasets whose files are laid out differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.mixture import Mixture
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.data.loading.lane_batch import AS_THEY_ARE, LaneBatch, SampleRules
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.loader_state import cursor_of
from elastic_train.data.loading.reader import MixedReader, Reader
from elastic_train.data.loading.worker_processes import LaneDataset, LaneSampler

Ids = npt.NDArray[np.int64]
NUM_LANES, MICRO_BATCH, COLUMNS = 3, 4, ["tokens", "id"]


def write(folder: Path, rows: int, first: int, names: Sequence[str]) -> Manifest:
    """Write a dataset whose columns are in this order; `id` counts from `first`, tokens follow from it."""
    ids = range(first, first + rows)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "tokens": pa.array([[id_] * (id_ % 5) for id_ in ids], pa.list_(pa.int32())),
        "other": pa.array(ids, pa.int8() if rows < 99 else pa.float32()),
    }
    folder.mkdir()
    pq.write_table(pa.table({name: columns[name] for name in names}), folder / "a.parquet", row_group_size=7)
    return build_manifest(str(folder))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Two datasets of 53 and 17 rows, whose ids follow one another as those of the mixture do."""
    folder = tmp_path_factory.mktemp("sources")
    return [write(folder / "big", 53, 0, ["id", "tokens", "other"]), write(folder / "small", 17, 53, ["tokens", "id"])]


@pytest.fixture(scope="module")
def order(sources: list[Manifest]) -> Mixture:
    orders = [Order(each.group_rows, num_lanes=NUM_LANES, seed=4, block_row_groups=2) for each in sources]
    return Mixture(orders, [2, 1])


def reader_of(sources: list[Manifest]) -> MixedReader:
    return MixedReader([Reader(manifest, COLUMNS) for manifest in sources])


def checked(rows: pa.Table, ids: Ids, draw: SampleRandom) -> dict[str, Tensor]:
    """Find in each row what its id says, in columns that are in one order; draw a number for it."""
    assert rows.column_names == COLUMNS
    assert rows.column("id").to_pylist() == ids.tolist()
    assert rows.column("tokens").to_pylist() == [[id_] * (id_ % 5) for id_ in ids.tolist()]
    return {"noise": torch.from_numpy(draw.uniform("noise"))}


def drawn(steps: Sequence[Sequence[LaneBatch]]) -> list[tuple[int, float]]:
    """Return ids and draws of steps, lane by lane."""
    return [
        (int(id_), float(noise))
        for step in steps
        for batch in step
        for id_, noise in zip(batch.ids, batch.tensors["noise"] if batch.tensors else (), strict=True)
    ]


def expected(order: Mixture, first: int, num_steps: int, lanes: range) -> list[tuple[int, float]]:
    """Return what the order says, with the draw of each sample in the epoch of its source."""
    found = []
    for step in range(first, first + num_steps):
        for lane in lanes:
            samples = order.samples(order.cursor_at(step, MICRO_BATCH), lane, MICRO_BATCH)
            assert not isinstance(samples.epochs, int)
            for id_, epoch in zip(samples.ids, samples.epochs.tolist(), strict=True):
                noise = SampleRandom(order.seed, epoch, np.array([id_])).uniform("noise")
                found.append((int(id_), float(noise[0])))
    return found


@pytest.mark.heavy
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, NUM_LANES), st.integers(0, 40), st.sampled_from([0, 100, 1 << 20]))
def test_any_world_reads_the_order_from_any_step(
    sources: list[Manifest], order: Mixture, world_size: int, first: int, prefetch: int
) -> None:
    """Every rank its lanes, many epochs of the small source among them, and the loader's state is the cursor."""
    for rank in range(world_size):
        lanes = owned_lanes(rank, world_size, NUM_LANES)
        place = {"lanes": lanes, "micro_batch": MICRO_BATCH, "cursor": Cursor(0, first * MICRO_BATCH), "num_steps": 25}
        loader = LaneLoader(reader_of(sources), order, checked, prefetch_bytes=prefetch, **place)  # type: ignore[arg-type]
        assert drawn(list(loader)) == expected(order, first, 25, lanes)
        assert cursor_of(loader.state_dict()) == Cursor(0, (first + 25) * MICRO_BATCH)


def test_workers_read_the_same(sources: list[Manifest], order: Mixture) -> None:
    """A slice is turned into rows, and into draws, as threads do it."""
    dataset = LaneDataset(reader_of(sources), order, checked, MICRO_BATCH, AS_THEY_ARE)
    sampler = LaneSampler(order, range(NUM_LANES), MICRO_BATCH, Cursor(0, 8), 9)
    steps = [dataset.__getitems__(slices) for slices in sampler]
    assert drawn(steps) == expected(order, 2, 9, range(NUM_LANES))


def test_samples_of_holes_are_left_out_with_their_draws(sources: list[Manifest], order: Mixture) -> None:
    """Of a row group of the second source, and a few samples of the first, from different steps on."""
    group = int(order.first_group[1])
    rules = SampleRules(holes=((group, 5),), left_out=((3, 9, 2),))
    place = {"lanes": range(NUM_LANES), "micro_batch": MICRO_BATCH, "cursor": Cursor(), "num_steps": 20}
    steps = list(LaneLoader(reader_of(sources), order, checked, rules=rules, **place))  # type: ignore[arg-type]
    whole = expected(order, 0, 20, range(NUM_LANES))
    per_step = NUM_LANES * MICRO_BATCH
    kept = [
        each
        for at, each in enumerate(whole)
        if not (53 <= each[0] < 60 and at >= 5 * per_step) and not (3 <= each[0] < 9 and at >= 2 * per_step)
    ]
    assert drawn(steps) == kept
    assert sum(batch.num_left_out for step in steps for batch in step) == len(whole) - len(kept) > 0


def test_blocks_of_a_rare_source_are_decoded_once_an_epoch(sources: list[Manifest], order: Mixture) -> None:
    """Each lane holds a block of each source for as long as its steps need it."""
    decoded: Counter[int] = Counter()

    class Counting(MixedReader):
        def decode(self, group: int):  # type: ignore[no-untyped-def]
            decoded[group] += 1
            return super().decode(group)

    reader = Counting([Reader(manifest, COLUMNS) for manifest in sources])
    num_steps = order.steps_for(1, MICRO_BATCH)
    place = {"lanes": range(NUM_LANES), "micro_batch": MICRO_BATCH, "cursor": Cursor(), "num_steps": num_steps}
    list(LaneLoader(reader, order, checked, **place))  # type: ignore[arg-type]
    blocks = [
        int(group)
        for lane in range(NUM_LANES)
        for block in order.blocks(lane, range(num_steps), MICRO_BATCH)
        for group in block.groups
    ]
    assert decoded == Counter(blocks)
