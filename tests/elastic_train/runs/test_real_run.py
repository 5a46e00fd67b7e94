"""The report reads the files of a real job of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.insight.phases import PHASES
from elastic_train.runs.page import render
from elastic_train.runs.report import report_on
from tests.conftest import start
from tests.elastic_train.training.jobs import CLASSIFIER, config, succeed

pytestmark = pytest.mark.slow


def test_a_real_run_has_a_whole_report(tmp_path: Path, rows: Path) -> None:
    """Its time tiles, all of its figures are drawn, and its commits prove the coverage."""
    succeed(start([config(tmp_path, rows, CLASSIFIER), "--monitoring.phases-every-steps", "2"], num_ranks=2))
    report = report_on(str(tmp_path / "run"))
    assert (report.state, report.step, report.changes) == ("done", report.result["step"], [])
    assert report.seconds == pytest.approx(report.story.ended - report.story.began)
    assert report.spent["steps"] > 0 and report.spent["validation"] > 0 and report.spent["ending"] > 0
    assert report.coverage.proven and not report.coverage.wrong
    assert set(report.phases_s()) == {*PHASES, "hidden"}
    assert report.memory is not None and [one.rank for one in report.memory.ranks] == [0, 1]
    for facts in (one.facts for one in report.memory.ranks):
        taken = facts.parts
        assert taken["weights"] == taken["gradients"] > 0 and taken["optimizer"] == pytest.approx(
            2 * taken["weights"], rel=0.01
        )
        assert facts.peak > facts.program + sum(taken.values()) > facts.program > 0
    assert report.samples_per_s is not None and report.environment()["hosts"]
    page = render([report])
    assert page.count("<svg") >= 8 and "Cannot be drawn" not in page
