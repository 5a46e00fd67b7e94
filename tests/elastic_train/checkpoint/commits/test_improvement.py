"""Early stopping counts validations: each once, by the best value that was a number."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.checkpoint.commits.improvement import Improvement, improvement_for, is_exhausted
from elastic_train.config.recipe import EarlyStoppingConfig

values = st.lists(st.one_of(st.floats(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=30)


def after(metric: str, found: list[float], min_delta: float = 0.0) -> Improvement:
    known = Improvement(metric)
    for number, value in enumerate(found):
        known = known.after(10 * (number + 1), value, min_delta)
    return known


@given(values, st.booleans())
def test_the_best_is_the_first_of_the_best_numbers(found: list[float], is_higher_better: bool) -> None:
    numbers = [value for value in found if math.isfinite(value)]
    known = after("max score" if is_higher_better else "min score", found)
    best = (max if is_higher_better else min)(numbers, default=None)
    assert known.best == best
    assert known.best_step == (0 if best is None else 10 * (found.index(best) + 1))
    assert known.num_since == len(found) - known.best_step // 10


@given(values, st.floats(0, 2))
def test_a_validation_counts_once_and_a_small_gain_not_at_all(found: list[float], min_delta: float) -> None:
    known = after("min loss", found, min_delta)
    if found:
        again = known.after(10 * len(found), -100.0, min_delta)
        assert again == known, "the same step, validated again after a fault"
    if known.best is not None:
        assert known.after(1000, known.best - min_delta / 2, min_delta).num_since == (
            known.num_since + 1 if min_delta > 0 or known.best - min_delta / 2 == known.best else 0
        )


def test_another_metric_or_none_begins_again() -> None:
    """A configuration may change when a run is resumed: then values of another metric say nothing."""
    known = after("min loss", [1.0, 2.0, 2.0])
    config = EarlyStoppingConfig(metric="min loss", patience=2)
    assert is_exhausted(config, known) and not is_exhausted(config.model_copy(update={"patience": 3}), known)
    other = EarlyStoppingConfig(metric="max f1", patience=2)
    assert improvement_for(other, known) == Improvement("max f1") and not is_exhausted(other, known)
    assert improvement_for(None, known) is None and not is_exhausted(None, known)
    assert improvement_for(config, None) == Improvement("min loss")
