"""Live worlds that exchange between devices: peers die at each point of an exchange, and no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_layouts import assert_nothing_is_lost
from tests.elastic_train.training.live.test_live import (
    PARAMS,
    etcd,
    launch,
    lose_peers,
    nothing_left,
    steps_of,
    undisturbed,
    weights,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
AROUND_AN_EXCHANGE = ("exchange", "applied")


def test_a_peer_lost_around_an_exchange_between_devices_costs_no_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The peer is killed or frozen before, during or after the survivors' device exchange."""
    points = tmp_path / "points"
    points.mkdir()
    path = Path(write_config(tmp_path, rows, 100_000))
    params = {**PARAMS, "lane_ms": 10.0}
    task = {"path": "tests.device_task:PacedClassifier", "params": params}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": task}))
    job = launch(tmp_path, etcd, str(path), ranks=3, nnodes="1:1", **{VARIABLE: str(points)})
    try:
        run = lose_peers(job, tmp_path, points, AROUND_AN_EXCHANGE)
    finally:
        job.kill()
    assert weights(run) == undisturbed(steps_of(run))


def test_a_stage_lost_between_devices_costs_no_applied_step(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """Meanwhile its peers' devices run exchanges of several groups, all of which end."""
    parallel = {"pipeline": 2, "shards": "gradients"}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, 2, [("backward", "kill")], tasks="tests.device_task")
