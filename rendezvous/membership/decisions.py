"""Which members train together: pure decisions on a view of the store, and the guarded writes that carry them out.

A member is ready for a world of a term above its `after`. The leader, the ready member that registered first, seals a
world as soon as every live member is ready: at once when it continues a job, after a short quiet time when nobody of
the last world lives, so that nodes started together make one world. Members that have finished are not waited for.

Invariant: a world is written only over the revision of the last one, with a term above it, above the head's, and above
all that its members remember, and only while every member in it is alive and ready. So at most one world per term is
sealed, and terms only grow, also over an etcd that comes back without its data.
No I/O, no clock: the same code runs in the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rendezvous.membership.cells import arrange, is_a_part_left_behind
from rendezvous.membership.records import (
    Cause,
    Closed,
    Failure,
    Keys,
    Member,
    Seat,
    View,
    World,
    encode,
    read_view,
    refuse_newer,
)
from rendezvous.membership.store import ABSENT, MOST_GUARDS, Snapshot

MOST_GUARDED = MOST_GUARDS - 3
"""Seats that are guarded one by one. In a larger world a member may be gone at the seal: it breaks at once, at the
price of a term."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many nodes and members a world may have, and how long a new job waits for one more."""

    min_nodes: int
    max_nodes: int
    last_call_s: float = 2.0
    max_members: int = 1 << 30
    cell_size: int = 1
    """How many members of one node make up a cell; a world is made of whole cells (`cells`)."""
    last_holder_s: float = 30.0
    """How long a world waits for a member that alone may hold a part of the state until its node has a cell again."""

    @property
    def nodes(self) -> str:
        """The limits as --nnodes has them, on which all members must agree."""
        return f"{self.min_nodes}:{self.max_nodes}"


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
    """Nothing to do until the view changes, or for `seconds` if given."""

    why: Literal["members", "nodes", "last call", "leader", "room", "holder"]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Expelled:
    """This member's lease has ended: register again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """This member was started with other limits than those who were there before: leave."""

    why: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is done: leave."""


Decision = Enter | Seal | Wait | Expelled | Refused | Finished


@dataclass(frozen=True, slots=True)
class Change:
    """A transaction to try: what it writes, and the revisions that it relies on."""

    writes: Mapping[str, str | None]
    guards: Mapping[str, int]


def decide(view: View, me: str, policy: Policy, quiet_s: float) -> Decision:
    """Say what a member that is ready does next; `quiet_s` is how long the ready members have been the same.

    Raises NewerVersionError.
    """
    refuse_newer(view.newer)
    if view.closed is not None:
        return Finished()
    mine = view.member(me)
    if mine is None:
        return Expelled()
    if (why := disagreement(view, mine.nodes, mine.id)) is not None:
        return Refused(why)
    if view.world is not None and view.world.rank_of(me) is not None and mine.after < view.term:
        return Enter(view.world)
    if view.is_ending:
        return Wait("members")
    if len(view.ready) < len(view.staying):
        return Wait("room" if _has_no_room(view, me, policy) else "members")
    ready = _candidates(view)
    num_nodes = ready.num_nodes
    if num_nodes < policy.min_nodes:
        return Wait("nodes")
    if me not in ready.ids:
        return Wait("room")
    chosen = _chosen(view, policy)
    if not chosen:
        return Wait("nodes")
    if chosen[0].id != me:
        return Wait("room" if policy.cell_size > 1 and all(member.id != me for member in chosen) else "leader")
    if num_nodes < policy.max_nodes and _is_fresh(view) and quiet_s < policy.last_call_s:
        return Wait("last call", policy.last_call_s - quiet_s)
    if quiet_s < policy.last_holder_s and _loses_a_part(chosen, ready.members, policy, view):
        return Wait("holder", policy.last_holder_s - quiet_s)
    return _seal(view, chosen)


def _loses_a_part(chosen: Sequence[Member], ready: Sequence[Member], policy: Policy, view: View) -> bool:
    return policy.cell_size > 1 and is_a_part_left_behind(chosen, ready, policy.cell_size, view.world)


def disagreement(view: View, nodes: str, me: str = "") -> str | None:
    """Say what is wrong with a member's limits, MIN:MAX, if those who were there before it have others.

    Were each to go by its own, one would make room for a node, and the other would not, for ever.
    """
    agreed = "" if view.closed is not None else _agreed_limits(view)
    if not nodes or not agreed or nodes == agreed or (view.members and view.members[0].id == me):
        return None
    return (
        f"--nnodes (or --nodes) is {nodes} here, and {agreed} on the nodes that run already, such as that of member "
        f"{view.members[0].id}: start this node with theirs, or all of them again with yours"
    )


def mutually_reachable(members: tuple[Member, ...], last: World | None = None) -> tuple[Member, ...]:
    """The members left when no two of them miss each other's nodes.

    Of the nodes that cannot reach each other, the one with the most such others is dropped first, so the larger part of
    a network that has split continues. If two have as many, the one that was not in the last world is dropped, because
    the others have trained further; else the later one.
    """
    if not any(member.missed for member in members):
        return members
    conflicts: dict[str, set[str]] = {member.node_id: set() for member in members}
    stood = {member.node_id for member in members if last is not None and last.rank_of(member.id) is not None}
    for member in members:
        for other in member.missed:
            if other in conflicts and other != member.node_id:
                conflicts[member.node_id].add(other)
                conflicts[other].add(member.node_id)
    while any(conflicts.values()):
        worst = max(reversed(conflicts), key=lambda node: (len(conflicts[node]), node not in stood))
        for other in conflicts.pop(worst):
            conflicts[other].discard(worst)
    return tuple(member for member in members if member.node_id in conflicts)


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
    newcomers = (member for member in view.members if world.rank_of(member.id) is None and _agrees(view, member))
    staying = (*mates, *newcomers)
    admitted = _admitted(mutually_reachable(staying, world), policy, world)
    return tuple(member for member in admitted if world.rank_of(member.id) is None)


def is_broken(view: View, me: str, world: World) -> bool:
    """Whether a world can take no further step: one of its members is gone or has left it, or a newer one exists."""
    return view.term != world.term or view.member(me) is None or not view.is_whole


def is_only_growing(view: View, world: World) -> bool:
    """Whether a new round is due to joiners alone: nobody of `world` is lost or has stopped."""
    return not is_broken(view, world.seats[0].member, world)


def count_nodes(members: Iterable[Member]) -> int:
    """Count the nodes that members belong to."""
    return len({member.node_id for member in members})


def mates_of(view: View, world: World) -> tuple[Member, ...]:
    """The members of `world` that are still alive."""
    if view.term == world.term:
        return view.mates
    return tuple(member for member in view.members if world.rank_of(member.id) is not None)


def node_to_spare(view: View, world: World, rank: int, min_nodes: int) -> str | None:
    """Return the node of a rank if at least so many others of its world stay; None if they do not, or it is gone.

    Nodes that are asked to leave already do not stay.
    """
    mates, leaver = mates_of(view, world), world.seats[rank].member
    node = next((mate.node_id for mate in mates if mate.id == leaver), None)
    staying = {mate.node_id for mate in mates} - view.leaving - {node}
    return node if len(staying) >= min_nodes else None


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


def bury(snapshot: Snapshot, keys: Keys, member_id: str) -> Change:
    """Remove a member that is known to be dead; if it is alive, it finds itself expelled and joins again."""
    key = keys.member(member_id)
    return Change({key: None}, {key: snapshot.revision_of(key)})


def close(snapshot: Snapshot, keys: Keys, closed: Closed) -> Change:
    """Mark the job as done, unless it is; the next one of this run id may keep its commits in another store."""
    is_closed = read_view(snapshot, keys).closed is not None
    guard = ABSENT if is_closed else snapshot.revision_of(keys.closed)
    return Change({keys.closed: encode(closed), keys.store: None}, {keys.closed: guard})


def leave_finished(snapshot: Snapshot, keys: Keys, me: str) -> Change | None:
    """Write into a world that a member whose workers have finished leaves it; None if nobody has to know that."""
    view = read_view(snapshot, keys)
    world, mine = view.world, view.member(me)
    if world is None or mine is None or not view.is_finishing(mine) or ending(view, me, world) != "wait":
        return None  # it has not finished, or is the last one, or nobody continues that world
    left = replace(world, left=(*world.left, me))
    return Change({keys.world: encode(left)}, {keys.world: snapshot.revision_of(keys.world)})


def leaving_world(member: Member, view: View) -> Member:
    """The record of a member that is ready for the next world."""
    return replace(member, after=max(member.after, view.term))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The members that a world could be made of, were there room for all."""

    members: tuple[Member, ...]
    ids: frozenset[str]
    num_nodes: int


@lru_cache(8)
def _candidates(view: View) -> _Candidates:
    ready = _of_whole_nodes(view.ready) if _is_fresh(view) else view.ready
    members = mutually_reachable(tuple(member for member in ready if _agrees(view, member)), view.world)
    return _Candidates(members, frozenset(member.id for member in members), count_nodes(members))


@lru_cache(8)
def _chosen(view: View, policy: Policy) -> tuple[Member, ...]:
    """The members of the next world, were it sealed now."""
    return _admitted(_candidates(view).members, policy, view.world)


def _agreed_limits(view: View) -> str:
    """The limits of the member that registered first; members of a world agree, so there they are those of all."""
    return next((member.nodes for member in view.mates or view.members), "")


def _agrees(view: View, member: Member) -> bool:
    return not member.nodes or member.nodes == _agreed_limits(view)


def _seal(view: View, chosen: tuple[Member, ...]) -> Seal:
    head_term = 0 if view.head is None else view.head.term
    term = max(view.term, head_term, *(member.after for member in chosen)) + 1
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
    """Nobody of the last world lives: a job starts, or starts again."""
    return not view.mates


def _admitted(members: tuple[Member, ...], policy: Policy, last: World | None) -> tuple[Member, ...]:
    """The members of the first `max_nodes` nodes, in the order given, and of them the first `max_members`.

    Where a cell has several, they are those of whole cells, in the order of their ranks. A node that makes none takes
    no other's place, and those that trained last come first.
    """
    size = policy.cell_size
    counts = Counter(member.node_id for member in members)
    nodes = [node for node in counts if counts[node] >= size]
    if size > 1 and len(nodes) > policy.max_nodes:
        trained = {member.node_id for member in members if last is not None and last.rank_of(member.id) is not None}
        nodes.sort(key=lambda node: node not in trained)
    chosen = set(nodes[: policy.max_nodes])
    found = tuple(member for member in members if member.node_id in chosen)
    if size == 1:
        return found[: policy.max_members]
    return arrange(found, size, last, policy.max_members // size).members


def _of_whole_nodes(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members of nodes that have come with all of their members."""
    counts = Counter(member.node_id for member in members)
    return tuple(member for member in members if counts[member.node_id] >= member.node_members)


def _has_no_room(view: View, me: str, policy: Policy) -> bool:
    """The world is full or out of reach, and stands without this member."""
    world, mine = view.world, view.member(me)
    if world is None or mine is None or world.rank_of(me) is not None:
        return False
    if view.is_split and me not in {member.id for member in mutually_reachable((*view.mates, mine), world)}:
        return True
    if policy.cell_size > 1 and mine not in _joining(view, policy):
        return True
    is_node_left_out = mine.node_id not in view.nodes and len(view.nodes) >= policy.max_nodes
    return is_node_left_out or len(view.mates) >= policy.max_members
