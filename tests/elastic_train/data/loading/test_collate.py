"""The function that turns rows into tensors, and what it draws: the same in every world, thread, worker and resume."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.core.lanes import owned_lanes
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading.lane_batch import Collate, takes_draw
from elastic_train.data.loading.loader import LaneLoader
from elastic_train.data.loading.loader_state import cursor_of
from elastic_train.data.loading.reader import Reader
from tests.conftest import write_rows
from tests.elastic_train.data.loading.worker_collate import Augmenting

Ids = npt.NDArray[np.int64]
NUM_LANES, MICRO_BATCH, NUM_ROWS = 4, 3, 50


def plain(rows: pa.Table, ids: Ids) -> dict[str, Tensor]:
    return {"id": torch.from_numpy(ids.copy())}


def drawing(rows: pa.Table, ids: Ids, draw: SampleRandom) -> dict[str, Tensor]:
    """Draw two numbers for each row."""
    return {"noise": torch.from_numpy(draw.uniform("noise", 2))}


def widened(rows: pa.Table, ids: Ids, max_width: int = 9) -> dict[str, Tensor]:
    return {"width": torch.tensor(max_width)}


def optional(rows: pa.Table, ids: Ids, draw: SampleRandom | None = None) -> dict[str, Tensor]:
    assert draw is not None, "a parameter that is called draw is passed"
    return {"seed": torch.from_numpy(draw.seeds("a").astype(np.int64))}


@functools.wraps(plain)
def wrapped(*arguments: object) -> dict[str, Tensor]:
    return plain(*arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(str(write_rows(tmp_path_factory.mktemp("collate") / "rows", NUM_ROWS, group_rows=7)))


def loader_of(
    manifest: Manifest, collate: Collate, lanes: range, cursor: Cursor, num_steps: int, num_workers: int = 0
) -> LaneLoader:
    return LaneLoader(
        Reader(manifest, ["label"]),
        Order(manifest.group_rows, num_lanes=NUM_LANES, seed=3, block_row_groups=2),
        collate,
        lanes=lanes,
        micro_batch=MICRO_BATCH,
        cursor=cursor,
        num_steps=num_steps,
        num_workers=num_workers,
    )


Drawn = dict[tuple[int, int], list[float]]


def drawn_by(loader: LaneLoader) -> Drawn:
    """Return what was drawn, by epoch and sample id."""
    drawn: Drawn = {}
    for step in loader:
        for batch in step:
            if batch.tensors is not None:
                noise = batch.tensors["noise"].tolist()
                drawn |= {(batch.epoch, id_): row for id_, row in zip(batch.ids.tolist(), noise, strict=True)}
    return drawn


def expected(num_epochs: int) -> Drawn:
    ids = np.arange(NUM_ROWS)
    noise = [SampleRandom(3, epoch, ids).uniform("noise", 2).tolist() for epoch in range(num_epochs)]
    return {(epoch, id_): noise[epoch][id_] for epoch in range(num_epochs) for id_ in range(NUM_ROWS)}


STEPS = 5  # of an epoch: a lane has 12 or 13 rows


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_world_draws_the_same(dataset: Manifest, world_size: int) -> None:
    """Over two epochs every sample draws what its seed, epoch and id say, in whatever world it is read."""
    drawn: Drawn = {}
    for rank in range(world_size):
        lanes = owned_lanes(rank, world_size, NUM_LANES)
        drawn |= drawn_by(loader_of(dataset, drawing, lanes, Cursor(), 2 * STEPS))
    assert drawn == expected(2)
    assert all(drawn[0, id_] != drawn[1, id_] for id_ in range(NUM_ROWS)), "epochs draw different numbers"


def test_a_resume_draws_the_same(dataset: Manifest) -> None:
    """One rank for a few steps, three from its cursor on: no draw depends on where a loader began."""
    loader = loader_of(dataset, drawing, range(NUM_LANES), Cursor(), 2)
    drawn = drawn_by(loader)
    for rank in range(3):
        cursor = cursor_of(loader.state_dict())
        drawn |= drawn_by(loader_of(dataset, drawing, owned_lanes(rank, 3, NUM_LANES), cursor, STEPS - 2))
    assert drawn == expected(1)


@pytest.mark.slow
def test_worker_processes_draw_the_same(dataset: Manifest) -> None:
    """Two worker processes draw what threads draw, from a method as from a function."""
    collate = Augmenting().collate
    assert drawn_by(loader_of(dataset, collate, range(NUM_LANES), Cursor(), STEPS, num_workers=2)) == expected(1)


@pytest.mark.parametrize(
    ("collate", "is_drawing"),
    [
        (plain, False),
        (drawing, True),
        (widened, False),
        (optional, True),
        (wrapped, False),
        (Augmenting().collate, True),
        (functools.partial(widened, max_width=3), False),
        (lambda *arguments: plain(*arguments), False),
        (lambda rows, ids, anything: {}, True),
    ],
)
def test_collate_functions_of_two_arguments_keep_working(dataset: Manifest, collate: Collate, is_drawing: bool) -> None:
    """Two arguments are passed as ever; a third only where it is required, or named draw."""
    assert takes_draw(collate) == is_drawing
    (step,) = loader_of(dataset, collate, range(NUM_LANES), Cursor(), 1)
    assert [batch.tensors is not None for batch in step] == [True] * NUM_LANES


@pytest.mark.parametrize(
    ("collate", "shown"),
    [
        (lambda rows: {}, r"\(rows\)"),
        (lambda rows, ids, draw, epoch: {}, r"\(rows, ids, draw, epoch\)"),
        (lambda rows, ids, *, draw: {}, r"\(rows, ids, \*, draw\)"),
    ],
)
def test_other_collate_functions_are_refused_at_once(
    dataset: Manifest, collate: Callable[..., object], shown: str
) -> None:
    """The loader is not built, and the message shows what was passed and what is expected."""
    with pytest.raises(TypeError, match=shown + r" cannot be called .*; expected collate\(rows, ids\), or collate"):
        loader_of(dataset, collate, range(NUM_LANES), Cursor(), 1)  # type: ignore[arg-type]


def test_short_micro_batches_draw_the_same(tmp_path: Path) -> None:
    """A short last micro-batch draws what its ids say, as a whole one does."""
    manifest = load_manifest(str(write_rows(tmp_path / "rows", 5, num_files=1, group_rows=2)))
    drawn = drawn_by(loader_of(manifest, drawing, range(NUM_LANES), Cursor(), 1))
    assert drawn == {(0, id_): SampleRandom(3, 0, np.array([id_])).uniform("noise", 2)[0].tolist() for id_ in range(5)}
