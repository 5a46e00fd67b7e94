"""The guarded writes that carry out decisions, with the revisions that they depend on.

A view belongs to the snapshot passed with it. Invariant: a world is written only over the revision of the last one,
with a term above it, above the head's, and above all that its members remember, and only while every member in it is
alive and ready. So at most one world per term is sealed, and terms only grow, even if etcd comes back without its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rendezvous.membership.records import Closed, Failure, Keys, Member, Over, Terms, View, encode
from rendezvous.membership.rules.standing import ending
from rendezvous.membership.store import ABSENT, MOST_GUARDS, Snapshot
from rendezvous.membership.worlds import World

MOST_GUARDED = MOST_GUARDS - 3
"""Maximum number of seats guarded individually. In a larger world a member may be gone at the seal: the world then
breaks at once, which costs a term.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """A transaction to try: its writes, and the revisions that it depends on."""

    writes: Mapping[str, str | None]
    guards: Mapping[str, int]

    def without(self, key: str) -> Change:
        """Leave out a key that is written and guarded."""
        writes, guards = dict(self.writes), dict(self.guards)
        del writes[key], guards[key]
        return Change(writes, guards)


def seal(snapshot: Snapshot, keys: Keys, world: World) -> Change:
    """Write a world over the last one, while all of its members are as the leader saw them."""
    seats = {keys.member(seat.member): snapshot.revision_of(keys.member(seat.member)) for seat in world.seats}
    assert ABSENT not in seats.values(), "a world is made of live members"
    guards = {keys.world: snapshot.revision_of(keys.world), keys.head: snapshot.revision_of(keys.head)}
    if len(seats) > MOST_GUARDED:
        seats = {keys.members: snapshot.revision}
    guards[keys.closed] = snapshot.revision_of(keys.closed)  # absent, or unreadable
    return Change({keys.world: encode(world)}, {**guards, **seats})


def register(keys: Keys, member: Member) -> Change:
    """Write the record of a new member."""
    key = keys.member(member.id)
    return Change({key: encode(member)}, {key: ABSENT})


def rewrite(snapshot: Snapshot, view: View, keys: Keys, mine: Member, wanted: Member) -> Change:
    """Replace a member's own record, perhaps by one with another id, in one step; fails if its lease has ended.

    If nothing but its terms changes, only they are written. The first member that leaves a world tells all that it is
    over; of several at once, the others fail, and need not tell.
    """
    old, new = keys.member(mine.id), keys.member(wanted.id)
    writes: dict[str, str | None] = {keys.terms_of(mine.id): encode(Terms.of(wanted))}
    guards = {old: snapshot.revision_of(old)}
    if Terms.of(mine).put_into(wanted) != mine:
        writes = {old: None, keys.terms_of(mine.id): None, new: encode(wanted)}
    if new != old:
        guards[new] = ABSENT
    world = view.world
    if world is not None and world.rank_of(mine.id) is not None and view.over < world.term <= wanted.after:
        writes[keys.over], guards[keys.over] = encode(Over(world.term)), snapshot.revision_of(keys.over)
    return Change(writes, guards)


def report_failure(snapshot: Snapshot, keys: Keys, failure: Failure) -> Change:
    """Record the first failure of a term; fails if another member was faster."""
    return Change({keys.failure: encode(failure)}, {keys.failure: snapshot.revision_of(keys.failure)})


def remove_dead_members(snapshot: Snapshot, keys: Keys, members: Iterable[Member]) -> Change:
    """Remove members known to be dead, at once; one that is alive finds itself expelled and joins again.

    One that has just become ready is alive, which a snapshot that is not whole does not show.
    """
    ids = [member.id for member in members][: MOST_GUARDS // 2]
    dead, terms = map(keys.member, ids), map(keys.terms_of, ids) if snapshot.is_whole else ()
    guards = {key: snapshot.revision_of(key) for key in (*dead, *terms)}
    return Change({key: None for key in guards if key in snapshot.entries or key.startswith(keys.members)}, guards)


def close(snapshot: Snapshot, view: View, keys: Keys, closed: Closed) -> Change:
    """Mark the job as done, unless it is; the next job of this run id may use another store for its commits."""
    guard = ABSENT if view.closed is not None else snapshot.revision_of(keys.closed)
    return Change({keys.closed: encode(closed), keys.store: None}, {keys.closed: guard})


def leave_finished(snapshot: Snapshot, view: View, keys: Keys, me: str) -> Change | None:
    """Record in a world that a member whose workers have finished leaves it; None if no member needs to know."""
    world, mine = view.world, view.member(me)
    if world is None or mine is None or not view.is_finishing(mine) or ending(view, me, world) != "wait":
        return None  # it has not finished, or is the last one, or that world is over
    left = replace(world, left=(*world.left, me))
    return Change({keys.world: encode(left)}, {keys.world: snapshot.revision_of(keys.world)})


def leaving_world(member: Member, view: View) -> Member:
    """Return the record of a member that is ready for the next world."""
    return replace(member, after=max(member.after, view.term))
