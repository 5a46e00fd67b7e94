"""Rules for a standing world: its completeness, growth, blame for failures, and end."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from rendezvous.membership.records import Member, View
from rendezvous.membership.rules.admission import Policy, admitted, agrees, mutually_reachable
from rendezvous.membership.worlds import World


def num_waiting(view: View, me: str, world: World, policy: Policy) -> int:
    """Return the number of changes that require a new round of `world`; 0 while it stands."""
    if view.term != world.term or view.member(me) is None:
        return 1
    return _num_changes(view, policy)


@lru_cache(8)
def _num_changes(view: View, policy: Policy) -> int:
    """Return the number of changes that require a new round; the same for all members of the current world."""
    world = view.world
    assert world is not None, "asked by a member of it"
    return view.num_lost + view.is_left(world.term) + len(_joining(view, policy))


def joining(view: View, world: World, policy: Policy) -> tuple[Member, ...]:
    """Return the members that a new round would add to `world`; empty if it is not the current one."""
    return () if view.term != world.term else _joining(view, policy)


@lru_cache(8)
def _joining(view: View, policy: Policy) -> tuple[Member, ...]:
    world, mates = view.world, view.mates
    assert world is not None, "asked by a member of it"
    if world.left or any(view.is_finishing(mate) for mate in mates):
        return ()  # The job is about to end: no member is admitted any more.
    newcomers = (member for member in view.members if world.rank_of(member.id) is None and agrees(view, member))
    staying = (*mates, *newcomers)
    room_for = admitted(mutually_reachable(staying, world), policy, world)
    return tuple(member for member in room_for if world.rank_of(member.id) is None)


def is_broken(view: View, me: str, world: World) -> bool:
    """Return True if a world cannot take another step: a member is gone or has left it, or a newer one exists."""
    return view.term != world.term or view.member(me) is None or not view.is_whole


def is_only_growing(view: View, world: World) -> bool:
    """Return True if a new round is due only to joiners: no member of `world` is lost or has stopped."""
    return not is_broken(view, world.seats[0].member, world)


def mates_of(view: View, world: World) -> tuple[Member, ...]:
    """Return the members of `world` that are still alive."""
    if view.term == world.term:
        return view.mates
    return tuple(member for member in view.members if world.rank_of(member.id) is not None)


def node_to_spare(view: View, world: World, rank: int, policy: Policy) -> str | None:
    """Return the node of a rank if enough others of its world would stay and form a cell; else, or if gone, None.

    Nodes that are already asked to leave do not count as staying.
    """
    mates, leaver = mates_of(view, world), world.seats[rank].member
    node = next((mate.node_id for mate in mates if mate.id == leaver), None)
    gone = {*view.leaving, node}
    staying = {mate.node_id for mate in mates} - gone
    others = tuple(member for member in view.members if member.node_id not in gone)
    return node if len(staying) >= policy.min_nodes and admitted(others, policy, world) else None


Blame = Literal["free", "pay", "wait"]


def blame(view: View, me: str, world: World) -> Blame:
    """Return the verdict on charging a restart to a member whose workers failed.

    Workers also fail when a node is lost. Only the first member to fail in a term pays, and only once every other has
    confirmed that it is alive; if one is gone or has been asked to leave, or a new world exists, none pays.
    """
    mates = [mate for mate in mates_of(view, world) if mate.id != me]
    num_gone = view.num_lost if view.term == world.term else len(world.seats) - len(mates) - 1
    if view.term > world.term or num_gone > 0 or view.member(me) is None:
        return "free"
    if view.failure is None or view.failure.term < world.term:
        return "wait"
    if view.failure.member != me or any(mate.node_id in view.leaving for mate in mates):
        return "free"
    return "pay" if all(max(mate.seen, mate.after, mate.done) >= world.term for mate in mates) else "wait"


Ending = Literal["wait", "close", "leave"]


def ending(view: View, me: str, world: World) -> Ending:
    """Return how a member with finished workers ends: close the job as the last of its world, wait, or leave."""
    mates = [mate for mate in mates_of(view, world) if mate.id != me]
    if view.closed is not None or view.term > world.term or view.is_left(world.term):
        return "leave"
    return "close" if all(mate.done >= world.term for mate in mates) else "wait"
