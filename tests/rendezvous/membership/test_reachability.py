"""Nodes that reach etcd but not each other are detected by probing, left out, and accepted again afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import MemoryStore
from rendezvous.agent.identity import Answer
from rendezvous.membership import reachability as reach
from rendezvous.membership.known_agents import Ask
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.reachability import Reachability
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.worlds import World
from tests.conftest import PATIENCE_S, eventually


def make_node(
    store: MemoryStore, name: str, ask: Ask = lambda *_: "itself", *, last_call_s: float = PATIENCE_S
) -> Participant:
    place = Place(name, name, 1, name=name, node=name, agent=f"{name}:1")
    return Participant(store, "job", Policy(1, 3, last_call_s), place, ttl_s=3.0, ask=ask)


def enter(node: Participant) -> World:
    node.join(PATIENCE_S)
    return next_world(node)


def next_world(node: Participant) -> World:
    world = node.next_world(lambda seal: (node.place.host, 1), PATIENCE_S)
    assert world is not None
    return world


def test_a_node_that_is_cut_off_from_the_others_is_left_out_until_it_can_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two silent probes in a row count; the larger part continues, and accepts the third again once it answers."""
    monkeypatch.setattr(reach, "AGAIN_S", 0.0)
    store, cut = MemoryStore(), {"c"}

    def ask_from(name: str) -> Ask:
        return lambda agent, *_: "itself" if (name in cut) == (agent[0] in cut) else "silent"

    nodes = {name: make_node(store, name, ask_from(name)) for name in "abc"}
    reaches = {name: Reachability(node) for name, node in nodes.items()}
    with ThreadPoolExecutor(3) as pool:
        assert {len(world.seats) for world in pool.map(enter, nodes.values())} == {3}
        reaches["a"].look()
        assert not nodes["b"].is_broken(), "one look may be an accident"
        for looking in (*reaches.values(), *reaches.values()):
            looking.look()
        eventually(lambda: all(node.is_broken() for node in nodes.values()), "the end of the world")
        waiting = pool.submit(enter, nodes["c"])
        worlds = list(pool.map(enter, [nodes["a"], nodes["b"]]))
        assert [len(world.seats) for world in worlds] == [2, 2]
        assert nodes["a"].num_waiting() == 0 and not waiting.done()
        cut.clear()
        for looking in reaches.values():
            looking.look()
        eventually(lambda: nodes["a"].num_waiting() == nodes["b"].num_waiting() == 1, "room for the third")
        assert {len(world.seats) for world in pool.map(enter, [nodes["a"], nodes["b"]])} == {3}
        assert len(waiting.result(PATIENCE_S).seats) == 3
    for name, node in nodes.items():
        reaches[name].close()
        node.leave()


@pytest.mark.slow
def test_a_member_missing_only_in_the_record_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of etcd's answers was lost: the record names a node that this process does not know it has named."""
    monkeypatch.setattr(reach, "SELDOM_S", 0.05)
    store = MemoryStore()
    nodes = {name: make_node(store, name, last_call_s=0.5) for name in "ab"}
    reaches = [Reachability(node) for node in nodes.values()]
    for node in nodes.values():  # before either seals: the last call is short
        node.join(PATIENCE_S)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(next_world, nodes.values()))
    nodes["a"].report_missed(frozenset("b"))
    eventually(lambda: not any(member.missed for member in nodes["b"].view.members), "the end of missing")
    for looking, node in zip(reaches, nodes.values(), strict=True):
        looking.close()
        node.leave()


@pytest.mark.parametrize("answer", ["refused", "other", "silent", "mute"])
def test_a_newcomer_whom_others_cannot_reach_does_not_end_their_world(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is at its address, its identity is checked before the others make room; once it answers, they do."""
    monkeypatch.setattr(reach, "AGAIN_S", 0.02)
    monkeypatch.setattr(reach, "LOOK_EVERY_S", 0.05)
    store, wrong = MemoryStore(), {"c"}
    nodes = {
        name: make_node(store, name, lambda agent, *_: answer if agent[0] in wrong else "itself", last_call_s=0.5)
        for name in "abc"
    }
    reaches = [Reachability(node) for node in nodes.values()]
    with ThreadPoolExecutor(3) as pool:
        for name in "ab":  # before either seals: the last call is short
            nodes[name].join(PATIENCE_S)
        assert [len(world.seats) for world in pool.map(next_world, [nodes["a"], nodes["b"]])] == [2, 2]
        for looking in reaches:
            looking.notice()
        waiting = pool.submit(enter, nodes["c"])
        eventually(lambda: any("c" in member.missed for member in nodes["a"].view.members), "that it is missed")
        assert not any(nodes[name].wants_to_grow(0.0) or nodes[name].is_broken() for name in "ab")
        assert nodes["a"].view.term == 1 and not waiting.done()
        wrong.clear()
        eventually(lambda: any(nodes[name].wants_to_grow(0.0) for name in "ab"), "room for it")
        assert {len(world.seats) for world in pool.map(enter, [nodes["a"], nodes["b"]])} == {3}
        assert len(waiting.result(PATIENCE_S).seats) == 3
    for looking, node in zip(reaches, nodes.values(), strict=True):
        looking.close()
        node.leave()


@pytest.mark.slow
def test_a_newcomer_that_cannot_reach_the_others_says_so_before_it_is_a_member() -> None:
    """The others thus never make room for it."""
    store = MemoryStore()
    nodes = {name: make_node(store, name, last_call_s=0.5) for name in "ab"}
    cut = make_node(store, "c", lambda *_: "refused")
    with ThreadPoolExecutor(3) as pool:
        for node in nodes.values():  # before either seals: the last call is short
            node.join(PATIENCE_S)
        list(pool.map(next_world, nodes.values()))
        eventually(lambda: cut.view.term == 1, "the world")
        looking = Reachability(cut)
        looking.look_ahead()
        cut.join(PATIENCE_S)
        (mine,) = [member for member in cut.view.members if member.id == cut.id]
        assert mine.missed == ("a", "b")
        eventually(lambda: len(nodes["a"].view.members) == 3, "the newcomer")
        assert nodes["a"].num_waiting() == 0
    looking.close()
    for node in (*nodes.values(), cut):
        node.leave()


def test_a_refusing_node_that_lives_is_taken_for_dead_once_and_then_for_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It registers again, and counts as unknown to members that have not reached it since: it costs one world only."""
    monkeypatch.setattr(reach, "AGAIN_S", 0.0)
    store, refuses = MemoryStore(), set[str]()
    ask: Ask = lambda agent, *_: "refused" if agent[0] in refuses else "itself"  # noqa: E731
    nodes = {name: make_node(store, name, ask) for name in "abc"}
    looking = Reachability(nodes["a"])
    is_over = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        assert {len(world.seats) for world in pool.map(enter, nodes.values())} == {3}
        looking.look()
        refuses.add("c")
        looking.look()
        assert not nodes["a"].is_broken(), "one look may be an accident"
        looking.look()
        eventually(lambda: nodes["a"].is_broken() and nodes["b"].is_broken(), "the end of the world")
        nodes["c"].join(PATIENCE_S)
        nodes["a"].join(PATIENCE_S)
        nodes["b"].join(PATIENCE_S)
        waiting = [
            pool.submit(nodes[name].next_world, lambda _: ("h", 1), PATIENCE_S, is_over.is_set) for name in "abc"
        ]
        eventually(lambda: nodes["a"].world is not None and nodes["a"].world.term == 2, "the next world")
        for _ in range(2):
            looking.look()
        (mine,) = [member for member in nodes["a"].view.members if member.node_id == "a"]
        assert mine.missed == ("c",), "out of reach, not dead"
        is_over.set()
        for entered in waiting:
            entered.exception(PATIENCE_S)
    looking.close()
    for node in nodes.values():
        node.leave()


def test_a_thread_that_cannot_be_started_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards nobody noticed, on that node, which others were out of reach."""
    looks: list[bool] = []

    def look(self: Reachability, *, hangs: bool) -> None:
        looks.append(hangs)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Reachability, "look", look)
    node = make_node(MemoryStore(), "a")
    looking = Reachability(node)
    looking.ask(is_urgent=True)
    eventually(lambda: looks, "the first look")
    looking.ask(is_urgent=True)
    eventually(lambda: len(looks) == 2, "another look", 30.0)
    looking.close()
    node.leave()
