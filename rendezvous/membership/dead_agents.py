"""Finds members whose agent is gone, while all others wait for a world: which member probes, how often, and whom.

A worker dies with its agent, so there is no need to wait for its lease to end. Were it everybody who looked, a thousand
nodes would knock at one door ten times a second.
"""

from __future__ import annotations

from rendezvous.membership.probes import is_refused
from rendezvous.membership.records import Member, View

LOOK_S = 1.0
"""The longest that a wait lasts without another look, whatever the watch brings."""

PROBE_S = 0.1
"""How soon a worker that waits for others probes their agents again. The pause doubles after every probe of the same
ones, up to `LOOK_S`: those that it waits for may be training a long step."""

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


class DeadAgentProbe:
    """The probes of one member, from its machine."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._last: tuple[tuple[str, ...], float] = (), PROBE_S

    def pause_s(self, view: View) -> float:
        """Return the pause before the next probe; it grows as long as the late members are the same."""
        late = tuple(member.id for member in view.members if not view.is_ready(member))
        before, pause_s = self._last
        pause_s = min(LOOK_S, 2 * pause_s) if late == before else PROBE_S
        self._last = late, pause_s
        return pause_s

    def gone(self, view: View) -> list[Member]:
        """Return the late members whose agent is gone, because its machine refuses a connection."""
        late = [member for member in view.members if member.agent and not view.is_ready(member)]
        # On another host, a loopback address would mean this machine.
        near = {m.agent for m in late if m.host == self._host or not m.agent.startswith(("127.", "localhost"))}
        refused = {agent for agent in sorted(near) if is_refused(agent)}
        return [member for member in late if member.agent in refused]
