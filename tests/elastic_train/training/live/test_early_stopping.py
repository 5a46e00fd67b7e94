"""Early stopping in live jobs: a rank's death during validation changes neither the last step nor the bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic_train.system.failpoints import VARIABLE, arm
from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import average_of, result, succeed
from tests.elastic_train.training.live.test_live import (
    JOB,
    etcd,
    finish,
    launch,
    nothing_left,
    write_config,
)
from tests.memory_job import start

__all__ = ["etcd", "nothing_left"]  # fixtures
EVERY, PATIENCE = 15, 3
RECIPE = {
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "ema_decay": 0.9},
    "validation": {
        "every": f"{EVERY} steps",
        "weights": "ema",
        "early_stopping": {"metric": "max loss", "patience": PATIENCE},
    },
}


def job(folder: Path, rows: Path) -> str:
    """Write the configuration of an endless job; its monitored loss falls, so that the first validation is the best."""
    path = Path(write_config(folder, rows, 100_000, lane_ms=0.0))
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **JOB, **RECIPE}))
    return str(path)


@pytest.mark.slow
def test_a_validation_that_a_fault_ends_is_done_again(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """The survivors, whose weights and averages are sharded, repeat the validation before they train on."""
    succeed(start([job(tmp_path / "alone", rows)]))
    assert result(tmp_path / "alone")["step"] == EVERY * (1 + PATIENCE)
    points = tmp_path / "points"
    points.mkdir()
    arm(points, "validate", "kill", 2)  # before the job starts: it may end before a test looks
    environ = {VARIABLE: str(points), "ELASTIC_TRAIN__PARALLEL__SHARDS": "parameters"}
    run, log = finish(launch(tmp_path, etcd, job(tmp_path, rows), ranks=3, **environ), tmp_path)
    assert {line["world"] for line in run.of("form") if line["term"] == 1} == {3}
    assert not (points / "validate").exists()
    assert "early stopping after step" in log and result(tmp_path)["term"] != 1
    for key in ("step", "ended_by", "improvement", "weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(tmp_path / "alone")[key], key
    assert average_of(tmp_path) == average_of(tmp_path / "alone")
