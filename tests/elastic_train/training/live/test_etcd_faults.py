"""Live training during etcd faults: members continue in their world, since only forming a new world needs etcd."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.judge.invariants.whole_run import check_kept
from chaos.services.etcd_cluster import EtcdCluster, frozen
from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.membership.store import Put
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import start
from tests.elastic_train.training.live.test_live import (
    ENDLESS,
    eventually,
    history,
    launch,
    until_whole,
    weights,
    write_config,
)

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
OUTAGE_S = 20.0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_continues_whatever_breaks_in_etcd(tmp_path: Path, rows: Path) -> None:
    """The etcd leader dies; all members are down for 20 s; one stays silent while the history is compacted.

    None of these affects the world. Then, with that member still silent, a worker is killed: the job regroups, no
    survivor loses a step, and the result has the bits of an undisturbed run.
    """
    run = tmp_path / "run"
    with EtcdCluster() as cluster:
        job = launch(tmp_path, cluster, write_config(tmp_path, rows, ENDLESS), ranks=2, conf=",ttl=2")
        try:
            term, ranks = until_whole(run, 2)
            lose_leader(cluster, run)
            lose_all(cluster, run)
            follower = cluster.follower()
            with frozen(follower):
                compact([member for member in cluster.members if member is not follower])
                train_on(run, for_s=2 * OUTAGE_S / 3)
                assert terms(run) == {term}, "the world has outlived all that"
                os.kill(ranks[1], signal.SIGKILL)
                until_whole(run, 2, above=term)
            compact(cluster.members)
            train_on(run)
            leave(job)
        finally:
            job.kill()
    left = collect(run)
    assert left.result is not None, (tmp_path / "node.log").read_text()
    check_kept(left)
    alone = tmp_path / "alone"
    steps = int(str(left.result["step"]))
    assert start([write_config(alone, rows, steps, lane_ms=0.0)], timeout_s=PATIENCE_S).code == 0
    assert weights(left) == weights(collect(alone / "run"))


def lose_leader(cluster: EtcdCluster, run: Path) -> None:
    """Kill the leader; restart it once another member leads."""
    lost = cluster.leader()
    lost.kill()
    assert cluster.leader() is not lost
    train_on(run)
    lost.start()


def lose_all(cluster: EtcdCluster, run: Path) -> None:
    """Kill all members at once; restart them with the same data after 20 s."""
    cluster.kill()
    train_on(run, for_s=OUTAGE_S)
    cluster.start()
    train_on(run)


def compact(members: list[EtcdServer]) -> None:
    """Write, then compact all history up to that write, while the job's watches are open."""
    store = EtcdStore(etcd_options([member.endpoint for member in members]), give_up_after_s=PATIENCE_S)
    written = store.swap({"/elsewhere": Put("1")}, {})
    store._connection.client().compact(written)
    store.close()


def train_on(run: Path, *, for_s: float = 0.0, num_steps: int = 20) -> None:
    """Return after a number of seconds and a number of further steps."""
    began, before = time.monotonic(), len(steps_of(run))
    eventually(
        lambda: time.monotonic() - began >= for_s and len(steps_of(run)) >= before + num_steps,
        f"{num_steps} steps in {for_s} s",
        PATIENCE_S,
    )


def steps_of(run: Path) -> list[dict[str, int]]:
    return [line for line in history(run) if line["op"] == "step"]


def terms(run: Path) -> set[int]:
    return {line["term"] for line in history(run) if line["op"] == "form"}


def leave(job: ForkedWorker) -> None:
    """Ask the only node to leave: it commits its applied state."""
    job.send_signal(signal.SIGTERM)
    job.wait(PATIENCE_S)
