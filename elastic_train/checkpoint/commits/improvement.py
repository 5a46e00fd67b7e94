"""Track validation results: the best value, and the number of validations since. Stored in commits, as early stopping
and the best commit depend on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastic_train.config.recipe import EarlyStoppingConfig, parse_best


@dataclass(frozen=True, slots=True)
class Improvement:
    """The best value of a metric (None if there was no finite one) and its step.

    `metric` is written 'min loss'. `validated_at` is the step of the last validation, `num_since` the number of
    consecutive validations without improvement.
    """

    metric: str
    best: float | None = None
    best_step: int = 0
    validated_at: int = 0
    num_since: int = 0

    def after(self, step: int, value: float | None, min_delta: float) -> Improvement:
        """Return the state after a validation at a step; repeated validations of a step count once.

        A validation without a value (None), as without targets, is neither an improvement nor a failure.
        """
        if step <= self.validated_at:
            return self
        if value is None:
            return replace(self, validated_at=step)
        if math.isfinite(value) and self._is_better(value, min_delta):
            return replace(self, best=value, best_step=step, validated_at=step, num_since=0)
        return replace(self, validated_at=step, num_since=self.num_since + 1)

    def _is_better(self, value: float, min_delta: float) -> bool:
        _, is_higher_better = parse_best(self.metric)
        gain = 0.0 if self.best is None else value - self.best if is_higher_better else self.best - value
        return self.best is None or (gain > 0.0 and gain >= min_delta)


def improvement_for(config: EarlyStoppingConfig | None, known: Improvement | None) -> Improvement | None:
    """Return the comparison of validations: the known one if its metric matches, else a new one; None if none are
    compared."""
    if config is None:
        return None
    return known if known is not None and known.metric == config.metric else Improvement(config.metric)


def is_exhausted(config: EarlyStoppingConfig | None, known: Improvement | None) -> bool:
    """Return True if enough consecutive validations brought no improvement to end training."""
    found = improvement_for(config, known)
    return config is not None and found is not None and found.num_since >= config.patience
