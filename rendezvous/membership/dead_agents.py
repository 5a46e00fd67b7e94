"""Find members whose agent is gone while all others wait for a world: who probes, how often, and whom.

A worker dies with its agent, so the others need not wait for its lease to end. If everyone probed, a thousand nodes
would connect to one agent ten times per second.
"""

from __future__ import annotations

from itertools import islice

from rendezvous.membership.known_agents import KnownAgents, by_node
from rendezvous.membership.records import Member, View

LOOK_S = 1.0
"""Maximum seconds of a wait before the next check, whatever the watch brings."""

PROBE_S = 0.1
"""Seconds before a waiting worker probes the others' agents again.

Doubled after every probe of the same ones, up to `LOOK_S`, because these may be training a long step.
"""

PROBE_TIMEOUT_S = 0.2

NUM_LOOKING = 3
"""Number of nodes that probe on behalf of all others at first."""
NUM_MEETING = 16
"""Number of nodes of a world whose first worker asks the others and newcomers for their identity."""


def is_looking(view: View, own: str, waited_s: float = 0.0) -> bool:
    """Return True if a member probes on behalf of all that wait: the first worker of each of a few nodes.

    Another one looks after each `LOOK_S`, since the first may have died together, but none that has met no agents.
    """
    firsts, most = dict[str, str](), min(NUM_MEETING, NUM_LOOKING + waited_s // LOOK_S)
    for member in view.staying:
        firsts.setdefault(member.node_id, member.id)
        if len(firsts) >= most:
            break
    return own in firsts.values()


def believed(gone: set[str], num_others: int) -> set[str]:
    """Return the nodes to take for dead, given those whose agents seem gone and the number of other nodes.

    A member refused by more than half of several nodes suspects its own machine: by removing them, it would stop the
    healthy nodes and train alone. If they are dead, their leases end.
    """
    return gone if len(gone) <= max(1, num_others // 2) else set()


class DeadAgentProbe:
    """One member's probes, from its machine."""

    def __init__(self, agents: KnownAgents) -> None:
        self._agents = agents
        self._last: tuple[tuple[str, ...], float] = (), PROBE_S

    def pause_s(self, view: View) -> float:
        """Return the pause before the next probe; it grows while the late members stay the same."""
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
        if found and self._is_refused_by_the_living(view):
            return []
        return [member for name in found for member in late[name] if self._agents.has_met(member)]

    def _is_refused_by_the_living(self, view: View) -> bool:
        """Return True if the first few nodes that have just become ready refuse as well: then it is this machine."""
        ready = (members for members in by_node(view.ready).values() if self._agents.is_known(members))
        refusals = [self._agents.has_ended(members, PROBE_TIMEOUT_S) for members in islice(ready, NUM_LOOKING)]
        return bool(refusals) and all(refusals)
