"""Validation metrics of language models, with integer states, which add up exactly over any world.

A separate module because torchmetrics takes over a second to import.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.tasks.metric_library import Metric

_UNIT = 1 << 20
"""Negative log-likelihoods are counted in units of 1 / this: 1e12 tokens of 8 nats each fit 64 bits."""
_MOST = 2.0**40
"""Most units of a token: those of a model that diverges, a million nats and more, would not fit."""


class TokenMetric(Metric):
    """A metric of each target's negative log-likelihood, and whether it is the most likely token; both (targets,)."""

    higher_is_better: bool | None = None
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.total.double() / self.count  # NaN without targets


class Perplexity(TokenMetric):
    """Exponential of the mean negative log-likelihood, without additions to the loss; infinite once one is huge."""

    higher_is_better = False
    num_huge: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_huge", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, likelihoods: Tensor, is_first: Tensor) -> None:
        units = (likelihoods.double() * _UNIT).round()
        self.total += units.clamp(max=_MOST).to(torch.int64).sum()
        self.count += len(likelihoods)
        self.num_huge += (units > _MOST).sum()

    def compute(self) -> Tensor:
        return (super().compute() / _UNIT).exp().masked_fill(self.num_huge > 0, torch.inf)


class TokenAccuracy(TokenMetric):
    """Share of targets that are the most likely token."""

    higher_is_better = True

    def update(self, likelihoods: Tensor, is_first: Tensor) -> None:
        self.total += is_first.sum()
        self.count += len(is_first)


class PreferenceAccuracy(TokenMetric):
    """Share of pairs whose chosen answer has become the likelier one, relative to the reference.

    Fed with the margin of each pair, and whether it is above 0; both (pairs,).
    """

    higher_is_better = True

    def update(self, margins: Tensor, is_preferred: Tensor) -> None:
        self.total += is_preferred.sum()
        self.count += len(margins)
