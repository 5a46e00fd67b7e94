"""What a recovery asks of etcd: one write for each member, and no lists."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import MemoryStore
from rendezvous.agent.identity import Answer
from rendezvous.membership import dead_agents, known_agents, own_record
from rendezvous.membership.memory_store import MemoryWatch
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import read_view
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.store import Guards, Put, Snapshot, Writes
from tests.conftest import PATIENCE_S
from tests.rendezvous.membership.participants import TTL_S, make_node, meet_again, pair
from tests.rendezvous.rendezvous_sides import eventually


class CountingStore(MemoryStore):
    """Counts lists, and the keys of each transaction that succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lists, self.written = 0, list[int]()

    def get(self, prefix: str) -> Snapshot:
        self.num_lists += 1
        return super().get(prefix)

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        revision = super().swap(writes, guards)
        if revision is not None:
            self.written.append(len(writes))
        return revision

    def watch(self, prefix: str, end: str = "") -> MemoryWatch:
        return MemoryWatch(self._listed, prefix, end)

    @property
    def _listed(self) -> MemoryStore:
        """This store, without counting what its watches read."""
        listed = MemoryStore()
        listed.__dict__ = self.__dict__
        return listed


def test_a_recovery_writes_once_for_each_member_and_lists_nothing(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """If each member listed all of them, etcd would send records in the square of their number."""
    store, is_gone = CountingStore(), set[str]()
    monkeypatch.setattr(known_agents, "refuses", lambda agent, _: agent in is_gone)

    def ask(*_: object) -> Answer:
        return "itself"

    places = [
        Place("host", "127.0.0.1", 1, node=name, node_members=3 if name == "c" else 1, agent=f"{name}:1")
        for name in ("a", "b", "c", "c", "c")
    ]
    # The first world waits for all three nodes: the leader may see the others late.
    nodes = [Participant(store, "job", Policy(1, 3, PATIENCE_S), place, ttl_s=TTL_S, ask=ask) for place in places]
    assert all(world is not None and len(world.seats) == 5 for world in meet_again(nodes, pool))
    for node in nodes[:2]:
        node.agents.ask([member for member in node.view.members if member.node == "c"], 1.0)
    is_gone.add("c:1")
    store.num_lists, store.written = 0, []
    worlds = meet_again(nodes[:2], pool)
    assert all(world is not None and len(world.seats) == 2 for world in worlds)
    assert (store.num_lists, sorted(store.written)) == (0, [1, 1, 2, 3]), "two members, a world, a dead node"
    for node in nodes:
        node.leave()


def test_only_those_who_decide_are_told_who_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven nodes three follow the terms of all, and the survivors of the first four again three."""
    monkeypatch.setattr(dead_agents, "LOOK_S", PATIENCE_S)
    store = MemoryStore()
    nodes = [make_node(store, most=7, node=name) for name in "abcdefg"]
    with ThreadPoolExecutor(len(nodes)) as pool:
        worlds = meet_again(nodes, pool)
        assert all(world is not None and len(world.seats) == 7 for world in worlds)
        eventually(lambda: [node._watch.snapshot.is_whole for node in nodes] == [True] * 3 + [False] * 4, "the first")
        for node in nodes[:4]:
            node.leave()
        left = nodes[4:]
        eventually(lambda: all(node.is_broken() for node in left), "the loss")
        worlds = meet_again(left, pool)
    assert all(world is not None and (world.term, len(world.seats)) == (2, 3) for world in worlds)
    assert all(node._watch.snapshot.is_whole for node in left)
    for node in left:
        node.leave()


@pytest.mark.parametrize("damage", [None, Put("garbage")])
def test_terms_that_etcd_loses_alone_are_written_again(
    damage: Put | None, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Whether the member follows the terms or not; otherwise all would wait for it until they give up."""
    monkeypatch.setattr(own_record, "KEEP_S", 0.0)
    store = MemoryStore()
    nodes = [make_node(store, most=4, node=name) for name in "abcd"]
    assert all(meet_again(nodes, pool))
    for node in nodes:
        node.join(PATIENCE_S)
        store.swap({node.keys.terms_of(node.id): damage}, {})
    worlds = list(pool.map(lambda node: node.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S), nodes))
    assert all(world is not None and (world.term, len(world.seats)) == (2, 4) for world in worlds)
    for node in nodes:
        node.leave()


def test_all_follow_the_terms_if_etcd_comes_back_with_an_older_world(pool: ThreadPoolExecutor) -> None:
    """Who leads depends on ranks in the newest world, which only the terms tell."""
    store = MemoryStore()
    nodes = [make_node(store, most=5, node=name) for name in "abcde"]
    first = meet_again(nodes, pool)
    assert all(first) and not nodes[4]._needs_terms(0.0)
    old = store.get(nodes[0].keys.world).entries[nodes[0].keys.world].value
    assert all(meet_again(nodes, pool)) and not nodes[4]._needs_terms(0.0)
    store.swap({nodes[0].keys.world: Put(old)}, {})
    eventually(lambda: all(node._needs_terms(0.0) for node in nodes), "the older world")
    for node in nodes:
        node.leave()


def test_a_member_whose_watch_is_late_leaves_a_world_that_another_has_left(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """If it registered anew instead, all would wait until the lease of its old record ends."""
    store = MemoryStore()
    nodes = pair(store, pool)
    ids = [node.id for node in nodes]
    monkeypatch.setattr(MemoryWatch, "wait", lambda *_: None)
    monkeypatch.setattr(own_record, "BROUGHT_S", 0.0)
    for node in nodes:
        node.join(PATIENCE_S)
    assert [node.id for node in nodes] == ids
    keys = nodes[0].keys
    assert [member.after for member in read_view(store.get(keys.prefix), keys).members] == [1, 1]
    for node in nodes:
        node.leave()


def test_a_write_that_the_watch_does_not_bring_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream may be broken without a sign, and decisions need a view with the member's own write."""
    store, is_silent = MemoryStore(), [False]
    wait = MemoryWatch.wait

    def silent(self: MemoryWatch, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        return None if is_silent[0] else wait(self, seen, timeout_s)

    monkeypatch.setattr(MemoryWatch, "wait", silent)
    monkeypatch.setattr(own_record, "BROUGHT_S", 0.0)
    node = make_node(store, last_call_s=0.0)
    is_silent[0] = True
    node.join(PATIENCE_S)
    assert node.view.member(node.id) is not None
    is_silent[0] = False
    eventually(lambda: node.view.revision == store.revision, "the watch")
    node.leave()
