"""Metrics that decide are scikit-learn's, whatever the scores; any division of the samples gives one value."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_recall_fscore_support, roc_auc_score

from elastic_train.parallel.group import Group
from elastic_train.tasks.classification_metrics import Accuracy, AreaUnderCurve, PositiveF1, classification_metrics
from elastic_train.training.evaluation import _all_rows

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("torchmetrics")]  # one process imports it

Scores = npt.NDArray[np.float64]
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, Scores], Scores]] = {
    "rare, ranked perfectly, all below 0.003": lambda rng, y: 0.001 + 0.002 * (0.5 * y + 0.5 * rng.random(len(y))),
    "heavy ties": lambda rng, y: np.round(0.6 * rng.random(len(y)) + 0.3 * y, 1),
    "saturated": lambda rng, y: 1 - 1e-9 * (rng.random(len(y)) + 1 - 0.5 * y),
    "log-uniform": lambda rng, y: 10 ** (-12 * rng.random(len(y)) - 1 + 0.5 * y),
    "constant": lambda rng, y: np.full(len(y), 0.25),
    "a narrow band": lambda rng, y: 0.37 + 1e-6 * (rng.random(len(y)) + 0.3 * y),
    "two bands": lambda rng, y: np.where(rng.random(len(y)) < 0.5, rng.random(len(y)), 0.5 + 1e-8 * rng.random(len(y))),
    "denormal": lambda rng, y: 1e-310 * (rng.random(len(y)) + 0.2 * y),
}


def area(scores: Scores, target: npt.NDArray[np.int64], num_classes: int = 2, **options: int) -> float:
    """Feed the metric in parts of uneven size; scores are (samples, classes)."""
    metric = AreaUnderCurve(num_classes, **options)
    for part in np.array_split(np.arange(len(target)), 7):
        metric.update(torch.tensor(scores[part]), torch.tensor(target[part]))
    return float(metric.compute())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("share", [0.003, 0.4])
def test_the_area_is_that_of_scikit_learn(name: str, share: float) -> None:
    rng = np.random.default_rng(1)
    target = (rng.random(6000) < share).astype(np.int64)
    scores = DISTRIBUTIONS[name](rng, target)
    both = np.stack([1 - scores, scores], axis=1)
    assert area(both, target) == pytest.approx(roc_auc_score(target, scores), abs=1e-12)
    assert area(both, target, most_rows=4096) == pytest.approx(roc_auc_score(target, scores), abs=1e-3), "bounded"


@pytest.mark.parametrize("most_rows", [1 << 21, 11 * 400])
def test_the_area_of_eleven_classes_is_the_mean_over_those_that_are_there(most_rows: int) -> None:
    rng = np.random.default_rng(2)
    shares = np.array([0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.008, 0.005, 0.004, 0.003, 0.0])
    target = rng.choice(11, 20_000, p=shares)
    logits = rng.normal(size=(len(target), 11)) * 4
    logits[np.arange(len(target)), target] += 3
    scores = torch.tensor(logits).float().softmax(1)
    metric = AreaUnderCurve(11, most_rows=most_rows)
    metric.update(scores, torch.tensor(target))
    expected = np.mean([roc_auc_score(target == number, scores.numpy()[:, number]) for number in range(10)])
    assert float(metric.compute()) == pytest.approx(expected, abs=1e-3)
    assert metric.remark == "the mean leaves out the classes [10], which have no sample"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 2)), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([3, 8, 1 << 21]),
)
@example([(0.0, 1.0, 0), (0.0, 1.0, 0), (0.0, 0.5, 0), (1.0, 0.25, 2), (0.5, 0.0, 0)], 1, 8)
def test_any_division_among_ranks_gives_the_same_bits(
    rows: list[tuple[float, float, int]], cut: int, most_rows: int
) -> None:
    """Also where the table is cut: each part of the samples keeps at least what the whole keeps."""
    scores = torch.tensor([[a, b, abs(a - b)] for a, b, _ in rows], dtype=torch.float64)
    target = torch.tensor([label for *_, label in rows])
    values = []
    for parts in ([(0, len(rows))], [(0, cut), (cut, len(rows))], [(place, place + 1) for place in range(len(rows))]):
        whole = AreaUnderCurve(3, most_rows=most_rows)
        for lo, hi in parts:
            rank = AreaUnderCurve(3, most_rows=most_rows)
            if lo < hi:
                rank.update(scores[lo:hi], target[lo:hi])
            whole.rows += rank.rows
        whole.rows = [_all_rows(whole.rows, Group(0, 1, None, 1.0))]
        values.append(float(whole.compute()))
    assert math.isnan(values[0]) or len(set(values)) == 1
    if most_rows > 100 and not math.isnan(values[0]):
        present = [number for number in range(3) if 0 < int((target == number).sum()) < len(rows)]
        found = [roc_auc_score(target == number, scores[:, number]) for number in present]
        assert values[0] == pytest.approx(np.mean(found), abs=1e-12)


def test_what_has_no_area_is_no_number() -> None:
    """One class alone, no sample, or a score that is NaN."""
    two = torch.tensor([[0.2, 0.8], [0.6, 0.4]])
    for scores, target in ((two, [1, 1]), (two, [0, 0]), (two[:0], []), (two * torch.nan, [0, 1])):
        metric = AreaUnderCurve(2)
        metric.update(scores, torch.tensor(target, dtype=torch.int64))
        assert math.isnan(float(metric.compute()))
    assert math.isnan(float(AreaUnderCurve(2).compute()))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 1000))
def test_scores_of_each_class_are_those_of_scikit_learn_and_add_up_over_ranks(num: int, size: int, seed: int) -> None:
    """Of classes with a sample; the state is counts, so that ranks add theirs up."""
    rng = np.random.default_rng(seed)
    scores, target = torch.tensor(rng.dirichlet(np.ones(num), size)).float(), rng.integers(0, max(1, num - 1), size)
    whole, first, second = (Accuracy([f"c{number}" for number in range(num)]) for _ in range(3))
    for metric, lo, hi in ((whole, 0, size), (first, 0, size // 2), (second, size // 2, size)):
        if lo < hi:
            metric.update(scores[lo:hi], torch.tensor(target[lo:hi]))
    first.confmat += second.confmat
    assert torch.equal(whole.confmat, first.confmat) and not whole.confmat.is_floating_point()
    labels = sorted({*target.tolist()})
    found = precision_recall_fscore_support(target, scores.argmax(1), labels=labels, zero_division=0.0)
    expected = {
        f"{score}/c{number}": values[place]
        for score, values in zip(("precision", "recall", "f1"), found, strict=False)
        for place, number in enumerate(labels)
    }
    assert whole.details() == pytest.approx(expected)
    assert float(whole.compute()) == pytest.approx(float(np.mean(scores.argmax(1).numpy() == target)))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 1000))
def test_the_f1_is_that_of_scikit_learn_over_the_classes_that_are_seen(num: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, target = torch.tensor(rng.dirichlet(np.ones(num), size)).float(), rng.integers(0, max(1, num - 1), size)
    metric = classification_metrics([*map(str, range(num))])["macro_f1"]
    metric.update(scores, torch.tensor(target))
    assert float(metric.compute()) == pytest.approx(f1_score(target, scores.argmax(1), average="macro"), abs=1e-6)
    if num == 2:
        positive = PositiveF1()
        positive.update(scores, torch.tensor(target))
        assert float(positive.compute()) == pytest.approx(
            f1_score(target, scores.argmax(1), zero_division=0.0), abs=1e-6
        )
