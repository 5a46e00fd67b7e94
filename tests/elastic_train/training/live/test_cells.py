"""Cells that lose ranks: nobody gives up an applied step while each part of the state is left, and no bit differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from chaos.judge.invariants.rollbacks import copies
from chaos.judge.invariants.whole_run import check_kept
from chaos.judge.job_shape import cell_size
from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    JOB,
    etcd,
    launch,
    leave,
    lose_ranks,
    nothing_left,
    steps_of,
    until_whole,
    weights,
)
from tests.memory_job import start

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.hunt]  # in memory: test_lost_ranks
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}


def write_config(
    folder: Path,
    rows: Path,
    steps: int,
    parallel: Mapping[str, object],
    sizes: Mapping[str, object] = MODEL,
    tasks: str = "chaos.tasks.paced_language",
) -> str:
    """Write a job of a language model, of transformers if `sizes` say so; where it is endless, each lane takes a while
    longer."""
    model = {"hf": {"config": sizes}} if "model_type" in sizes else {"model": sizes}
    params = {**model, "max_tokens": 16, "lane_ms": 40.0 if steps == ENDLESS else 0.0}
    tree = {
        **JOB,
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"train": str(rows / "train"), "too_long": "truncate"},
        "validation": {},
        "task": {"path": f"{tasks}:PacedLanguage", "params": params},
        "parallel": parallel,
        "max_steps": steps,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def assert_nothing_is_lost(
    folder: Path,
    rows: Path,
    etcd: EtcdServer,
    parallel: Mapping[str, object],
    places: Sequence[str],
    *,
    alone: Mapping[str, object],
    num_cells: int = 2,
    sizes: Mapping[str, object] = MODEL,
    tasks: str = "chaos.tasks.paced_language",
) -> None:
    """Kill a rank of cells at each place in turn: others go on with their processes and parts.

    A new process takes the place, and gets the part. In the end weights are those of as many steps of an undisturbed
    job, `alone`.
    """
    points = folder / "points"
    points.mkdir()
    config = write_config(folder, rows, ENDLESS, parallel, sizes, tasks)
    per_cell = cell_size({"parallel": parallel})
    size = per_cell * num_cells
    job = launch(folder, etcd, config, ranks=size, **{VARIABLE: str(points)})
    try:
        term, _ = until_whole(folder / "run", size, least=2)
        lose_ranks(folder, points, size, [(place, "kill") for place in places])
        log = (folder / "node.log").read_text()
        run = leave(job, folder)
    finally:
        job.kill()
    whole = f"{num_cells} cells of {per_cell} ranks" if num_cells > 1 else f"{per_cell} ranks make one cell, and"
    assert whole in log or (num_cells == 1 and f"1 cell of {per_cell} ranks" in log), log
    assert "Traceback" not in log, log
    check_kept(run)
    copies(run)
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert len({line["term"] for line in restored}) >= len(places)
    assert all(int(str(line["step"])) > 0 for line in restored) and not run.of("rollback")
    undisturbed = write_config(folder / "alone", rows, steps_of(run), alone, sizes)
    succeed(start([undisturbed], num_ranks=cell_size({"parallel": alone})))
    assert weights(run) == result(folder / "alone")["weights_sha256"]


@pytest.mark.parametrize(
    "places",
    [("backward", "apply", "commit"), pytest.param(("forward", "exchange", "applied"), marks=pytest.mark.long)],
)
def test_ranks_of_cells_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    assert_nothing_is_lost(tmp_path, rows, etcd, {"tensor": 2}, places, alone={"tensor": 2})


@pytest.mark.parametrize("places", [["backward"], pytest.param(["forward", "applied"], marks=pytest.mark.long)])
def test_ranks_that_share_out_tokens_and_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    parallel = {"tensor": 2, "sequence": True}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, places, alone=parallel)


@pytest.mark.long  # of stages, and of ranks that are no cells, there is one that is not
def test_a_third_cell_has_what_two_have_lost(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """At the hand-over two ranks die, which may have held the same part."""
    assert_nothing_is_lost(tmp_path, rows, etcd, {"tensor": 2}, ["hand-over"], alone={"tensor": 2}, num_cells=3)
