"""Early stopping in live jobs: a rank's death during validation changes neither the last step nor the bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import memory_job, memory_live
from tests.elastic_train.training.jobs import CLASSIFIER, average_of, config, result, succeed
from tests.memory_job import Loss

EVERY, PATIENCE = 5, 3
JOB: dict[str, object] = {
    **CLASSIFIER,
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "ema_decay": 0.9},
    "validation": {
        "every": f"{EVERY} steps",
        "weights": "ema",
        "early_stopping": {"metric": "max loss", "patience": PATIENCE},  # the loss falls: the first one is the best
    },
    "max_steps": 100_000,
}


@pytest.mark.slow
def test_a_validation_that_a_fault_ends_is_done_again(tmp_path: Path, rows: Path) -> None:
    """The survivors, whose weights and averages are sharded, repeat the validation before they train on."""
    succeed(memory_job.start([config(tmp_path / "alone", rows, JOB)]))
    assert result(tmp_path / "alone")["step"] == EVERY * (1 + PATIENCE)
    job = [config(tmp_path, rows, JOB), "--parallel.shards", "parameters"]
    done = memory_live.start(job, num_ranks=3, losses=[Loss(1, 2, "validate")])
    assert sorted(done.codes) == [-9, 0, 0, 0], done.output
    assert "early stopping after step" in done.output and result(tmp_path)["term"] != 1
    for key in ("step", "ended_by", "improvement", "weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(tmp_path / "alone")[key], key
    assert average_of(tmp_path) == average_of(tmp_path / "alone")
