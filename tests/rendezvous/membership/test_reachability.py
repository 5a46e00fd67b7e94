"""Nodes that reach etcd but not each other: found by looking, left out, and let in again when the network heals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rendezvous import MemoryStore
from rendezvous.membership import reachability as reach
from rendezvous.membership.decisions import Policy
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.probes import is_reachable
from rendezvous.membership.reachability import Reachability
from rendezvous.membership.records import World
from tests.rendezvous.rendezvous_sides import eventually


def make_node(store: MemoryStore, name: str) -> Participant:
    place = Place(name, name, 1, name=name, node=name, agent=f"{name}:1")
    return Participant(store, "job", Policy(1, 3, 5.0), place, ttl_s=3.0)


def enter(node: Participant) -> World:
    node.join(10.0)
    world = node.next_world(lambda seal: (node.place.host, 1), 10.0)
    assert world is not None
    return world


def test_a_node_that_is_cut_off_from_the_others_is_left_out_until_it_can_be_reached() -> None:
    """Two silent looks in a row count; the larger part continues, and takes the third back once it answers."""
    store, cut = MemoryStore(), {"c"}
    nodes = {name: make_node(store, name) for name in "abc"}

    def sees(name: str, agent: str) -> bool:
        return (name in cut) == (agent[0] in cut)

    reaches = {name: Reachability(node, lambda agent, name=name: sees(name, agent)) for name, node in nodes.items()}  # type: ignore[misc]
    with ThreadPoolExecutor(3) as pool:
        assert {len(world.seats) for world in pool.map(enter, nodes.values())} == {3}
        reaches["a"].look()
        assert not nodes["b"].is_broken(), "one look may be an accident"
        for reach in (*reaches.values(), *reaches.values()):
            reach.look()
        eventually(lambda: all(node.is_broken() for node in nodes.values()), "the end of the world")
        waiting = pool.submit(enter, nodes["c"])
        worlds = list(pool.map(enter, [nodes["a"], nodes["b"]]))
        assert [len(world.seats) for world in worlds] == [2, 2]
        assert nodes["a"].num_waiting() == 0 and not waiting.done()
        cut.clear()
        for reach in reaches.values():
            reach.look()
        eventually(lambda: nodes["a"].num_waiting() == nodes["b"].num_waiting() == 1, "room for the third")
        assert {len(world.seats) for world in pool.map(enter, [nodes["a"], nodes["b"]])} == {3}
        assert len(waiting.result(10.0).seats) == 3
    for name, node in nodes.items():
        reaches[name].close()
        node.leave()


@pytest.mark.slow
def test_a_member_missing_only_in_the_record_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of etcd's was lost: the record names a node that this process does not know that it has named."""
    monkeypatch.setattr(reach, "SELDOM_S", 0.05)
    store = MemoryStore()
    nodes = {name: make_node(store, name) for name in "ab"}
    reaches = [Reachability(node, lambda agent: True) for node in nodes.values()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, nodes.values()))
    nodes["a"].report_missed(frozenset("b"))
    eventually(lambda: not any(member.missed for member in nodes["b"].view.members), "the end of missing")
    for looking, node in zip(reaches, nodes.values(), strict=True):
        looking.close()
        node.leave()


def test_refusals_count_as_reachable_and_bad_addresses_do_not() -> None:
    """A refused connection is an answer: the machine is there. An invalid or unroutable address is out of reach."""
    assert is_reachable("127.0.0.1:1")
    assert not is_reachable("nowhere")
