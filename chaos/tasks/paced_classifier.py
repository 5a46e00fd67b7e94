"""The text classifier, slow enough for faults to be placed between its steps; its numbers do not depend on the pace."""

from __future__ import annotations

import time

from torch import nn

from elastic_train.tasks.task import Batch, LaneLoss
from elastic_train.tasks.text_classifier import TextClassifier


class PacedClassifier(TextClassifier):
    """Takes `lane_ms` longer for every lane of every step; validation is as quick as ever."""

    def __init__(self, lane_ms: float = 0.0, **params: object) -> None:
        super().__init__(**params)  # type: ignore[arg-type]
        self._lane_ms = lane_ms

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if model.training and self._lane_ms:
            time.sleep(self._lane_ms / 1000)
        return super().loss(model, batch)
