"""Find nodes that a member cannot reach although all reach etcd: no lease ends, yet a world with both hangs.

A thread asks the agents of other nodes for their identity:

* a newcomer asks those of the standing world before it registers, and records those it cannot reach;
* the first worker of each of the first nodes of a world asks newcomers before the world makes room for them, and the
  others of the world, so that it later recognizes a dead agent's refusal;
* a member that has waited for its peers longer than a lease asks all of them, one worker per node.

A node that is away twice in a row is named in the asking member's record, and `decisions` forms worlds without such
pairs. It is asked again periodically, so that a recovered network is used again. An agent that is gone is removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from rendezvous.agent.identity import ASK_TIMEOUT_S
from rendezvous.errors import StoreError
from rendezvous.membership.dead_agents import NUM_MEETING, believed
from rendezvous.membership.known_agents import Standing, by_node
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Member, View
from rendezvous.membership.rules import standing
from rendezvous.membership.rules.admission import count_nodes

AGAIN_S = 1.0
"""Seconds after the first look at which nodes that were away are asked again."""
BEFORE_S = 0.2
"""The same for a newcomer before it registers."""

LOOK_EVERY_S = 10.0
SELDOM_S = 60.0
"""Seconds between checks of a member's own record for unreachable nodes: an answer from etcd may have been lost."""

_MOST_AT_ONCE = 16

_log = logging.getLogger("rendezvous")


class Reachability:
    """The nodes that one member can reach; a thread looks on request, for newcomers, and periodically."""

    def __init__(self, participant: Participant) -> None:
        self._participant, self._agents = participant, participant.agents
        self._away: Mapping[str, float] = {}
        """Nodes that were away at the last look, each with the time of its first such look."""
        self._hung_at = 0.0
        self._hangs = self._is_warned = False
        self._looking = threading.Lock()
        self._asked, self._closed = threading.Event(), threading.Event()
        participant.at_change = self.notice
        threading.Thread(target=self._serve, name="reach", daemon=True).start()

    def ask(self, *, is_urgent: bool = False) -> None:
        """Have all nodes of this member's world asked soon, because the world hangs; returns at once.

        `is_urgent` is True if it could not even begin.
        """
        if time.monotonic() - self._hung_at > (AGAIN_S if self._away or is_urgent else LOOK_EVERY_S):
            self._hangs = True
            self._asked.set()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()

    def look_ahead(self) -> None:
        """Before registering, ask the nodes of the standing world, and record those that cannot be reached."""
        nodes = by_node(self._participant.view.mates)
        for _ in range(2):
            away = {name for name, standing in self._standing_of(nodes).items() if standing != "here"}
            nodes = {name: members for name, members in nodes.items() if name in away}
            if not nodes:
                break
            time.sleep(BEFORE_S)
        if nodes:
            self._warn(nodes)
        self._participant.note_missed(frozenset(nodes))

    def look(self, *, hangs: bool = True) -> None:
        """Ask the nodes that there is reason to ask, and report changes; with `hangs`, ask all of the world."""
        with self._looking:
            view = self._participant.view
            mine = view.member(self._participant.id)
            if hangs:
                self._hung_at = time.monotonic()
            if mine is None:
                return
            self._agents.forget_all_but(view)
            missed = frozenset(mine.missed)
            held = missed | self._away.keys() | {member.node_id for member in self._new(view)}
            if hangs and _is_first_of_its_node(view, mine):
                held |= view.nodes
            asked = held | {mate.node_id for mate in self._unmet_mates(view)}
            asked -= {mine.node_id}
            nodes = by_node(member for member in view.members if member.node_id in asked) if asked else {}
            self._judge(view, nodes, held, missed)

    def _judge(self, view: View, nodes: Mapping[str, list[Member]], held: Set[str], missed: frozenset[str]) -> None:
        """Ask nodes; of those in `held` that are away again, remove the dead and report the others."""
        now, before = time.monotonic(), self._away
        standing = self._standing_of(nodes)
        self._away = {name: before.get(name, now) for name, how in standing.items() if how != "here" and name in held}
        again = {name for name in self._away if name in missed or (name in before and now - before[name] >= AGAIN_S)}
        dead = believed({name for name in again if standing[name] == "gone"}, count_nodes(view.members) - 1)
        self._bury([member for name in sorted(dead) for member in nodes[name]])
        if again - dead != missed:
            self._warn({name: nodes[name] for name in again - dead})
            self._participant.report_missed(frozenset(again - dead))

    def notice(self) -> None:
        """Look soon if there are agents that this member should meet; called whenever the view has changed."""
        view = self._participant.view
        if self._new(view) or self._unmet_mates(view):
            self._asked.set()
        self._warn_if_missed(view)

    def _new(self, view: View) -> list[Member]:
        """Return the unmet newcomers that the world would admit, if this member is one of its first."""
        world = self._participant.world
        if world is None or self._participant.id not in _first_ones(view):
            return []
        joining = standing.joining(view, world, self._participant.policy)
        return [member for member in joining if not self._agents.has_met(member)]

    def _unmet_mates(self, view: View) -> list[Member]:
        if self._participant.id not in _first_ones(view):
            return []
        return [mate for mate in view.mates if not self._agents.has_met(mate)]

    def _standing_of(self, nodes: Mapping[str, list[Member]]) -> dict[str, Standing]:
        if not nodes:
            return {}
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(nodes))) as pool:
            answers = pool.map(lambda members: self._agents.ask(members, ASK_TIMEOUT_S), nodes.values())
            return dict(zip(nodes, answers, strict=True))

    def _bury(self, dead: list[Member]) -> None:
        """Remove the dead; a view that is not whole does not show which of them have just become ready.

        One that is ready lives although its agent refuses. It is then out of reach, and would lose its place anyway.
        """
        self._participant.remove_dead_members(member for member in dead if self._agents.has_met(member))

    def _warn(self, missed: Mapping[str, list[Member]]) -> None:
        where = ", ".join(f"{name} at {members[0].agent}" for name, members in sorted(missed.items()))
        _log.warning("nodes in etcd that cannot be reached from here: %s", where or "none any more")

    def _warn_if_missed(self, view: View) -> None:
        """Warn once, on a node that others cannot reach, with the remedy."""
        mine = view.member(self._participant.id)
        if self._is_warned or mine is None or not view.is_split:
            return
        by = sorted(member.node_id for member in view.members if mine.node_id in member.missed)
        if by:
            self._is_warned = True
            _log.warning(
                "%d nodes cannot reach this one at %s, such as %s, and train without it: check the firewall, or name "
                "the address at which they can (--local-addr)",
                *(len(by), mine.agent, by[0]),
            )

    def _serve(self) -> None:
        """Look on request, and every few seconds while this member's record names unreachable nodes."""
        pause_s = SELDOM_S
        while not self._closed.is_set():
            is_asked = self._asked.wait(pause_s)
            self._asked.clear()
            hangs, self._hangs = self._hangs, False
            if is_asked or self._misses_any() or self._away:
                try:
                    self.look(hangs=hangs)
                except (StoreError, RuntimeError) as error:  # the latter if no thread can be started
                    _log.debug("could not report the nodes that are out of reach: %s", error)
            if self._away and not self._misses_any():
                self._closed.wait(AGAIN_S)
                pause_s = 0.0
            else:
                pause_s = LOOK_EVERY_S if self._misses_any() or self._unmet_mates(self._participant.view) else SELDOM_S

    def _misses_any(self) -> bool:
        mine = self._participant.view.member(self._participant.id)
        return mine is not None and bool(mine.missed)


@lru_cache(8)
def _first_ones(view: View) -> frozenset[str]:
    """Return the first worker of each of the first nodes of the current world."""
    firsts: dict[str, str] = {}
    for mate in view.mates:
        firsts.setdefault(mate.node_id, mate.id)
        if len(firsts) == NUM_MEETING:
            break
    return frozenset(firsts.values())


def _is_first_of_its_node(view: View, mine: Member) -> bool:
    return next((mate for mate in view.mates if mate.node_id == mine.node_id), mine) == mine
