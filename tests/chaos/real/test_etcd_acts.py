"""Faults of etcd's members: one fault's end does not end another fault."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos.errors import RunError
from chaos.real.acts import etcd
from chaos.real.acts.etcd import lose_lease
from chaos.real.job import Job
from chaos.scenario.schedule import Due
from chaos.services.etcd_cluster import EtcdCluster
from rendezvous.etcd.options import etcd_options
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.records import Keys, encode
from rendezvous.membership.store import Put
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S

DUE = Due("lose_etcd_data", None, None, 0.0, for_s=1.0)


class Member:
    """A member of etcd that runs, or was killed."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid

    def kill(self) -> None:
        self.pid = None


def around(deleted: list[str], *pids: int | None) -> Job:
    """Return a job's etcd as its acts see it."""
    cluster = SimpleNamespace(members=[Member(pid) for pid in pids], delete_data=lambda: deleted.append("data"))
    return SimpleNamespace(around=SimpleNamespace(etcd=cluster))  # type: ignore[return-value]


def test_an_outage_waits_until_members_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise undoing the first fault would start the member that the second has just killed, or without its data."""
    monkeypatch.setattr(etcd, "_answers", lambda member: True)
    monkeypatch.setattr(etcd, "_mark", lambda members: True)
    deleted, mine = list[str](), os.getpid()
    job = around(deleted, mine, None, mine)
    assert etcd.lose_etcd_data(job, DUE) is None
    assert deleted == [] and job.around.etcd is not None and job.around.etcd.members[0].pid == mine
    job = around(deleted, mine, mine)
    done = etcd.lose_etcd_data(job, DUE)
    assert done is not None and done.pids == [mine, mine] and deleted == ["data"]


def test_a_soak_does_not_wait_for_ever_for_its_end(tmp_path: Path) -> None:
    """A job that hangs after the last fault is stuck, as is one that hangs before it."""
    last = time.time() - 100

    def waits(heal_s: float, undos: tuple[object, ...] = ()) -> None:
        job = SimpleNamespace(
            scenario=SimpleNamespace(soak=SimpleNamespace(heal_s=heal_s)),
            followed=SimpleNamespace(applied_at=last, step=7, term=2),
            _disturbed_at=0.0,
            _undos=undos,
            _logs=lambda: "its log",
        )
        Job.check_progress(job, "the job's end")  # type: ignore[arg-type]

    waits(300.0)
    waits(50.0, undos=(1,))
    with pytest.raises(RunError, match=r"the job's end did not come, and no step for 50 s \(step 7, term 2\)"):
        waits(50.0)


@pytest.mark.slow
@pytest.mark.parametrize(("sealed_at", "is_struck"), [(1700000000.25, True), (1700000009.5, False)])
def test_a_lease_is_lost_in_the_world_that_the_histories_know(sealed_at: float, is_struck: bool) -> None:
    """Etcd may have lost its data and count terms from 1 again, while the store continues."""
    with EtcdCluster(num_members=1) as cluster:
        store, keys = EtcdStore(etcd_options(cluster.endpoint), give_up_after_s=PATIENCE_S), Keys("job")
        lease = store.lease(PATIENCE_S)
        world = World(2, (Seat("a", num_workers=1),), "start", "127.0.0.1", 1, sealed_at=1700000000.25)
        store.swap({keys.world: Put(encode(world)), keys.member("a"): Put("{}", lease)}, {})
        node = SimpleNamespace(pids=lambda: [7], is_up=True, number=0)
        followed = SimpleNamespace(pids={0: 7}, term=189, sealed_at=sealed_at)
        around = SimpleNamespace(etcd=cluster, run_id="job")
        job = SimpleNamespace(around=around, nodes=[node], followed=followed, draws=random.Random(1))
        done = lose_lease(job, SimpleNamespace(target=0))  # type: ignore[arg-type]
        assert (done is not None) == is_struck
        assert (keys.member("a") in store.get(keys.member("a")).entries) != is_struck
        lease.abandon()
        store.close()
