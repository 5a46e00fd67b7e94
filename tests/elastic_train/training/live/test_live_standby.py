"""A live node with a frozen or killed standby process still replaces workers that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.services.etcd_cluster import EtcdCluster
from rendezvous import EtcdServer
from rendezvous.process_table import children_of, name_of
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    eventually,
    launch,
    nothing_left,
    until_whole,
    write_config,
)

pytestmark = pytest.mark.slow
__all__ = ["nothing_left"]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdCluster(num_members=1) as cluster:
        yield cluster.members[0]


@pytest.mark.long
def test_a_node_whose_standby_process_is_frozen_or_killed_replaces_its_workers(
    tmp_path: Path, rows: Path, etcd: EtcdServer
) -> None:
    """No worker waits for SIGCONT or dies with the standby process, and the node starts another standby process."""
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, ENDLESS), ranks=2)
    term, ranks = until_whole(tmp_path / "run", 2)
    assert {name_of(pid) for pid in ranks.values()} == {"worker"}

    def standby() -> int | None:
        return next((pid for pid in children_of(job.pid) if name_of(pid) == "standby"), None)

    for number in (signal.SIGSTOP, signal.SIGKILL):
        first = standby()
        assert first is not None
        os.kill(first, number)
        for rank in (0, 1):
            os.kill(ranks[rank], signal.SIGKILL)
            term, ranks = until_whole(tmp_path / "run", 2, above=term)
        eventually(lambda before=first: standby() not in (None, before), "another")  # type: ignore[misc]
    log = (tmp_path / "node.log").read_text()
    assert "the standby process failed" in log and "stopped or swapped out" in log
    assert "the standby process was killed" in log
