"""The plan of a simulated job: data set, task and initial state."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from chaos.sim.modelled.state import ModelledState, modelled_state
from chaos.sim.modelled.tiny_model import TinyModel, build_tiny_state
from chaos.sim.modelled.training import WORDS, Weights
from chaos.sim.modelled.training_data import ModelledFeed
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.arrays import Int64s
from elastic_train.core.order import Order
from elastic_train.job.state import AppliedState

FILE = "rows.parquet"
"""The only file of a training set, with all of its row groups."""


@dataclass(frozen=True, slots=True)
class ModelledFile:
    path: str


@dataclass(frozen=True)
class ModelledManifest:
    group_rows: Int64s

    url = "sim://data"

    @property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    @property
    def coverage(self) -> CoverageSums:
        return _whole(self.num_rows)

    @property
    def files(self) -> list[ModelledFile]:
        return [ModelledFile(FILE)]

    def place_of_group(self, group: int) -> tuple[int, int]:
        return 0, group

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.group_rows.tobytes()).hexdigest()


class ModelledTask:
    """A task that passes on the witness's counts at the end."""

    def __init__(self, leave: Callable[[Int64s], None]) -> None:
        self._leave = leave

    def metrics(self) -> Mapping[str, object]:
        return {}

    def finish(self, model: Weights | nn.Module, folder: Path) -> None:
        counts = model.state_dict()["counts"]
        assert isinstance(counts, torch.Tensor), "as both kinds of model have them"
        self._leave(counts.numpy().copy())


@dataclass(frozen=True)
class ModelledPlan:
    """Stand-in for `elastic_train.job.plan.Plan`."""

    config: Config
    task: ModelledTask
    manifest: ModelledManifest
    order: Order
    feed: ModelledFeed
    total_steps: int
    device: torch.device
    take_state: Callable[[ModelledState | AppliedState], None]
    """Called with every state that is built, in the process that builds it."""
    sources: tuple[()] = ()
    why_compiled: None = None
    is_tiny: bool = False
    """True if the product's own state trains a real, tiny model instead of a modelled one."""
    num_parts: int = 1
    """Number of shards of the modelled weights."""

    @property
    def num_lanes(self) -> int:
        return self.config.batch.num_lanes

    @property
    def micro_batch(self) -> int:
        return self.config.batch.micro_batch

    @property
    def validates_every(self) -> int | None:
        return self.config.validation.every_steps

    @property
    def retention(self) -> Retention:
        return Retention.of(last=self.config.checkpoint.keep_last)

    def keep_casts(self, num_lanes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def build_state(self, *, may_defer: bool = False) -> ModelledState | AppliedState:
        state = self._make_state()
        self.take_state(state)
        return state

    def _make_state(self) -> ModelledState | AppliedState:
        if self.is_tiny:
            return build_tiny_state(self.config, self.manifest.num_rows, self.total_steps)
        weights = self._first_weights()
        return modelled_state(weights, self.config.parallel.cell)

    def first_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole initial weights, the same on every rank."""
        model = TinyModel(self.manifest.num_rows) if self.is_tiny else self._first_weights()
        yield from model.state_dict().items()

    def _first_weights(self) -> Weights:
        counts, words = np.zeros(self.manifest.num_rows, np.int64), np.zeros(WORDS * self.num_parts, np.int64)
        return Weights(counts, words, parts=range(self.num_parts), size=self.num_parts)

    def check_continues(self, record: CommitRecord) -> None:
        assert record.manifest_digest == self.manifest.digest and record.config_digest == self.config.identity()


@lru_cache(64)
def _whole(num_rows: int) -> CoverageSums:
    return CoverageSums.of_all(num_rows)
