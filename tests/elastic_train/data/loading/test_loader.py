"""The loader: the pure order carried by a StatefulDataLoader, resumed anywhere, with any number of workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader, stateful_dataloader

from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading import loader
from elastic_train.data.loading.lane_batch import AS_THEY_ARE, Collate
from elastic_train.data.loading.loader import LaneBatch, LaneLoader
from elastic_train.data.loading.loader_state import LoaderStates, cursor_of
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.worker_processes import (
    LaneDataLoader,
    LaneDataset,
    LaneSampler,
    LaneSlice,
    WorkerProcess,
    read_in_workers,
)
from elastic_train.data.worker_failures import UNGUARDED_CODE, needed, refuse_unguarded
from elastic_train.errors import AwayError, ConfigError, ElasticTrainError, UnfinishedError
from tests.conftest import PATIENCE_S, ROOT, write_rows
from tests.elastic_train.data.loading.worker_collate import AbortingAtExit, Ending, collate

pytestmark = pytest.mark.slow

MICRO_BATCH = 3
NUM_LANES = 5
Micro = tuple[int, int, int, int, list[int]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A prime number of rows, in row groups of 7 and shorter."""
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("loader") / "rows", 101, group_rows=7)))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from a process that has imported what they need: starting them anew is tested by other tests."""
    multiprocessing.set_forkserver_preload([collate.__module__, WorkerProcess.__module__])
    monkeypatch.setattr(WorkerProcess, "_Popen", staticmethod(ForkServerProcess._Popen))


def order_of(manifest: Manifest, *, num_lanes: int = NUM_LANES) -> Order:
    return Order(manifest.group_rows, num_lanes=num_lanes, seed=3, block_row_groups=2)


def loader_of(
    manifest: Manifest,
    order: Order,
    lanes: range,
    *,
    cursor: Cursor = Cursor(),  # noqa: B008 - frozen
    num_steps: int | None = None,
    num_workers: int = 0,
    micro_batch: int = MICRO_BATCH,
    collate: Collate = collate,
) -> LaneLoader:
    return LaneLoader(
        Reader(manifest, ["label"]),
        order,
        collate,
        lanes=lanes,
        micro_batch=micro_batch,
        cursor=cursor,
        num_steps=order.num_steps(micro_batch) if num_steps is None else num_steps,
        num_workers=num_workers,
    )


def micro_batches(step: list[LaneBatch]) -> list[Micro]:
    """Return what identifies a step's micro-batches."""
    return [(batch.lane, batch.epoch, batch.lo, batch.hi, batch.ids.tolist()) for batch in step]


def expected_step(order: Order, lanes: range, cursor: Cursor, micro_batch: int = MICRO_BATCH) -> list[Micro]:
    """Return a step straight from the order."""
    step = []
    for lane in lanes:
        ids = order.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + micro_batch).tolist()
        step.append((lane, cursor.epoch, cursor.offset, cursor.offset + len(ids), ids))
    return step


def expected_steps(order: Order, lanes: range, first: int, num_steps: int) -> list[list[Micro]]:
    steps = range(first, first + num_steps)
    return [expected_step(order, lanes, order.cursor_at(step, MICRO_BATCH)) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 63])
def test_every_world_reads_the_order_once(tmp_path: Path, num_rows: int, world_size: int) -> None:
    """Over all ranks of a world, an epoch is the pure order step by step, and every sample exactly once."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", num_rows, num_files=1, group_rows=4)))
    order = order_of(manifest)
    seen: Counter[int] = Counter()
    for rank in range(world_size):
        lanes = owned_lanes(rank, world_size, NUM_LANES)
        steps = [micro_batches(step) for step in loader_of(manifest, order, lanes)]
        assert steps == expected_steps(order, lanes, 0, order.num_steps(MICRO_BATCH))
        seen.update(id_ for step in steps for *_, ids in step for id_ in ids)
    assert seen == Counter(range(num_rows))


def test_a_micro_batch_has_a_sample(dataset: Manifest) -> None:
    with pytest.raises(ConfigError, match="micro_batch must be at least 1, not 0"):
        loader_of(dataset, order_of(dataset), range(NUM_LANES), micro_batch=0, num_steps=1)


@pytest.mark.parametrize("micro_batch", [1, 4, 200])
def test_any_micro_batch_reads_the_order_once(dataset: Manifest, micro_batch: int) -> None:
    """One sample at a time, or all of a lane at once: every sample once."""
    order = order_of(dataset)
    steps = loader_of(dataset, order, range(NUM_LANES), micro_batch=micro_batch)
    assert Counter(id_ for step in steps for batch in step for id_ in batch.ids.tolist()) == Counter(range(101))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_without_lanes_takes_the_same_steps(dataset: Manifest, num_workers: int) -> None:
    """A loop of one's own may have more ranks than lanes: the last ones have nothing to read, and the same state."""
    order = order_of(dataset)
    lanes = owned_lanes(0, NUM_LANES + 1, NUM_LANES)
    loader = loader_of(dataset, order, lanes, num_workers=num_workers, num_steps=3)
    assert (len(lanes), list(loader)) == (0, [[], [], []])
    assert loader.state_dict() == LoaderStates(order, dataset.digest, MICRO_BATCH).write(Cursor(0, 3 * MICRO_BATCH))


def test_tensors_are_those_of_the_ids(dataset: Manifest) -> None:
    """A micro-batch's tensors hold the rows that its ids name."""
    labels = Reader(dataset, ["label"]).read(np.arange(101))[0].column("label").to_pylist()
    for step in loader_of(dataset, order_of(dataset), range(NUM_LANES)):
        for batch in step:
            assert batch.tensors is not None
            assert batch.tensors["label"].tolist() == [labels[id_] for id_ in batch.ids]
            assert batch.tensors["id"].tolist() == batch.ids.tolist()


def test_a_lane_without_samples_has_no_tensors(tmp_path: Path) -> None:
    """With fewer samples than lanes the empty lanes still give a micro-batch each, of no ids."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 2, num_files=1)))
    (step,) = loader_of(manifest, order_of(manifest), range(NUM_LANES))
    found = [(batch.lane, len(batch.ids), batch.tensors is None) for batch in step]
    assert found == [(0, 0, True), (1, 0, True), (2, 1, False), (3, 0, True), (4, 1, False)]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_is_away_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """As a folder that is mounted again, or a store whose network returns: the steps go on where they were."""
    folder, away = write_rows(tmp_path / "rows", 101, group_rows=7), tmp_path / "away"
    manifest, rests = load_manifest(str(folder)), list[int]()
    order = order_of(manifest)

    def resting() -> contextlib.AbstractContextManager[None]:
        rests.append(len(rests))
        if len(rests) == 2:
            away.rename(folder)
        return contextlib.nullcontext()

    def steps(limit_s: float = 300.0) -> Iterator[list[LaneBatch]]:
        return loader.patiently(loader_of(manifest, order, range(NUM_LANES), num_workers=num_workers), limit_s, resting)

    monkeypatch.setattr(loader, "LOOK_AGAIN_S", 0.0)
    got = steps()
    first = next(got)
    folder.rename(away)
    found = [micro_batches(step) for step in (first, *got)]
    assert found == expected_steps(order, range(NUM_LANES), 0, len(found)) and rests == [0, 1]
    folder.rename(away)
    with pytest.raises(AwayError, match=r"no manifest.*Mount it, or make it answer again"):
        next(steps(limit_s=0.0))


@pytest.mark.parametrize("taken", [0, 1, 4, 6, 7, 9])
def test_a_loaded_state_yields_exactly_the_remaining_steps(dataset: Manifest, taken: int) -> None:
    """The state after any step of two epochs, loaded into a new loader twice, yields the remaining steps alone."""
    order, lanes = order_of(dataset), range(1, 4)
    num_steps, done, state = 2 * order.num_steps(MICRO_BATCH), [], None
    for number in (taken, 1, num_steps - taken - 1):
        loader = loader_of(dataset, order, lanes, num_steps=num_steps)
        if state is not None:
            loader.load_state_dict(state)
        steps = iter(loader)
        done += [micro_batches(next(steps)) for _ in range(number)]
        state = loader.state_dict()
        assert cursor_of(state) == order.cursor_at(len(done), MICRO_BATCH)
    assert list(steps) == [] and done == expected_steps(order, lanes, 0, num_steps)


@pytest.mark.usefixtures("forked")
def test_state_is_of_steps_yielded_not_of_those_prefetched(dataset: Manifest) -> None:
    """Two workers prefetch; the loader's state does not, and resumes without workers in another world."""
    order = order_of(dataset)
    first = loader_of(dataset, order, range(NUM_LANES), num_steps=6, num_workers=2)
    steps = iter(first)
    done = [micro_batches(next(steps)) for _ in range(2)]
    state = first.state_dict()
    rest = [micro_batches(step) for step in steps]
    assert cursor_of(state) == Cursor(0, 2 * MICRO_BATCH)
    assert done + rest == expected_steps(order, range(NUM_LANES), 0, 6)
    for world_size in (1, 2):
        lanes = owned_lanes(0, world_size, NUM_LANES)
        resumed = loader_of(dataset, order, lanes, num_steps=6)
        resumed.load_state_dict(state)
        assert [micro_batches(step) for step in resumed] == expected_steps(order, lanes, 2, 4)


def test_one_worker_resumes_from_a_cursor(dataset: Manifest) -> None:
    """A loader with one worker crosses from one epoch into the next; its worker ends when it is given up.

    A library that would abort the worker at its exit changes nothing.
    """
    order = order_of(dataset)
    last = order.num_steps(MICRO_BATCH) - 1
    begin, aborts = order.cursor_at(last, MICRO_BATCH), AbortingAtExit().collate
    loader = loader_of(dataset, order, range(2), cursor=begin, num_steps=9, num_workers=1, collate=aborts)
    steps = iter(loader)
    assert [micro_batches(next(steps)) for _ in range(3)] == expected_steps(order, range(2), last, 3)
    (worker,) = multiprocessing.active_children()
    steps.close()  # type: ignore[attr-defined]
    assert worker.exitcode == 0 and not multiprocessing.active_children()
    assert cursor_of(loader.state_dict()) == Cursor(1, 2 * MICRO_BATCH)


def inner_loader(
    manifest: Manifest,
    order: Order,
    lanes: range,
    *,
    num_steps: int,
    num_workers: int,
    cursor: Cursor = Cursor(),  # noqa: B008 - frozen
) -> LaneDataLoader:
    """Return what carries the lanes of a loader with worker processes."""
    dataset = LaneDataset(Reader(manifest, ["label"]), order, collate, MICRO_BATCH, AS_THEY_ARE)
    sampler = LaneSampler(order, lanes, MICRO_BATCH, cursor, num_steps)
    return LaneDataLoader(dataset, sampler, num_workers=num_workers)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_of_the_stateful_data_loader_is_the_cursor(dataset: Manifest, num_workers: int) -> None:
    """After any step, also across an epoch's end, and after any lane of one: the cursor after the last whole step."""
    order, lanes = order_of(dataset), range(1, 4)
    first = order.num_steps(MICRO_BATCH) - 2
    start = order.cursor_at(first, MICRO_BATCH)
    loader = inner_loader(dataset, order, lanes, num_steps=4, num_workers=num_workers, cursor=start)
    assert isinstance(loader, StatefulDataLoader)
    states = LoaderStates(order, dataset.digest, MICRO_BATCH)
    assert loader.state_dict() == states.write(start), "asked before it is used, it starts no worker"
    assert not multiprocessing.active_children()
    for num_yielded, batch in enumerate(loader, 1):
        steps_done, lanes_of_next = divmod(num_yielded, len(lanes))
        assert batch.lane == lanes[lanes_of_next - 1]
        assert loader.state_dict() == states.write(order.cursor_at(first + steps_done, MICRO_BATCH))
    assert num_yielded == 4 * len(lanes)


@pytest.mark.usefixtures("forked")
def test_a_state_is_loaded_with_other_workers_in_another_world(dataset: Manifest) -> None:
    """Two workers alone, then none in a world of 2, then one in a world of 3: each continues where the last one was."""
    order = order_of(dataset)
    states = LoaderStates(order, dataset.digest, MICRO_BATCH)
    state = states.write(Cursor())
    for turn, (num_workers, world_size) in enumerate(((2, 1), (0, 2), (1, 3))):
        lanes = owned_lanes(world_size - 1, world_size, NUM_LANES)
        loader = inner_loader(dataset, order, lanes, num_steps=6, num_workers=num_workers)
        loader.load_state_dict(state)
        steps = read_in_workers(loader, len(lanes))
        assert [micro_batches(next(steps)) for _ in range(2)] == expected_steps(order, lanes, 2 * turn, 2)
        steps.close()  # type: ignore[attr-defined]
        assert not multiprocessing.active_children()
        state = loader.state_dict()
        assert state == states.write(order.cursor_at(2 * turn + 2, MICRO_BATCH)), "kept when its workers end"


def test_a_resumed_loader_ends_where_the_original_would(dataset: Manifest) -> None:
    """A state from the middle leaves the rest of its steps; one from the end leaves none."""
    order = order_of(dataset)
    states = LoaderStates(order, dataset.digest, MICRO_BATCH)
    for step, num_left in ((0, 6), (4, 2), (6, 0)):
        loader = inner_loader(dataset, order, range(2), num_steps=6, num_workers=0)
        loader.load_state_dict(states.write(order.cursor_at(step, MICRO_BATCH)))
        assert [micro_batches([batch])[0] for batch in loader] == [
            micro for micros in expected_steps(order, range(2), step, num_left) for micro in micros
        ]


def test_torchdatas_own_loader_resumes_by_the_sampler(dataset: Manifest) -> None:
    """The sampler follows torchdata's protocol: a plain StatefulDataLoader with it resumes where another stopped."""

    def plain() -> StatefulDataLoader[list[LaneSlice]]:
        sampler = LaneSampler(order_of(dataset), range(2), MICRO_BATCH, Cursor(), 3)
        return StatefulDataLoader(_Slices(), batch_sampler=sampler, collate_fn=list)

    first = plain()
    slices = iter(first)
    done = [next(slices) for _ in range(2)]
    second = plain()
    second.load_state_dict(first.state_dict())
    assert done + list(second) == list(plain())


class _Slices:
    def __getitem__(self, slice_: LaneSlice) -> LaneSlice:
        return slice_


UNFINISHED = """
import sys
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.loader_state import LoaderStates, cursor_of
from elastic_train.data.loading.reader import Reader
from elastic_train.core.order import Cursor, Order
from tests.elastic_train.data.loading.worker_collate import Ending, collate

if __name__ == "__main__":
    manifest = load_manifest(sys.argv[1])
    order = Order(manifest.group_rows, num_lanes=1, seed=1)
    place = {"lanes": range(1), "micro_batch": 4, "cursor": Cursor(), "num_steps": 9, "num_workers": 1}
    steps = iter(LaneLoader(Reader(manifest, ["label"]), order, collate, **place))
    next(steps)
"""


@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [
        (Ending(0), UnfinishedError, "exited with 0 while its batches were needed"),
        (Ending(-signal.SIGKILL), UnfinishedError, "was killed by SIGKILL"),
        (Ending(UNGUARDED_CODE), ConfigError, 'put that call below `if __name__ == "__main__":`'),
        (Ending(0, quits=True), UnfinishedError, "to end a worker process with 0, by sys.exit, quit or SystemExit"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_worker_that_ends_too_soon_is_an_error_that_says_how(
    dataset: Manifest,
    ending: Ending,
    kind: type[ElasticTrainError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ends it, code 0 included; in no words of torch's."""
    monkeypatch.setattr(
        stateful_dataloader._StatefulMultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,)
    )
    order, others = order_of(dataset), needed()
    loader = loader_of(dataset, order, range(1), num_steps=2, num_workers=1, collate=ending.collate)
    with pytest.raises(kind, match=re.escape(said)):
        list(loader)
    assert needed() == others


def test_a_script_without_a_guard_trains_in_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that imports the script ends where the script trains; any other process continues."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    refuse_unguarded()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    refuse_unguarded()
    assert codes == [UNGUARDED_CODE]


@pytest.mark.long
def test_a_process_can_end_in_the_middle_of_an_epoch(dataset: Manifest, tmp_path: Path) -> None:
    """Workers are deaf to the signal by which multiprocessing ends them, and waits for them: they end all the same."""
    script = tmp_path / "unfinished.py"
    script.write_text(UNFINISHED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, dataset.url], env=environ, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0


def test_the_sampler_yields_a_slice_for_every_lane(dataset: Manifest) -> None:
    """Batches of one slice, lane after lane, step after step, from the cursor on."""
    sampler = LaneSampler(order_of(dataset), range(1, 3), MICRO_BATCH, Cursor(2, 18), 3)
    assert list(sampler) == [
        [LaneSlice(2, 1, 18, 21)],
        [LaneSlice(2, 2, 18, 21)],
        [LaneSlice(3, 1, 0, 3)],
        [LaneSlice(3, 2, 0, 3)],
        [LaneSlice(3, 1, 3, 6)],
        [LaneSlice(3, 2, 3, 6)],
    ]
    assert len(sampler) == 6
