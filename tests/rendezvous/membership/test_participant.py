"""Nodes on a store: registering, sealing, losing a member, blame, limits, the end; in memory, without a clock."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import MemoryStore, TooFewNodesError, outage_log
from rendezvous.agent.identity import Answer
from rendezvous.errors import LimitsDifferError, StoppedWaiting
from rendezvous.membership import known_agents, participant
from rendezvous.membership.dead_agents import is_looking
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.rules.cells import CellShape
from rendezvous.membership.rules.decisions import Seal
from rendezvous.membership.store import Guards, Writes
from rendezvous.membership.worlds import World
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.membership.participants import TTL_S, crash, enter, make_node, pair, store_world


def test_nodes_started_together_make_one_world(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """Two nodes with limits 1:2 wait for each other, and not for the last call."""
    first, second = pair(store, pool)
    assert first.num_waiting() == second.num_waiting() == 0
    assert [seat.member for seat in store_world(first).seats] == [first.id, second.id]


def test_a_lost_lease_ends_the_world(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """When a lease expires the survivor is asked for a new round, and is alone in a world of the next term."""
    first, second = pair(store, pool)
    crash(store, second)
    eventually(lambda: first.num_waiting() > 0, "the loss is noticed")
    assert not first.is_only_growing()
    world = enter(first)
    assert world is not None and (world.term, world.cause, len(world.seats)) == (2, "lost", 1)


def test_a_joiner_is_admitted(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """When a node joins later the others start a new round, and all meet in the next term."""
    first = make_node(store, last_call_s=0.0)
    enter(first)
    second = make_node(store)
    joining = pool.submit(enter, second)
    eventually(lambda: first.num_waiting() > 0, "the joiner is noticed")
    assert first.is_only_growing()
    world = enter(first)
    assert world is not None and world == joining.result(PATIENCE_S) and (world.term, world.cause) == (2, "joined")


def test_a_leader_can_step_back(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """It keeps its lease and loses no time; the other leads the next world, and it has the last seat."""
    first, second = pair(store, pool)
    old_id, lease = first.id, first._own.lease

    def step_back() -> World | None:
        first.join(PATIENCE_S, as_last=True)
        return first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)

    stepping = pool.submit(step_back)
    eventually(second.is_broken, "the world is over")
    world = enter(second)
    assert world is not None and world == stepping.result(PATIENCE_S)
    assert [seat.member for seat in world.seats] == [second.id, first.id]
    assert first.id != old_id and first._own.lease is lease and first.view.member(old_id) is None
    first.leave()
    assert store.get(first.keys.members).entries.keys() == {first.keys.member(second.id)}


def test_a_member_of_a_cell_says_which_rank_it_had(store: MemoryStore) -> None:
    """It may have stepped back repeatedly, its lease may have expired, or etcd may have lost its world; but it has no
    rank to speak of before it has that rank's state."""
    policy = Policy(1, 2, 0.0, cell=CellShape(1, 2))
    places = [Place("host", "127.0.0.1", 1, node="a", node_members=2) for _ in range(2)]
    first, second = (Participant(store, "job", policy, place, ttl_s=TTL_S) for place in places)
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    world = first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    assert world is not None and second.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) == world
    first.join(PATIENCE_S)
    mine = first.view.member(first.id)
    assert mine is not None and (mine.rank, mine.rank_in) == (-1, 0), "it never got its state"
    second.join(PATIENCE_S)
    world = first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    assert world is not None and second.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) == world
    first.note_state(is_there=True)
    second.note_state(is_there=True)
    first.join(PATIENCE_S)
    mine = first.view.member(first.id)
    assert mine is not None and (mine.rank, mine.rank_in) == (0, world.term), "the world may be overwritten"
    old_id = second.id
    for _ in range(2):
        second.join(PATIENCE_S, as_last=True)
        mine = second.view.member(second.id)
        assert mine is not None and mine.id != old_id and (mine.rank, mine.rank_in) == (1, world.term)
    crash(store, second)
    eventually(lambda: second._own.is_gone, "the lease is lost")
    second.join(PATIENCE_S)
    mine = second.view.member(second.id)
    assert mine is not None and (mine.rank, mine.rank_in) == (1, world.term)
    second.note_state(is_there=False)
    second.join(PATIENCE_S)
    mine = second._own.mine(second._latest.now())
    assert mine is not None and (mine.rank, mine.rank_in) == (-1, 0), "it has come to another part"


def test_a_member_that_cannot_host_a_world_lets_another_lead(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A member without a free port or file keeps its lease, and is in the world that the other seals."""
    nodes = [make_node(store), make_node(store)]

    def refuse(seal: Seal) -> tuple[str, int]:
        raise OSError("Too many open files")

    nodes[0].join(PATIENCE_S)
    eventually(lambda: len(nodes[1].view.members) == 1, "the first")
    nodes[1].join(PATIENCE_S)
    waiting = pool.submit(nodes[0].next_world, refuse, PATIENCE_S)
    world = nodes[1].next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    assert world is not None and world == waiting.result(PATIENCE_S)
    assert [seat.member for seat in world.seats] == [node.id for node in reversed(nodes)]


def test_the_only_member_hosts_its_world_as_soon_as_it_can(store: MemoryStore) -> None:
    """Nobody else could host it; a transient fault does not end the member."""
    node, tries = make_node(store, last_call_s=0.0), list[Seal]()

    def host(seal: Seal) -> tuple[str, int]:
        tries.append(seal)
        if len(tries) < 3:
            raise OSError("Too many open files")
        return "127.0.0.1", 1

    node.join(PATIENCE_S)
    world = node.next_world(host, PATIENCE_S)
    assert world is not None and len(tries) == 3
    node.leave()


def test_a_lost_node_is_free_for_the_survivor(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A survivor whose workers failed waits for the lease of the dead node, and does not pay."""
    first, second = pair(store, pool)
    second._left.set()
    blamed = pool.submit(first.is_to_blame)
    eventually(lambda: first.view.failure is not None, "the failure is reported")
    assert not blamed.done()
    crash(store, second)
    assert blamed.result(PATIENCE_S) is False


def test_a_leaving_node_is_free_for_the_others(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node that was asked to leave lives on while its workers end; those of the others fail for that reason."""
    first, second = pair(store, pool)
    second.begin_to_leave()
    assert first.is_to_blame() is False
    assert first.view.leaving == {second.id} and len(first.view.members) == 2


def test_one_node_pays_for_a_failed_worker(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """When workers of both nodes fail and both nodes live, exactly one pays, without waiting for a lease."""
    assert sorted(pool.map(Participant.is_to_blame, pair(store, pool))) == [False, True]


def test_the_last_to_finish_closes_the_job(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """Finished nodes wait for each other; then the job is closed, and a late joiner is sent away."""
    first, second = pair(store, pool)
    waiting = pool.submit(first.finish, PATIENCE_S)
    eventually(lambda: any(member.done for member in second.view.members), "the first is done")
    assert not waiting.done()
    second.finish(PATIENCE_S)
    waiting.result(PATIENCE_S)
    assert enter(make_node(store)) is None


def test_a_node_that_finishes_long_after_another_is_not_restarted(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A finished node leaves when its patience ends; the other continues, and closes the job."""
    first, second = pair(store, pool)
    first.finish(0.0)
    assert second.view.closed is None
    first.leave()
    eventually(lambda: second.view.member(first.id) is None, "it has left")
    assert second.num_waiting() == 0 and not second.is_broken()
    second.finish(PATIENCE_S)
    assert enter(make_node(store)) is None


def test_nodes_without_patience_that_finish_together_close_the_job(
    store: MemoryStore, pool: ThreadPoolExecutor
) -> None:
    """The last node to report its end closes the job, however short it may wait."""
    nodes = pair(store, pool)
    list(pool.map(lambda node: (node.finish(0.0), node.leave()), nodes))
    assert enter(make_node(store)) is None


def test_a_closed_run_id_can_be_used_again(store: MemoryStore) -> None:
    """The mark of a finished job expires, and terms continue from the last one."""
    node = make_node(store, last_call_s=0.0)
    enter(node)
    node.finish(PATIENCE_S)
    node.leave()
    store.advance(300.0)
    world = enter(make_node(store, last_call_s=0.0))
    assert world is not None and (world.term, world.cause) == (2, "start")


def test_leaving_is_noticed_at_once(
    store: MemoryStore, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that leaves revokes its lease: no wait is needed. Its watch is closed once."""
    first, second = pair(store, pool)
    closed = list[bool]()
    monkeypatch.setattr(second._watch, "close", lambda: closed.append(True))
    second.leave()
    eventually(lambda: first.num_waiting() > 0, "the leave is noticed")
    second.leave()
    assert closed == [True]


def test_a_node_is_asked_to_leave_without_waiting_for_etcd(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not keep the process alive sends the request; the node is told once, when etcd answers."""
    first, second = (make_node(store, node=name) for name in "ab")
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) is not None
    told = list[bool]()
    monkeypatch.setattr(second, "_at_request", lambda: told.append(True))
    answers, swap, threads = threading.Event(), store.swap, list[threading.Thread]()

    def late(writes: Writes, guards: Guards) -> int | None:
        threads.append(threading.current_thread())
        assert answers.wait(PATIENCE_S)
        return swap(writes, guards)

    monkeypatch.setattr(store, "swap", late)
    assert first.ask_to_leave(1) == "b"
    eventually(lambda: bool(threads), "the request")
    assert threads[0].daemon and not told
    answers.set()
    eventually(lambda: bool(told), "the request is noticed")
    second.join(PATIENCE_S)
    eventually(lambda: second.view.over == 1, "another change")
    assert told == [True]


def test_an_expelled_node_joins_as_a_new_one(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    """A node whose lease expired while it was frozen is asked for a new round and gets a new id."""
    first, second = pair(store, pool)
    old = second.id
    assert second._own.lease is not None
    second._own.lease.abandon()
    store.advance(TTL_S)
    eventually(lambda: second.num_waiting() > 0 and first.num_waiting() > 0, "both notice")
    enter(first)
    back = pool.submit(enter, second)
    eventually(lambda: first.num_waiting() > 0, "the return is noticed")
    assert enter(first) == back.result(PATIENCE_S) and second.id != old


@pytest.mark.slow
def test_too_few_nodes_is_an_error(store: MemoryStore) -> None:
    """Below the minimum a node stops after its timeout, and says how many nodes came."""
    with pytest.raises(TooFewNodesError, match="1 of at least 2 nodes"):
        enter(make_node(store, most=3, least=2), timeout_s=2.0)


@pytest.mark.slow
def test_a_leader_seals_what_it_has_seen(store: MemoryStore) -> None:
    """A member that dies between the decision and the transaction makes it fail; the leader decides again."""
    leader, late = make_node(store, last_call_s=1.0), make_node(store)
    leader.join(PATIENCE_S)
    late.join(PATIENCE_S)
    eventually(lambda: len(leader.view.members) == 2, "both members")

    def dies_now() -> bool:
        if leader.view.member(late.id) is not None:
            late.leave()
            eventually(lambda: leader.view.member(late.id) is None, "the loss")
        return False

    world = leader.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S, dies_now)
    assert world is not None and [seat.member for seat in world.seats] == [leader.id]
    leader.leave()


def test_one_worker_of_a_node_looks_for_agents_that_are_gone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first that waits probes: a thousand would probe one another's machines ten times a second."""
    asked: list[str] = []
    monkeypatch.setattr(known_agents, "refuses", lambda agent, _: bool(asked.append(agent)))

    def ask(*_: object) -> Answer:
        return "itself"

    places = [Place("host", "127.0.0.1", 1, node=name, agent=f"{name}:1") for name in ("here", "here", "there")]
    nodes = [Participant(store, "job", Policy(1, 2, 0.0), place, ttl_s=TTL_S, ask=ask) for place in places]
    for node in nodes:
        node.join(PATIENCE_S)
    eventually(lambda: all(len(node.view.members) == 3 for node in nodes), "all members")
    assert nodes[0].next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) is not None
    eventually(lambda: all(node.view.term == 1 for node in nodes), "the world")
    for node in nodes[:2]:
        node.join(PATIENCE_S)
    eventually(lambda: len(nodes[0].view.ready) == 2, "those who wait")
    snapshot = nodes[0]._latest.now().snapshot
    assert [is_looking(node.view, node.id) for node in nodes[:2]] == [True, False]
    assert not nodes[0]._bury(snapshot) and asked == [], "a refusal says nothing of an agent that was never met"
    nodes[0].agents.ask([nodes[0].view.members[2]], 1.0)
    assert not nodes[0]._bury(snapshot) and asked == ["there:1"]
    for node in nodes:
        node.leave()


@pytest.mark.parametrize(
    ("most", "node", "differs"),
    [(3, "", "--nnodes .* is 1:3 here, and 1:2 on"), (2, "a", "--recovery .* is live here, and restart on")],
)
def test_a_node_with_other_limits_or_in_another_mode_is_refused_and_the_others_do_not_notice(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, most: int, node: str, differs: str
) -> None:
    """Otherwise nodes with --nnodes 1:2 and 1:3 admit and drop a third one twice a second.

    Workers of nodes in different modes would wait for each other in one world, silently.
    """
    monkeypatch.setattr(participant, "LEASE_MARGIN_S", -TTL_S)
    first, other = make_node(store, last_call_s=0.0), make_node(store, most=most, last_call_s=0.0, node=node)
    first.join(PATIENCE_S)
    assert first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) is not None
    eventually(lambda: other.view.term == 1, "the world")
    with pytest.raises(LimitsDifferError, match=f"{differs} the nodes that run already"):
        other.join(PATIENCE_S)
    assert len(first.view.members) == 1 and first.num_waiting() == 0
    first.leave()
    other.leave()


def test_a_job_may_be_started_with_other_limits_while_the_leases_of_its_dead_members_last(store: MemoryStore) -> None:
    """Killed members are not asked: the newcomer waits until they are gone."""
    dead, other = make_node(store, last_call_s=0.0), make_node(store, most=3, last_call_s=0.0)
    dead.join(PATIENCE_S)
    eventually(lambda: len(other.view.members) == 1, "the first")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(other.join, PATIENCE_S)
        dead.leave()  # as if its lease expired
        joining.result(PATIENCE_S)
    assert [member.nodes for member in other.view.members] == ["1:3"]
    other.leave()


@pytest.mark.parametrize(("most", "node"), [(3, ""), (2, "a")])
def test_of_two_that_come_together_with_other_limits_or_modes_the_second_is_refused(
    store: MemoryStore, most: int, node: str
) -> None:
    """Neither saw the other before it registered; they never form a world together."""
    first, other = make_node(store, last_call_s=0.0), make_node(store, most=most, last_call_s=0.0, node=node)
    first.join(PATIENCE_S)
    other._own.register()
    eventually(lambda: len(first.view.members) == len(other.view.members) == 2, "both")
    with pytest.raises(LimitsDifferError):
        other.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    world = first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    assert world is not None and [seat.member for seat in world.seats] == [first.id]
    first.leave()
    other.leave()


@pytest.mark.parametrize(("num_workers", "missing"), [(2, "the other workers of a node"), (1, "the others, giving up")])
def test_a_member_says_whom_it_waits_for(store: MemoryStore, num_workers: int, missing: str) -> None:
    """Otherwise a member whose mate had left before the first world would report 1 of at least 1 nodes."""
    place = Place(host="a", address="127.0.0.1", num_workers=1, name="a.0", node="a", node_members=num_workers)
    member = Participant(store, "job", Policy(1, 1), place, ttl_s=TTL_S)
    member.join(PATIENCE_S)
    eventually(lambda: bool(member.view.ready), "it is there")
    assert f"1 of at least 1 nodes are there, under /elastic/job/: waiting for {missing}" in member._waiting(9.0)
    member.leave()


def test_who_waits_in_vain_says_at_once_who_has_finished(
    store: MemoryStore, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """One node's workers end with 0, and it leaves once the other's have failed, which would wait 900 s for it."""
    nodes = [make_node(store, least=2), make_node(store, least=2)]
    assert all(pool.map(enter, nodes))
    first, second = nodes
    waiting = pool.submit(first.finish, PATIENCE_S)
    eventually(lambda: any(member.done for member in second.view.members), "the first is done")
    second.join(PATIENCE_S)
    waiting.result(PATIENCE_S)
    first.leave()
    eventually(lambda: second.view.member(first.id) is None, "it has left")
    with pytest.raises(TooFewNodesError, match=f"come back only if .*: host .member {first.id}"):
        second.next_world(lambda seal: ("127.0.0.1", 1), 0.2)
    assert f"host (member {first.id})" in caplog.text and caplog.text.count("1 of at least 2 nodes are there") == 1
    second.leave()


def test_a_node_that_there_is_no_room_for_says_once_that_it_stands_by(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a second terminal with the same command is silent until the first one's job ends."""
    monkeypatch.setattr(outage_log, "FIRST_WORD_S", 0.0)
    monkeypatch.setattr(participant, "LOOK_S", 0.0)
    first, spare = make_node(store, most=1, last_call_s=0.0), make_node(store, most=1, last_call_s=0.0)
    first.join(PATIENCE_S)
    assert first.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S) is not None
    spare.join(PATIENCE_S)
    eventually(lambda: spare.view.world is not None, "the world")
    looks, pauses = itertools.count(), list[float]()
    monkeypatch.setattr(spare._latest, "wait", lambda snapshot, timeout_s: pauses.append(timeout_s))
    with pytest.raises(StoppedWaiting):
        spare.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S, lambda: next(looks) == 5)
    assert (
        caplog.text.count("this node stands by until one is lost: the job under /elastic/job/ has 1 of at most 1 nodes")
        == 1
    )
    assert pauses == [0.0] * 5, "it waits for a change between its looks"
    first.leave()
    spare.leave()
