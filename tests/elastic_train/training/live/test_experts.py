"""Cells whose ranks have some of the experts each, and lose some: no applied step is given up, and no bit differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from tests.conftest import start
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_cells import MODEL, assert_kept_every_step, write_config
from tests.elastic_train.training.live.test_live import (
    etcd,
    eventually,
    finish,
    launch,
    nothing_left,
    until_whole,
    weights,
)

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live experts")]  # one run to compare with
SIZES = {**MODEL, "experts": 4, "hidden": 16}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> object:
    """The hash of the weights of an undisturbed run of one process, which has all experts."""
    folder = tmp_path_factory.mktemp("whole")
    until = folder / "until"
    until.touch()
    succeed(start([write_config(folder, rows, until, SIZES, expert=1)], num_ranks=1))
    return result(folder)["weights_sha256"]


@pytest.mark.parametrize("point", ["backward", "exchange", "apply"])
def test_a_rank_with_experts_that_dies_costs_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, one_rank: object, point: str
) -> None:
    """In the midst of a turn its cell waits for its tokens, and the other cell for its gradients."""
    points, known = tmp_path / "points", tmp_path / "known"
    points.mkdir()
    job = launch(
        tmp_path, etcd, write_config(tmp_path, rows, known, SIZES, expert=2), ranks=4, **{VARIABLE: str(points)}
    )
    term, _ = until_whole(tmp_path / "run", 4)
    arm(points, point, "kill")
    eventually(lambda: not (points / point).exists(), f"a fault at {point}")
    until_whole(tmp_path / "run", 4, above=term)
    known.touch()
    run, log = finish(job, tmp_path)
    assert "2 cells of 2 ranks" in log and "Traceback" not in log, log
    assert_kept_every_step(run, term)
    assert weights(run) == one_rank
