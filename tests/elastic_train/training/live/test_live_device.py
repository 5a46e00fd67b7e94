"""Live worlds whose ranks exchange between devices: peers die at each point of an exchange, and no bit differs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from chaos.judge.evidence.run_files import collect
from chaos.judge.invariants.whole_run import check_kept
from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_live import (
    PARAMS,
    etcd,
    eventually,
    launch,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
AROUND_AN_EXCHANGE = ("exchange", "applied")


def test_a_peer_lost_around_an_exchange_between_devices_costs_no_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """Before it, while survivors' devices are at it, and after it; killed there, or frozen for a while."""
    points = tmp_path / "points"
    points.mkdir()
    path = Path(write_config(tmp_path, rows, 100_000))
    params = {**PARAMS, "lane_ms": 10.0}
    path.write_text(
        yaml.safe_dump(
            {
                **yaml.safe_load(path.read_text()),
                "task": {"path": "tests.device_task:PacedClassifier", "params": params},
            }
        )
    )
    job = launch(tmp_path, etcd, str(path), ranks=3, nnodes="1:1", **{VARIABLE: str(points)})
    try:
        term = 0
        for point in AROUND_AN_EXCHANGE:
            term, ranks = until_whole(tmp_path / "run", 3, above=term)
            arm(points, point, "kill")
            eventually(lambda: not (points / point).exists(), f"a fault at {point}")  # noqa: B023 - called at once
        term, ranks = until_whole(tmp_path / "run", 3, above=term)
        os.kill(ranks[1], signal.SIGSTOP)
        term, _ = until_whole(tmp_path / "run", 2, above=term)
        os.kill(ranks[1], signal.SIGCONT)
        term, again = until_whole(tmp_path / "run", 3, above=term)
        assert set(again.values()) == set(ranks.values()), "the frozen process comes back with its device"
        job.send_signal(signal.SIGTERM)
        job.wait(60)
    finally:
        job.kill()
    run = collect(tmp_path / "run")
    assert run.result is not None, (tmp_path / "node.log").read_text()
    check_kept(run)
    assert weights(run) == undisturbed(int(str(run.result["step"])))
