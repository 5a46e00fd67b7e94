"""The sample streams of a run: random draws of `collate` in training and in validation."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from elastic_train.config.schema import Config
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.core.order import Cursor, Order
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.loading.lane_batch import AS_THEY_ARE
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.data.loading.reader import Reader
from elastic_train.data.loading.worker_processes import LaneDataset, LaneSampler
from elastic_train.errors import ConfigError
from elastic_train.job.sample_streams import Feed
from elastic_train.job.units.generators import moved_generators, states_of_generators, undisturbed
from tests.conftest import write_rows

RUN_SEED, NUM_LANES, MICRO_BATCH, NUM_ROWS = 11, 2, 5, 20
Drawn = dict[int, float]


class Drawing:
    """As much of a task as reading needs."""

    def columns(self) -> Sequence[str]:
        return ["label"]

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:
        return {"noise": torch.from_numpy(draw.uniform("noise")), "is_training": torch.tensor(draw.is_training)}


@pytest.fixture
def feed(tmp_path: Path) -> tuple[Feed, Order]:
    """A feed over 20 rows for training, and the same 20 for validation."""
    url = str(write_rows(tmp_path / "rows", NUM_ROWS))
    config = Config.model_validate(
        {
            "run": {"seed": RUN_SEED},
            "data": {"train": url, "validation": url},
            "batch": {"global_batch": NUM_LANES * MICRO_BATCH, "micro_batch": MICRO_BATCH},
        }
    )
    manifest = load_manifest(url)
    order = Order(manifest.group_rows, num_lanes=NUM_LANES, seed=RUN_SEED)
    return Feed(config, Drawing(), [manifest]), order  # type: ignore[arg-type]


def drawn_in(steps: Iterable[Sequence[LaneBatch]]) -> Drawn:
    drawn: Drawn = {}
    for batch in (batch for step in steps for batch in step):
        assert batch.tensors is not None
        drawn |= dict(zip(batch.ids.tolist(), batch.tensors["noise"].tolist(), strict=True))
    return drawn


def expected(seed: int, epoch: int) -> Drawn:
    ids = np.arange(NUM_ROWS)
    return dict(zip(ids.tolist(), SampleRandom(seed, epoch, ids).uniform("noise").tolist(), strict=True))


def test_training_draws_by_the_runs_seed_and_the_epoch(feed: tuple[Feed, Order]) -> None:
    """Each epoch of a run has different numbers."""
    feed_, order = feed
    for epoch in (0, 3):
        steps = feed_.training(order, range(NUM_LANES), Cursor(epoch), order.num_steps(MICRO_BATCH))
        assert drawn_in(steps) == expected(RUN_SEED, epoch)


def test_every_validation_draws_the_same(feed: tuple[Feed, Order]) -> None:
    """Seed 0 and epoch 0, whatever the run and its progress, so that two validations can be compared."""
    feed_, _ = feed
    for _ in range(2):
        steps = feed_.validation(range(NUM_LANES))
        assert steps is not None and drawn_in(steps) == expected(0, 0)


def test_only_training_is_augmented(feed: tuple[Feed, Order]) -> None:
    """Drawing code can ask whether its rows are for training or validation, also in a worker process."""
    feed_, order = feed
    for is_training, steps in (
        (True, feed_.training(order, range(NUM_LANES), Cursor(), 2)),
        (False, feed_.validation(range(NUM_LANES))),
    ):
        assert steps is not None
        batches = [batch for step in steps for batch in step]
        assert batches and all(batch.tensors["is_training"] == is_training for batch in batches if batch.tensors)
    for is_training, of in ((True, order), (False, feed_._held_out_order)):
        reader = Reader(feed_._manifests[0], ["label"])
        dataset = LaneDataset(reader, of, Drawing().collate, MICRO_BATCH, AS_THEY_ARE)
        sampler = LaneSampler(of, range(1), MICRO_BATCH, Cursor(), 1)
        (batch,) = dataset.__getitems__(next(iter(sampler)))
        assert batch.tensors["is_training"] == is_training


_GENERATOR, _TORCH, _CALLS = np.random.default_rng(3), torch.Generator(), iter(range(1 << 20))


@pytest.mark.parametrize(
    ("draws", "named"),
    [
        (lambda: random.random(), r"global generator of random,"),
        (lambda: np.random.rand(), r"global generator of numpy\.random,"),
        (lambda: np.random.permutation(5)[0], r"global generator of numpy\.random,"),
        (lambda: torch.rand(()), r"global generator of torch,"),
        (lambda: torch.randperm(5)[0] + random.random(), r"global generator of torch and of random,"),
        (lambda: _GENERATOR.random(), r"another 'x'"),
        (lambda: np.random.default_rng().random(), r"another 'x'"),
        (lambda: torch.rand((), generator=_TORCH), r"another 'x'"),
        (lambda: random.Random().random(), r"another 'x'"),
        (lambda: uuid.uuid4().int % 1000, r"another 'x'"),
        (lambda: next(_CALLS), r"another 'x'"),
        (lambda: time.perf_counter_ns() % 1_000_003, r"another 'x'"),
    ],
)
def test_a_collate_whose_results_cannot_be_had_again_is_refused(
    feed: tuple[Feed, Order], draws: Callable[[], float], named: str
) -> None:
    """Global generators are named; a private generator, counter or clock is detected by a second call."""

    def collate(rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        return {"ids": torch.from_numpy(ids.copy()), "x": torch.tensor(float(draws()))}

    feed[0]._task.collate = collate  # type: ignore[method-assign]
    with undisturbed(), pytest.raises(ConfigError, match=rf"Drawing.collate .*{named}.*Add a third parameter `draw`"):
        feed[0].try_collate(feed[1])


def test_a_collate_that_draws_from_draw_passes_and_leaves_generators_alone(feed: tuple[Feed, Order]) -> None:
    before = states_of_generators()
    feed[0].try_collate(feed[1])
    assert moved_generators(before) == []
