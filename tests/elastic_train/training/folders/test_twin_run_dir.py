"""Two jobs with one run.dir and different run ids: one trains, the other exits with 2 and names the first one's id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.live.test_live import (
    etcd,
    history,
    launch,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
pytestmark = pytest.mark.slow
NUM_STEPS = 75


def test_a_second_job_ends_before_it_trains(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """Otherwise the two would fence each other off in turn (24 terms, twice the steps) without any message."""
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=120.0, until=known)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    job = launch(first, etcd, config, ranks=1)
    until_whole(tmp_path / "run", 1)
    assert launch(second, etcd, config, ranks=1).wait(PATIENCE_S) != 0
    known.touch()
    said = (second / "node.log").read_text()
    assert f"the job of run id {first.name!r}" in said and "is at work here" in said
    assert "exitcode  : 2" in said or "exitcode: 2" in said, said
    assert job.wait(PATIENCE_S) == 0
    assert {line["term"] for line in history(tmp_path / "run")} == {1}
    assert weights(collect(tmp_path / "run")) == undisturbed(NUM_STEPS)
