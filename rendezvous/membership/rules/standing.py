"""What becomes of a world that stands: whether it is whole, who waits for the next one, who pays, and how it ends."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from rendezvous.membership.records import Member, View, World
from rendezvous.membership.rules.admission import Policy, admitted, agrees, mutually_reachable


def num_waiting(view: View, me: str, world: World, policy: Policy) -> int:
    """How many changes a member of `world` has to make room for by a new round; 0 while the world stands."""
    if view.term != world.term or view.member(me) is None:
        return 1
    return _num_changes(view, policy)


@lru_cache(8)
def _num_changes(view: View, policy: Policy) -> int:
    """Count the changes that the present world has to make room for; the same for all of its members."""
    world, mates = view.world, view.mates
    assert world is not None, "asked by a member of it"
    again = sum(mate.after >= world.term for mate in mates)
    return view.num_lost + again + len(_joining(view, policy))


def joining(view: View, world: World, policy: Policy) -> tuple[Member, ...]:
    """The members that a new round would admit beside those of `world`; none if that is not the present one."""
    return () if view.term != world.term else _joining(view, policy)


@lru_cache(8)
def _joining(view: View, policy: Policy) -> tuple[Member, ...]:
    world, mates = view.world, view.mates
    assert world is not None, "asked by a member of it"
    if world.left or any(view.is_finishing(mate) for mate in mates):
        return ()  # The job is about to end: nobody is admitted any more.
    newcomers = (member for member in view.members if world.rank_of(member.id) is None and agrees(view, member))
    staying = (*mates, *newcomers)
    room_for = admitted(mutually_reachable(staying, world), policy, world)
    return tuple(member for member in room_for if world.rank_of(member.id) is None)


def is_broken(view: View, me: str, world: World) -> bool:
    """Whether a world can take no further step: one of its members is gone or has left it, or a newer one exists."""
    return view.term != world.term or view.member(me) is None or not view.is_whole


def is_only_growing(view: View, world: World) -> bool:
    """Whether a new round is due to joiners alone: nobody of `world` is lost or has stopped."""
    return not is_broken(view, world.seats[0].member, world)


def mates_of(view: View, world: World) -> tuple[Member, ...]:
    """The members of `world` that are still alive."""
    if view.term == world.term:
        return view.mates
    return tuple(member for member in view.members if world.rank_of(member.id) is not None)


def node_to_spare(view: View, world: World, rank: int, policy: Policy) -> str | None:
    """Return the node of a rank if enough others of its world stay, and make a cell; None if not, or it is gone.

    Nodes that are asked to leave already do not stay.
    """
    mates, leaver = mates_of(view, world), world.seats[rank].member
    node = next((mate.node_id for mate in mates if mate.id == leaver), None)
    gone = {*view.leaving, node}
    staying = {mate.node_id for mate in mates} - gone
    others = tuple(member for member in view.members if member.node_id not in gone)
    return node if len(staying) >= policy.min_nodes and admitted(others, policy, world) else None


Blame = Literal["free", "pay", "wait"]


def blame(view: View, me: str, world: World) -> Blame:
    """Say whether a member whose workers failed pays for the restart.

    Workers fail when a node is lost, too. Only the member that was the first to fail in a term pays, and only once
    every other has shown that it is alive; if one is gone, or a new world exists, none pays.
    """
    mates = [mate for mate in mates_of(view, world) if mate.id != me]
    num_gone = view.num_lost if view.term == world.term else len(world.seats) - len(mates) - 1
    if view.term > world.term or num_gone > 0 or view.member(me) is None:
        return "free"
    if view.failure is None or view.failure.term < world.term:
        return "wait"
    if view.failure.member != me:
        return "free"
    return "pay" if all(max(mate.seen, mate.after, mate.done) >= world.term for mate in mates) else "wait"


Ending = Literal["wait", "close", "leave"]


def ending(view: View, me: str, world: World) -> Ending:
    """Say how a member whose workers finished ends: close the job with the last of its world, or leave it to others."""
    mates = [mate for mate in mates_of(view, world) if mate.id != me]
    if view.closed is not None or view.term > world.term or any(mate.after >= world.term for mate in mates):
        return "leave"
    return "close" if all(mate.done >= world.term for mate in mates) else "wait"
