"""Validation metrics with integer states, so that any world computes the same values.

A separate module because torchmetrics takes over a second to import: a validation can wait for that, a recovery should
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_train.tasks.metric_library import (
    BinaryF1Score,
    Metric,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

_BINS, _UNIT = 15, 1 << 30
_MOST_ROWS = 1 << 21
"""Distinct scores, over all classes, up to which an area is exact: 64 MB. Beyond, close ones are merged."""
_MOST_CLASSES = 1000
"""Most classes for which a confusion matrix is kept: 8 MB."""
_CLASS, _KEY = 0, 1
_CUT = -2
"""Class of a row that holds, instead of a score, the number of low bits dropped in its table."""


class PositiveF1(BinaryF1Score):
    """F1 of class 1, from (batch, 2) probabilities."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds[:, 1], target)


class AreaUnderCurve(Metric):
    """Mean area under the ROC curve of each class against the rest; for two classes, that of class 1.

    The state is an integer table: class, score, and how many targets with this score are of other classes, and of this
    one. A score is the ordered bits of its double, so areas equal scikit-learn's, including ties and saturated scores.
    A table longer than `most_rows` drops as few low bits of all scores as possible. A subset of samples never drops
    more bits than the whole set, and merged tables drop as many as any of them, so the result is the same for any
    division among ranks.

    Classes without samples are left out of the mean and named in `remark`. The value is NaN if a score is NaN, or no
    class has both kinds of samples.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    rows: list[Tensor]

    def __init__(self, num_classes: int, *, most_rows: int = _MOST_ROWS) -> None:
        super().__init__()
        self._classes = [1] if num_classes == 2 else list(range(num_classes))
        self._most_rows, self._num_new = most_rows, 0
        self.remark: str | None = None
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        classes = torch.tensor(self._classes, device=preds.device)
        scores = preds.double()[:, self._classes]
        is_of_class = (target[:, None] == classes).long()
        number = classes.expand_as(scores).masked_fill(scores.isnan(), -1)
        columns = (number, _ordered(scores), 1 - is_of_class, is_of_class)
        self.rows.append(torch.stack([column.reshape(-1) for column in columns], dim=1))
        self._num_new += scores.numel()
        if self._num_new >= self._most_rows:
            self.rows, self._num_new = [_merged(torch.cat(self.rows), self._most_rows)], 0

    def compute(self) -> Tensor:
        undefined = torch.tensor(torch.nan, dtype=torch.float64)
        table = self.rows if isinstance(self.rows, Tensor) else torch.cat([_NO_ROWS, *(row.cpu() for row in self.rows)])
        rows = _merged(table.cpu(), self._most_rows)
        rows = rows[rows[:, _CLASS] != _CUT]
        if not len(rows) or bool((rows[:, _CLASS] < 0).any()):
            return undefined
        areas, absent = [], []
        for number in self._classes:
            others, own = rows[rows[:, _CLASS] == number, 2:].T
            num_others, num_own = int(others.sum()), int(own.sum())
            if not num_own:
                absent.append(number)
            if num_own and num_others:
                pairs = int((own * (2 * (others.cumsum(0) - others) + others)).sum())
                areas.append(pairs / (2 * num_own * num_others))
        if absent and len(self._classes) > 1:
            self.remark = f"the mean leaves out the classes {absent}, which have no sample"
        return torch.tensor(sum(areas) / len(areas), dtype=torch.float64) if areas else undefined


_NO_ROWS = torch.zeros((0, 4), dtype=torch.int64)


def _ordered(scores: Tensor) -> Tensor:
    """Return integers with the same order and equality as the scores."""
    bits = (scores + 0.0).view(torch.int64)  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)


def _merged(rows: Tensor, most: int) -> Tensor:
    """Return a sorted table with one row per class and score, of about `most` rows at most."""
    is_cut = rows[:, _CLASS] == _CUT
    num_bits = max(rows[is_cut, _KEY].tolist(), default=0)
    rows = rows[~is_cut]
    rows[:, _KEY] = (rows[:, _KEY] >> num_bits) << num_bits
    for column in (_KEY, _CLASS):
        rows = rows[rows[:, column].argsort(stable=True)]
    rows = _added(rows)
    if len(rows) > most:
        lo, num_bits = num_bits, 63
        while num_bits - lo > 1:
            middle = (lo + num_bits) // 2
            lo, num_bits = (lo, middle) if int(_begins(rows, middle).sum()) <= most else (middle, num_bits)
        rows[:, _KEY] = (rows[:, _KEY] >> num_bits) << num_bits
        rows = _added(rows)
    return torch.cat([rows.new_tensor([[_CUT, num_bits, 0, 0]]), rows]) if num_bits else rows


def _added(rows: Tensor) -> Tensor:
    """Add up the counts of consecutive rows with the same class and score."""
    begins = _begins(rows, 0)
    counts = rows.new_zeros((int(begins.sum()), 2)).index_add_(0, begins.cumsum(0) - 1, rows[:, 2:])
    return torch.cat([rows[begins, :2], counts], dim=1)


def _begins(rows: Tensor, shift: int) -> Tensor:
    """Return which rows of a sorted table differ from the previous one in class, or in score without its low bits."""
    begins = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    keys, classes = rows[:, _KEY] >> shift, rows[:, _CLASS]
    begins[1:] = (keys[1:] != keys[:-1]) | (classes[1:] != classes[:-1])
    return begins


class CalibrationError(Metric):
    """Expected calibration error of the most likely class (Guo et al. 2017, section 2), in 15 bins of confidence.

    Confidences are summed as integer multiples of 2^-30.
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
        return gaps.sum() / self.count.sum()  # NaN without samples


class Accuracy(MulticlassConfusionMatrix):
    """Share of rows whose most likely class is correct; the state is the confusion matrix, (target, prediction).

    `details` has the scores of each class, by name, for up to `most_named` classes.
    """

    higher_is_better = True
    confmat: Tensor

    def __init__(self, names: Sequence[str], *, most_named: int = 20) -> None:
        super().__init__(len(names))
        self.names, self._most_named = list(names), most_named

    def compute(self) -> Tensor:
        return self.confmat.diagonal().sum() / self.confmat.sum()

    def details(self) -> dict[str, float]:
        """Return precision, recall and F1 of the classes that occur in the set."""
        return self.by_class() if len(self.names) <= self._most_named else {}

    def by_class(self) -> dict[str, float]:
        """Return these scores for any number of classes; a class that is never predicted has precision 0."""
        right, real, said = (
            counts.tolist() for counts in (self.confmat.diagonal(), self.confmat.sum(1), self.confmat.sum(0))
        )
        return {
            f"{score}/{name}": value
            for number, name in enumerate(self.names)
            if real[number]
            for score, value in (
                ("precision", right[number] / max(1, said[number])),
                ("recall", right[number] / real[number]),
                ("f1", 2 * right[number] / (real[number] + said[number])),
            )
        }


def classification_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics of classes with these names, fed with (batch, classes) probabilities.

    They are accuracy, with the scores of each class, macro-F1 and AUC, and for two classes the positive class's F1.
    Above 1,000 classes no confusion matrix is kept.
    """
    num_classes = len(names)
    few = num_classes <= _MOST_CLASSES
    metrics: dict[str, Metric] = {
        "accuracy": Accuracy(names) if few else MulticlassAccuracy(num_classes, average="micro"),
        "macro_f1": MulticlassF1Score(num_classes, average="macro"),
    }
    if num_classes == 2:
        metrics["f1"] = PositiveF1()
    return {**metrics, "auc": AreaUnderCurve(num_classes)}
