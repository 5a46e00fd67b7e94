"""Cells of two and four ranks that share one device, over gloo and NCCL: one hash, and a lost rank costs no step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_live import (
    etcd,
    launch,
    leave,
    lose_ranks,
    nothing_left,
    steps_of,
    until_whole,
    weights,
)
from tests.gpu.conftest import DEVICE
from tests.gpu.test_training import hash_of, write_job

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = pytest.mark.slow
Parallel = Mapping[str, object]
GLOO, NCCL = "chaos.tasks.paced_language", "tests.gpu.nccl_task"
TASKS = [  # two groups, which share runs to compare with: one would take longer than all other tests
    pytest.param(tasks, id=name, marks=pytest.mark.xdist_group(f"gpu-cells-{name}"))
    for name, tasks in (("gloo", GLOO), ("nccl", NCCL))
]
MODEL = {"vocabulary": 64, "dim": 32, "depth": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1, "tied": False}
EXPERTS = {**MODEL, "hidden": 48, "experts": 4, "shared_hidden": 16}
SEQUENCE = {"tensor": 2, "sequence": True}


def keys_of(rows: Path, parallel: Parallel, tasks: str = GLOO, lane_ms: float = 0.0) -> dict[str, object]:
    """Return a language model's keys of a configuration."""
    params = {"model": EXPERTS if "expert" in parallel else MODEL, "max_tokens": 16, "lane_ms": lane_ms}
    data = {"train": str(rows / "train"), "validation": str(rows / "validation"), "too_long": "truncate"}
    task = {"path": f"{tasks}:PacedLanguage", "params": params}
    return {"task": task, "data": data, "parallel": dict(parallel), "optimizer": {"lr": 0.01, "ema_decay": 0.9}}


@pytest.fixture(scope="module")
def hash_without(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Callable[[Parallel], object]:
    """The hash of one cell with some degrees and without shards, over gloo, or of one rank."""
    known = dict[str, object]()

    def found(parallel: Parallel) -> object:
        if (key := str(parallel)) not in known:
            num_ranks = None if parallel.keys() <= {"expert"} else 2
            folder = tmp_path_factory.mktemp("without")
            known[key] = hash_of(folder, rows, DEVICE, num_ranks, **keys_of(rows, parallel))
        return known[key]

    return found


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize(
    ("parallel", "num_ranks", "without"),
    [
        ({"tensor": 2}, 4, {"tensor": 2}),
        ({**SEQUENCE, "shards": "parameters"}, 4, SEQUENCE),
        ({"pipeline": 2}, 2, {}),
        ({"pipeline": 2, "schedule": "interleaved", "shards": "optimizer"}, 4, {}),
        ({"expert": 2}, 2, {"expert": 1}),
        ({"context": 2, "shards": "optimizer"}, 4, {"context": 2}),
    ],
    ids=str,
)
def test_cells_that_share_a_device_have_one_hash(
    tmp_path: Path,
    rows: Path,
    device: str,
    hash_without: Callable[[Parallel], object],
    parallel: Parallel,
    num_ranks: int,
    without: Parallel,
    tasks: str,
) -> None:
    found = hash_of(tmp_path, rows, device, num_ranks, **keys_of(rows, parallel, tasks))
    assert found == hash_without(without)


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize(
    ("parallel", "num_ranks", "without"),
    [({"context": 2}, 2, {"context": 2}), ({"pipeline": 2, "shards": "gradients"}, 4, {})],
    ids=["one cell", "two cells"],
)
def test_a_rank_of_a_cell_that_dies_costs_no_step(
    tmp_path: Path,
    rows: Path,
    etcd: EtcdServer,
    device: str,
    parallel: Parallel,
    num_ranks: int,
    without: Parallel,
    tasks: str,
) -> None:
    """In a backward pass, while its peers' devices are at exchanges with it; others go on with what they hold."""
    points = tmp_path / "points"
    points.mkdir()
    config = write_job(tmp_path, rows, device, steps=100_000, **keys_of(rows, parallel, tasks, lane_ms=40.0))
    job = launch(tmp_path, etcd, config, ranks=num_ranks, nnodes="1:1", **{VARIABLE: str(points)})
    try:
        term, _ = until_whole(tmp_path / "run", num_ranks, least=2)
        lose_ranks(tmp_path, points, num_ranks, [("backward", "kill")])
        run = leave(job, tmp_path)
    finally:
        job.kill()
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert restored and not run.of("rollback")
    num = 2 if without else None
    keys = keys_of(rows, without)
    assert weights(run) == hash_of(tmp_path / "alone", rows, device, num, steps=steps_of(run), **keys)
