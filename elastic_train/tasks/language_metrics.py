"""Validation metrics of language models; their states are integers, so that they add up exactly over any world.

A separate module because torchmetrics takes over a second to import.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.tasks.metric_library import Metric

_UNIT, _MOST = 1 << 20, 1 << 16
"""A token's negative log-likelihood is counted in parts of 1/_UNIT: 1e12 tokens of 8 nats each fit 64 bits. From _MOST
nats on it counts as infinite."""


class TokenMetric(Metric):
    """Is fed with each target's negative log-likelihood, and whether it is the most likely token; both (targets,)."""

    higher_is_better: bool | None = None
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.total.double() / self.count  # NaN without a target


class Perplexity(TokenMetric):
    """The exponential of the mean negative log-likelihood, without what a loss adds to it; infinite if that of one
    target is."""

    higher_is_better = False
    num_infinite: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_infinite", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, likelihoods: Tensor, is_first: Tensor) -> None:
        is_infinite = likelihoods >= _MOST
        self.total += (likelihoods.masked_fill(is_infinite, 0).double() * _UNIT).round().to(torch.int64).sum()
        self.count += len(likelihoods)
        self.num_infinite += is_infinite.sum()

    def compute(self) -> Tensor:
        finite = (super().compute() / _UNIT).exp()
        return torch.where(self.num_infinite > 0, torch.inf, finite)


class TokenAccuracy(TokenMetric):
    """The share of targets that are the most likely token."""

    higher_is_better = True

    def update(self, likelihoods: Tensor, is_first: Tensor) -> None:
        self.total += is_first.sum()
        self.count += len(is_first)
