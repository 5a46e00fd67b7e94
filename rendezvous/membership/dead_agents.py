"""Who looks, while all wait for a world, whether the agents of those who are late are gone; how often, and at whom.

A worker dies with its agent, so there is no need to wait for its lease to end. Were it everybody who looked, a thousand
nodes would knock at one door ten times a second.
"""

from __future__ import annotations

from rendezvous.membership.probes import is_refused
from rendezvous.membership.records import Member, View

LOOK_S = 1.0
"""The longest that a wait goes without looking again, whatever the watch says."""

PROBE_S = 0.1
"""How soon a worker that waits for others looks again whether their agents are gone; twice as late after every look
at the same ones, up to `LOOK_S`: those that it waits for may be training a long step."""

NUM_LOOKING = 3
"""Nodes that look for all others."""


def is_looking(view: View, own: str) -> bool:
    """Say whether a member looks for all that wait: one worker of each of a few nodes does."""
    firsts: dict[str, str] = {}
    ready = view.ready
    for member in ready:
        firsts.setdefault(member.node_id, member.id)
        if len(firsts) == NUM_LOOKING:
            break
    return not ready or own in firsts.values()


class DeadAgentProbe:
    """A member's looks, from a machine."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._last: tuple[tuple[str, ...], float] = (), PROBE_S

    def pause_s(self, view: View) -> float:
        """Look less and less often for those who are late, as long as they are the same."""
        late = tuple(member.id for member in view.members if not view.is_ready(member))
        before, pause_s = self._last
        pause_s = min(LOOK_S, 2 * pause_s) if late == before else PROBE_S
        self._last = late, pause_s
        return pause_s

    def gone(self, view: View) -> list[Member]:
        """Return the members that everybody waits for and whose agent's machine says that the agent is gone."""
        late = [member for member in view.members if member.agent and not view.is_ready(member)]
        # A loopback address means another machine there.
        near = {m.agent for m in late if m.host == self._host or not m.agent.startswith(("127.", "localhost"))}
        refused = {agent for agent in sorted(near) if is_refused(agent)}
        return [member for member in late if member.agent in refused]
