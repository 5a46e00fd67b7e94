"""Finds members whose agent is gone, while all others wait for a world: which member asks, how often, and whom.

A worker dies with its agent, so there is no need to wait for its lease to end. Were it everybody who looked, a thousand
nodes would knock at one door ten times a second.
"""

from __future__ import annotations

from rendezvous.membership.known_agents import KnownAgents, by_node
from rendezvous.membership.records import Member, View

LOOK_S = 1.0
"""The longest that a wait lasts without another look, whatever the watch brings."""

PROBE_S = 0.1
"""How soon a worker that waits for others probes their agents again. The pause doubles after every probe of the same
ones, up to `LOOK_S`: those that it waits for may be training a long step."""

PROBE_TIMEOUT_S = 0.2

NUM_LOOKING = 3
"""How many nodes probe on behalf of all others."""


def is_looking(view: View, own: str) -> bool:
    """Say whether a member probes on behalf of all that wait: one worker of each of a few nodes does."""
    firsts: dict[str, str] = {}
    ready = view.ready
    for member in ready:
        firsts.setdefault(member.node_id, member.id)
        if len(firsts) == NUM_LOOKING:
            break
    return not ready or own in firsts.values()


def believed(gone: set[str], num_others: int) -> set[str]:
    """Return which nodes are taken for dead, of those whose agents seem to be gone and so many others altogether.

    A member that more than half of several nodes refuse suspects its own machine: were it to remove them, it would stop
    the healthy ones, and train alone. If they are dead, their leases end.
    """
    return gone if len(gone) <= max(1, num_others // 2) else set()


class DeadAgentProbe:
    """The probes of one member, from its machine."""

    def __init__(self, agents: KnownAgents) -> None:
        self._agents = agents
        self._last: tuple[tuple[str, ...], float] = (), PROBE_S

    def pause_s(self, view: View) -> float:
        """Return the pause before the next probe; it grows as long as the late members are the same."""
        late = tuple(member.id for member in view.members if not view.is_ready(member))
        before, pause_s = self._last
        pause_s = min(LOOK_S, 2 * pause_s) if late == before else PROBE_S
        self._last = late, pause_s
        return pause_s

    def gone(self, view: View) -> list[Member]:
        """Return the late members whose agent has answered this member before, and is gone."""
        late = by_node(member for member in view.members if member.agent and not view.is_ready(member))
        gone = {name for name, members in late.items() if self._agents.has_ended(members, PROBE_TIMEOUT_S)}
        found = sorted(believed(gone, len(by_node(view.members)) - 1))
        return [member for name in found for member in late[name] if self._agents.has_met(member)]
