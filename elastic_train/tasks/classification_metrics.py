"""Validation metrics whose states are integer counts, so that they add up exactly over any world.

A separate module because torchmetrics takes over a second to import, which a validation can wait for and a
recovery should not.
"""

from __future__ import annotations

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAUROC, MulticlassF1Score

_THRESHOLDS = 200  # a curve over all predictions would keep floats; a binned one counts


class PositiveF1(BinaryF1Score):
    """F1 of class 1, from (batch, 2) probabilities."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[:, 1], target)


class PositiveAUROC(BinaryAUROC):
    """Area under the curve of class 1, from (batch, 2) probabilities."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[:, 1], target)


def classification_metrics(num_classes: int) -> dict[str, Metric]:
    """Return macro-F1 and AUC, and for two classes the positive class's F1; fed with (batch, classes) probabilities."""
    metrics: dict[str, Metric] = {"macro_f1": MulticlassF1Score(num_classes, average="macro")}
    if num_classes == 2:
        return {**metrics, "f1": PositiveF1(), "auc": PositiveAUROC(thresholds=_THRESHOLDS)}
    return {**metrics, "auc": MulticlassAUROC(num_classes, average="macro", thresholds=_THRESHOLDS)}
