"""The text classifier, slow enough for faults to be placed between its steps."""

from __future__ import annotations

import time

from torch import nn

from elastic_train.tasks.task import Batch, LaneLoss
from elastic_train.tasks.text_classifier import TextClassifier


class SlowClassifier(TextClassifier):
    """Takes `lane_ms` longer for every lane of every step; validation is as quick as ever."""

    def __init__(self, lane_ms: float, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self.lane_ms = lane_ms

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if model.training:
            time.sleep(self.lane_ms / 1000)
        return super().loss(model, batch)
