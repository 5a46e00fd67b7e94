"""A live node whose standby process is frozen: workers that die are seen, and others take their places."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.services.etcd_cluster import EtcdCluster
from chaos.services.torchrun_node import children_of
from rendezvous import EtcdServer
from tests.elastic_train.training.test_live import eventually, launch, nothing_left, until_whole, write_config
from tests.processes import parent_of

pytestmark = pytest.mark.slow
__all__ = ["nothing_left"]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdCluster(num_members=1) as cluster:
        yield cluster.members[0]


@pytest.mark.long
def test_a_node_with_a_frozen_standby_process_replaces_its_workers(
    tmp_path: Path, rows: Path, etcd: EtcdServer
) -> None:
    """One started by the agent itself, then one that was forked before: neither waits for SIGCONT."""
    job = launch(tmp_path, etcd, write_config(tmp_path, rows, 100_000), ranks=2, conf=",ttl=60", standby=True)
    term, ranks = until_whole(tmp_path / "run", 2)

    def standby() -> int | None:
        found = [pid for pid in children_of(job.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found[0] if found else None

    eventually(lambda: standby() is not None, "the standby process")
    first = standby()
    assert first is not None
    while parent_of(ranks[1]) != first:
        os.kill(ranks[1], signal.SIGKILL)  # the first ones die while the standby process still imports
        term, ranks = until_whole(tmp_path / "run", 2, above=term)
    os.kill(first, signal.SIGSTOP)
    for rank in (0, 1):
        os.kill(ranks[rank], signal.SIGKILL)
        term, ranks = until_whole(tmp_path / "run", 2, above=term)
    log = (tmp_path / "node.log").read_text()
    assert "the standby process failed" in log and "stopped or swapped out" in log
