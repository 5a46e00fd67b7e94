"""What one member knows of other nodes' agents, from having asked them itself who they are.

A refused connection says by itself neither that an agent is dead nor that it can be reached: the address may lead to
another machine, or something on the way refuses. It means that the agent is gone if this very member has had the right
answer there before. That holds for the registration of which it was heard: a node that was taken for dead and
registers again is not known until it answers again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal

from rendezvous.agent.identity import Answer, ask, refuses
from rendezvous.membership.records import Member, View

Standing = Literal["here", "gone", "away"]
"""`gone`: the agent has ended, and its workers with it. `away`: this member cannot reach it."""
Ask = Callable[[str, str, float], Answer]


class KnownAgents:
    """The agents that one member has met; several threads may ask."""

    def __init__(self, node: str, ask_at: Ask | None = None) -> None:
        self._node, self._ask_at = node, ask_at
        self._met: set[str] = set()

    def has_met(self, member: Member) -> bool:
        """Say whether a member's agent has answered since it registered; there is nothing to ask of its own node."""
        return not member.agent or member.node_id == self._node or member.id in self._met

    def ask(self, members: Collection[Member], timeout_s: float) -> Standing:
        """Ask the agent of a node for its members, which share it."""
        first = next(iter(members))
        if not first.agent or first.node_id == self._node:
            return "here"
        answer = (self._ask_at or ask)(first.agent, first.node_id, timeout_s)
        if answer == "itself":
            self._met.update(member.id for member in members)
            return "here"
        is_known = any(member.id in self._met for member in members)
        if answer == "mute":
            return "here" if is_known else "away"
        return "gone" if is_known and answer in ("refused", "other") else "away"

    def has_ended(self, members: Collection[Member], timeout_s: float) -> bool:
        """Say whether the agent of a node that this member has met refuses; a quick look, for those who wait for it."""
        first = next(iter(members))
        is_known = first.node_id != self._node and any(member.id in self._met for member in members)
        return is_known and refuses(first.agent, timeout_s)

    def forget_all_but(self, view: View) -> None:
        """Keep nothing of members that have left."""
        if self._met:
            self._met.intersection_update(member.id for member in view.members)


def by_node(members: Iterable[Member]) -> dict[str, list[Member]]:
    """Return members by the node that they belong to."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node_id, []).append(member)
    return nodes
