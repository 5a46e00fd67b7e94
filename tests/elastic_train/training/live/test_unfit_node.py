"""A node whose CPU computes wrongly wants to join a running world: it is rejected by name; the world is unaffected."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.tasks.orders import done_by, give
from elastic_train.runs.glance import look
from elastic_train.system.failpoints import VARIABLE
from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S, eventually
from tests.elastic_train.training.live.test_live import (
    etcd,
    finish,
    launch,
    launch_alone,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)

pytestmark = pytest.mark.process
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
STEPS = 100
"""As many as take a minute at the pace of a job that has to last until two nodes have joined."""


def test_a_node_that_computes_wrongly_costs_a_world_nothing(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """One of its workers computes wrongly and none joins; the world is unchanged, and later accepts a healthy node.

    Its launcher exits with 71; its log names machine, check, both values and what to do, and `top` shows it.
    """
    until, points = tmp_path / "until", tmp_path / "points"
    config = write_config(tmp_path, rows, STEPS, lane_ms=150.0, until=until)
    job = launch(tmp_path, etcd, config, ranks=1)
    term, _ = until_whole(tmp_path / "run", 1)
    points.mkdir()
    assert give(points, "flip_product")
    unfit = launch_alone(tmp_path, etcd, config, "unfit", ranks=2, **{VARIABLE: str(points)})
    assert unfit.wait(PATIENCE_S) == 71
    assert str(done_by(points, "flip_product")).endswith("computes wrongly")
    log = (tmp_path / "unfit.log").read_text()
    assert f"node {socket.gethostname()} fails its health check and does not join" in log
    assert "computes wrongly: 1 element of 16384 of a product of whole numbers in float32" in log
    assert "has to be" in log and "take this machine out of use" in log
    assert any("left out: node" in what for _, what in look(tmp_path / "run").recent)
    launch_alone(tmp_path, etcd, config, "fit")
    assert until_whole(tmp_path / "run", 2)[0] == term + 1, "no world but those of nodes that are well"
    until.touch()
    run, _ = finish(job, tmp_path)
    assert weights(run) == undisturbed(STEPS)
    [noted] = {line["why"] for line in run.of("unfit")}
    assert "computes wrongly" in str(noted)


def test_a_node_whose_key_says_so_is_let_in_unexamined(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """The same node trains with `run.health_check: false`, which each node may set for itself."""
    config, points = write_config(tmp_path, rows, 100_000), tmp_path / "points"
    launch(tmp_path, etcd, config, ranks=1)
    until_whole(tmp_path / "run", 1)
    points.mkdir()
    assert give(points, "flip_product")
    environ = {VARIABLE: str(points), "ELASTIC_TRAIN__RUN__HEALTH_CHECK": "false"}
    launch_alone(tmp_path, etcd, config, "unexamined", **environ)
    eventually(lambda: done_by(points, "flip_product") is not None, "a worker that computes wrongly")
    until_whole(tmp_path / "run", 2)
