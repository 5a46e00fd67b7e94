"""Cells that lose ranks: nobody gives up an applied step while each part of the state is left, and no bit differs."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import Evidence
from chaos.judge.invariants.whole_run import check_kept
from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from tests.conftest import start
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_live import (
    JOB,
    etcd,
    eventually,
    finish,
    launch,
    nothing_left,
    until_whole,
    weights,
)

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live cells")]  # one run to compare with
STEPS = 45
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}
PARAMS = {"model": MODEL, "max_tokens": 16}


def write_config(folder: Path, rows: Path, until: Path, sizes: Mapping[str, object] = MODEL, **parallel: object) -> str:
    """Write a job of cells of two ranks by default, whose lanes take longer until a file exists."""
    params = {**PARAMS, "model": sizes, "lane_ms": 65.0, "until": str(until)}
    tree = {
        **JOB,
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"},
        "task": {"path": "tests.tasks:PacedLanguage", "params": params},
        "parallel": parallel or {"tensor": 2},
        "max_steps": STEPS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


@pytest.fixture(scope="module")
def one_cell(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> object:
    """The hash of the weights of an undisturbed run of one cell."""
    folder = tmp_path_factory.mktemp("cell")
    until = folder / "until"
    until.touch()
    succeed(start([write_config(folder, rows, until)], num_ranks=2))
    return result(folder)["weights_sha256"]


@pytest.mark.parametrize("point", ["forward", "backward", "exchange", "apply", "applied", "hand-over", "commit"])
def test_a_rank_of_a_cell_that_dies_costs_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, one_cell: object, point: str
) -> None:
    """Other cells go on with their processes and parts; a new process takes the place, and gets the part.

    At the hand-over two ranks die, which may have held the same part: a third cell has it.
    """
    points, known = tmp_path / "points", tmp_path / "known"
    points.mkdir()
    num_cells = 3 if point == "hand-over" else 2
    num_ranks = 2 * num_cells
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, known), ranks=num_ranks, **{VARIABLE: str(points)})
    term, ranks = until_whole(tmp_path / "run", num_ranks)
    arm(points, point, "kill")
    if point == "hand-over":
        os.kill(ranks[3], signal.SIGKILL)
    eventually(lambda: not (points / point).exists(), f"a fault at {point}")
    until_whole(tmp_path / "run", num_ranks, above=term)
    known.touch()
    run, log = finish(job, tmp_path)
    assert f"{num_cells} cells of 2 ranks" in log and "Traceback" not in log, log
    assert_kept_every_step(run, term)
    assert weights(run) == one_cell


def assert_kept_every_step(run: Evidence, term: int) -> None:
    check_kept(run)
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert restored and all(int(str(line["step"])) > 0 for line in restored)
    assert not run.of("rollback")
