"""The savers of `benchmarks.checkpoint`: ours, torch.save, dcp.save and dcp.async_save, with one training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.order import Cursor
from elastic_train.job.build import build_state
from elastic_train.job.state import AppliedState, StepFacts
from elastic_train.world.fencing import StoreFence

OURS = "elastic_train"
WIDTH, NUM_ROWS = 1024, 64
BYTES_OF_LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)
"""Weights and both of AdamW's moments."""


@dataclass
class Training:
    """A training loop that saves may stall: AdamW over linear layers, one thread."""

    state: AppliedState
    batch: torch.Tensor

    def compute(self) -> None:
        """Run forward and backward."""
        self.state.model(self.batch).square().mean().backward()

    def update(self) -> None:
        self.state.apply(StepFacts(Cursor(), CoverageSums(), 1, SampleAccount()), self.state.measure())
        self.state.optimizer.zero_grad(set_to_none=False)

    def facts(self) -> CommitFacts:
        return CommitFacts(
            step=self.state.step,
            cursor=self.state.reached.cursor,
            coverage=self.state.reached.coverage,
            rng={},
            metrics={},
            config_digest="",
            manifest_digest="",
            world_size=1,
        )


def train(size_gb: float) -> tuple[Training, int]:
    """Build a loop with a state of about `size_gb`; return it with the exact size in bytes.

    Two steps allocate all state.
    """
    num_layers = max(1, round(size_gb * 1e9 / BYTES_OF_LAYER))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    training = Training(
        build_state(model, OptimizerConfig(), 10_000, "cpu", is_fp16=False), torch.randn(NUM_ROWS, WIDTH)
    )
    for _ in range(2):
        training.compute()
        training.update()
    return training, num_layers * BYTES_OF_LAYER


Waits = tuple[Callable[[], None], Callable[[], None] | None]
"""Functions that wait until the state may change, and until the save has ended; the latter is None if it has."""
Side = Callable[[Path], Callable[[], Waits]]
"""Prepares a folder for a save, and returns the function that starts it."""


def all_sides(training: Training, *, can_stage_twice: bool) -> Iterator[tuple[str, Side]]:
    """Yield every side with its name; with `can_stage_twice`, also the one that allocates memory for each save."""
    memory = SaveMemory()

    def ours(target: Path) -> Callable[[], Waits]:
        saves = open_saves(open_store(str(target)), memory)

        def wait() -> None:
            committed(saves)

        def begin() -> Waits:
            state = training.state
            saves.begin(state.shards.share.held(), training.facts(), is_still=state.pieces.only_update_changes())
            return saves.await_staging, wait

        return begin

    def torch_save(target: Path) -> Callable[[], Waits]:
        target.mkdir()

        def begin() -> Waits:
            torch.save(training.state.shards.share.held(), target / "state.pt")
            return _nothing, None

        return begin

    def dcp_save(target: Path) -> Callable[[], Waits]:
        def begin() -> Waits:
            saver.save(training.state.shards.share.held(), checkpoint_id=target)
            return _nothing, None

        return begin

    def dcp_async_save(stager: DefaultStager | None, target: Path) -> Callable[[], Waits]:
        def begin() -> Waits:
            promise = saver.async_save(training.state.shards.share.held(), checkpoint_id=target, async_stager=stager)
            return _nothing, _ended(promise)

        return begin

    kept = DefaultStager(StagingOptions(False, False, False, False))
    yield OURS, ours
    yield "torch.save", torch_save
    yield "dcp.save", dcp_save
    if can_stage_twice:
        yield "dcp.async_save", partial(dcp_async_save, None)
    yield "dcp.async_save, kept memory", partial(dcp_async_save, kept)


def open_saves(store: Store, memory: SaveMemory) -> Saves:
    """Open the saves of a world of one rank."""
    fence = StoreFence(store)
    term = fence.claim()
    return Saves(store, CommitWriter(store, fence, term, None), term, Role(0, 1, "benchmark"), memory)


def committed(saves: Saves) -> CommitRecord:
    """Wait for a save, which must succeed."""
    ended = saves.wait()
    assert ended is not None and ended.commit is not None, f"the save failed: {ended}"
    return ended.commit


def evict(folder: Path) -> None:
    """Evict a folder's files, which are on the disk, from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _ended(promise: object) -> Callable[[], None]:
    assert isinstance(promise, Future), "dcp.async_save returns a future of the upload"

    def wait() -> None:
        promise.result()

    return wait


def _nothing() -> None:
    pass
