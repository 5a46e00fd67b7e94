"""A rank computes one gradient wrongly in a live world: an audit names it, and the result's bits are unaffected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from chaos.tasks.orders import done_by, give
from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import history
from tests.elastic_train.training.live.test_live import (
    etcd,
    eventually,
    finish,
    launch,
    nothing_left,
    undisturbed,
    weights,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left", "undisturbed"]  # fixtures
STEPS, FIRST = 30, 6


def test_a_rank_that_computes_wrongly_is_named(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The auditor's computation and one more by all ranks identify it; other steps have no event.

    `test_layouts` of whole runs has the layouts.
    """
    points, known = tmp_path / "points", tmp_path / "known"
    path = Path(write_config(tmp_path, rows, STEPS, lane_ms=100.0, until=known))
    tree = yaml.safe_load(path.read_text())
    tree["run"]["audit_lanes"] = 1
    path.write_text(yaml.safe_dump(tree))
    points.mkdir()
    job = launch(tmp_path, etcd, str(path), ranks=3, nnodes="1:1", ELASTIC_FAILPOINTS=str(points))
    eventually(lambda: any(int(str(line["step"])) >= FIRST for line in history(tmp_path, "step")), f"step {FIRST}")
    assert give(points, "flip_gradient")
    eventually(lambda: done_by(points, "flip_gradient") is not None, "a gradient that is wrong")
    known.touch()
    run, log = finish(job, tmp_path)
    [pid] = re.findall(r"process (\d+) flipped a bit of the gradient", str(done_by(points, "flip_gradient")))
    [event] = [line for line in run.of("event") if line["kind"] == "wrong_gradient"]
    ranks = {line["pid"]: line["rank"] for line in run.of("form")}
    assert event["of_rank"] == ranks[int(pid)], log
    assert (event["value"], event["usual"]) == (1, 4)
    assert event["lane"] in range(4) and len(event["samples"]) == 6
    assert not run.of("rollback")
    assert weights(run) == undisturbed(STEPS)
