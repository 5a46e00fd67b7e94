"""Validation values: without targets there is none, and a metric that no validation could compute is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import ConfigError
from elastic_train.inference.predicting import Alone
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group
from elastic_train.tasks.classification_metrics import CalibrationError, classification_metrics
from elastic_train.tasks.language.metrics import Perplexity, TokenAccuracy
from elastic_train.tasks.preparing import try_metrics
from elastic_train.tasks.task import LaneLoss, Task, mean_loss, weight_of
from elastic_train.training.evaluation import evaluate

pytestmark = pytest.mark.xdist_group("torchmetrics")  # one process imports it


class Losses:
    """A task with given losses and metrics instead of a model's."""

    def __init__(self, losses: Sequence[LaneLoss], metrics: Mapping[str, Metric]) -> None:
        self._losses, self._metrics = iter(losses), metrics

    def metrics(self) -> Mapping[str, Metric]:
        return self._metrics

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> LaneLoss:
        return next(self._losses)

    def turns(self, owners: Group, batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
        return batches


def shards_of(task: Losses) -> StateShards:
    """Return shards whose share is a task, and which has no experts."""
    return cast(StateShards, SimpleNamespace(share=task, cut=SimpleNamespace(experts=())))


def evaluated(
    losses: Sequence[LaneLoss], metrics: Mapping[str, Metric], model: nn.Module | None = None
) -> tuple[dict[str, float | None], list[str]]:
    task, remarks = Losses(losses, metrics), list[str]()
    steps = [[LaneBatch(0, 0, n, n + 2, np.array([n, n + 1]), {})] for n in range(0, 2 * len(losses), 2)]
    alone, shards = Alone(Group(0, 1, None, 1.0)), shards_of(task)
    cpu = torch.device("cpu")
    found = evaluate(cast(Task, task), model or nn.Module(), steps, shards, alone, 1, cpu, remark=remarks.append)
    return found, remarks


def language() -> dict[str, Metric]:
    return {"perplexity": Perplexity(), "accuracy": TokenAccuracy()}


def test_a_validation_without_a_target_is_no_number() -> None:
    """The value is neither 0.0 nor a perplexity of 1.0; if only some rows lack targets, the others determine it."""
    none = LaneLoss(torch.tensor(0.0), 0.0, torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    some = LaneLoss(torch.tensor(6.0), 2.0, torch.tensor([2.0, 4.0]), torch.tensor([True, False]))
    values, remarks = evaluated([none, none], language())
    assert values == {"loss": None, "samples": 4.0, "perplexity": None, "accuracy": None}
    assert remarks == [
        "no sample of the validation set has a target: its loss and metrics are no numbers, and decide nothing"
    ]
    values, remarks = evaluated([none, some], language())
    assert values["loss"] == 3.0 and values["accuracy"] == 0.5 and not remarks
    assert values["perplexity"] == pytest.approx(math.exp(3.0))


def test_what_a_loss_draws_in_a_validation_follows_from_its_lane_and_place() -> None:
    """It must not depend on the rank's lanes or on earlier draws."""

    class Drawing(Losses):
        def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> LaneLoss:
            drawn.append((float(torch.rand(())), np.random.random(), random.random()))
            return LaneLoss(torch.tensor(1.0), 1.0)

    def draws(lanes: range) -> list[tuple[float, ...]]:
        drawn.clear()
        task = Drawing([], {})
        steps = [[LaneBatch(lane, 0, lo, lo + 2, np.array([lo, lo + 1]), {}) for lane in lanes] for lo in (0, 2)]
        alone, shards = Alone(Group(0, 1, None, 1.0)), shards_of(task)
        evaluate(cast(Task, task), nn.Module(), steps, shards, alone, 2, torch.device("cpu"))
        return list(drawn)

    drawn = list[tuple[float, ...]]()
    both = draws(range(2))
    assert draws(range(1, 2)) == [both[1], both[3]]
    assert len({one for each in both for one in each}) == 12


def test_a_validation_leaves_modules_in_the_mode_that_each_had() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    evaluated([LaneLoss(torch.tensor(1.0), 2.0)], {}, model)
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize("huge", [1e9, 1e13, 3e38, math.inf])
def test_a_model_that_diverges_does_not_have_the_best_perplexity(huge: float) -> None:
    """Its sum would not fit 64 bits: the perplexity was 0."""
    likelihoods = torch.full((20_000,), huge)
    loss = LaneLoss(likelihoods.double().sum(), 20_000.0, likelihoods, torch.zeros(20_000, dtype=torch.bool))
    assert evaluated([loss], language())[0]["perplexity"] == math.inf


def test_a_metric_that_the_targets_do_not_define_is_no_number_and_one_of_nan_is_nan() -> None:
    """NaN (a diverged model) ranks below any number; an undefined metric does not count."""
    scores = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    values, remarks = evaluated(
        [LaneLoss(torch.tensor(1.0), 2.0, scores, torch.tensor([1, 1]))], classification_metrics(["no", "yes"])
    )
    assert values["auc"] is None and values["f1"] is not None
    assert remarks == ["the metric 'auc' is undefined for the targets of the validation set: it decides nothing"]
    values, _ = evaluated(
        [LaneLoss(torch.tensor(torch.nan), 2.0, scores * torch.nan, torch.tensor([1, 0]))],
        classification_metrics(["no", "yes"]),
    )
    assert all(math.isnan(cast(float, values[name])) for name in ("loss", "auc", "f1", "macro_f1"))


class Detailed(MulticlassF1Score):
    """A metric with details as torch computes them."""

    more: object = torch.tensor([0.5])

    def details(self) -> dict[str, object]:
        return {"f1/no": torch.tensor(0.5), "rows": np.int64(2), "more": self.more}


def test_details_are_numbers_whatever_computes_them() -> None:
    """Records of commits hold plain numbers only."""
    scores, given = torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 0])
    values, _ = evaluated([LaneLoss(torch.tensor(1.0), 2.0, scores, given)], {"mine": Detailed(2, average="macro")})
    assert [(type(values[name]), values[name]) for name in ("f1/no", "rows", "more")] == [
        (float, 0.5),
        (float, 2.0),
        (float, 0.5),
    ]
    wrong = Detailed(2, average="macro")
    wrong.more = "many"
    with pytest.raises(ConfigError, match="metric 'mine': 'more' of `details` gives str, not one number"):
        try_metrics({"mine": wrong}, LaneLoss(torch.tensor(1.0), 2.0, scores, given))


def test_weights_are_numbers_of_at_least_0_or_none_for_not_to_divide() -> None:
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"returns the weight .*at least 0"):
            weight_of(LaneLoss(torch.tensor(1.0), weight))
    assert mean_loss(6.0, weight_of(LaneLoss(torch.tensor(6.0), None))) == 6.0
    assert mean_loss(6.0, 2.0) == 3.0 and mean_loss(0.0, 0.0) is None


class OfFloats(Metric):
    """A metric whose state is a list of floats, empty before the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        cast(list[Any], self.rows).append(preds)

    def compute(self) -> Tensor:
        return torch.tensor(0.0)


class Largest(OfFloats):
    """A metric whose state keeps the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("most", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (MeanMetric(), "not an integer count"),
        (BinaryAUROC(), "not an integer count"),
        (OfFloats(), "not an integer count"),
        (Largest(), "dist_reduce_fx 'sum'"),
        (MulticlassF1Score(2, average=None), r"gives shape \(2,\), not one number"),
        (MulticlassF1Score(3, average="macro"), "refuses the predictions and targets"),
    ],
)
def test_a_metric_that_no_validation_could_compute_is_refused(metric: Metric, message: str) -> None:
    scores = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    with pytest.raises(ConfigError, match=message):
        try_metrics({"mine": metric}, LaneLoss(torch.tensor(1.0), 2.0, scores, torch.tensor([1, 0])))


def test_the_products_own_metrics_are_not_refused() -> None:
    scores = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    loss = LaneLoss(torch.tensor(1.0), 2.0, scores, torch.tensor([1, 0]))
    try_metrics({**classification_metrics(["no", "yes"]), "calibration_error": CalibrationError()}, loss)
