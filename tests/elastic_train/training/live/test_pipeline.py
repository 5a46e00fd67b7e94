"""Pipelines that lose a stage: nobody gives up an applied step while another cell has it, and no bit differs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from tests.conftest import start
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_cells import assert_kept_every_step, write_config
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
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live pipeline")]  # one run to compare with


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> object:
    """The hash of the weights of an undisturbed run of one process, which holds the whole model."""
    folder = tmp_path_factory.mktemp("one")
    until = folder / "until"
    until.touch()
    succeed(start([write_config(folder, rows, until, pipeline=1)]))
    return result(folder)["weights_sha256"]


@pytest.mark.parametrize(
    ("point", "nth", "kind"),
    [
        ("forward", 1, "1f1b"),
        ("forward", 8, "gpipe"),
        ("backward", 7, "1f1b"),
        ("exchange", 2, "1f1b"),
        ("apply", 3, "1f1b"),
        ("applied", 1, "1f1b"),
        ("hand-over", 1, "1f1b"),
    ],
)
def test_a_stage_that_dies_costs_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, one_process: object, point: str, nth: int, kind: str
) -> None:
    """In whichever pass of its schedule; a new process takes the place, and gets the stage from another cell.

    At the hand-over two ranks die, which may have held the same stage: a third cell has it.
    """
    points, known = tmp_path / "points", tmp_path / "known"
    points.mkdir()
    num_cells = 3 if point == "hand-over" else 2
    num_ranks = 2 * num_cells
    config = write_config(tmp_path, rows, known, pipeline=2, schedule=kind)
    job = launch(tmp_path, etcd, config, ranks=num_ranks, **{VARIABLE: str(points)})
    term, ranks = until_whole(tmp_path / "run", num_ranks)
    arm(points, point, "kill", nth)
    if point == "hand-over":
        os.kill(ranks[3], signal.SIGKILL)
    eventually(lambda: not (points / point).exists(), f"a fault at {point}")
    until_whole(tmp_path / "run", num_ranks, above=term)
    known.touch()
    run, log = finish(job, tmp_path)
    assert f"{num_cells} cells of 2 ranks" in log and "Traceback" not in log, log
    assert_kept_every_step(run, term)
    assert weights(run) == one_process
