"""Of two nodes, one has different validation data: it is rejected, and the other's result keeps its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.conftest import PATIENCE_S, start, write_rows
from tests.elastic_train.training.live.test_live import (
    etcd,
    history,
    launch_alone,
    nothing_left,
    until_whole,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["etcd", "nothing_left"]  # fixtures
STEPS = 120


def test_a_node_with_another_validation_set_is_turned_away(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """The rejected node exits with 2, prints both digests and is not restarted; the other loses no step."""
    known = tmp_path / "known"
    config = write_config(tmp_path, rows, STEPS, lane_ms=60.0, until=known)
    other = write_rows(tmp_path / "other", 101, seed=3)
    first = launch_alone(tmp_path, etcd, config, "first", "--data.validation", str(rows / "validation"))
    until_whole(tmp_path / "run", 1)
    second = launch_alone(tmp_path, etcd, config, "second", "--data.validation", str(other))
    assert second.wait(PATIENCE_S) == 2, (tmp_path / "second.log").read_text()
    [said] = [line for line in (tmp_path / "second.log").read_text().splitlines() if line.startswith("error: ")]
    assert said.startswith("error: the validation set's digest is ") and said.endswith("all nodes must have the same")
    assert first.poll() is None
    known.touch()
    assert first.wait(240) == 0, (tmp_path / "first.log").read_text()[-2000:]
    lines = history(tmp_path / "run")
    assert not [line for line in lines if line["op"] == "rollback"]
    alone = start([write_config(tmp_path / "alone", rows, STEPS, lane_ms=0.0)])
    assert alone.code == 0, alone.output
    results = [json.loads((folder / "run" / "result.json").read_text()) for folder in (tmp_path, tmp_path / "alone")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["metrics"] == results[1]["metrics"]
