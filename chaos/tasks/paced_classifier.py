"""The text classifier, slow enough for faults to be placed between its steps; its numbers do not depend on the pace.

It does to itself what nobody could do to it from outside: a bit of its weights flips, or a lane's loss is not a number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from chaos.tasks.orders import Orders
from elastic_train.core.sample_random import SampleRandom
from elastic_train.tasks.task import Batch, LaneLoss
from elastic_train.tasks.text_classifier import TextClassifier

_BIT = 1 << 20
"""Of a float's fraction: the weight changes by less than half."""
_SPOILT = "has no loss"


class PacedClassifier(TextClassifier):
    """Takes `lane_ms` longer for every lane of every step; validation is as quick as ever.

    `spoilt` are samples, each with its epoch, whose lane's loss is not a number.
    """

    def __init__(self, lane_ms: float = 0.0, spoilt: Sequence[tuple[int, int]] = (), **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._lane_ms, self._spoilt, self._orders = lane_ms, spoilt, Orders()

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> Batch:  # type: ignore[override]
        batch = super().collate(rows, ids)
        if any(((ids == sample) & (draw.epoch == epoch)).any() for epoch, sample in self._spoilt):
            batch[_SPOILT] = torch.ones(())
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if not model.training:
            return super().loss(model, batch)
        if self._lane_ms:
            time.sleep(self._lane_ms / 1000)
        if (said := self._orders.take("flip_memory")) is not None:
            said.write_text(_flip(model))
        found, is_spoilt = super().loss(model, batch), _SPOILT in batch
        if (said := self._orders.take("nan_loss")) is not None:
            is_spoilt = True
            said.write_text(f"process {os.getpid()} gave nan in place of a loss of {float(found.total)}")
        return LaneLoss(found.total * torch.nan, *_rest(found)) if is_spoilt else found


def _rest(loss: LaneLoss) -> tuple[float, torch.Tensor | None, torch.Tensor | None]:
    return loss.weight, loss.predictions, loss.targets


def _flip(model: nn.Module) -> str:
    """Flip a bit of the first weight that is trained; say of which, and what it was and is."""
    name, weights = next((name, one) for name, one in model.named_parameters() if one.requires_grad)
    first = weights.detach().view(-1)[:1]
    before = float(first)
    first.view(torch.int32).bitwise_xor_(_BIT)
    return f"process {os.getpid()} flipped a bit of {name}: {before} became {float(first)}"
