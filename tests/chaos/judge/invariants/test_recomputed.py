"""A record's early stopping and metrics are recomputed from the logged validations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.judge.delivery.claims import claims
from chaos.judge.evidence.applied import shape_of, validated_every
from chaos.judge.evidence.run_files import Evidence, Line, collect
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.written.complete import check_pointers
from chaos.judge.invariants.written.recomputed import check_improvement, check_metrics
from tests.chaos.recorded import record

LOSSES = {5: 0.5, 10: 0.25, 15: 0.375, 20: 0.25}


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Return a run that validated every five steps, and would have stopped early."""
    run = collect(record(tmp_path_factory.mktemp("recomputed") / "run") / "faulted")
    stopping = {"metric": "min loss", "patience": 3, "min_delta": 0.0}
    lines = [{"t": 0.0, "step": step, "values": {"validation/loss": loss}} for step, loss in LOSSES.items()]
    return replace(
        run, config={**run.config, "validation": {"every": "5 steps", "early_stopping": stopping}}, metrics={1: lines}
    )


def improvement(best: float, best_step: int, validated_at: int, num_since: int) -> Line:
    said = {"best": best, "best_step": best_step, "validated_at": validated_at, "num_since": num_since}
    return {"metric": "min loss", **said}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (7, improvement(0.5, 5, 5, 0)),
        (10, improvement(0.5, 5, 5, 0)),  # made before the validation of its step
        (10, improvement(0.25, 10, 10, 0)),
        (22, improvement(0.25, 10, 20, 2)),  # an equal one is not better
    ],
)
def test_the_best_validation_is_worked_out_from_what_was_logged(validated: Evidence, step: int, said: Line) -> None:
    assert check_improvement(validated, "a record", {"step": step, "improvement": said})
    for name, value in said.items():
        wrong = {**said, name: f"{value}x" if isinstance(value, str) else value + 5}  # type: ignore[operator]
        with pytest.raises(Violated, match="a record says"):
            check_improvement(validated, "a record", {"step": step, "improvement": wrong})
    with pytest.raises(Violated, match="last"):
        check_improvement(validated, "a record", {"step": 22})


def test_validations_by_epoch_are_due_at_their_last_steps(validated: Evidence) -> None:
    steps = shape_of(validated).steps_of(2)
    for keys, every in (({"every": "2 epochs"}, steps), ({"every": "5 steps"}, 5), ({}, None)):
        assert validated_every(replace(validated, config={**validated.config, "validation": keys})) == every


def test_what_was_not_logged_is_not_worked_out(validated: Evidence) -> None:
    """Rank 0 may die before it logs; a job that compares no validations has none in its records."""
    said = improvement(0.125, 25, 25, 0)
    assert not check_improvement(validated, "a record", {"step": 26, "improvement": said})
    plain = replace(validated, config={**validated.config, "validation": {"every": "5 steps", "early_stopping": None}})
    with pytest.raises(Violated, match="compares no validations"):
        check_improvement(plain, "a record", {"step": 26, "improvement": said})


def test_a_job_may_end_early_only_where_logged_validations_say_so(validated: Evidence) -> None:
    """Six of 600 epochs were applied: up to the fourth validation in a row without an improvement."""
    stopping = {"metric": "min loss", "patience": 4, "min_delta": 0.0}
    config = {**validated.config, "epochs": 600, "validation": {"every": "5 steps", "early_stopping": stopping}}
    said = improvement(0.25, 10, 30, 4)
    result = {**(validated.result or {}), "ended_by": "early stopping", "improvement": said}
    last = max(validated.commits, key=lambda commit: commit.key)
    others = [commit for commit in validated.commits if commit is not last]
    commits = [*others, replace(last, fields={**(last.fields or {}), "improvement": said})]
    for later, is_right in (({25: 0.25, 30: 0.5}, True), ({25: 0.25, 30: 0.125}, False), ({25: 0.25}, None)):
        lines: list[Line] = [
            {"t": 0.0, "step": step, "values": {"validation/loss": loss}} for step, loss in {**LOSSES, **later}.items()
        ]
        run = replace(validated, config=config, result=result, commits=commits, metrics={3: lines})
        assert shape_of(run).total_steps == 30
        if is_right:
            assert "ended by early stopping" in claims(run, None)
        else:
            with pytest.raises(
                Unknown if is_right is None else Violated,
                match="early stopping, and not all" if is_right is None else "by the logged",
            ):
                claims(run, None)


def test_metrics_are_those_of_a_logged_validation(validated: Evidence) -> None:
    """It is the newest one in the record's lineage: term 1 logged one, and applied the next step."""
    record: Line = {"step": 12, "intervals": [{"term": 1, "lo": 0, "hi": 12}], "metrics": {"loss": 0.25}}
    assert check_metrics(validated, "a record", record)
    for metrics in ({"loss": 0.375}, {"loss": 0.5}, {}):
        with pytest.raises(Violated, match=r"no validation up to its step|went through the validation of step 10"):
            check_metrics(validated, "a record", {**record, "metrics": metrics})
    later = {"step": 27, "intervals": [{"term": 2, "lo": 0, "hi": 27}]}
    assert not check_metrics(validated, "a record", {**later, "metrics": {"loss": 0.125}}), "of step 25, not logged"
    again = {"step": 12, "intervals": [{"term": 1, "lo": 0, "hi": 10}, {"term": 2, "lo": 10, "hi": 12}]}
    for loss in (0.5, 0.25):
        assert check_metrics(validated, "a record", {**again, "metrics": {"loss": loss}}), "of step 10, or not yet"


def test_files_of_a_run_are_where_it_says(tmp_path: Path) -> None:
    """A head is one of the run's commits, at its step; names outside the run are no evidence."""
    folder = record(tmp_path / "run") / "faulted"
    run = collect(folder)
    for step, is_right in ((30, True), (25, False)):
        (folder / "head.json").write_text(f'{{"commit": "commits/00000003-000000000030.json", "step": {step}}}')
        if is_right:
            check_pointers(run)
        else:
            with pytest.raises(Violated, match=r"head.json names .* of step 25, which is of step 30"):
                check_pointers(run)
