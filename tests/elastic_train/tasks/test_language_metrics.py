"""Metrics of language models at the ends of their range."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_train.tasks.language_metrics import Perplexity


@pytest.mark.parametrize(
    ("likelihoods", "expected"),
    [([1.0, 3.0], math.exp(2)), ([1.0, math.inf], math.inf), ([1e15], math.inf), ([60_000.0], math.inf)],
)
def test_perplexity_is_no_best_value_where_a_target_cannot_be(likelihoods: list[float], expected: float) -> None:
    """A model that gives a target no probability, by a mask over its vocabulary, has an infinite one, in any world."""
    metric = Perplexity()
    metric.update(torch.tensor(likelihoods), torch.zeros(len(likelihoods), dtype=torch.bool))
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-5)
