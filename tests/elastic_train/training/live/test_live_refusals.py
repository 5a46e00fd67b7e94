"""Live jobs with an etcd that answers with errors: out of space, or with changed users."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_live import (
    eventually,
    finish,
    launch,
    nothing_left,
    undisturbed,
    until_whole,
    weights,
    write_config,
)
from tests.rendezvous.etcd.test_refusals import QUOTA, fill, make_room

pytestmark = pytest.mark.slow
__all__ = ["nothing_left", "undisturbed"]


def test_a_worker_that_dies_while_etcd_is_full_ends_nobody(
    tmp_path: Path, rows: Path, undisturbed: Callable[[int], object]
) -> None:
    """The survivor and the new worker wait with the state and continue once there is space; no bit differs.

    The log names the alarm and the command that clears it.
    """
    full = tmp_path / "is over"  # steps are slow until then, so that some are left however long filling etcd takes
    with EtcdServer(flags=QUOTA) as server:
        job = launch(tmp_path, server, write_config(tmp_path, rows, 60, lane_ms=150.0, until=full), ranks=2)
        term, ranks = until_whole(tmp_path / "run", 2)
        fill(server)
        os.kill(ranks[1], signal.SIGKILL)
        eventually(lambda: (tmp_path / "node.log").read_text().count("etcdctl alarm disarm") >= 2, "both in the log")
        make_room(server)
        _, again = until_whole(tmp_path / "run", 2, above=term)
        full.touch()
        assert ranks[0] in again.values()
        run, log = finish(job, tmp_path)
    assert log.count("another is started in its place") == 1, log
    assert weights(run) == undisturbed(60)
