"""Nodes whose etcd is down, refuses, or has lost its data: no node exits, and the next world forms."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import EtcdServer, MemoryStore
from rendezvous.errors import StoreRefusedError, StoreUnavailableError
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.membership import participant
from rendezvous.membership.latest_view import LatestView
from rendezvous.membership.records import Keys
from rendezvous.membership.store import Entry, Guards, Lease, Put, Snapshot, Writes
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.membership.participants import TTL_S, enter, make_node, meet_again
from tests.rendezvous.rendezvous_sides import patient

REAL_TTL_S = 10.0
"""TTL of leases on a real etcd: a machine may be busy for some seconds, and a test waits until they have expired."""


def test_a_finished_member_waits_for_an_etcd_that_is_away(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers have finished: nothing is raised, and the job is closed when etcd returns."""
    node, swap, refused = make_node(store, last_call_s=0.0), store.swap, list[Writes]()
    enter(node)

    def away(writes: Writes, guards: Guards) -> int | None:
        refused.append(writes)
        if len(refused) < 3:
            raise StoreUnavailableError("no etcd answers")
        return swap(writes, guards)

    monkeypatch.setattr(store, "swap", away)
    node.finish(PATIENCE_S)
    assert len(refused) > 3
    eventually(lambda: node.view.closed is not None, "the job is closed")


@pytest.mark.slow
def test_a_node_expelled_while_it_waits_outlives_an_etcd_that_does_not_answer(
    store: MemoryStore, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers again as soon as etcd grants leases again, and until then pauses between its tries."""
    node, granted, refused = make_node(store, least=2), store.lease, threading.Event()
    pauses, sleep = list[float](), time.sleep

    def refuse(ttl_s: float, *, renew: bool = True) -> Lease:
        refused.set()
        raise StoreUnavailableError("no leader")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(min(seconds, participant.LOOK_S))

    monkeypatch.setattr(participant.time, "sleep", pause)
    waiting = pool.submit(enter, node)
    eventually(lambda: node._own.lease is not None and node.view.member(node.id) is not None, "its registration")
    old = node.id
    monkeypatch.setattr(store, "lease", refuse)
    assert node._own.lease is not None
    node._own.lease.abandon()
    store.advance(TTL_S)
    assert refused.wait(PATIENCE_S)
    eventually(lambda: participant.LOOK_S in pauses, "a pause")
    monkeypatch.setattr(store, "lease", granted)
    other = pool.submit(enter, make_node(store, least=2))
    assert waiting.result(PATIENCE_S) == other.result(PATIENCE_S) and node.id != old


def test_a_node_frozen_while_it_registers_registers_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Etcd refuses a record on a lease that expired before its first use; that ends nobody."""
    node, swap, tries = make_node(store, most=1), store.swap, []

    def refuse_first(writes: Writes, guards: Guards) -> int | None:
        tries.append(writes)
        if len(tries) == 1:
            raise StoreRefusedError("requested lease not found")
        return swap(writes, guards)

    monkeypatch.setattr(store, "swap", refuse_first)
    assert enter(node) is not None and len(node.view.members) == 1


@pytest.mark.slow
def test_an_outage_of_etcd_does_not_end_a_world() -> None:
    """During and after an outage of etcd, a world's members stay in it, and a new round is possible."""
    with EtcdServer() as server, ThreadPoolExecutor(2) as pool:
        nodes = [make_node(patient(server.endpoint), ttl_s=REAL_TTL_S) for _ in range(2)]
        list(pool.map(enter, nodes))
        server.kill()
        threading.Event().wait(REAL_TTL_S + 1)
        assert [node.num_waiting() for node in nodes] == [0, 0]
        server.start()
        joins = list(pool.map(enter, nodes))
        assert joins[0] == joins[1] and joins[0] is not None and joins[0].cause == "restart"
        for node in nodes:
            node.leave()


@pytest.mark.slow
def test_members_rejoin_an_etcd_that_lost_its_data() -> None:
    """Its revisions restart at 1: the members notice, register once or twice each, and form the next world."""
    with EtcdServer() as server, ThreadPoolExecutor(2) as pool:
        stores = [patient(server.endpoint) for _ in range(2)]
        nodes = [make_node(store, ttl_s=REAL_TTL_S) for store in stores]
        list(pool.map(enter, nodes))
        for number in range(50):
            stores[0].swap({f"/elsewhere/{number}": Put("")}, {})
        server.kill()
        shutil.rmtree(server.data_dir / "member")
        server.start()
        eventually(lambda: all(node.num_waiting() for node in nodes), "the loss")
        joins = meet_again(nodes, pool)
        assert joins[0] == joins[1] and joins[0] is not None and len(joins[0].seats) == 2
        eventually(lambda: all(len(node.view.members) == 2 for node in nodes), "those that were registered twice")
        assert stores[0].get("/").revision < 20
        for node in nodes:
            node.leave()


def test_a_snapshot_from_before_a_data_loss_is_not_shown_after_it() -> None:
    """An answer from before the loss may arrive late, with a higher revision."""
    seen, lives = LatestView(Keys("job"), Snapshot(70, {})), DataLossDetector()
    assert lives.heard(lives.ask(), 70) == 0
    late, other = lives.ask(), lives.ask()
    assert lives.heard(lives.ask(), 3) == 1
    seen.show(Snapshot(3, {}, life=1))
    seen.show(Snapshot(80, {"/elsewhere": Entry("late", 80, 80)}, life=lives.heard(late, 80)))
    assert seen.now().snapshot == Snapshot(3, {}, life=1)
    seen.show(Snapshot(4, {}, life=lives.heard(other, 4)))  # asked in the old life, answered in the new one
    assert seen.now().snapshot == Snapshot(4, {}, life=1)
    assert lives.heard(lives.ask(), 5) == 1 and lives.heard(lives.ask(), 4) == 2
