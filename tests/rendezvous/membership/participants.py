"""Nodes on a store, as tests create them: alone, in pairs, or crashed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rendezvous import EtcdStore, MemoryStore
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.worlds import World
from tests.conftest import PATIENCE_S

TTL_S = 3.0


def make_node(
    store: MemoryStore | EtcdStore,
    *,
    most: int = 2,
    least: int = 1,
    last_call_s: float = PATIENCE_S,
    ttl_s: float = TTL_S,
    node: str = "",
) -> Participant:
    """Return a node, or the one worker of a named node in `live` mode.

    The first world waits for max_nodes nodes, unless the last call is short.
    """
    place = Place("host", "127.0.0.1", 1, node=node)
    return Participant(store, "job", Policy(least, most, last_call_s), place, ttl_s=ttl_s)


def enter(node: Participant, timeout_s: float = PATIENCE_S) -> World | None:
    node.join(timeout_s)
    return _wait_for_world(node, timeout_s)


def meet_again(nodes: Sequence[Participant], pool: ThreadPoolExecutor) -> list[World | None]:
    """Make all nodes leave their world before any of them seals the next one.

    If the world's record is lost, a member that has not left it yet counts as ready. It then finds itself in a new
    world, leaves that, and its agent's peers would follow.
    """
    for node in nodes:
        node.join(PATIENCE_S)
    return list(pool.map(_wait_for_world, nodes))


def _wait_for_world(node: Participant, timeout_s: float = PATIENCE_S) -> World | None:
    return node.next_world(lambda seal: ("127.0.0.1", 1), timeout_s)


def pair(store: MemoryStore, pool: ThreadPoolExecutor) -> tuple[Participant, Participant]:
    """Two nodes in their first world, the leader first."""
    nodes = [make_node(store), make_node(store)]
    worlds = list(pool.map(enter, nodes))
    assert worlds[0] == worlds[1] and worlds[0] is not None and worlds[0].cause == "start"
    first, second = sorted(nodes, key=lambda node: worlds[0].rank_of(node.id) or 0)
    return first, second


def crash(store: MemoryStore, node: Participant) -> None:
    """End a node as SIGKILL does: nothing is revoked, and its lease expires."""
    node._left.set()
    assert node._own.lease is not None
    node._own.lease.abandon()
    store.advance(TTL_S)


def store_world(node: Participant) -> World:
    assert node.world is not None
    return node.world
