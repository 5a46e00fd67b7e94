"""Two jobs with one run.dir and different run ids: one trains, the other exits with 2 and names the first one's id."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.services.etcd_cluster import EtcdCluster
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.live.test_live import (
    eventually,
    history,
    launch,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

__all__ = ["nothing_left", "undisturbed"]  # fixtures
pytestmark = pytest.mark.slow
NUM_STEPS = 75


@pytest.fixture(scope="module")
def etcds() -> Iterator[list[EtcdServer]]:
    with EtcdCluster(num_members=1) as one, EtcdCluster(num_members=1) as other:
        yield [one.members[0], other.members[0]]


@pytest.mark.parametrize("num_etcds", [1, pytest.param(2, marks=pytest.mark.long)], ids=["one etcd", "an etcd each"])
def test_a_second_job_ends_before_it_trains(
    tmp_path: Path, rows: Path, etcds: list[EtcdServer], num_etcds: int, undisturbed: Callable[[int], object]
) -> None:
    """Otherwise the two would fence each other off in turn (24 terms, twice the steps) without any message."""
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=120.0, until=known)
    first, second = tmp_path / f"first-{num_etcds}", tmp_path / f"second-{num_etcds}"
    for folder in (first, second):
        folder.mkdir()
    job = launch(first, etcds[0], config, ranks=1)
    until_whole(tmp_path / "run", 1)
    assert launch(second, etcds[num_etcds - 1], config, ranks=1).wait(PATIENCE_S) != 0
    known.touch()
    said = (second / "node.log").read_text()
    assert f"the job of run id {first.name!r}" in said and "is at work here" in said
    assert "exitcode  : 2" in said or "exitcode: 2" in said, said
    assert job.wait(PATIENCE_S) == 0
    assert {line["term"] for line in history(tmp_path / "run")} == {1}
    assert weights(collect(tmp_path / "run")) == undisturbed(NUM_STEPS)


@pytest.mark.long
def test_a_job_that_another_one_has_fenced_off_ends(
    tmp_path: Path, rows: Path, etcds: list[EtcdServer], undisturbed: Callable[[int], object]
) -> None:
    """The first job is frozen while the second looks and starts; it resumes, sees the newer term, and exits."""
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, NUM_STEPS, lane_ms=120.0, until=known)
    first, second = tmp_path / "frozen", tmp_path / "newer"
    for folder in (first, second):
        folder.mkdir()
    frozen = launch(first, etcds[0], config, ranks=1, ELASTIC_TRAIN__HANG_TIMEOUT_S="600")
    _, workers = until_whole(tmp_path / "run", 1)
    for pid in (frozen.pid, workers[0]):
        os.kill(pid, signal.SIGSTOP)
    newer = launch(second, etcds[1], config, ranks=1)
    eventually(lambda: any(line["term"] == 2 for line in history(tmp_path / "run")), "the second job")
    for pid in (workers[0], frozen.pid):
        os.kill(pid, signal.SIGCONT)
    assert frozen.wait(PATIENCE_S) != 0
    known.touch()
    said = (first / "node.log").read_text()
    assert "the job of run id 'newer'" in said and "this one ends" in said
    assert newer.wait(PATIENCE_S) == 0
    assert "this job continues in its place" in (second / "node.log").read_text()
    assert max(line["term"] for line in history(tmp_path / "run")) == 2
    assert weights(collect(tmp_path / "run")) == undisturbed(NUM_STEPS)
