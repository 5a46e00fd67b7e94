"""Early stopping counts each validation once, relative to the best value that was a number."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.checkpoint.commits.lookup import find_trained
from elastic_train.checkpoint.commits.record import Improvement, improvement_for, is_exhausted
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.config.recipe import EarlyStoppingConfig, judged_by
from elastic_train.core.lineage import COMMITS
from elastic_train.errors import ConfigError
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.checkpoint.commit_samples import facts, small_state

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


def test_a_gain_of_exactly_min_delta_counts() -> None:
    """Differences of these values are exact."""
    known = after("min loss", [1.0], 0.25)
    assert known.after(20, 0.75, 0.25).best == 0.75
    assert known.after(20, 0.875, 0.25).best == 1.0


def test_another_metric_or_none_begins_again() -> None:
    """A resumed run may have another metric configured; the old metric's values then do not count."""
    known = after("min loss", [1.0, 2.0, 2.0])
    config = EarlyStoppingConfig(metric="min loss", patience=2)
    assert is_exhausted(config, known) and not is_exhausted(config.model_copy(update={"patience": 3}), known)
    other = EarlyStoppingConfig(metric="max f1", patience=2)
    assert improvement_for(other, known) == Improvement("max f1") and not is_exhausted(other, known)
    assert improvement_for(None, known) is None and not is_exhausted(None, known)
    assert improvement_for(config, None) == Improvement("min loss")


def test_a_run_that_keeps_its_best_state_is_known_by_it(tmp_path: Path) -> None:
    """Not by the commit that had the best value of any validation before it: that value is of other weights."""
    store = LocalStore(tmp_path)
    fence = StoreFence(store)
    writer, known = CommitWriter(store, fence, fence.claim(), None), Improvement("min loss")
    for step, loss, last in ((40, 0.3, 0.3), (50, None, 0.2), (60, 0.4, 0.4)):
        known = known if loss is None else known.after(step, loss, 0.0)
        writer.save(small_state(step), replace(facts(step), improvement=known, metrics={"loss": last}))
    store.create("configs/00000001.yaml", b"checkpoint: {keep_best: min loss}\n")
    record, why = find_trained(str(tmp_path), None)
    assert record.step == 40 and why is not None and "0.3" in why
    judged = judged_by(None, "min loss")
    assert judged is not None and not is_exhausted(judged, replace(known, num_since=10**9))
    own = EarlyStoppingConfig(patience=2)
    assert judged_by(own, "max f1") is own and judged_by(None, None) is None


@pytest.mark.parametrize("patience", [2, 3])
@pytest.mark.parametrize("is_url", [False, True])
def test_a_run_that_early_stopping_ended_is_known_by_its_best_commit(
    tmp_path: Path, patience: int, is_url: bool
) -> None:
    """Exceptions: another one is named, patience was left, or the best commit is gone, which the reason says."""
    store, url = LocalStore(tmp_path), f"file://{tmp_path}" if is_url else str(tmp_path)
    fence = StoreFence(store)
    writer = CommitWriter(store, fence, fence.claim(), None)
    known = Improvement("min loss")
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4), (4, 0.6)):
        known = known.after(step, loss, 0.0)
        writer.save(small_state(step), replace(facts(step), improvement=known))
    text = f"validation: {{early_stopping: {{metric: min loss, patience: {patience}}}}}\n"
    store.create("configs/00000001.yaml", text.encode())
    if not is_url:
        (tmp_path / "config.yaml").write_text(text)
    head, best = f"{COMMITS}00000001-{4:012d}.json", f"{COMMITS}00000001-{2:012d}.json"
    record, why = find_trained(url, None)
    if patience == 3:
        assert (record.key, why) == (head, None)
        return
    assert record.key == best and best in str(why) and "--commit newest takes step 4" in str(why)
    assert find_trained(url, "newest")[0].key == head and find_trained(url, "3")[0].step == 3
    store.delete(best)
    record, why = find_trained(url, None)
    assert record.key == head and "no intact commit of the best validation, step 2, is left" in str(why)


def test_a_run_that_keeps_its_best_commit_is_known_by_it(tmp_path: Path) -> None:
    """It uses keep_best's metric; the loss counts if a user asks for the best commit of a run that keeps none."""
    store = LocalStore(tmp_path)
    fence = StoreFence(store)
    writer = CommitWriter(store, fence, fence.claim(), None)
    with pytest.raises(ConfigError, match="no commits"):
        find_trained(str(tmp_path), "best")
    for step, loss, score in ((1, 0.5, 0.1), (2, 0.3, 0.2), (3, 0.4, 0.9), (4, 0.6, 0.9)):
        writer.save(small_state(step), replace(facts(step), metrics={"loss": loss, "score": score}))
    (tmp_path / "config.yaml").write_text("checkpoint: {keep_best: max score}\n")
    record, why = find_trained(str(tmp_path), None)
    assert record.step == 3, "the first of those that are as good"
    assert why is not None and "(max score: 0.9000)" in why and "--commit newest takes step 4" in why
    assert find_trained(str(tmp_path), "newest") == (find_trained(str(tmp_path), "4")[0], None)
    (tmp_path / "config.yaml").write_text("checkpoint: {}\n")
    assert find_trained(str(tmp_path), None)[0].step == 4 and find_trained(str(tmp_path), "best")[0].step == 2
    store.delete(find_trained(str(tmp_path), "best")[0].key)
    assert find_trained(str(tmp_path), "best")[0].step == 3


def test_of_equally_good_commits_of_one_step_the_newest_terms_is_the_best(tmp_path: Path) -> None:
    """A world that was asked to leave before its first step has committed the state that it began with again."""
    store, saved = LocalStore(tmp_path), replace(facts(1), metrics={"loss": 0.5})
    fence = StoreFence(store)
    first = CommitWriter(store, fence, fence.claim(), None).save(small_state(1), saved)
    writer = CommitWriter(store, fence, fence.claim(), first)
    again = writer.save(small_state(1), saved)
    writer.save(small_state(2), replace(facts(2), metrics={"loss": 0.75}))
    assert find_trained(str(tmp_path), "best")[0] == again


def test_a_validation_without_a_value_counts_neither_way() -> None:
    """A validation without targets is not best and uses up no patience; NaN is worse than all numbers."""
    known = Improvement("min loss").after(10, 1.0, 0.0).after(20, None, 0.0)
    assert (known.best, known.best_step, known.num_since, known.validated_at) == (1.0, 10, 0, 20)
    assert known.after(30, math.nan, 0.0).num_since == 1
