"""One member's knowledge of other nodes' agents, from asking them for their identity.

A refused connection alone proves neither that an agent is dead nor that it is reachable: the address may lead to
another machine, or a firewall may refuse. It means that the agent is gone only if this member got the right answer
there before, for the same registration: a node that was taken for dead and registers again is unknown until it answers
again.
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
        """Return True if a member's agent has answered since it registered; its own node's counts as met."""
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
        """Return True if a node's agent that this member has met now refuses connections; faster than `ask`."""
        return self.is_known(members) and refuses(next(iter(members)).agent, timeout_s)

    def is_known(self, members: Collection[Member]) -> bool:
        """Return True if this member has met the agent of a node, another than its own."""
        return any(member.id in self._met and member.node_id != self._node for member in members)

    def forget_all_but(self, view: View) -> None:
        """Forget members that have left."""
        if self._met:
            self._met.intersection_update(member.id for member in view.members)


def by_node(members: Iterable[Member]) -> dict[str, list[Member]]:
    """Return members by their node."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node_id, []).append(member)
    return nodes
