"""Sharded stages that lose ranks, in processes: while a copy of each shard survives, no step is lost, no bit differs.

Every layout loses ranks at every point in memory (`whole_runs.test_lost_ranks`).
"""

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
pytestmark = pytest.mark.slow
Parallel = Mapping[str, object]
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "tied": False}


def write_config(
    folder: Path,
    rows: Path,
    steps: int,
    parallel: Parallel,
    tasks: str = "chaos.tasks.paced_language",
) -> str:
    """Write the configuration of a language model; an endless job's lanes take longer."""
    params = {"model": MODEL, "max_tokens": 16, "lane_ms": 40.0 if steps == ENDLESS else 0.0}
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
    parallel: Parallel,
    num_cells: int,
    faults: Sequence[tuple[str, str]],
    tasks: str = "chaos.tasks.paced_language",
) -> None:
    """End a rank of a cell by each fault (place and kind) in turn; the others continue with their processes and shards.

    A new process replaces the rank and receives its shard. The final weights equal those of an undisturbed job of as
    many steps, with one cell and nothing sharded.
    """
    points = folder / "points"
    points.mkdir()
    config = write_config(folder, rows, ENDLESS, parallel, tasks)
    per_cell = cell_size({"parallel": parallel})
    size = per_cell * num_cells
    job = launch(folder, etcd, config, ranks=size, **{VARIABLE: str(points)})
    try:
        term, _ = until_whole(folder / "run", size, least=2)
        lose_ranks(folder, points, size, faults)
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
    assert len({line["term"] for line in restored}) >= len(faults)
    assert all(int(str(line["step"])) > 0 for line in restored) and not run.of("rollback")
    succeed(start([write_config(folder / "alone", rows, steps_of(run), {})]))
    assert weights(run) == result(folder / "alone")["weights_sha256"]


@pytest.mark.hunt  # in memory each time, and with devices
def test_ranks_that_die_cost_no_applied_step(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """Stages gather weights while the other cell waits for gradients."""
    parallel = {"pipeline": 2, "shards": "parameters", "copies": 2}
    faults = [("forward 5", "kill"), ("backward 7", "kill"), ("applied", "kill")]
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, 2, faults)
