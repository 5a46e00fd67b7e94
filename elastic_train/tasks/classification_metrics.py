"""Validation metrics whose states are integer counts, so that they add up exactly over any world.

A separate module because torchmetrics takes over a second to import, which a validation can wait for and a
recovery should not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.tasks.metric_library import (
    BinaryAUROC,
    BinaryF1Score,
    Metric,
    MulticlassAUROC,
    MulticlassF1Score,
)

_THRESHOLDS = 200  # a curve over all predictions would keep floats; a binned one counts
_BINS, _UNIT = 15, 1 << 30


class PositiveF1(BinaryF1Score):
    """F1 of class 1, from (batch, 2) probabilities."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[:, 1], target)


class PositiveAUROC(BinaryAUROC):
    """Area under the curve of class 1, from (batch, 2) probabilities."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[:, 1], target)


class CalibrationError(Metric):
    """Expected calibration error of the most likely class (Guo et al. 2017, section 2), in 15 bins of confidence.

    Confidences are added up in parts of 2^-30, as integers.
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False
    count: Tensor
    correct: Tensor
    confidence: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "correct", "confidence"):
            self.add_state(name, torch.zeros(_BINS, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        confidence, likeliest = preds.max(dim=-1)
        bins = (confidence * _BINS).long().clamp(0, _BINS - 1)
        self.count.index_add_(0, bins, torch.ones_like(bins))
        self.correct.index_add_(0, bins, (likeliest == target).long())
        self.confidence.index_add_(0, bins, (confidence.double() * _UNIT).round().long())

    def compute(self) -> Tensor:
        gaps = (self.correct.double() - self.confidence.double() / _UNIT).abs()
        return gaps.sum() / self.count.sum().clamp(min=1)


def classification_metrics(num_classes: int) -> dict[str, Metric]:
    """Return macro-F1 and AUC, and for two classes the positive class's F1; fed with (batch, classes) probabilities."""
    metrics: dict[str, Metric] = {"macro_f1": MulticlassF1Score(num_classes, average="macro")}
    if num_classes == 2:
        return {**metrics, "f1": PositiveF1(), "auc": PositiveAUROC(thresholds=_THRESHOLDS)}
    return {**metrics, "auc": MulticlassAUROC(num_classes, average="macro", thresholds=_THRESHOLDS)}
