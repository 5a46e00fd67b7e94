"""Nodes over a store: registering, sealing, losing a member, blame, the end; in memory, without waiting for a clock."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import EtcdServer, EtcdStore, MemoryStore, TooFewNodesError, etcd_options
from rendezvous.errors import LimitsDifferError, StoreRefusedError, StoreUnavailableError
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.identity import Answer
from rendezvous.membership import known_agents, participant
from rendezvous.membership.dead_agents import is_looking
from rendezvous.membership.decisions import Policy
from rendezvous.membership.latest_view import LatestView
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Keys, World
from rendezvous.membership.store import (
    Entry,
    Guards,
    Lease,
    Put,
    Snapshot,
    Writes,
)
from tests.rendezvous.rendezvous_sides import eventually

TTL_S = 3.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def make_node(
    store: MemoryStore | EtcdStore, *, most: int = 2, least: int = 1, last_call_s: float = 5.0
) -> Participant:
    return Participant(store, "job", Policy(least, most, last_call_s), Place("host", "127.0.0.1", 1), ttl_s=TTL_S)


def enter(node: Participant, timeout_s: float = 10.0) -> World | None:
    node.join(timeout_s)
    return node.next_world(lambda seal: ("127.0.0.1", 1), timeout_s)


def pair(store: MemoryStore, pool: ThreadPoolExecutor) -> tuple[Participant, Participant]:
    """Two nodes in their first world, the leader first."""
    nodes = [make_node(store), make_node(store)]
    worlds = list(pool.map(enter, nodes))
    assert worlds[0] == worlds[1] and worlds[0] is not None and worlds[0].cause == "start"
    first, second = sorted(nodes, key=lambda node: worlds[0].rank_of(node.id) or 0)
    return first, second


def crash(store: MemoryStore, node: Participant) -> None:
    """End a node as SIGKILL does: nothing is revoked, and its lease runs out."""
    node._left.set()
    assert node._own.lease is not None
    node._own.lease.abandon()
    store.advance(TTL_S)


def test_nodes_started_together_make_one_world(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """Two nodes that may be one or two wait for each other, and not for the last call."""
    first, second = pair(store, pool)
    assert first.num_waiting() == second.num_waiting() == 0
    assert [seat.member for seat in store_world(first).seats] == [first.id, second.id]


def store_world(node: Participant) -> World:
    assert node.world is not None
    return node.world


def test_a_lost_lease_ends_the_world(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """When a lease ends the survivor is asked for a new round, and is alone in a world of the next term."""
    first, second = pair(store, pool)
    crash(store, second)
    eventually(lambda: first.num_waiting() > 0, "the loss is noticed")
    assert not first.is_only_growing()
    world = enter(first)
    assert world is not None and (world.term, world.cause, len(world.seats)) == (2, "lost", 1)


def test_a_joiner_is_admitted(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node that comes later makes the others start a new round, and all meet in the next term."""
    first = make_node(store, last_call_s=0.0)
    enter(first)
    second = make_node(store)
    joining = pool.submit(enter, second)
    eventually(lambda: first.num_waiting() > 0, "the joiner is noticed")
    assert first.is_only_growing()
    world = enter(first)
    assert world is not None and world == joining.result(10) and (world.term, world.cause) == (2, "joined")


def test_a_leader_can_step_back(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """It keeps its lease and loses no time; the other leads the next world, and it has the last seat."""
    first, second = pair(store, pool)
    old_id, lease = first.id, first._own.lease

    def step_back() -> World | None:
        first.join(10.0, as_last=True)
        return first.next_world(lambda seal: ("127.0.0.1", 1), 10.0)

    stepping = pool.submit(step_back)
    eventually(second.is_broken, "the world is over")
    world = enter(second)
    assert world is not None and world == stepping.result(10)
    assert [seat.member for seat in world.seats] == [second.id, first.id]
    assert first.id != old_id and first._own.lease is lease and first.view.member(old_id) is None
    first.leave()
    assert store.get(first.keys.members).entries.keys() == {first.keys.member(second.id)}


def test_a_lost_node_is_free_for_the_survivor(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A survivor whose workers failed waits for the lease of the dead node, and does not pay."""
    first, second = pair(store, pool)
    second._left.set()
    blamed = pool.submit(first.is_to_blame)
    eventually(lambda: first.view.failure is not None, "the failure is reported")
    assert not blamed.done()
    crash(store, second)
    assert blamed.result(10) is False


def test_one_node_pays_for_a_failed_worker(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """When workers of both nodes fail and both nodes live, exactly one pays, without waiting for a lease."""
    assert sorted(pool.map(Participant.is_to_blame, pair(store, pool))) == [False, True]


def test_the_last_to_finish_closes_the_job(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """Finished nodes wait for each other; then the job is closed, and a late joiner is sent away."""
    first, second = pair(store, pool)
    waiting = pool.submit(first.finish, 10.0)
    eventually(lambda: any(member.done for member in second.view.members), "the first is done")
    assert not waiting.done()
    second.finish(10.0)
    waiting.result(10)
    assert enter(make_node(store)) is None


def test_a_node_that_finishes_long_after_another_is_not_restarted(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node that has finished leaves when its patience ends; the other works on, and closes the job."""
    first, second = pair(store, pool)
    first.finish(0.0)
    assert second.view.closed is None
    first.leave()
    eventually(lambda: second.view.member(first.id) is None, "it has left")
    assert second.num_waiting() == 0 and not second.is_broken()
    second.finish(10.0)
    assert enter(make_node(store)) is None


def test_nodes_without_patience_that_finish_together_close_the_job(
    store: MemoryStore, pool: ThreadPoolExecutor
) -> None:
    """Whoever is the last to say that it has finished closes the job, however short it may wait."""
    nodes = pair(store, pool)
    list(pool.map(lambda node: (node.finish(0.0), node.leave()), nodes))
    assert enter(make_node(store)) is None


def test_a_finished_member_waits_for_an_etcd_that_is_away(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers have done is done: nothing is raised, and the job is closed when etcd is back."""
    node, swap, refused = make_node(store, last_call_s=0.0), store.swap, list[Writes]()
    enter(node)

    def away(writes: Writes, guards: Guards) -> int | None:
        refused.append(writes)
        if len(refused) < 3:
            raise StoreUnavailableError("no etcd answers")
        return swap(writes, guards)

    monkeypatch.setattr(store, "swap", away)
    node.finish(10.0)
    assert len(refused) > 3
    eventually(lambda: node.view.closed is not None, "the job is closed")


def test_a_closed_run_id_can_be_used_again(store: MemoryStore) -> None:
    """The mark of a finished job expires, and terms continue from where they were."""
    node = make_node(store, last_call_s=0.0)
    enter(node)
    node.finish(10.0)
    node.leave()
    store.advance(300.0)
    world = enter(make_node(store, last_call_s=0.0))
    assert world is not None and (world.term, world.cause) == (2, "start")


def test_leaving_is_noticed_at_once(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node that leaves revokes its lease: no time has to pass."""
    first, second = pair(store, pool)
    second.leave()
    eventually(lambda: first.num_waiting() > 0, "the leave is noticed")


def test_an_expelled_node_joins_as_a_new_one(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node whose lease ended while it was frozen is asked for a new round and gets a new id."""
    first, second = pair(store, pool)
    old = second.id
    assert second._own.lease is not None
    second._own.lease.abandon()
    store.advance(TTL_S)
    eventually(lambda: second.num_waiting() > 0 and first.num_waiting() > 0, "both notice")
    enter(first)
    back = pool.submit(enter, second)
    eventually(lambda: first.num_waiting() > 0, "the return is noticed")
    assert enter(first) == back.result(10) and second.id != old


def test_a_node_expelled_while_it_waits_outlives_an_etcd_that_does_not_answer(
    store: MemoryStore, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers again as soon as etcd grants a lease again."""
    node, granted, refused = make_node(store, least=2), store.lease, threading.Event()

    def refuse(ttl_s: float, *, renew: bool = True) -> Lease:
        refused.set()
        raise StoreUnavailableError("no leader")

    waiting = pool.submit(enter, node)
    eventually(lambda: node._own.lease is not None and node.view.member(node.id) is not None, "its registration")
    old = node.id
    monkeypatch.setattr(store, "lease", refuse)
    assert node._own.lease is not None
    node._own.lease.abandon()
    store.advance(TTL_S)
    assert refused.wait(10)
    monkeypatch.setattr(store, "lease", granted)
    other = pool.submit(enter, make_node(store, least=2))
    assert waiting.result(10) == other.result(10) and node.id != old


def test_a_node_frozen_while_it_registers_registers_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Etcd refuses a record on a lease that ended before its first use; that ends nobody."""
    node, swap, tries = make_node(store, most=1), store.swap, []

    def refuse_first(writes: Writes, guards: Guards) -> int | None:
        tries.append(writes)
        if len(tries) == 1:
            raise StoreRefusedError("requested lease not found")
        return swap(writes, guards)

    monkeypatch.setattr(store, "swap", refuse_first)
    assert enter(node) is not None and len(node.view.members) == 1


@pytest.mark.slow
def test_too_few_nodes_is_an_error(store: MemoryStore) -> None:
    """Below the minimum a node gives up after its time, and says how many came."""
    with pytest.raises(TooFewNodesError, match="1 of at least 2 nodes"):
        enter(make_node(store, most=3, least=2), timeout_s=2.0)


@pytest.mark.slow
def test_an_outage_of_etcd_does_not_end_a_world() -> None:
    """While etcd is away, and after it is back, the members of a world stay in it, and a new round is possible."""
    with EtcdServer() as server, ThreadPoolExecutor(2) as pool:
        nodes = [make_node(EtcdStore(etcd_options(server.endpoint))) for _ in range(2)]
        list(pool.map(enter, nodes))
        server.kill()
        threading.Event().wait(TTL_S + 1)
        assert [node.num_waiting() for node in nodes] == [0, 0]
        server.start()
        joins = list(pool.map(enter, nodes))
        assert joins[0] == joins[1] and joins[0] is not None and joins[0].cause == "restart"
        for node in nodes:
            node.leave()


@pytest.mark.slow
def test_members_rejoin_an_etcd_that_lost_its_data() -> None:
    """Its revisions begin at 1 again: the members notice, register once or twice each, and form the next world."""
    with EtcdServer() as server, ThreadPoolExecutor(2) as pool:
        stores = [EtcdStore(etcd_options(server.endpoint)) for _ in range(2)]
        nodes = [make_node(store) for store in stores]
        list(pool.map(enter, nodes))
        for number in range(50):
            stores[0].swap({f"/elsewhere/{number}": Put("")}, {})
        server.kill()
        shutil.rmtree(server.data_dir / "member")
        server.start()
        eventually(lambda: all(node.num_waiting() for node in nodes), "the loss")
        joins = list(pool.map(enter, nodes))
        assert joins[0] == joins[1] and joins[0] is not None and len(joins[0].seats) == 2
        eventually(lambda: all(len(node.view.members) == 2 for node in nodes), "those that were registered twice")
        assert stores[0].get("/").revision < 20
        for node in nodes:
            node.leave()


def test_a_snapshot_from_before_a_data_loss_is_not_shown_after_it() -> None:
    """An answer of the etcd that was may arrive late, and has the higher revision."""
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


@pytest.mark.slow
def test_a_leader_seals_what_it_has_seen(store: MemoryStore) -> None:
    """A member that dies between the decision and the transaction makes it fail; the leader decides again."""
    leader, late = make_node(store), make_node(store)
    leader.join(10.0)
    late.join(10.0)
    eventually(lambda: len(leader.view.members) == 2, "both members")

    def dies_now() -> bool:
        if leader.view.member(late.id) is not None:
            late.leave()
            eventually(lambda: leader.view.member(late.id) is None, "the loss")
        return False

    world = leader.next_world(lambda seal: ("127.0.0.1", 1), 10.0, dies_now)
    assert world is not None and [seat.member for seat in world.seats] == [leader.id]
    leader.leave()


def test_one_worker_of_a_node_looks_for_agents_that_are_gone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of those that wait; a thousand would ask one another's machines ten times a second."""
    asked: list[str] = []
    monkeypatch.setattr(known_agents, "refuses", lambda agent, _: bool(asked.append(agent)))

    def ask(*_: object) -> Answer:
        return "itself"

    places = [Place("host", "127.0.0.1", 1, node=name, agent=f"{name}:1") for name in ("here", "here", "there")]
    nodes = [Participant(store, "job", Policy(1, 2, 0.0), place, ttl_s=TTL_S, ask=ask) for place in places]
    for node in nodes:
        node.join(10.0)
    eventually(lambda: all(len(node.view.members) == 3 for node in nodes), "all members")
    assert nodes[0].next_world(lambda seal: ("127.0.0.1", 1), 10.0) is not None
    eventually(lambda: all(node.view.term == 1 for node in nodes), "the world")
    for node in nodes[:2]:
        node.join(10.0)
    eventually(lambda: all(len(node.view.ready) == 2 for node in nodes), "those who wait")
    snapshot = nodes[0]._latest.now().snapshot
    assert [is_looking(node.view, node.id) for node in nodes[:2]] == [True, False]
    assert not nodes[0]._bury(snapshot) and asked == [], "a refusal says nothing of an agent that was never met"
    nodes[0].agents.ask([nodes[0].view.members[2]], 1.0)
    assert not nodes[0]._bury(snapshot) and asked == ["there:1"]
    for node in nodes:
        node.leave()


def test_a_node_with_other_limits_is_refused_and_the_others_do_not_notice(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with --nnodes 1:2 and one with 1:3 once made room for a third, and none, twice a second."""
    monkeypatch.setattr(participant, "LEASE_MARGIN_S", -TTL_S)
    first, other = make_node(store, last_call_s=0.0), make_node(store, most=3, last_call_s=0.0)
    first.join(10.0)
    assert first.next_world(lambda seal: ("127.0.0.1", 1), 10.0) is not None
    eventually(lambda: other.view.term == 1, "the world")
    with pytest.raises(LimitsDifferError, match="is 1:3 here, and 1:2 on the nodes that run already"):
        other.join(10.0)
    assert len(first.view.members) == 1 and first.num_waiting() == 0
    first.leave()
    other.leave()


def test_a_job_may_be_started_with_other_limits_while_the_leases_of_its_dead_members_last(store: MemoryStore) -> None:
    """Those who were killed are not asked: the newcomer waits until they are gone."""
    dead, other = make_node(store, last_call_s=0.0), make_node(store, most=3, last_call_s=0.0)
    dead.join(10.0)
    eventually(lambda: len(other.view.members) == 1, "the first")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(other.join, 10.0)
        dead.leave()  # as its lease's end
        joining.result(10.0)
    assert [member.nodes for member in other.view.members] == ["1:3"]
    other.leave()


def test_of_two_that_come_together_with_other_limits_the_second_is_refused(store: MemoryStore) -> None:
    """Neither saw the other before it registered; no world is made of both."""
    first, other = make_node(store, last_call_s=0.0), make_node(store, most=3, last_call_s=0.0)
    first.join(10.0)
    other._own.register()
    eventually(lambda: len(first.view.members) == len(other.view.members) == 2, "both")
    with pytest.raises(LimitsDifferError):
        other.next_world(lambda seal: ("127.0.0.1", 1), 10.0)
    world = first.next_world(lambda seal: ("127.0.0.1", 1), 10.0)
    assert world is not None and [seat.member for seat in world.seats] == [first.id]
    first.leave()
    other.leave()
