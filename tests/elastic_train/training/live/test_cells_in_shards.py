"""Cells with state in shards, be it the optimizer's or gradients, too, that lose ranks: while a copy lives no applied
step is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.elastic_train.training.jobs import result, succeed
from tests.elastic_train.training.live.test_cells import MODEL, assert_nothing_is_lost, write_config
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    etcd,
    eventually,
    history,
    launch,
    leave,
    nothing_left,
    steps_of,
    weights,
)
from tests.elastic_train.training.live.test_sharded import lose_a_share
from tests.memory_job import start

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = pytest.mark.slow
SHARDS = {"shards": "optimizer", "copies": 2}
HUNT = pytest.mark.hunt  # in memory: test_lost_ranks
LONG = pytest.mark.long  # those with gradients hold shares of the optimizer's state, too


@pytest.mark.parametrize(
    ("degrees", "num_cells", "places"),
    [
        pytest.param({"tensor": 2, "shards": "gradients"}, 3, ("backward 3", "exchange", "commit"), marks=HUNT),
        ({"pipeline": 2, "shards": "parameters"}, 2, ("forward 5", "backward 7", "applied")),
        pytest.param({"tensor": 2, "shards": "parameters"}, 2, ("backward 3",), marks=HUNT),
        pytest.param({"context": 2, "shards": "parameters"}, 2, ("backward 3", "applied"), marks=HUNT),
        pytest.param({"context": 2, "pipeline": 2}, 1, ("exchange 2",), marks=HUNT),
        pytest.param({"context": 2}, 2, ("backward", "exchange", "apply"), marks=LONG),
        pytest.param({"pipeline": 2, "shards": "gradients"}, 2, ("forward 5", "backward 7", "applied"), marks=LONG),
        pytest.param({"context": 2, "pipeline": 2}, 1, ("backward 7", "applied"), marks=LONG),
        pytest.param({"tensor": 2, "shards": "gradients"}, 3, ("applied",), marks=LONG),
        pytest.param({"tensor": 2, "shards": "parameters"}, 2, ("forward 5", "applied"), marks=LONG),
        pytest.param({"tensor": 2}, 2, ("backward", "exchange", "apply", "applied", "commit"), marks=LONG),
        pytest.param({"tensor": 2}, 3, ("exchange", "apply", "applied"), marks=LONG),
        pytest.param({"pipeline": 2}, 3, ("backward 7", "exchange 2", "apply 3", "applied"), marks=LONG),
    ],
)
def test_ranks_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, degrees: Mapping[str, object], num_cells: int, places: Sequence[str]
) -> None:
    """The others go on with what they hold; who takes the place gets its share from its column."""
    alone = {key: degrees.get(key, 1) for key in ("tensor", "context")}  # stages show in no bit
    assert_nothing_is_lost(tmp_path, rows, etcd, {**SHARDS, **degrees}, places, alone=alone, num_cells=num_cells)


@pytest.mark.long  # test_sharded has one without cells
def test_a_third_copy_has_what_two_have_lost(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """At the hand-over two ranks die, which may have held the same share."""
    parallel = {"tensor": 2, **SHARDS, "copies": 3}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, ["hand-over"], alone={"tensor": 2}, num_cells=3)


@pytest.mark.long  # test_sharded has one without cells
def test_without_a_second_copy_the_newest_commit_is_what_is_left(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """Although the other cell has all of the weights; it is said at the start, and no bit differs in the end."""
    parallel = {"tensor": 2, "shards": "optimizer", "copies": 1}
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, ENDLESS, parallel), ranks=4)
    try:
        eventually(lambda: any(line["op"] == "commit" for line in history(tmp_path / "run")), "a commit")
        term = lose_a_share(tmp_path / "run", 4)
        log = (tmp_path / "node.log").read_text()
        run = leave(job, tmp_path)
    finally:
        job.kill()
    assert "2 cells of 2 ranks, over which the optimizer's state of each place is held once" in log
    assert "Traceback" not in log, log
    restored = [line for line in run.of("restore") if int(str(line["term"])) > term]
    assert any(line.get("lost") for line in restored) and "all holders of" in log, log
    assert all(int(str(line["step"])) > 0 for line in restored)
    alone = write_config(tmp_path / "alone", rows, steps_of(run), {"tensor": 2}, MODEL)
    succeed(start([alone], num_ranks=2))
    assert weights(run) == result(tmp_path / "alone")["weights_sha256"]
