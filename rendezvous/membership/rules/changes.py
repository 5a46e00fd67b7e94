"""The guarded writes that carry decisions out: what each writes, and the revisions that it relies on.

A view is what the snapshot beside it says.
Invariant: a world is written only over the revision of the last one, with a term above it, above the head's, and above
all that its members remember, and only while every member in it is alive and ready. So at most one world per term is
sealed, and terms only grow, also over an etcd that comes back without its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rendezvous.membership.records import Closed, Failure, Keys, Member, View, World, encode
from rendezvous.membership.rules.standing import ending
from rendezvous.membership.store import ABSENT, MOST_GUARDS, Snapshot

MOST_GUARDED = MOST_GUARDS - 3
"""Seats that are guarded one by one. In a larger world a member may be gone at the seal: it breaks at once, at the
price of a term."""


@dataclass(frozen=True, slots=True)
class Change:
    """A transaction to try: what it writes, and the revisions that it relies on."""

    writes: Mapping[str, str | None]
    guards: Mapping[str, int]


def seal(snapshot: Snapshot, keys: Keys, world: World) -> Change:
    """Write a world over the last one, while all of its members are as the leader saw them."""
    seats = {keys.member(seat.member): snapshot.revision_of(keys.member(seat.member)) for seat in world.seats}
    assert ABSENT not in seats.values(), "a world is made of live members"
    guards = {keys.world: snapshot.revision_of(keys.world), keys.head: snapshot.revision_of(keys.head)}
    if len(seats) > MOST_GUARDED:
        seats = {keys.members: snapshot.revision}
    guards[keys.closed] = snapshot.revision_of(keys.closed)  # none, or nothing that could be read
    return Change({keys.world: encode(world)}, {**guards, **seats})


def update(snapshot: Snapshot, keys: Keys, member: Member) -> Change:
    """Replace a member's own record; fails when its lease is over."""
    key = keys.member(member.id)
    return Change({key: encode(member)}, {key: snapshot.revision_of(key)})


def rename(snapshot: Snapshot, keys: Keys, old_id: str, member: Member) -> Change:
    """Replace a member's own record by one of another id, in one step; fails when its lease is over."""
    old, new = keys.member(old_id), keys.member(member.id)
    return Change({old: None, new: encode(member)}, {old: snapshot.revision_of(old), new: ABSENT})


def report_failure(snapshot: Snapshot, keys: Keys, failure: Failure) -> Change:
    """Be the first to fail in a term; fails if another member was faster."""
    return Change({keys.failure: encode(failure)}, {keys.failure: snapshot.revision_of(keys.failure)})


def remove_dead_member(snapshot: Snapshot, keys: Keys, member_id: str) -> Change:
    """Remove a member that is known to be dead; if it is alive, it finds itself expelled and joins again."""
    key = keys.member(member_id)
    return Change({key: None}, {key: snapshot.revision_of(key)})


def close(snapshot: Snapshot, view: View, keys: Keys, closed: Closed) -> Change:
    """Mark the job as done, unless it is; the next one of this run id may keep its commits in another store."""
    guard = ABSENT if view.closed is not None else snapshot.revision_of(keys.closed)
    return Change({keys.closed: encode(closed), keys.store: None}, {keys.closed: guard})


def leave_finished(snapshot: Snapshot, view: View, keys: Keys, me: str) -> Change | None:
    """Write into a world that a member whose workers have finished leaves it; None if nobody has to know that."""
    world, mine = view.world, view.member(me)
    if world is None or mine is None or not view.is_finishing(mine) or ending(view, me, world) != "wait":
        return None  # it has not finished, or is the last one, or nobody continues that world
    left = replace(world, left=(*world.left, me))
    return Change({keys.world: encode(left)}, {keys.world: snapshot.revision_of(keys.world)})


def leaving_world(member: Member, view: View) -> Member:
    """The record of a member that is ready for the next world."""
    return replace(member, after=max(member.after, view.term))
