"""Training compares its coverage sums at the end of every epoch: a repeated or skipped sample ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

import elastic_train as et
from tests.conftest import start
from tests.elastic_train.training.jobs import CLASSIFIER, PARAMS, config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_ranks", [None, 2])
@pytest.mark.parametrize("how", ["repeat", "drop"])
def test_an_epoch_whose_samples_were_not_applied_once_each_is_the_last(
    tmp_path: Path, rows: Path, how: str, num_ranks: int | None
) -> None:
    """The error has the expected and actual sums, the exit code prevents restarts, no commit has the epoch's end."""
    task = {"path": "tests.tasks:Miscounts", "params": {**PARAMS, "how": how}}
    path = config(tmp_path, rows, {**CLASSIFIER, "task": task}, checkpoint={"every": "1 steps"})
    done = start([path], num_ranks=num_ranks)
    assert done.code == 65, done.output
    num_rows = et.load_manifest(str(rows / "train")).num_rows
    assert "the samples of epoch 0 were not applied once each" in done.output
    assert f"{num_rows:,} (sums " in done.output.partition("are expected")[0]
    head = et.discover(et.open_store(str(tmp_path / "run"))).head
    assert head is None or head.cursor.epoch == 0
    assert not (tmp_path / "run" / "result.json").exists()
