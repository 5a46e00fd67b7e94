"""Admission to a world: members with equal limits that reach one another, as many as there is room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rendezvous.membership.records import Member, View
from rendezvous.membership.rules.cells import CellShape, arrange, places_had
from rendezvous.membership.worlds import World


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits on the nodes and members of a world, and how long a new job waits for more."""

    min_nodes: int
    max_nodes: int
    last_call_s: float = 2.0
    max_members: int = 1 << 30
    cell: CellShape = CellShape()  # noqa: RUF009 - frozen
    """Shape of cells; a world has only complete cells (`cells`)."""
    last_holder_s: float = 30.0
    """Seconds that a world waits for the sole holder of a part of the state until its node has a cell again."""

    @property
    def nodes(self) -> str:
        """The limits as in --nnodes; all members must agree on them."""
        return f"{self.min_nodes}:{self.max_nodes}"


def disagreement(view: View, nodes: str, *, is_live: bool, me: str = "") -> str | None:
    """Describe the difference between a member's limits (MIN:MAX) or mode and those of earlier members; None if equal.

    Members with different limits would never agree on making room for a node; and workers that are members themselves
    would wait in one world with those of an agent, which meet elsewhere.
    """
    first = None if view.closed is not None else _first(view)
    if first is None or (view.members and view.members[0].id == me):
        return None
    where = f"on the nodes that run already, such as that of member {view.members[0].id}"
    with_theirs = "start this node with theirs, or all of them again with yours"
    if is_live != first.is_worker:
        modes = ("live", "restart") if is_live else ("restart", "live")
        return f"--recovery (recovery in --rdzv_conf) is {modes[0]} here, and {modes[1]} {where}: {with_theirs}"
    if not nodes or not first.nodes or nodes == first.nodes:
        return None
    return f"--nnodes (or --nodes) is {nodes} here, and {first.nodes} {where}: {with_theirs}"


def mutually_reachable(members: tuple[Member, ...], last: World | None = None) -> tuple[Member, ...]:
    """Return the members that remain so that no two of them miss each other's nodes.

    Of the nodes that cannot reach each other, the one with the most such others is dropped first, so the larger part of
    a partitioned network continues. On a tie, the one that was not in the last world is dropped, because the others
    have trained further; else the later one.
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


def count_nodes(members: Iterable[Member]) -> int:
    """Return the number of nodes that members belong to."""
    return len({member.node_id for member in members})


def agrees(view: View, member: Member) -> bool:
    """Return True if a member has the limits and the mode of earlier members."""
    first = _first(view)
    if first is None or member.is_worker != first.is_worker:
        return False
    return not member.nodes or member.nodes == first.nodes


def admitted(members: tuple[Member, ...], policy: Policy, last: World | None) -> tuple[Member, ...]:
    """Return the members of the first `max_nodes` nodes, in the given order, and of them the first `max_members`.

    With cells of several members, only those in complete cells, in rank order. A node with too few members for a stage
    takes no other's place, and those that trained last come first.
    """
    size = policy.cell.size
    counts = Counter(member.node_id for member in members)
    nodes = [node for node in counts if counts[node] >= policy.cell.stage_size]
    if size > 1 and len(nodes) > policy.max_nodes:
        had = places_had(members, policy.cell, last)
        trained = Counter[str]()
        for member in members:
            if (seat := had.get(member.id)) is not None:
                trained[member.node_id] = max(trained[member.node_id], seat.term)
        nodes.sort(key=lambda node: -trained[node])
    chosen = set(nodes[: policy.max_nodes])
    found = tuple(member for member in members if member.node_id in chosen)
    if size == 1:
        return found[: policy.max_members]
    return arrange(found, policy.cell, last, policy.max_members // size).members


def of_whole_nodes(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members of nodes that have come with all of their members."""
    counts = Counter(member.node_id for member in members)
    return tuple(member for member in members if counts[member.node_id] >= member.node_members)


def _first(view: View) -> Member | None:
    """Return the first registered member, preferably of the last world; its limits and mode count."""
    return next(iter(view.mates or view.members), None)
