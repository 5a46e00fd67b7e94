"""A member's record of itself, and the addresses of other agents that it knows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rendezvous import EtcdStore, MemoryStore, StoreUnavailableError
from rendezvous.agent.identity import Answer
from rendezvous.membership import dead_agents, known_agents, own_record
from rendezvous.membership.dead_agents import LOOK_S, DeadAgentProbe, believed, is_looking
from rendezvous.membership.known_agents import KnownAgents
from rendezvous.membership.memory_store import MemoryLease, MemoryWatch
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Member, View, read_view
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.rules.cells import CellShape
from rendezvous.membership.store import Guards, Put, Snapshot, Writes
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.membership.participants import TTL_S, make_node, meet_again, pair


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


class LosingStore(MemoryStore):
    """Loses the answer to one transaction, counted from 1, which the client then tries again or gives up."""

    def __init__(self, lost: int, *, gives_up: bool) -> None:
        super().__init__()
        self.num_answers, self.is_losing = 0, True
        self._lost, self._gives_up, self._is_revoked = lost, gives_up, False

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        revision = super().swap(writes, guards)
        self.num_answers += self.is_losing and revision is not None
        if self.num_answers != self._lost or revision is None or not self.is_losing:
            return revision
        if self._gives_up:
            raise StoreUnavailableError("no answer")
        return super().swap(writes, guards) or EtcdStore._written_before(self, writes)  # type: ignore[arg-type]

    def end(self, lease: MemoryLease) -> None:
        """End a lease; a client that has just given up does so once more."""
        is_first, self._is_revoked = not self._is_revoked, True
        if is_first and self._gives_up and self.is_losing:
            raise StoreUnavailableError("no answer")
        super().end(lease)


@pytest.mark.heavy
@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("lost", range(1, 8))
def test_a_member_has_one_record_whichever_answer_is_lost(
    lost: int, is_late: bool, gives_up: bool, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Two nodes register, form a world, and leave it, the first as the last member: it gets another id.

    A record that nobody answers for would be in the next world. The watch may be late, too.
    """
    store, wait, is_silent = LosingStore(lost, gives_up=gives_up), MemoryWatch.wait, [False]

    def late(self: MemoryWatch, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        return None if is_silent[0] else wait(self, seen, timeout_s)

    monkeypatch.setattr(MemoryWatch, "wait", late)
    monkeypatch.setattr(own_record, "BROUGHT_S", 0.0)
    monkeypatch.setattr(own_record, "PAUSE_S", 0.01)
    nodes = [make_node(store), make_node(store)]
    for _ in range(2):
        is_silent[0] = is_late
        for node in nodes:
            node.join(PATIENCE_S, as_last=node is nodes[0])
        is_silent[0] = False
        worlds = list(pool.map(lambda node: node.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S), nodes))
        assert worlds[0] == worlds[1] and worlds[0] is not None
        assert sorted(seat.member for seat in worlds[0].seats) == sorted(node.id for node in nodes)
    store.is_losing = False
    assert store.num_answers >= 6
    for node in nodes:
        node.leave()
    assert not store.get(nodes[0].keys.members).entries


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


def test_members_of_cells_follow_the_terms_if_some_left_without_their_state(pool: ThreadPoolExecutor) -> None:
    """Who leads depends on who has which part, which only the terms tell: if nobody who leads knew, all would wait."""
    store, policy = MemoryStore(), Policy(1, 4, PATIENCE_S, cell=CellShape(2, 1))
    places = [Place("host", "127.0.0.1", 1, node=name) for name in "abcd"]
    nodes = [Participant(store, "job", policy, place, ttl_s=PATIENCE_S) for place in places]
    last = nodes[3]
    assert all(meet_again(nodes, pool)) and not last._needs_terms(0.0)
    for node in nodes[:3]:
        node.note_state(is_there=True)
        node.join(PATIENCE_S)
    eventually(lambda: last._needs_terms(0.0), "it leaves without its state")
    last.note_state(is_there=True)
    assert not last._needs_terms(0.0)
    last._own.ttl_s = 0.0
    assert last._needs_terms(0.0), "others may have left without theirs"
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


def worker(name: str, node: str) -> Member:
    return Member(name, "host", node, 1, after=0, node=node, agent=f"{node}:1")


class Net:
    """Answers for every agent at once."""

    answer: Answer = "itself"

    def __call__(self, *_: object) -> Answer:
        return self.answer


def known(*answers: Answer) -> tuple[KnownAgents, list[str]]:
    """Ask for two workers of one node repeatedly; return the result of each time."""
    net = Net()
    agents, found = KnownAgents("here", net), []
    for answer in answers:
        net.answer = answer
        found.append(str(agents.ask([worker("b0", "b"), worker("b1", "b")], 1.0)))
    return agents, found


def test_a_refusal_is_death_only_to_who_has_met_the_agent() -> None:
    """Otherwise the address may belong to another machine: docker gives 172.17.0.2 to a container on every host."""
    assert known("refused", "other", "silent", "mute")[1] == ["away"] * 4
    assert known("itself", "refused")[1] == ["here", "gone"]
    assert known("itself", "other")[1] == ["here", "gone"], "its port was given to another process"
    assert known("itself", "silent", "mute")[1] == ["here", "away", "here"], "cut off; frozen, or busy"


def test_a_node_that_was_taken_for_dead_and_registers_again_is_not_known() -> None:
    """If the refusal still counted as death, every member that has reached it would end a healthy world again."""
    net = Net()
    agents = KnownAgents("here", net)
    agents.ask([worker("b0", "b")], 1.0)
    net.answer = "refused"
    assert agents.ask([worker("b0", "b")], 1.0) == "gone"
    assert agents.ask([worker("b0-again", "b")], 1.0) == "away"


def test_own_workers_and_those_without_an_agent_need_not_be_met() -> None:
    """There is nothing to ask."""
    agents = KnownAgents("here", Net())
    without = Member("a", "host", "a", 1, after=0)
    assert agents.has_met(worker("x", "here")) and agents.has_met(without)
    assert not agents.has_met(worker("b0", "b"))
    agents.ask([worker("b0", "b")], 1.0)
    assert agents.has_met(worker("b0", "b"))
    agents.forget_all_but(View(1, ()))
    assert not agents.has_met(worker("b0", "b"))


def test_more_nodes_look_the_longer_they_wait() -> None:
    """The first ones may have died together; only one worker of each looks."""
    view = View(2, tuple(worker(f"{node}{turn}", node) for turn in range(2) for node in "abcde"))

    def looking(waited_s: float) -> str:
        return "".join(member.node for member in view.members if is_looking(view, member.id, waited_s))

    assert [looking(waited_s * LOOK_S) for waited_s in (0.0, 0.9, 1.0, 9.0)] == ["abc", "abc", "abcd", "abcde"]


def test_who_waits_buries_late_members_that_it_has_met_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a joiner whose address the others reach differently ends healthy worlds ten times a second."""
    net = Net()
    agents = KnownAgents("a", net)
    a, b, c = worker("a0", "a"), worker("b0", "b"), worker("c0", "c")
    world = World(1, (Seat("a0", 1), Seat("b0", 1), Seat("c0", 1)), "start", "a", 1, 0.0)
    monkeypatch.setattr(known_agents, "refuses", lambda *_: True)
    waiting = View(2, (Member("a0", "host", "a", 1, after=1, node="a", agent="a:1"), b, c), world)
    agents.ask([b], 1.0)
    assert [member.id for member in DeadAgentProbe(agents).gone(waiting)] == ["b0"]
    assert a not in DeadAgentProbe(agents).gone(waiting)


def test_who_is_refused_by_most_suspects_itself() -> None:
    """It removes one node, or up to half of several; otherwise it would stop the healthy ones and train alone."""
    assert believed({"b"}, 1) == {"b"} and believed({"b"}, 2) == {"b"}
    assert believed({"b", "c"}, 2) == set()
    assert believed({"b", "c"}, 4) == {"b", "c"} and believed({"b", "c", "d"}, 4) == set()


@pytest.mark.parametrize(("refusing", "dead"), [("bd", ["b0"]), ("bcd", []), ("bc", [])])
def test_who_is_refused_by_the_living_as_well_buries_nobody(
    monkeypatch: pytest.MonkeyPatch, refusing: str, dead: list[str]
) -> None:
    """A late node may be busy with a long step, and a firewall of one's own machine refuses in its name.

    Here `b` is late; `c`, and once `d`, are ready.
    """
    agents, ready = KnownAgents("a", Net()), [replace(worker(f"{node}0", node), after=1) for node in "acd"]
    for member in (worker("b0", "b"), *ready[1 : 2 + (len(refusing) == 3)]):
        agents.ask([member], 1.0)
    world = World(1, tuple(Seat(f"{node}0", 1) for node in "abcd"), "start", "a", 1, 0.0)
    monkeypatch.setattr(known_agents, "refuses", lambda agent, *_: agent[0] in refusing)
    view = View(2, (ready[0], worker("b0", "b"), *ready[1:]), world)
    assert [member.id for member in DeadAgentProbe(agents).gone(view)] == dead
