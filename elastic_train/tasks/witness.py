"""A model that counts: after training, w[i] is how many times sample i was applied.

The loss of a micro-batch is -w[ids].sum() with weight 0 (not divided), so that under plain SGD with rate 1 every
applied sample adds exactly 1 to its own weight. It needs no trust in cursors, coverage sums or histories.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.task import Batch, LaneLoss

if TYPE_CHECKING:
    from torchmetrics import Metric


class Counts(nn.Module):
    """One float32 weight per sample, exact up to 2^24 counts."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_samples))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the weights of the given sample ids; shape as `ids`."""
        return self.w[ids]


class Witness:
    """Count every application of every sample; use with optimizer sgd, lr 1, constant, no decay, no clipping.

    `lane_ms` sets the duration of a lane's pass, so that faults can be placed between steps of this cheap task.
    """

    def __init__(self, lane_ms: float = 0.0) -> None:
        self._lane_ms = lane_ms
        self._num_samples = 0
        self._column = ""

    def prepare(self, manifest: Manifest) -> None:
        self._num_samples = manifest.num_rows
        self._column = next(iter(manifest.columns))

    def columns(self) -> Sequence[str]:
        return [self._column]

    def build_model(self) -> nn.Module:
        return Counts(self._num_samples)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        assert len(rows) == len(ids), f"{len(rows)} rows for {len(ids)} ids"
        return {"ids": torch.from_numpy(ids)}

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if self._lane_ms:
            time.sleep(self._lane_ms / 1000)
        return LaneLoss(-model(batch["ids"]).sum(), None)

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def finish(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, Counts), "the witness trains its own model"
        np.save(folder / "witness.npy", model.w.detach().cpu().numpy().astype(np.int64))
