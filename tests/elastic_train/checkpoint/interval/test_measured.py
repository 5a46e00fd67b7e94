"""Measurements of faults and saves from histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint.interval.measured import faults_before, measured_saves
from elastic_train.checkpoint.interval.young_daly import Faults, SaveCost
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import FOLDER, lines_of
from tests.elastic_train.tracking.unqueued import Unqueued


def test_faults_are_the_terms_that_lost_applied_steps(tmp_path: Path) -> None:
    """Planned ends lose no step and do not count, nor do later terms, other ranks and unfinished histories."""
    for term, rank, lost in [(1, 0, None), (2, 0, 3), (2, 1, None), (3, 0, 0), (4, 0, 1), (7, 0, 5)]:
        history = History(Unqueued(), tmp_path, term, rank)
        resumed: dict[str, object] | None = None if lost is None else {"steps_lost": lost}
        history.restore(
            step=4,
            epoch=0,
            offset=4,
            commit="c",
            given_by=None,
            applied_by=None,
            seconds=0.1,
            skipped=[],
            resumed=resumed,
        )
        history.step(step=5, epoch=0, lo=5, hi=6, lanes=range(4), num_samples=4, world=2, loss=0.5)
        history.close()
    History(Unqueued(), tmp_path, 5, 0).close()
    found = faults_before(tmp_path, before_term=7)
    assert found.num == 2
    files = sorted((tmp_path / FOLDER).iterdir())
    lines = [line for path in files for line in lines_of(path.read_bytes())]
    times = [float(str(line["t"])) for line in lines if line["rank"] == 0 and int(str(line["term"])) < 7]
    assert found.trained_s == pytest.approx(sum(b - a for a, b in zip(times[::2], times[1::2], strict=True)))
    assert faults_before(tmp_path / "none", before_term=7) == Faults(0, 0.0)


def test_the_newest_saves_are_measured(tmp_path: Path) -> None:
    """They come from rank 0 of the newest terms, the last first; no save stalls longer than it takes."""
    for term, rank, saves in [(1, 0, [(1.0, 0.1)]), (2, 0, [(3.0, 0.3), (4.0, 5.0)]), (2, 1, [(9.0, 0.9)])]:
        history = History(Unqueued(), tmp_path, term, rank)
        for publish_s, stall_s in saves:
            history.commit(
                step=1,
                key="k",
                digest="d",
                parent=None,
                weights_sha256="w",
                created_at=0.0,
                seconds=publish_s,
                stall_s=stall_s,
            )
        history.close()
    assert measured_saves(tmp_path, 2) == [SaveCost(4.0, 4.0), SaveCost(0.3, 3.0)]
    assert measured_saves(tmp_path, 9) == [SaveCost(4.0, 4.0), SaveCost(0.3, 3.0), SaveCost(0.1, 1.0)]
    assert measured_saves(tmp_path / "none", 9) == []
