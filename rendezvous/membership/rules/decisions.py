"""Decide which members train together: pure decisions on a view of the store.

A member is ready for a world of a term above its `after`. The leader, the ready member that registered first, seals a
world as soon as every live member is ready: at once if it continues a job, or after a short quiet time if no member of
the last world lives, so that nodes started together form one world. Finished members are not waited for.

No I/O, no clock: the same code runs in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rendezvous.membership.records import Member, View, refuse_newer
from rendezvous.membership.rules.admission import (
    Policy,
    admitted,
    agrees,
    count_nodes,
    disagreement,
    mutually_reachable,
    of_whole_nodes,
)
from rendezvous.membership.rules.cells import is_a_part_left_behind
from rendezvous.membership.rules.standing import joining
from rendezvous.membership.worlds import Cause, Seat, World


@dataclass(frozen=True, slots=True)
class Enter:
    """Train in this world."""

    world: World


@dataclass(frozen=True, slots=True)
class Seal:
    """Lead: host the store of the next world and write it."""

    term: int
    seats: tuple[Seat, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the view changes, or for `seconds` if given."""

    why: Literal["members", "nodes", "last call", "leader", "room", "holder"]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Expelled:
    """Register again: this member's lease has ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Leave: this member's limits or mode differ from those of earlier members."""

    why: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Leave: the job is done."""


Decision = Enter | Seal | Wait | Expelled | Refused | Finished


def decide(view: View, me: str, policy: Policy, quiet_s: float, left: int = 0) -> Decision:
    """Return the next action of a ready member; `quiet_s` is how long the ready members have been the same.

    It has left the world of the term `left`, even if the view, which is not whole then, does not show it. Raises
    NewerVersionError.
    """
    refuse_newer(view.newer)
    if view.closed is not None:
        return Finished()
    mine = view.member(me)
    if mine is None:
        return Expelled()
    if (why := disagreement(view, mine.nodes, is_live=mine.is_worker, me=mine.id)) is not None:
        return Refused(why)
    if view.world is not None and view.world.rank_of(me) is not None and max(mine.after, left) < view.term:
        return Enter(view.world)
    if view.is_ending:
        return Wait("members")
    ready = _candidates(view)
    num_nodes = ready.num_nodes
    if num_nodes < policy.min_nodes:
        return Wait("nodes")
    if len(view.ready) < len(view.staying):
        return Wait("room" if _has_no_room(view, me, policy) else "members")
    if me not in ready.ids:
        return Wait("room")
    chosen = _chosen(view, policy)
    if not chosen:
        return Wait("nodes")
    if chosen[0].id != me:
        return Wait("room" if policy.cell.size > 1 and all(member.id != me for member in chosen) else "leader")
    if num_nodes < policy.max_nodes and _is_fresh(view) and quiet_s < policy.last_call_s:
        return Wait("last call", policy.last_call_s - quiet_s)
    if quiet_s < policy.last_holder_s and _loses_a_part(chosen, ready.members, policy, view):
        return Wait("holder", policy.last_holder_s - quiet_s)
    return _seal(view, chosen)


def leads(view: View, me: str, policy: Policy) -> bool:
    """Return True if a member is to seal the next world as soon as all are ready, which the view need not show."""
    chosen = _chosen(view, policy)
    return bool(chosen) and chosen[0].id == me


def _loses_a_part(chosen: Sequence[Member], ready: Sequence[Member], policy: Policy, view: View) -> bool:
    return policy.cell.size > 1 and is_a_part_left_behind(chosen, ready, policy.cell, view.world)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The members of a possible world if there were room for all, and all were ready."""

    members: tuple[Member, ...]
    ids: frozenset[str]
    num_nodes: int


@lru_cache(8)
def _candidates(view: View) -> _Candidates:
    staying = of_whole_nodes(view.staying) if _is_fresh(view) else view.staying
    members = mutually_reachable(tuple(member for member in staying if agrees(view, member)), view.world)
    return _Candidates(members, frozenset(member.id for member in members), count_nodes(members))


@lru_cache(8)
def _chosen(view: View, policy: Policy) -> tuple[Member, ...]:
    """Return the members of the next world if it were sealed now."""
    return admitted(_candidates(view).members, policy, view.world)


def _seal(view: View, chosen: tuple[Member, ...]) -> Seal:
    head_term = 0 if view.head is None else view.head.term
    term = max(view.term, view.over, head_term, *(member.after for member in chosen)) + 1
    seats = tuple(Seat(member.id, member.num_workers, member.role) for member in chosen)
    return Seal(term, seats, _cause(view, chosen))


def _cause(view: View, chosen: tuple[Member, ...]) -> Cause:
    if view.world is None or _is_fresh(view):
        return "start"
    before = {seat.member for seat in view.world.seats}
    now = {member.id for member in chosen}
    if before - now:
        return "lost"
    return "joined" if now - before else "restart"


def _is_fresh(view: View) -> bool:
    """Return True if no member of the last world lives: a job starts, or starts again."""
    return not view.mates


def _has_no_room(view: View, me: str, policy: Policy) -> bool:
    """Return True if the world stands without this member, because it is full or unreachable."""
    world, mine = view.world, view.member(me)
    if world is None or mine is None or world.rank_of(me) is not None:
        return False
    if view.is_split and me not in {member.id for member in mutually_reachable((*view.mates, mine), world)}:
        return True
    if policy.cell.size > 1 and mine not in joining(view, world, policy):
        return True
    is_node_left_out = mine.node_id not in view.nodes and len(view.nodes) >= policy.max_nodes
    return is_node_left_out or len(view.mates) >= policy.max_members
